"""The same app on real Flower processes: the simulation engine, and SuperNodes on loopback."""

import json
from pathlib import Path
from typing import Any

import pytest

from simulations.__main__ import main
from simulations.config import Settings
from simulations.runtime.flower import (
    FlowerRunFailed,
    flower_environment,
    run_and_read,
    run_with_flower,
)
from tests.flower.supernodes import OpenSuperLink
from tests.leftovers import living

pytestmark = pytest.mark.flower

NUM_PARTIES = 3
SETTINGS = {
    "strategy": "fedkt",
    "num-parties": NUM_PARTIES,
    "num-teachers": 2,
    "num-trees": 10,
    "boosting-rounds": 10,
    "epochs": 3,
    "learner": "random-forest,xgboost,mlp",
    "seed": 4,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of the in-process runner."""
    folder = tmp_path_factory.mktemp("local")
    assignments = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    written = [f"--set=output-dir={folder}", "--json", f"{folder}/out.json"]
    assert main(["run", *assignments, *written]) == 0
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return report


def settings(folder: Path) -> Settings:
    return Settings.from_run_config({**SETTINGS, "output-dir": str(folder)})


def same_outcome(report: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare all that does not depend on time or place."""
    for key in ("accuracy", "solo-accuracy", "central-accuracy", "num-bytes-sent", "rejected"):
        assert report[key] == expected[key], key
    solo = [[party["solo-accuracy"] for party in one["parties"]] for one in (report, expected)]
    assert solo[0] == solo[1]


def test_the_simulation_engine_gives_the_same_result(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    """`flwr run` on Ray ends in the numbers of the in-process runner, and leaves nothing."""
    report, _ = run_with_flower(settings(tmp_path))

    same_outcome(report, expected)
    assert living("flower-superlink", str(tmp_path)) == []


@pytest.mark.deployment
def test_supernodes_give_the_same_result(tmp_path: Path, expected: dict[str, Any]) -> None:
    """One SuperLink and three SuperNode processes end in the same numbers."""
    with OpenSuperLink() as superlink:
        port = superlink.port
        for i in range(NUM_PARTIES):
            superlink.start_supernode({"partition-id": i, "num-partitions": NUM_PARTIES})
        report, _ = run_and_read(superlink, settings(tmp_path))

    same_outcome(report, expected)
    assert living(str(port)) == []


def test_a_simulation_joins_no_cluster_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts its own, whatever runs on this machine, unless an address is given."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert flower_environment(tmp_path)["RAY_ADDRESS"] == "local"

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert flower_environment(tmp_path)["RAY_ADDRESS"] == "10.0.0.1:6379"


def test_a_failed_run_is_an_error(tmp_path: Path) -> None:
    """A setting that no run can have ends in one sentence, though Flower exits with 0."""
    wrong = {**settings(tmp_path).to_run_config(), "learner": "crystal-ball"}

    # The server's part fails before anybody is asked, so that no party is needed.
    with OpenSuperLink() as superlink:
        status = superlink.run_app(wrong)
        with pytest.raises(FlowerRunFailed, match=r"flwr run: it must succeed|must be JSON"):
            superlink.run_app({"no-such-key": 1})

    assert status.status == "finished:failed"
