"""What each party's releases cost, as a file for other programs."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message

from clients.app import client_app
from fl_strategies import KnowledgeStrategy, write_epsilon_csv
from fl_strategies.errors import RunFailed
from fl_strategies.wire import keys
from simulations.runtime.local import run_local
from tests.kept import NUM_PARTIES, Killed, MortalGrid, build, start
from tests.toys import EditedGrid, load_toy_party, toy_fedkt

APP = client_app(load_toy_party)
LOCAL_NOISE = {"release": "ldp", "target_epsilon": 30.0, "num_rounds_planned": 3}


def lines_of(strategy: KnowledgeStrategy[Any], folder: Path) -> list[dict[str, str]]:
    write_epsilon_csv(strategy, folder / "epsilon.csv")
    with (folder / "epsilon.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def local_noise(**changes: Any) -> KnowledgeStrategy[Any]:
    return build("fedmd", accept_noise=True, **{**LOCAL_NOISE, **changes})


def test_each_party_has_what_it_reported_after_each_round(tmp_path: Path) -> None:
    """Its own epsilon grows from round to round, and the line of all has the metrics'."""
    strategy = local_noise()
    result = run_local(strategy, APP, 4, num_rounds=3)

    lines = lines_of(strategy, tmp_path)
    assert list(lines[0]) == [
        "round",
        "party",
        "unit",
        "epsilon",
        "epsilon-unbounded",
        "delta",
        "num-releases",
        "mechanism",
    ]
    assert len(lines) == 3 * 5 * 2
    spent = [
        float(line["epsilon"])
        for line in lines
        if (line["party"], line["unit"]) == ("2", "example")
    ]
    assert 0 < spent[0] < spent[1] < spent[2] <= 30
    assert spent[2] == strategy.parties_[2].train[keys.EPSILON_EXAMPLE]
    (last,) = [
        line
        for line in lines
        if (line["party"], line["round"], line["unit"]) == ("all", "3", "example")
    ]
    metrics = result.train_metrics_clientapp[3]
    assert float(last["epsilon"]) == metrics[keys.EPSILON_EXAMPLE]
    assert float(last["delta"]) == metrics[keys.DELTA_EXAMPLE]
    assert (last["epsilon-unbounded"], last["mechanism"]) == ("false", "one-vote")


def test_what_promises_nothing_is_empty_with_a_flag(tmp_path: Path) -> None:
    """No spreadsheet reads infinity as a number."""
    strategy = toy_fedkt()
    run_local(strategy, APP, 4)

    lines = lines_of(strategy, tmp_path)
    assert {line["party"] for line in lines} == {"0", "1", "2", "3", "all"}
    for line in lines:
        assert (line["epsilon"], line["epsilon-unbounded"]) == ("", "true")
        assert line["mechanism"] == ""
        assert float(line["delta"]) == 1e-5


def test_a_trusted_server_promises_what_parties_cannot(tmp_path: Path) -> None:
    """Each party tells what the server sees; the noise that others see is in the last line."""
    strategy = toy_fedkt(privacy_level="L1", gamma=0.1)
    run_local(strategy, APP, 4)

    lines = lines_of(strategy, tmp_path)
    own = {line["epsilon-unbounded"] for line in lines if line["party"] != "all"}
    (everybody,) = [line for line in lines if (line["party"], line["unit"]) == ("all", "party")]
    assert own == {"true"}
    assert float(everybody["epsilon"]) == strategy.ledger_.get_epsilon() < math.inf
    assert everybody["mechanism"] == "noisy-max"


def test_a_party_that_tells_nothing_counts_as_unprotected(tmp_path: Path) -> None:
    def conceal(_: int, replies: list[Message]) -> None:
        for reply in replies[:1]:
            for name in (keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE):
                reply.content.metric_records[keys.METRICS].pop(name, None)

    strategy = local_noise()
    strategy.start(EditedGrid(APP, 4, conceal), ArrayRecord(), num_rounds=1)

    told = {
        line["party"]: (line["epsilon-unbounded"], line["delta"])
        for line in lines_of(strategy, tmp_path)
        if line["unit"] == "example"
    }
    assert told["0"] == ("true", "")
    assert told["1"][0] == "false"
    assert told["all"][0] == "true"


def test_a_failed_run_shows_what_was_spent_all_the_same(tmp_path: Path) -> None:
    def lose(_: int, replies: list[Message]) -> None:
        del replies[1:]

    strategy = local_noise()
    with pytest.raises(RunFailed):
        strategy.start(EditedGrid(APP, 4, lose), ArrayRecord(), num_rounds=1)

    lines = lines_of(strategy, tmp_path)
    assert [line["party"] for line in lines] == ["0", "0"]
    assert float(lines[0]["epsilon"]) > 0


def test_a_resumed_run_has_all_rounds(tmp_path: Path) -> None:
    folder, in_round_two = tmp_path / "kept", 2 * NUM_PARTIES + 1
    with pytest.raises(Killed):
        start(local_noise(folder=folder), MortalGrid(APP, in_round_two), 2)
    strategy = local_noise(folder=folder, resume=True)
    start(strategy, MortalGrid(APP), 2)

    rounds = [line["round"] for line in lines_of(strategy, tmp_path)]
    assert rounds == ["1"] * 8 + ["2"] * 8
