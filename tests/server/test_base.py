import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.app import client_app
from fl_strategies import REGISTRY, FedKT, Party, PartyState
from fl_strategies.errors import (
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
    RunFailed,
    UnsupportedLearner,
)
from fl_strategies.party.role import receive_model
from fl_strategies.server.strategy import KnowledgeStrategy
from fl_strategies.strategies.codistill.options import join_models
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge
from simulations.runtime.local import InMemoryGrid, run_local
from tests.kept import journal_of
from tests.toys import (
    PUBLIC,
    TEST,
    CentroidLearner,
    EditedGrid,
    common_options,
    load_toy_party,
    toy_fedkt,
    toy_party,
)

APP = client_app(load_toy_party)


class LateGrid(InMemoryGrid):
    """Nodes register one after the other while the server already asks."""

    def __init__(self) -> None:
        super().__init__(APP, 4)
        self.arrivals: Iterator[int] = iter([0, 0, 1, 2, 3, 4])

    def get_node_ids(self) -> list[int]:
        return super().get_node_ids()[: next(self.arrivals, 4)]


def test_the_server_waits_for_late_parties() -> None:
    strategy = toy_fedkt(max_wait=30.0)

    result = strategy.start(LateGrid(), ArrayRecord(), num_rounds=1)

    assert result.train_metrics_clientapp[1][keys.NUM_PARTIES] == 4


def test_all_connected_parties_take_part_even_if_fewer_were_expected() -> None:
    """`num_parties` is what to wait for, not how many to pick, and settings of users travel."""
    mine, grid = ConfigRecord({"mine": 7}), InMemoryGrid(APP, 4)

    sent = toy_fedkt(num_parties=2).ask_parties(1, ArrayRecord(), mine, grid)

    assert type(sent) is list  # a generator works in simulation and fails in deployment
    assert [message.metadata.dst_node_id for message in sent] == [1000, 1001, 1002, 1003]
    config = sent[0].content.config_records[keys.CONFIG]
    assert (config["mine"], config[keys.STRATEGY]) == (7, "fedkt")


def test_waiting_reminds_and_then_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fl_strategies.server.replies._SECONDS_BETWEEN_REMINDERS", 0.1)
    strategy, start = toy_fedkt(num_parties=5, max_wait=0.5), time.monotonic()

    with caplog.at_level(logging.INFO, logger="flwr.fl_strategies"):
        strategy.ask_parties(1, ArrayRecord(), ConfigRecord(), InMemoryGrid(APP, 4))

    assert time.monotonic() - start < 5
    assert "FedKT waits for parties: 4 of 5 are connected." in caplog.text
    assert "FedKT continues with 4 of 5 parties" in caplog.text


class Choosy(FedKT):
    """Asks some of the connected nodes, and needs so many replies."""

    chosen: ClassVar[list[int]] = [1000, 1002]
    needed = 2

    def nodes_for_round(self, nodes: list[int]) -> list[int]:
        assert nodes == [1000, 1001, 1002, 1003]
        return self.chosen

    def num_replies_needed(self) -> int:
        return self.needed


def choosy(**changes: Any) -> Choosy:
    strategy = Choosy.from_settings(**common_options(), num_teachers=2)
    vars(strategy).update(changes)
    return strategy


def test_a_strategy_chooses_whom_to_ask() -> None:
    """The hook sees all connected nodes; the others get no message and no delivery."""
    strategy = choosy()

    result = run_local(strategy, APP, 4)

    assert result.train_metrics_clientapp[1][keys.NUM_PARTIES] == 2
    assert sorted(strategy.parties_) == [0, 2]


def test_a_round_without_anybody_does_not_count() -> None:
    strategy = choosy(chosen=[])

    with pytest.raises(RunFailed, match=r"nobody was asked\. .* all the same: none\."):
        run_local(strategy, APP, 4)

    assert strategy.round_ == 0


@pytest.mark.parametrize(
    ("needed", "silent", "ends_well"),
    [(2, 0, True), (2, 1, False), (1, 1, True), (1, 2, False), (0, 2, True), (9, 0, True)],
)
def test_a_strategy_says_how_many_replies_it_needs(
    needed: int, silent: int, ends_well: bool
) -> None:
    strategy, grid = choosy(needed=needed), InMemoryGrid(APP, 4)
    messages = strategy.ask_parties(1, ArrayRecord(), ConfigRecord(), grid)
    replies = grid.send_and_receive(messages)

    _, metrics = strategy.aggregate_train(1, replies[silent:])

    assert (metrics is not None) == ends_well
    if metrics is not None:
        assert metrics[keys.NUM_PARTIES] == 2 - silent
    else:
        with pytest.raises(NotFitted, match=f"of 2 parties .* and {needed} are needed"):
            strategy.model_  # noqa: B018


