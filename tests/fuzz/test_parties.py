"""Hostile servers: whatever one asks, a party answers or refuses in one typed sentence."""

import random

import pytest
from flwr.app import Context, Message, RecordDict
from google.protobuf.message import DecodeError

from fl_strategies._compat import (
    message_from_bytes,
    message_to_bytes,
    records_from_bytes,
    records_to_bytes,
)
from simulations.local import InMemoryGrid
from tests.fuzz.federations import NUM_PARTIES, VARIANTS, private_numbers, recorded
from tests.fuzz.mutation import mutate_bytes, mutate_records
from tests.fuzz.trials import Trials, time_limit

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
    exchanges, app = recorded(name), VARIANTS[name].app()
    grid = InMemoryGrid(app, NUM_PARTIES)
    for rng in trials.numbers():
        exchange = rng.choice(exchanges)
        number = rng.randrange(len(exchange.sent))
        message = hostile(rng, exchange.sent[number])
        if message is None:
            trials.count(refused=True)
            continue
        node = exchange.sent[number].metadata.dst_node_id
        position = grid.get_node_ids().index(node)
        state = copied(exchange.states[node])
        context = Context(1, node, {"partition-id": position}, state, {})
        with time_limit():
            reply = app(message, context)
        trials.count(refused=reply.has_error())
        check_reply(reply)
    trials.require_both()


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
