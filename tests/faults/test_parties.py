"""The quick half of the fault matrix: parties that fail while a real federation runs."""

import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from clients.app import FAILED
from simulations.config import Settings
from tests.faults.conftest import Measured
from tests.faults.deployment import FaultyDeployment
from tests.faults.federation import (
    FEDKT,
    UNAVAILABLE,
    check_journals,
    faulty_federation,
    fill_disk,
    in_process,
    journal,
    left_out,
    let_double,
    mount_small_disk,
    plan,
    same_model,
    wait_for_fault,
)
from tests.leftovers import PATIENCE, wait_until

pytestmark = pytest.mark.flower

FULL, BAD, DOUBLE = 1, 2, 3


@pytest.fixture(scope="module")
def small_disk() -> list[bool]:
    """Return room for whether a party has a disk of its own."""
    return []


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, small_disk: list[bool]
) -> Iterator[FaultyDeployment]:
    """Four parties: a sound one, one with a small disk, one to fail, one that says it twice."""
    prepared = faulty_federation(tmp_path_factory.mktemp("faults") / "federation")
    let_double(prepared.members[DOUBLE])
    state = prepared.members[FULL].state
    small_disk.append(mount_small_disk(state))
    try:
        with FaultyDeployment(prepared) as running:
            yield running
    finally:
        if small_disk[0]:
            subprocess.run(["umount", str(state)], check=True)


def test_a_party_that_raises_is_left_out(
    deployment: FaultyDeployment, measured: Measured
) -> None:
    """The others' model is what it would be without the party; its error's text stays home.

    In the same run, a party whose SuperNode posts each reply twice counts once.
    """
    bad = deployment.member(BAD)
    plan(bad, "raise")

    report = deployment.run(FEDKT, timeout=PATIENCE)

    assert left_out(deployment, report) == {BAD: FAILED}
    assert same_model(report, in_process(deployment.prepared, FEDKT, failing={BAD}))
    check_journals(deployment.prepared, report)
    assert journal(bad) == []
    assert "Jane Doe" in bad.log.read_text()
    assert FAILED in (log := deployment.control.log(report["run-id"]))
    assert "Jane Doe" not in log
    assert (deployment.member(DOUBLE).folder / "doubled").read_text()  # it did so
    measured("party raises", report["seconds"], f"party excluded: {FAILED}")
    measured("duplicate reply", report["seconds"], "the second is dropped by the SuperLink")


def test_a_party_that_leaves_in_a_round_comes_back(
    deployment: FaultyDeployment, measured: Measured, small_disk: list[bool]
) -> None:
    """A stopped SuperNode is excluded at once; started again, it is the same party.

    In the run after its return, another party's disk is full: nothing leaves that party,
    because its journal cannot be written, and its reason is told.
    """
    plan(deployment.member(BAD), "wait")
    run_id = deployment.submit(FEDKT)
    wait_for_fault(deployment.member(BAD))
    start = time.monotonic()
    deployment.stop_member(BAD)
    report = deployment.finish(run_id, PATIENCE)
    seconds = time.monotonic() - start

    reasons = left_out(deployment, report)
    assert set(reasons) == {BAD}
    assert reasons[BAD].startswith(UNAVAILABLE)
    assert same_model(report, in_process(deployment.prepared, FEDKT, failing={BAD}))
    check_journals(deployment.prepared, report)
    measured("SuperNode stopped in a round (TERM)", seconds, f"excluded: {reasons[BAD]}")

    full = deployment.member(FULL)
    before = journal(full)
    deployment.bring_back(BAD)
    filler = fill_disk(full.state) if small_disk[0] else None
    if filler is None:
        plan(full, "no-space")
    report = deployment.run(FEDKT, timeout=PATIENCE)
    if filler is not None:
        filler.unlink()

    assert set(left_out(deployment, report)) == {FULL}
    told = re.findall(
        rf"excludes node {deployment.node_ids[FULL]}: (.*)",
        deployment.control.log(report["run-id"]),
    )
    assert told[0] == FAILED
    assert "Nothing left the party." in full.log.read_text()
    assert same_model(report, in_process(deployment.prepared, FEDKT, failing={FULL}))
    check_journals(deployment.prepared, report)
    assert journal(full) == before
    measured("disk full for a party's state", report["seconds"], f"excluded: {told[0]}")


def test_a_run_that_finds_nobody_ends_with_one_sentence(
    deployment: FaultyDeployment, measured: Measured
) -> None:
    """Without parties, a run waits for `max-wait` seconds and not for ever."""
    for number in range(len(deployment.prepared.members)):
        deployment.stop_member(number)
    wait_until(lambda: deployment.control.num_online() == 0)
    start = time.monotonic()
    run_id = deployment.submit(Settings.from_run_config(FEDKT.to_run_config(), max_wait=3.0))

    status = deployment.wait_for_run(run_id, PATIENCE)

    assert status.status == "finished:failed"
    sentence = "FedKT: 2 of 4 parties must connect within max_wait=3.0 seconds, got 0."
    assert sentence in status.details
    measured("all parties gone before the run", time.monotonic() - start, str(status))
