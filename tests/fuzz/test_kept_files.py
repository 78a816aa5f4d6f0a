"""Damaged files of a run: a checkpoint's state, its replies, and what a party keeps."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from clients.kept_run import KeptRun
from fl_strategies import _compat
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.server.run import Checkpoint
from fl_strategies.server.state import dump_state, load_state
from fl_strategies.wire.knowledge import Knowledge
from tests.fuzz.mutation import mutate_bytes
from tests.fuzz.trials import Trials

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
