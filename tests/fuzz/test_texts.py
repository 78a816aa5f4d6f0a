"""Untrusted texts and those of damaged disks: ledgers, events, journals, samples."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from clients.app import KeptRun
from fl_strategies import _compat, _util
from fl_strategies.errors import StrategyError
from fl_strategies.privacy import journal as journals
from fl_strategies.privacy.events import (
    MOST,
    DPSGDEvent,
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
    event_from_json,
    event_to_json,
)
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import SubsampleOnce
from fl_strategies.server.replies import MAX_DISTINCT_EVENTS, read_ledger
from fl_strategies.server.run import Checkpoint, dump_state, load_state
from fl_strategies.strategies.fedmd import samples as sampling
from fl_strategies.strategies.fedmd.samples import check_sample_id
from fl_strategies.wire.knowledge import Knowledge
from tests.fuzz.mutation import mutate_bytes, mutate_json, mutate_text
from tests.fuzz.records import as_often_as, json_values
from tests.fuzz.trials import Trials

EVENTS: tuple[PrivacyEvent, ...] = (
    NonPrivateEvent(unit="example", reason="weights left"),
    LaplaceEvent(unit="example", relation="replace-one", scale=4, l1_sensitivity=1),
    GaussianEvent(unit="example", relation="replace-one", scale=4, l2_sensitivity=1),
    NoisyMaxEvent(
        unit="example",
        relation="replace-one",
        noise="laplace",
        scale=4,
        sensitivity=1,
        num_classes=3,
    ),
    ThresholdEvent(unit="example", relation="replace-one", scale=4, sensitivity=1),
    SubsampleEvent(records=10, samples=2, replacement=True),
    DPSGDEvent(noise_multiplier=1.0, records=100, batch_size=10, steps=10),
)
FINGERPRINT = "0" * 64


def ledger_text(rng: random.Random) -> str:
    ledger = PrivacyLedger("example", delta=1e-5)
    for event in rng.sample(EVENTS, rng.randrange(1, len(EVENTS))):
        ledger.compose(event, rng.choice((1, 2, 10)))
    return json.dumps(ledger.state_dict())


@pytest.mark.share(0.1)
def test_damaged_ledgers(trials: Trials) -> None:
    """What a party says it has spent is a ledger of few events, or refused."""
    for rng in trials.numbers():
        text = ledger_text(rng)
        for _ in range(rng.choice((1, 1, 2, 3))):
            text = mutate_text(rng, text)
        ledger = trials.attempt(read_ledger, text)
        if ledger is not None:
            assert 1 <= len(ledger.entries) <= MAX_DISTINCT_EVENTS + 1
            for _, count in ledger.entries:
                assert type(count) is int
                assert 1 <= count <= MOST
            assert json.loads(json.dumps(ledger.state_dict())) == ledger.state_dict()
    trials.require_both()


@pytest.mark.share(0.1)
def test_damaged_events(trials: Trials) -> None:
    """One event, changed in one field, is an event that can be written again, or refused."""
    for rng in trials.numbers():
        data = mutate_json(rng, event_to_json(rng.choice(EVENTS)))
        event = trials.attempt(event_from_json, data)
        if event is not None:
            assert event_from_json(event_to_json(event)) == event
    trials.require_both()


@pytest.mark.share(0.003)
def test_wrong_texts(trials: Trials) -> None:
    """Any JSON, and any value of a record, in place of a ledger or of a sample's name."""

    @as_often_as(trials)
    @given(json_values() | st.binary(), st.booleans())
    def attempt(value: Any, encoded: bool) -> None:
        text = json.dumps(value) if encoded and not isinstance(value, bytes) else value
        trials.attempt(read_ledger, text)
        if value is not None and not isinstance(value, bytes | bool | int | float | str):
            trials.attempt(event_from_json, value)
        trials.attempt(check_sample_id, text)

    attempt()
    assert trials.refused


def sealed(rng: random.Random, lines: list[bytes]) -> bytes:
    """Return a journal one line of which was changed by somebody who can count checksums."""
    changed, previous = rng.randrange(len(lines)), journals.hashlib.sha256(b"example")
    checksum, written = previous.hexdigest().encode(), b""
    for number, line in enumerate(lines):
        body = json.loads(line)
        del body["checksum"]
        if number == changed:
            body = mutate_json(rng, body)
        text = json.dumps(body, separators=(",", ":")).encode()
        line = journals._seal(checksum, text if text[:1] == b"{" else b"{" + text)
        checksum = line[journals._DIGITS]
        written += line
    return written


@pytest.mark.share(0.01)
def test_damaged_journals(trials: Trials, tmp_path: Path) -> None:
    """A journal that was damaged is refused; one that is read can be charged, or refuses."""
    journal = PartyJournal(tmp_path, fingerprint=FINGERPRINT, max_epsilon=100.0)
    for event in EVENTS[1:4]:
        journal.charge([(event, 1)], run="1", purpose="test")
    valid = journal.path.read_bytes()
    announced = journal._announced_path.read_bytes()
    for rng in trials.numbers():
        step = rng.random()
        lines = valid.splitlines(keepends=True)
        damaged = sealed(rng, lines) if step < 0.5 else mutate_bytes(rng, valid)
        beside = rng.choice((announced, b"", mutate_bytes(rng, announced)))
        journal.path.write_bytes(valid if step > 0.9 else damaged)
        journal._announced_path.write_bytes(b"" if step < 0.5 else beside)
        epsilon = trials.attempt(journal.epsilon)
        assert epsilon is None or epsilon >= 0
    trials.require_both()


