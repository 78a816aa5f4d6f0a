"""The slow half of the fault matrix: Flower itself takes a minute to notice these."""

import time
from collections.abc import Iterator

import pytest

from tests.faults.conftest import Measured
from tests.faults.deployment import FaultyDeployment
from tests.faults.federation import (
    FEDKT,
    UNAVAILABLE,
    check_journals,
    faulty_federation,
    fedmd,
    in_process,
    journal,
    left_out,
    let_go,
    plan,
    same_model,
    wait_for_fault,
)
from tests.leftovers import PATIENCE, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.faults]

BAD = 2
TIMEOUT = 120.0
"""Seconds for an answer: more than sound parties need on a busy machine."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDeployment]:
    """Four parties, each of which may fail."""
    prepared = faulty_federation(tmp_path_factory.mktemp("faults") / "federation")
    with FaultyDeployment(prepared) as running:
        yield running


def test_a_party_whose_process_exits_is_left_out(
    deployment: FaultyDeployment, measured: Measured
) -> None:
    """Flower notices after about a minute; the others' model does not suffer."""
    plan(deployment.member(BAD), "exit")
    run_id = deployment.submit(FEDKT)
    wait_for_fault(deployment.member(BAD))
    start = time.monotonic()

    report = deployment.finish(run_id, PATIENCE)

    seconds = time.monotonic() - start
    reasons = left_out(deployment, report)
    assert set(reasons) == {BAD}
    assert "stopped responding" in reasons[BAD]
    assert same_model(report, in_process(deployment.prepared, FEDKT, failing={BAD}))
    check_journals(deployment.prepared, report)
    measured("party exits", seconds, f"excluded: {reasons[BAD]}")


def test_a_killed_supernode_comes_back_in_the_next_round(
    deployment: FaultyDeployment, measured: Measured
) -> None:
    """The round continues without it, and the next one waits for it and its old key."""
    settings = fedmd(2)
    plan(deployment.member(BAD), "wait")
    run_id = deployment.submit(settings)
    wait_for_fault(deployment.member(BAD))
    start = time.monotonic()
    deployment.kill_member(BAD)
    sentence = f"excludes node {deployment.node_ids[BAD]}: {UNAVAILABLE}"
    wait_until(lambda: sentence in deployment.control.log(run_id))
    noticed = time.monotonic() - start
    deployment.bring_back(BAD)

    report = deployment.finish(run_id, PATIENCE)

    seconds = time.monotonic() - start
    assert [one["train"]["num-parties"] for one in report["rounds"]] == [3, 4]
    assert report["rounds"][0]["train"]["num-rejected"] == 1
    assert left_out(deployment, report) == {}
    assert same_model(report, in_process(deployment.prepared, settings, away={BAD}))
    check_journals(deployment.prepared, report)
    measured(
        "SuperNode killed in round 1 of 2",
        seconds,
        f"noticed after {noticed:.0f} s: {sentence}; round 2 with it",
    )


def test_a_late_answer_changes_nothing(
    deployment: FaultyDeployment, measured: Measured
) -> None:
    """Who is slower than the timeout misses the round, and takes part in the next one.

    There, its late answer is not taken for the one that is asked for.
    """
    settings = fedmd(2, timeout=TIMEOUT)
    slow = deployment.member(BAD)
    plan(slow, "wait")
    run_id = deployment.submit(settings)
    wait_for_fault(slow)
    start = time.monotonic()
    sentence = f"excludes node {deployment.node_ids[BAD]}: it did not answer in time"
    wait_until(lambda: sentence in deployment.control.log(run_id))
    let_go(slow)

    report = deployment.finish(run_id, PATIENCE)

    seconds = time.monotonic() - start
    assert [one["train"]["num-parties"] for one in report["rounds"]] == [3, 4]
    assert left_out(deployment, report) == {}
    assert same_model(report, in_process(deployment.prepared, settings, late={BAD}))
    check_journals(deployment.prepared, report)
    # It had paid for the answer that came too late.
    assert len([line for line in journal(slow) if line["run"] == run_id]) == 2
    measured(
        f"party slower than timeout={TIMEOUT:.0f}, and late reply",
        seconds,
        "excluded from round 1: it did not answer in time; takes part in round 2",
    )


def test_all_parties_killed_in_a_round_end_with_one_sentence(
    deployment: FaultyDeployment, measured: Measured
) -> None:
    """The run ends by itself, and its status says why; with the parties back, one works."""
    members = deployment.prepared.members
    for one in members:
        plan(one, "wait")
    run_id = deployment.submit(FEDKT)
    for one in members:
        wait_for_fault(one)
    start = time.monotonic()
    for number in range(len(members)):
        deployment.kill_member(number)

    status = deployment.wait_for_run(run_id, PATIENCE)

    seconds = time.monotonic() - start
    assert status.status == "finished:failed"
    assert "0 of 4 parties sent a valid reply and 2 are needed" in status.details
    assert UNAVAILABLE in status.details
    assert not any(line["run"] == run_id for one in members for line in journal(one))
    for number in range(len(members)):
        deployment.bring_back(number)
    report = deployment.run(FEDKT, timeout=PATIENCE)
    assert same_model(report, in_process(deployment.prepared, FEDKT))
    measured("all parties killed in a round", seconds, str(status))
