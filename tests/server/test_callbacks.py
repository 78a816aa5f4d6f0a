"""Functions that a user gives to a strategy, and what they are told."""

import math
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord

import fl_strategies
from clients.app import client_app
from fl_strategies.errors import InvalidParameter, RunFailed
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid, run_local
from tests.kept import NUM_PARTIES, Killed, MortalGrid, build, start
from tests.toys import EditedGrid, load_toy_party, load_with, toy_fedkt, without_records

APP = client_app(load_toy_party)
Told = list[tuple[int, dict[str, float]]]


def failing(number: int, _: dict[str, float]) -> None:
    raise RuntimeError(f"the disk is full in round {number}")


def test_a_failing_callback_is_named_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others are called all the same, in every round."""
    told: Told = []
    strategy = build("fedmd", on_round=[failing, lambda *round_: told.append(round_)])

    run_local(strategy, APP, 4, num_rounds=3)

    warnings = [line for line in caplog.messages if "on_round" in line]
    assert len(warnings) == 1
    assert "function failing failed in round 1 (RuntimeError: the disk is full" in warnings[0]
    assert [number for number, _ in told] == [1, 2, 3]


def test_callbacks_cannot_change_what_others_see() -> None:
    told: Told = []
    first = lambda _, metrics: metrics.clear()  # noqa: E731 - two functions in a row
    strategy = toy_fedkt(on_round=[first, lambda *round_: told.append(round_)])

    result = run_local(strategy, APP, 4)

    assert told[0][1]["train/num-parties"] == 4
    assert result.train_metrics_clientapp[1][keys.NUM_PARTIES] == 4


@pytest.mark.parametrize("given", [3, "print", [print, None]])
def test_what_cannot_be_called_is_refused(given: object) -> None:
    with pytest.raises(InvalidParameter, match="FedKT: on_round must be a function of round"):
        toy_fedkt(on_round=given)


def test_the_servers_own_evaluation_is_told() -> None:
    """Callbacks wait for it, once a round and not before the first."""
    told: Told = []
    strategy = build("fedmd", on_round=lambda *round_: told.append(round_))

    strategy.start(
        InMemoryGrid(APP, 4),
        ArrayRecord(),
        num_rounds=2,
        evaluate_fn=lambda number, _: MetricRecord({"loss": float(number), "by": [1, 2]}),
    )

    assert [number for number, _ in told] == [1, 2]
    assert [metrics["server/loss"] for _, metrics in told] == [1.0, 2.0]
    assert told[0][1]["server/by/1"] == 2


def test_figures_of_parties_have_their_numbers() -> None:
    told: Told = []
    app = client_app(load_with(without_records, only=1))
    run_local(build("avgkd", on_round=lambda *round_: told.append(round_)), app, 4)

    ((_, metrics),) = told
    assert {n.rpartition("/")[2] for n in metrics if "accuracy-by-party/" in n} == {*"023"}
    assert metrics["num-rejected"] == 1
    assert not any("partition-ids" in name for name in metrics)


def test_a_round_without_a_result_is_told_too() -> None:
    """It has no metrics, but its time and how many were excluded; no reason of theirs."""
    told: Told = []

    def load(context: Any) -> Any:
        return without_records(load_toy_party(context))

    with pytest.raises(RunFailed):
        run_local(toy_fedkt(on_round=lambda *round_: told.append(round_)), client_app(load), 4)

    ((number, metrics),) = told
    assert number == 1
    assert metrics.keys() == {"seconds", "num-rejected"}
    assert metrics["num-rejected"] == 4


def test_what_nobody_knows_is_not_told() -> None:
    """An accuracy that is NaN has no name, and an epsilon that promises nothing is infinite."""
    told: Told = []

    def add_unknown(_: int, replies: list[Message]) -> None:
        for reply in replies:
            reply.content.metric_records[keys.METRICS]["mood"] = math.nan

    strategy = toy_fedkt(on_round=lambda *round_: told.append(round_))
    result = strategy.start(EditedGrid(APP, 4, add_unknown), ArrayRecord(), num_rounds=1)

    assert math.isnan(result.train_metrics_clientapp[1]["mood"])  # type: ignore[arg-type]
    assert "train/mood" not in told[0][1]
    assert told[0][1]["train/epsilon-example"] == math.inf


def test_a_second_start_goes_on_counting() -> None:
    told: Told = []
    strategy = build("fedmd", on_round=lambda *round_: told.append(round_))
    grid = InMemoryGrid(APP, 4)
    for _ in range(2):
        strategy.start(grid, ArrayRecord(), num_rounds=2)

    assert [number for number, _ in told] == [1, 2, 3, 4]


def test_a_resumed_run_tells_the_rest(tmp_path: Path) -> None:
    """A round in which the server is killed is told when it has ended, by its own number."""
    told: Told = []

    def strategy(**more: Any) -> Any:
        return build("fedmd", tmp_path, on_round=lambda *r: told.append(r), **more)

    in_round_two = 2 * NUM_PARTIES + 1
    with pytest.raises(Killed):
        start(strategy(), MortalGrid(APP, in_round_two))
    assert [number for number, _ in told] == [1]

    start(strategy(resume=True), MortalGrid(APP))

    assert [number for number, _ in told] == [1, 2, 3]


@pytest.mark.parametrize("name", ["TensorBoardTracker", "MLflowTracker", "WandbTracker"])
def test_a_tracker_of_former_releases_names_its_recipe(name: str) -> None:
    with pytest.raises(ImportError, match=r"Tracker must be a function .* docs/tracking\.md"):
        getattr(fl_strategies, name)
