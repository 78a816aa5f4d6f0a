"""Hostile parties: whatever one of them answers, the others make a model of the round."""

import random
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from google.protobuf.message import DecodeError

from fl_strategies import KnowledgeStrategy
from fl_strategies._compat import message_from_bytes, message_to_bytes
from fl_strategies.errors import StrategyError
from fl_strategies.server.replies import parse_reply
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid
from tests.fuzz.federations import NUM_PARTIES, VARIANTS, Exchange, recorded_of
from tests.fuzz.mutation import LONG, TEXTS, mutate_bytes, mutate_records
from tests.fuzz.trials import Trials, time_limit
from tests.toys import TEST

SPOILED_BY_ONE = ("fedavg", "feddf", "fedgen", "pfnm", "scaffold")
"""A mean of weights is not robust, as its documentation says; others stay finite."""


def hostile(rng: random.Random, request: Message, reply: Message) -> Message | None:
    """Return what a party could send in place of its reply; None if Flower cannot read it."""
    step = rng.random()
    if step < 0.03:
        reason = rng.choice((*TEXTS, LONG * 100))
        return Message(Error(rng.randrange(300), reason), reply_to=request)
    if step < 0.2:
        try:
            return message_from_bytes(mutate_bytes(rng, message_to_bytes(reply)))
        except (DecodeError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
    return Message(mutate_records(rng, reply.content), reply_to=request)


def with_one_hostile(
    rng: random.Random, exchange: Exchange
) -> tuple[int, list[Message], Message | None]:
    """Return the number of the hostile party, all replies in some order, and its own."""
    number = rng.randrange(NUM_PARTIES) % len(exchange.sent)
    own = hostile(rng, exchange.sent[number], exchange.replies[number])
    others = [reply for i, reply in enumerate(exchange.replies) if i != number]
    replies = [*others, own] if own is not None else others
    if own is not None and rng.random() < 0.05:
        replies.append(own)
    rng.shuffle(replies)
    return number, replies, own


@pytest.mark.share(0.004)
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_round_survives_one_hostile_reply(name: str, trials: Trials) -> None:
    """No exception, no other party lost, a finite model, and a next message that can go."""
    rounds = recorded_of(name, "train")
    app = VARIANTS[name].app()
    for rng in trials.numbers():
        exchange = rng.choice(rounds)
        number, replies, _ = with_one_hostile(rng, exchange)
        strategy = exchange.again()
        with time_limit():
            _, metrics = strategy.aggregate_train(1, replies)
        node = exchange.sent[number].metadata.dst_node_id
        trials.count(refused=node in strategy.rejected_)
        check_round(strategy, exchange, node, metrics)
        if rng.random() < 0.1:
            check_what_follows(name, strategy, InMemoryGrid(app, NUM_PARTIES))
    trials.require_both()


def check_round(
    strategy: KnowledgeStrategy[Any],
    exchange: Exchange,
    node: int,
    metrics: MetricRecord | None,
) -> None:
    """Only the hostile node is excluded, whoever it says that it is."""
    assert set(strategy.rejected_) <= {node}, strategy.rejected_
    enough = len(exchange.sent) - len(strategy.rejected_) >= 2
    if enough:
        assert metrics is not None
        assert metrics[keys.NUM_REJECTED] == len(strategy.rejected_)
        assert metrics[keys.NUM_PARTIES] == len(exchange.sent) - len(strategy.rejected_)


def check_what_follows(name: str, strategy: KnowledgeStrategy[Any], grid: InMemoryGrid) -> None:
    """Fail if what an untrusted party sent breaks the model or the next messages."""
    try:
        model = strategy.model_
    except StrategyError:
        return
    if VARIANTS[name].strategy not in SPOILED_BY_ONE:
        assert np.isfinite(model.logits(TEST[0])).all()
    assert strategy.ledger_.statement()
    sent = strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), grid)
    sent += strategy.ask_parties(2, ArrayRecord(), ConfigRecord(), grid)
    for message in sent:
        assert message_from_bytes(message_to_bytes(message)).content is not None


@pytest.mark.share(0.001)
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_an_evaluation_survives_one_hostile_reply(name: str, trials: Trials) -> None:
    """Untrusted metrics are dropped or combined; nothing is raised."""
    asked = recorded_of(name, "evaluate")
    for rng in trials.numbers():
        exchange = rng.choice(asked)
        number, replies, _ = with_one_hostile(rng, exchange)
        strategy = exchange.again()
        with time_limit():
            metrics = strategy.aggregate_evaluate(1, replies)
        node = exchange.sent[number].metadata.dst_node_id
        trials.count(refused=node in strategy.rejected_)
        assert metrics is not None
        assert metrics[keys.NUM_UNDELIVERED] == len(strategy.undelivered_)
        assert strategy.undelivered_ == strategy.rejected_
        assert set(strategy.rejected_) <= {m.metadata.dst_node_id for m in exchange.sent}
    trials.require_both()


@pytest.mark.share(0.003)
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_replies_are_refused_by_typed_errors_alone(name: str, trials: Trials) -> None:
    """`parse_reply` with the strategy's own `read`, without the net that a strategy has."""
    rounds = recorded_of(name, "train")
    for rng in trials.numbers():
        exchange = rng.choice(rounds)
        number = rng.randrange(len(exchange.sent))
        request, valid = exchange.sent[number], exchange.replies[number]
        reply = hostile(rng, request, valid)
        if reply is None:
            trials.count(refused=True)
            continue
        strategy = exchange.again()
        limit, kind = strategy.max_reply_bytes, strategy.reply_kind
        trials.attempt(parse_reply, request, reply, kind, limit, strategy.check)
    trials.require_both()
