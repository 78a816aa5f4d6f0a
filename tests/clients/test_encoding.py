"""Server and party compare what made rows of raw records, before anything is paid."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from clients.app import client_app
from fl_strategies import Party
from fl_strategies._compat import assign_message_id
from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import encode_arrays
from tests.toys import CentroidLearner, toy_fedkt, toy_party

OURS, OTHER = "a" * 64, "b" * 64
SENTENCE = (
    "Party 0: encoding must be the server's ({}), got {}. Give server and parties the same "
    "schema, or the same encoder, in the same version, or none to all."
)


def answer(party: Party, **changes: Any) -> Message:
    """Return what a party answers to a question of FedKT's, with other settings."""
    asked = {**toy_fedkt().party_config(), keys.SEED: 0, keys.STRATEGY: "fedkt", **changes}
    return respond(party, RecordDict({keys.CONFIG: ConfigRecord(asked)}))


def respond(party: Party, content: RecordDict) -> Message:
    message = Message(content, dst_node_id=2, message_type="train")
    assign_message_id(message)
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    return client_app(lambda _: party)(message, context)


@pytest.mark.parametrize(
    ("held", "asked", "shown"),
    [
        ("", {keys.ENCODING: OTHER}, ("hash 'bbbbbbbbbbbb'", "none")),
        (OURS, {}, ("none", "hash 'aaaaaaaaaaaa'")),
        (OURS, {keys.ENCODING: OTHER}, ("hash 'bbbbbbbbbbbb'", "hash 'aaaaaaaaaaaa'")),
        (OURS, {keys.ENCODING: 7}, ("7", "hash 'aaaaaaaaaaaa'")),
        (OURS, {keys.ENCODING: OURS.encode()}, ("b'aaaaaaaa", "hash 'aaaaaaaaaaaa'")),
        ("", {keys.ENCODING: [0]}, ("[0]", "none")),
        ("", {keys.ENCODING: False}, ("False", "none")),
    ],
)
def test_a_party_refuses_a_server_with_another_encoder(
    held: str, asked: dict[str, Any], shown: tuple[str, str], tmp_path: Path
) -> None:
    """One sentence says what to do; whatever type the server's word has, nothing is paid."""
    party = replace(toy_party(0), encoding=held)
    journal = PartyJournal(tmp_path, fingerprint=data_fingerprint(party.x, party.y))
    reply = answer(replace(party, journal=journal), **asked)

    assert reply.has_error()
    start, end = SENTENCE.format("|", shown[1]).split("|")
    assert str(reply.error.reason).startswith(f"{start}{shown[0]}")
    assert str(reply.error.reason).endswith(end)
    assert not journal.ledger().entries


@pytest.mark.parametrize("held", ["", OURS])
def test_the_same_encoder_is_no_matter(held: str) -> None:
    """Nothing said is the same as none."""
    party = replace(toy_party(0), encoding=held)

    assert not answer(party, **{keys.ENCODING: held}).has_error()
    assert answer(party).has_error() == bool(held)


def test_flowers_own_strategies_know_nothing_of_encoders() -> None:
    """A message without a strategy of ours is not asked for a hash that it cannot have."""
    party = replace(toy_party(0), encoding=OURS)
    model = CentroidLearner().fit(party.x, party.y, rng=np.random.default_rng(0))

    weights = encode_arrays(model.to_arrays())
    config = ConfigRecord({keys.SERVER_ROUND: 1})

    reply = respond(party, RecordDict({keys.ARRAYS: weights, keys.CONFIG: config}))

    assert not reply.has_error()


def test_an_encoding_is_a_text() -> None:
    """An encoder itself, given by mistake, is refused at both sides."""
    with pytest.raises(InvalidParameter, match="Party 0: encoding must be a hash, or empty"):
        replace(toy_party(0), encoding=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="FedKT: encoding must be a hash, or empty"):
        toy_fedkt(encoding=7)


def test_a_resumed_run_has_the_encoding_that_it_began_with() -> None:
    """Without one, runs that were begun before there were any can go on."""
    assert keys.ENCODING not in toy_fedkt().identity()
    assert toy_fedkt(encoding=OURS).identity()[keys.ENCODING] == OURS
