"""Hostile servers: whatever one asks, a party answers or refuses in one typed sentence."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from google.protobuf.message import DecodeError

from clients import client_app
from fl_strategies import Party
from fl_strategies._compat import (
    message_from_bytes,
    message_to_bytes,
    records_from_bytes,
    records_to_bytes,
)
from fl_strategies.privacy.journal import PartyJournal
from simulations.runtime.local import InMemoryGrid
from tests.fuzz.federations import NUM_PARTIES, VARIANTS, private_numbers, recorded
from tests.fuzz.mutation import mutate_bytes, mutate_records
from tests.fuzz.trials import Trials, time_limit
from tests.kept import journal_of

FOREIGN = "in the party's own code"
"""What a party says of an error that is none of this package's."""
TEXT, BYTES = private_numbers()


def hostile(rng: random.Random, message: Message) -> Message | None:
    """Return what a server could ask in place of this; None if Flower cannot read it."""
    whole = message_from_bytes(message_to_bytes(message))
    if rng.random() < 0.1:
        try:
            changed = message_from_bytes(mutate_bytes(rng, message_to_bytes(message)))
        except (DecodeError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
        if changed.has_error():
            return None
        whole.content = changed.content
    else:
        whole.content = mutate_records(rng, whole.content)
    return whole


@pytest.mark.share(0.002)
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_party_refuses_in_words_of_its_own(name: str, trials: Trials) -> None:
    """Neither train nor evaluate lets another error out, or a private number."""
    app = VARIANTS[name].app()
    for rng in trials.numbers():
        ask(name, app, rng, trials)
    trials.require_both()


@pytest.mark.share(0.001)
@pytest.mark.parametrize("budget", [None, 1.0], ids=["unlimited", "limited"])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_no_question_gets_past_the_journal(
    name: str, budget: float | None, trials: Trials, tmp_path: Path
) -> None:
    """New knowledge costs a line before it leaves, and all of it together the budget at most.

    The party knows of earlier rounds what it keeps beside its journal.
    """
    journals = journals_in(tmp_path, budget)

    def load(context: Context) -> Party:
        party = VARIANTS[name].load(context)
        return replace(party, journal=journals(party))

    app = client_app(load)
    known: dict[int, set[bytes]] = {number: set() for number in range(NUM_PARTIES)}
    for rng in trials.numbers():
        asked = ask(name, app, rng, trials, keeps=True)
        if asked is None:
            continue
        reply, number = asked
        journal = journals(VARIANTS[name].load(context_of(number)))
        if budget is not None:
            assert journal.epsilon() <= budget
        if not reply.has_error() and reply.metadata.message_type == MessageType.TRAIN:
            known[number].add(reply.content.object_id.encode())
            # One sample pays for all answers that are made of it.
            paid = 1 if name == "fedmd-nfdp" else len(known[number])
            assert len(journal.entries()) >= paid


def journals_in(folder: Path, budget: float | None) -> Callable[[Party], PartyJournal]:
    """Return what opens the journal of a party."""
    return lambda party: journal_of(party, folder / str(party.partition_id), max_epsilon=budget)


def context_of(number: int, state: RecordDict | None = None, node: int = 0) -> Context:
    return Context(1, node, {"partition-id": number}, state or RecordDict(), {})


def ask(
    name: str, app: ClientApp, rng: random.Random, trials: Trials, *, keeps: bool = False
) -> tuple[Message, int] | None:
    """Ask a party something hostile; return its answer and its number."""
    exchange = rng.choice(recorded(name))
    number = rng.randrange(len(exchange.sent))
    message = hostile(rng, exchange.sent[number])
    if message is None:
        trials.count(refused=True)
        return None
    node = exchange.sent[number].metadata.dst_node_id
    position = InMemoryGrid(app, NUM_PARTIES).get_node_ids().index(node)
    state = RecordDict() if keeps else copied(exchange.states[node])
    with time_limit():
        reply = app(message, context_of(position, state, node))
    trials.count(refused=reply.has_error())
    check_reply(reply)
    return reply, position


def copied(state: RecordDict) -> RecordDict:
    """Return a copy of a node's state: a party changes its own."""
    return records_from_bytes(records_to_bytes(state))


def check_reply(reply: Message) -> None:
    sent = message_to_bytes(reply)
    assert BYTES not in sent
    assert TEXT.encode() not in sent
    if reply.has_error():
        assert FOREIGN not in reply.error.reason, reply.error.reason
        assert len(reply.error.reason) < 20_000
