"""A party that is cut off, or killed, around the moment at which it answers.

In all of them it has paid: each journal has one line of the run, and no more.
"""

import time
from collections.abc import Iterator

import pytest

from simulations.deploy.federation import Member
from tests.faults.conftest import Measured
from tests.faults.deployment import FaultyDeployment
from tests.faults.federation import (
    FEDKT,
    UNAVAILABLE,
    faulty_federation,
    in_process,
    journal,
    left_out,
    let_go,
    plan,
    plan_when_paid,
    same_model,
    wait_for_fault,
)
from tests.faults.links import Link
from tests.leftovers import PATIENCE, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.faults]

SLOW, BAD = 0, 2
CUT_SECONDS = 109.0
"""How long a line stays cut at least; a SuperNode must outlast it."""


class LinkedDeployment(FaultyDeployment):
    """A deployment in which one party's line can be cut."""

    def start_superlink(self) -> None:
        """Start the SuperLink, and lay the line to it."""
        super().start_superlink()
        self.link = Link(self.host, self.port)
        self._stack.callback(self.link.close)

    def address_for(self, number: int) -> str:
        """Return the near end of the line for the party that is to be cut off."""
        return self.link.address if number == BAD else super().address_for(number)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedDeployment]:
    """Four parties, the line of one of which may be cut."""
    prepared = faulty_federation(tmp_path_factory.mktemp("links") / "federation")
    with LinkedDeployment(prepared) as running:
        yield running


def num_sent(one: Member) -> int:
    """Return how many replies a party's SuperNode has sent."""
    return one.log.read_text().count("Sent successfully")


def paid(deployment: LinkedDeployment, run_id: str) -> list[int]:
    """Return how often each party has paid for a run."""
    members = deployment.prepared.members
    return [sum(line["run"] == run_id for line in journal(one)) for one in members]


def without_the_model(deployment: LinkedDeployment, report: dict[str, object]) -> set[int]:
    """Return which parties a report names as those that do not have the model."""
    numbers = {str(node): number for number, node in enumerate(deployment.node_ids)}
    undelivered = report["undelivered"]
    assert isinstance(undelivered, dict)
    return {numbers[node] for node in undelivered}


def check_next_run(deployment: LinkedDeployment) -> None:
    """With everybody back, a run is complete, and everybody pays for it once."""
    deployment.wait_until_online()
    report = deployment.run(FEDKT, timeout=PATIENCE)
    assert report["rejected"] == report["undelivered"] == {}
    assert paid(deployment, str(report["run-id"])) == [1, 1, 1, 1]
    assert same_model(report, in_process(deployment.prepared, FEDKT))


def test_a_line_that_is_cut_after_the_reply(
    deployment: LinkedDeployment, measured: Measured
) -> None:
    """The reply counts; the party is named as one that has paid and lacks the model."""
    bad, slow = deployment.member(BAD), deployment.member(SLOW)
    before = num_sent(bad)
    plan(slow, "wait")  # which holds the end of the round
    run_id = deployment.submit(FEDKT)
    wait_for_fault(slow)
    wait_until(lambda: num_sent(bad) > before)
    start = time.monotonic()
    deployment.link.cut()
    let_go(slow)

    report = deployment.finish(run_id, PATIENCE)

    seconds = time.monotonic() - start
    time.sleep(max(CUT_SECONDS - seconds, 0.0))
    deployment.link.mend()
    assert report["rounds"][0]["train"]["num-parties"] == 4
    assert without_the_model(deployment, report) == {BAD}
    assert report["rounds"][0]["evaluate"]["num-undelivered"] == 1
    sentence = f"node {deployment.node_ids[BAD]}: {UNAVAILABLE}"
    assert f"not everybody has the model. {sentence}" in deployment.control.log(run_id)
    assert same_model(report, in_process(deployment.prepared, FEDKT))
    assert paid(deployment, run_id) == [1, 1, 1, 1]
    check_next_run(deployment)
    measured(
        "line cut after the reply", seconds, f"its reply counts; without the model: {sentence}"
    )


def test_a_line_that_is_cut_before_the_reply(
    deployment: LinkedDeployment, measured: Measured
) -> None:
    """The party has paid for an answer that never arrives, and pays no second time."""
    bad = deployment.member(BAD)
    plan(bad, "wait")
    run_id = deployment.submit(FEDKT)
    wait_for_fault(bad)
    start = time.monotonic()
    deployment.link.cut()
    let_go(bad)
    wait_until(lambda: paid(deployment, run_id)[BAD] == 1)

    report = deployment.finish(run_id, PATIENCE)

    seconds = time.monotonic() - start
    deployment.link.mend()
    reasons = left_out(deployment, report)
    assert set(reasons) == {BAD}
    assert reasons[BAD].startswith(UNAVAILABLE)
    assert without_the_model(deployment, report) == {BAD}
    assert same_model(report, in_process(deployment.prepared, FEDKT, failing={BAD}))
    check_next_run(deployment)
    assert paid(deployment, run_id) == [1, 1, 1, 1]
    measured("line cut before the reply", seconds, f"excluded: {reasons[BAD]}")


def test_a_party_that_is_killed_after_it_has_paid(
    deployment: LinkedDeployment, measured: Measured
) -> None:
    """It starts again with its journal: what it paid is there, once, and the next run works."""
    bad = deployment.member(BAD)
    plan_when_paid(bad, "wait")
    run_id = deployment.submit(FEDKT)
    wait_for_fault(bad)
    assert paid(deployment, run_id)[BAD] == 1
    start = time.monotonic()
    deployment.kill_member(BAD)
    deployment.bring_back(BAD)
    back = time.monotonic() - start

    report = deployment.finish(run_id, PATIENCE)

    seconds = time.monotonic() - start
    reasons = left_out(deployment, report)
    assert set(reasons) == {BAD}
    assert reasons[BAD].startswith(UNAVAILABLE)
    assert same_model(report, in_process(deployment.prepared, FEDKT, failing={BAD}))
    assert paid(deployment, run_id) == [1, 1, 1, 1]
    check_next_run(deployment)
    measured(
        "SuperNode killed after it has paid, and back",
        seconds,
        f"back after {back:.0f} s; excluded: {reasons[BAD]}",
    )