class StayingLearner(CentroidLearner):
    """A learner that cannot travel."""

    to_arrays = None  # type: ignore[assignment]


class RefusingLearner(CentroidLearner):
    """A learner whose models must not travel."""

    def to_arrays(self) -> NoReturn:
        raise UnsupportedLearner("RefusingLearner: rows must stay at home, got a call.")


@pytest.mark.parametrize(
    ("learner_fn", "reason"),
    [
        (StayingLearner, "must have to_arrays and from_arrays, got StayingLearner."),
        (RefusingLearner, "RefusingLearner: rows must stay at home, got a call."),
    ],
)
def test_the_log_says_why_a_model_stays(
    learner_fn: type[CentroidLearner], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that cannot or must not travel ends no run, and nobody is told to vote."""
    strategy = toy_fedkt(learner_fn=learner_fn)

    with caplog.at_level(logging.INFO, logger="flwr.fl_strategies"):
        result = run_local(strategy, APP, 4)

    (line,) = [m for m in caplog.messages if "the final model stays on the server" in m]
    assert line.endswith(reason)
    assert result.evaluate_metrics_clientapp == {}
    assert strategy.model_.predict(TEST[0]).shape == (200,)


UNREADABLE = (
    "the model's learner must be one of centroid, got 'galaxy-brain'. "
    "Add it to the party's catalogue, which is receives in a node-config."
)


def with_journals(folder: Path) -> ClientApp:
    """Return the app of parties that write down what they pay for."""

    def load(context: Context) -> Party:
        party = load_toy_party(context)
        return replace(party, journal=journal_of(party, folder / str(party.partition_id)))

    return client_app(load)


def test_parties_that_cannot_read_the_model_refuse_before_they_pay(tmp_path: Path) -> None:
    """The question names the model that will come; nobody trains for one it cannot have."""
    strategy = toy_fedkt(learner_name="galaxy-brain")

    with pytest.raises(RunFailed, match=r"receives in a node-config.* all the same: none\."):
        run_local(strategy, with_journals(tmp_path), 4)

    expected = {f"Party {i}: {UNREADABLE}" for i in range(4)}
    assert set(strategy.rejected_.values()) == expected
    assert not list(tmp_path.rglob("*.jsonl")), "a party has paid"


def test_a_model_that_is_not_delivered_needs_no_reader(tmp_path: Path) -> None:
    """Without delivery nothing is announced, and so nothing is refused."""
    strategy = toy_fedkt(learner_name="galaxy-brain", evaluate=False)

    run_local(strategy, with_journals(tmp_path), 4)

    assert len(list(tmp_path.rglob("*.jsonl"))) == 4
    assert strategy.rejected_ == strategy.undelivered_ == {}


class Deceiving(FedKT):
    """A server that announces a model which parties know, and sends another."""

    @property
    def delivered_learner(self) -> str:
        return "centroid"


def test_nodes_that_have_paid_and_lack_the_model_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a server announces need not be what it sends; a run does not hide who lacks it."""
    strategy = Deceiving.from_settings(**{**common_options(4), "learner_name": "galaxy-brain"})

    result = run_local(strategy, with_journals(tmp_path), 4)

    assert len(list(tmp_path.rglob("*.jsonl"))) == 4
    expected = {1000 + i: f"Party {i}: {UNREADABLE}" for i in range(4)}
    assert strategy.undelivered_ == expected
    assert result.evaluate_metrics_clientapp[1][keys.NUM_UNDELIVERED] == 4
    (line,) = [
        message for message in caplog.messages if "not everybody has the model" in message
    ]
    assert all(f"node {node}: {reason}" in line for node, reason in expected.items())


def test_everybody_has_the_model_of_a_sound_run() -> None:
    strategy = toy_fedkt()

    result = run_local(strategy, APP, 4)

    assert result.evaluate_metrics_clientapp[1][keys.NUM_UNDELIVERED] == 0
    assert strategy.undelivered_ == {}
    silent = run_local(toy_fedkt(evaluate=False), APP, 4)
    assert silent.evaluate_metrics_clientapp == {}, "without evaluation nothing is delivered"


@pytest.mark.parametrize("name", ["fedavg", "avgkd", "fedmd"])
def test_a_model_to_learn_from_is_read_before_it_is_paid_for(tmp_path: Path, name: str) -> None:
    """A message that brings a model the party cannot read costs it nothing."""
    party = toy_party(0)
    party = replace(party, journal=journal_of(party, tmp_path))
    strategy: Any = REGISTRY[name].strategy
    config = strategy.from_settings(**common_options(2)).party_config()
    config |= {keys.STRATEGY: name, keys.SEED: 0, keys.SERVER_ROUND: 1}
    sent = Knowledge("model", {"other": np.zeros(3)}, {keys.LEARNER: "centroid"})
    sent = join_models([sent]) if name == "avgkd" else sent

    with pytest.raises(KnowledgeMismatch, match="centroids must be"):
        REGISTRY[name].party.train(party, sent, ConfigRecord(config), PartyState(RecordDict()))

    assert not list(tmp_path.rglob("*.jsonl")), "the party has paid"


def test_a_catalogue_lets_a_party_receive_other_models() -> None:
    party = Party(**{**vars(toy_party(0)), "catalogue": {"other": CentroidLearner}})
    arrays = CentroidLearner().to_arrays()

    model = receive_model(party, Knowledge("model", arrays, {keys.LEARNER: "other"}))

    assert isinstance(model, CentroidLearner)


def test_a_catalogue_entry_must_be_portable() -> None:
    party = Party(**{**vars(toy_party(0)), "learner_fn": StayingLearner})

    with pytest.raises(ValueError, match="must have from_arrays to receive a model"):
        receive_model(party, Knowledge("model", {}, {keys.LEARNER: "centroid"}))


def test_knowledge_for_a_node_is_nothing_by_default() -> None:
    assert KnowledgeStrategy.knowledge_for(toy_fedkt(), 1) is None


def test_a_reply_to_no_question_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    asked, other = toy_fedkt(), toy_fedkt()
    grid = InMemoryGrid(APP, 4)
    stray = grid.send_and_receive(
        other.ask_parties(1, ArrayRecord(), ConfigRecord({"x": 1}), grid)
    )
    asked.ask_parties(1, ArrayRecord(), ConfigRecord(), grid)

    assert asked.aggregate_train(1, stray) == (None, None)
    assert "fedkt ignores a reply to no open question." in caplog.text


class Keeping(FedKT):
    """Says that parties keep their own models, so that each one's figure is reported."""

    central: ClassVar[bool] = False


@pytest.mark.parametrize(
    ("told", "read"), [(1, 1.0), (10**400, math.nan)], ids=["whole", "huge"]
)
def test_whole_numbers_among_figures_end_no_run(told: int, read: float) -> None:
    """A party may report 1 where others report 0.9, or more than a float can hold."""

    def boast(_: int, replies: list[Message]) -> None:
        for reply in replies[1:2]:
            reply.content.metric_records[keys.METRICS][keys.ACCURACY] = told

    strategy = Keeping.from_settings(**common_options(), num_teachers=2)
    grid = EditedGrid(APP, 4, boast)

    result = strategy.start(grid, ArrayRecord(), num_rounds=1)

    figures = result.evaluate_metrics_clientapp[1][f"{keys.ACCURACY}-by-party"]
    assert isinstance(figures, list)
    assert figures[1] == pytest.approx(read, nan_ok=True)
    assert all(isinstance(figure, float) and 0 <= figure <= 1 for figure in figures[2:])


def test_a_users_evaluation_gets_arrays_that_make_the_model() -> None:
    """It is not called before there is a model, where loading arrays would end the run."""
    seen = {}

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        named = {name: array.numpy() for name, array in arrays.items()}
        model = CentroidLearner().from_arrays(named)
        seen[number] = model.predict(PUBLIC).tolist()
        return MetricRecord({"rows": len(PUBLIC)})

    strategy = toy_fedkt(num_parties=2)
    grid = InMemoryGrid(client_app(load_toy_party), 2)
    result = strategy.start(grid, ArrayRecord(), num_rounds=1, evaluate_fn=evaluate)

    assert seen == {1: strategy.model_.predict(PUBLIC).tolist()}
    assert sorted(result.evaluate_metrics_serverapp) == [1]


def test_an_argument_that_is_declared_but_not_taken_is_named() -> None:
    """It would be given by a simulation and read by nobody."""

    class Mistaken(FedKT):
        takes = (*FedKT.takes, "task")

    with pytest.raises(InvalidParameter, match=r"Mistaken: takes must be .*, got 'task'"):
        Mistaken(**common_options(), task="single-label")  # type: ignore[arg-type]