@pytest.mark.share(0.03)
def test_damaged_samples(trials: Trials, tmp_path: Path) -> None:
    """A kept sample that was changed is one of these very data, or drawn and paid again."""
    journal = PartyJournal(tmp_path, fingerprint=FINGERPRINT)
    mechanism = SubsampleOnce(records=20, samples=4, replacement=True)
    sampling._write_sample(journal, mechanism, "ab" * 16, np.array([1, 5, 5, 19]))
    path = sampling._sample_path(journal, mechanism)
    valid = path.read_bytes()
    content = _util.unsealed(path.name, valid)
    assert content is not None
    assert sampling._read_sample(journal, mechanism) is not None
    for rng in trials.numbers():
        is_forged = rng.random() < 0.5
        if is_forged:  # with a checksum that fits
            forged = json.dumps(mutate_json(rng, json.loads(content))).encode()
            path.write_bytes(_util.sealed(path.name, forged))
        else:
            path.write_bytes(mutate_bytes(rng, valid))
        sample = sampling._read_sample(journal, mechanism)
        assert sample is None or is_forged or path.read_bytes() == valid
        trials.count(refused=sample is None)
        if sample is not None:
            rows = sample[1]
            assert rows.shape == (4,)
            assert rows.min() >= 0
            assert rows.max() < 20
    trials.require_both()


# What was found.


def test_a_sample_file_of_many_brackets_is_none(tmp_path: Path) -> None:
    """It ended in a RecursionError."""
    journal = PartyJournal(tmp_path, fingerprint=FINGERPRINT)
    mechanism = SubsampleOnce(records=20, samples=4, replacement=True)
    sampling._sample_path(journal, mechanism).write_bytes(b"[" * 100_000)

    assert sampling._read_sample(journal, mechanism) is None


@pytest.mark.parametrize("fingerprint", [[], {}, 7, None, "x"])
def test_a_forged_line_is_a_corrupt_journal(tmp_path: Path, fingerprint: object) -> None:
    """Fields of another type than was written ended in a TypeError."""
    journal = PartyJournal(tmp_path, fingerprint=FINGERPRINT)
    journal.charge([(EVENTS[0], 1)], run="1", purpose="test")
    body = json.loads(journal.path.read_bytes())
    del body["checksum"]
    body["fingerprint"] = fingerprint
    text = json.dumps(body, separators=(",", ":")).encode()
    start = journals.hashlib.sha256(b"example").hexdigest().encode()
    journal.path.write_bytes(journals._seal(start, text))
    journal._announced_path.unlink()

    with pytest.raises(StrategyError):
        journal.entries()


STATE = {
    "round_": 3,
    "ledger_": PrivacyLedger("example"),
    "_delivery": Knowledge("consensus", {"labels": np.arange(9)}, {"round": 2}),
    "parties": {0: (0.5, None), 1: [True, {"a"}]},
}


@pytest.mark.share(0.03)
def test_damaged_states(trials: Trials) -> None:
    """A state is as it was written, or refused in a sentence."""
    whole = dump_state(STATE, [Knowledge])
    assert trials.attempt(load_state, whole, [Knowledge]) is not None
    for rng in trials.numbers():
        state = trials.attempt(load_state, mutate_bytes(rng, whole), [Knowledge])
        if state is not None:
            assert state.keys() == STATE.keys()
    trials.require_both()


@pytest.mark.share(0.03)
def test_damaged_replies(trials: Trials, tmp_path: Path) -> None:
    """A recorded reply is a message, or refused in a sentence."""
    _compat.claim_task_identity()
    checkpoint = Checkpoint(tmp_path, resume=True)
    content = RecordDict({"arrays": ArrayRecord([np.arange(5.0)])})
    request = Message(RecordDict(), dst_node_id=7, message_type=MessageType.TRAIN)
    _compat.assign_message_id(request)
    reply = _compat.message_to_bytes(Message(content, reply_to=request))
    checkpoint.record(MessageType.TRAIN, 7, reply)
    (path,) = tmp_path.rglob("7.message")
    whole = path.read_bytes()
    assert trials.attempt(checkpoint.replay, MessageType.TRAIN, request) is not None
    for rng in trials.numbers():
        path.write_bytes(mutate_bytes(rng, whole))
        trials.attempt(checkpoint.replay, MessageType.TRAIN, request)
    trials.require_both()


@pytest.mark.share(0.03)
def test_damaged_runs_of_a_party(trials: Trials, tmp_path: Path) -> None:
    """What a party has kept is as it was written, or it begins anew."""
    state = RecordDict({"model": ArrayRecord([np.eye(3)]), "notes": ConfigRecord({"round": 2})})
    KeptRun(tmp_path, "run").keep("train", "what?", RecordDict(), state)
    path = tmp_path / "run.run"
    whole = path.read_bytes()
    assert KeptRun(tmp_path, "run").state == state
    for rng in trials.numbers():
        data = mutate_bytes(rng, whole)
        path.write_bytes(data)
        kept = trials.attempt(KeptRun, tmp_path, "run")
        assert (kept.state is None) == (data != whole)
