"""Servers that are killed in a round, and parties that restart between rounds."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from simulations.deploy.federation import Member
from tests.faults.conftest import Measured
from tests.faults.deployment import FaultyDeployment
from tests.faults.federation import (
    check_journals,
    faulty_federation,
    fedmd,
    in_process,
    journal,
    let_go,
    plan,
    same_model,
    wait_for_fault,
)
from tests.leftovers import PATIENCE, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.faults]

# Networks continue from round to round, so what a party has lost would show.
LEARNER = "mlp"
NUM_PARTIES = 3
SETTINGS = fedmd(2, num_parties=NUM_PARTIES)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDeployment]:
    """Three parties whose models live as long as a run."""
    folder = tmp_path_factory.mktemp("resume") / "federation"
    with FaultyDeployment(faulty_federation(folder, NUM_PARTIES, learner=LEARNER)) as running:
        yield running


def kill_server_app(deployment: FaultyDeployment) -> None:
    """Kill the strategy's process alone."""
    deployment.kill_server_app()


def kill_superlink(deployment: FaultyDeployment) -> None:
    """Kill the SuperLink with all that it has started, and start it with its database."""
    deployment.kill_superlink()
    deployment.start_superlink()
    deployment.wait_until_online()


@pytest.mark.parametrize("kill", [kill_server_app, kill_superlink])
def test_a_run_goes_on_after_its_server_was_killed(
    deployment: FaultyDeployment,
    tmp_path: Path,
    kill: Callable[[FaultyDeployment], None],
    measured: Measured,
) -> None:
    """The killed run ends as failed; resumed, it ends in the bits of one that was not killed.

    Nobody is asked again for what had arrived, and nothing is charged twice.
    """
    members, folder = deployment.prepared.members, tmp_path / "checkpoint"
    kept = fedmd(2, num_parties=NUM_PARTIES, checkpoint_dir=str(folder))
    before = [len(journal(one)) for one in members]
    plan(members[0], "wait")
    run_id = deployment.submit(kept)
    wait_for_fault(members[0])
    wait_until(lambda: len(list(folder.glob("round-*/train/*.message"))) == 2)
    start = time.monotonic()
    kill(deployment)
    let_go(members[0])

    status = deployment.wait_for_run(run_id, PATIENCE)
    noticed = time.monotonic() - start
    start = time.monotonic()
    again = deployment.submit(replace(kept, resume=True))
    resumed = deployment.wait_for_run(again, PATIENCE)

    seconds, report = time.monotonic() - start, deployment.result(again)
    assert status.status == "finished:failed"
    assert resumed.completed
    assert report["rejected"] == {}
    assert [one["train"]["num-parties"] for one in report["rounds"]] == [NUM_PARTIES] * 2
    assert same_model(report, in_process(deployment.prepared, SETTINGS, learner=LEARNER))
    lines = [len(journal(one)) - old for one, old in zip(members, before, strict=True)]
    assert lines == [2, 2, 2]
    what = kill.__name__.replace("_", " ").replace("kill ", "") + " killed in round 1 of 2"
    measured(what, noticed, f"{status}; resumed: ends well after {seconds:.0f} s, same bits")


def num_sent(member: Member) -> int:
    """Return how many replies a party's SuperNode has sent."""
    return member.log.read_text().count("Sent successfully")


def test_a_party_that_restarts_between_rounds_goes_on(
    deployment: FaultyDeployment, measured: Measured
) -> None:
    """Its model is on its own disk, so the run ends as if it had never stopped."""
    first, second = deployment.prepared.members[:2]
    before, sent = len(journal(first)), num_sent(second)
    run_id = deployment.submit(SETTINGS)
    wait_until(lambda: len(journal(first)) > before)
    plan(first, "wait")  # which holds the end of round 1
    wait_for_fault(first)
    wait_until(lambda: num_sent(second) > sent)
    start = time.monotonic()
    deployment.stop_member(1)
    deployment.bring_back(1)
    back = time.monotonic() - start
    let_go(first)

    report = deployment.finish(run_id, PATIENCE)

    assert [one["train"]["num-parties"] for one in report["rounds"]] == [NUM_PARTIES] * 2
    assert same_model(report, in_process(deployment.prepared, SETTINGS, learner=LEARNER))
    check_journals(deployment.prepared, report)
    measured("SuperNode restarted between rounds", back, "continues with its model, same bits")
