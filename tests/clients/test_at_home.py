"""A party compares the model of a run with its own, and keeps the answer to itself."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from clients.app import client_app
from fl_strategies import Party
from fl_strategies._compat import assign_message_id, records_to_bytes
from fl_strategies._util import Array, IntArray
from fl_strategies.errors import InvalidParameter
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.events import LaplaceEvent, NonPrivateEvent
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Scalar
from simulations.runtime.local import run_local
from tests.toys import TEST, CentroidLearner, load_toy_party, toy_fedkt, toy_party


class Wrong(CentroidLearner):
    """Learns every class as the next one."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        return super().fit(x, (y + 1) % 3, rng=rng)


class Failing(CentroidLearner):
    """Quotes what it should not."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:  # noqa: ARG002
        raise ValueError("the record of Ms. Doe")


class Counting(CentroidLearner):
    """Knows how often one of its kind was trained."""

    num_fits = 0

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        type(self).num_fits += 1
        return super().fit(x, y, rng=rng)


def delivered(flaw: int = 0, **changes: Scalar) -> Message:
    """Return the message that delivers a model which takes some test rows for others."""
    model = CentroidLearner().fit(*TEST, rng=np.random.default_rng(0))
    model.centroids = model.centroids + np.array([flaw, 0.0])
    config = {**toy_fedkt().party_config(), keys.SEED: 0, keys.STRATEGY: "fedkt", **changes}
    content = RecordDict({keys.CONFIG: ConfigRecord(config)})  # type: ignore[arg-type]
    Knowledge("model", model.to_arrays(), {keys.LEARNER: "centroid"}).write(content)
    message = Message(content, dst_node_id=2, message_type="evaluate")
    assign_message_id(message)
    return message


def context(state: RecordDict | None = None) -> Context:
    node_config = {"partition-id": 0}
    return Context(1, 2, node_config, RecordDict() if state is None else state, {})  # type: ignore[arg-type]


def evaluated(
    message: Message, state: RecordDict | None = None, **changes: object
) -> RecordDict:
    party = replace(toy_party(0), **changes)  # type: ignore[arg-type]
    # The model that arrives is read by a sound learner, whatever the party's own is.
    party = replace(party, learner_name="own", catalogue={"centroid": CentroidLearner})
    reply = client_app(lambda _: party)(message, context(state))
    assert not reply.has_error()
    return reply.content


def told(content: RecordDict) -> dict[str, object]:
    return dict(content.metric_records[keys.METRICS])


@pytest.mark.parametrize(
    ("own", "flaw", "word"),
    [(Wrong, 0, "better than"), (CentroidLearner, 9, "worse than")],
)
def test_what_is_found_at_home_stays_there(
    own: Callable[[], CentroidLearner], flaw: int, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has it; the answer is the same to the byte as that of a party with no opinion."""
    message = delivered(flaw)
    with caplog.at_level(logging.INFO, "flwr.fl_strategies"):
        answer = evaluated(message, compare_at_home=True, learner_fn=own)
    assert f"Party 0: the model of this run is {word} one of its own: accuracy" in caplog.text

    for other in (
        {"compare_at_home": False},
        {"compare_at_home": True, "learner_fn": CentroidLearner},
        {"compare_at_home": True, "learner_fn": Wrong},
        {"compare_at_home": True, "learner_fn": Failing},
    ):
        assert records_to_bytes(evaluated(message, **other)) == records_to_bytes(answer)


def test_a_model_like_its_own_is_level(caplog: pytest.LogCaptureFixture) -> None:
    """One standard error of the difference decides; the same answers are no win."""
    with caplog.at_level(logging.INFO, "flwr.fl_strategies"):
        content = evaluated(delivered(), plain(), compare_at_home=True, tell_verdict=True)

    assert "level with one of its own" in caplog.text
    assert told(content)[keys.BETTER_THAN_ALONE] == 0.0


def test_an_error_at_home_is_logged_there(caplog: pytest.LogCaptureFixture) -> None:
    """Even a party that tells its verdict then tells none."""
    content = evaluated(
        delivered(), plain(), compare_at_home=True, tell_verdict=True, learner_fn=Failing
    )

    assert "the record of Ms. Doe" in caplog.text
    assert math.isnan(told(content)[keys.BETTER_THAN_ALONE])  # type: ignore[arg-type]


def test_the_own_model_is_trained_once_a_run() -> None:
    """Strategies of many rounds deliver many models."""
    Counting.num_fits, state = 0, RecordDict()
    for flaw in (0, 1, 2):
        evaluated(delivered(flaw), state, compare_at_home=True, learner_fn=Counting)

    assert Counting.num_fits == 1


def noisy() -> RecordDict:
    """Return the state of a party whose labels left it with noise."""
    state = RecordDict()
    event = LaplaceEvent(unit="example", relation="replace-one", scale=4.0, l1_sensitivity=2.0)
    PartyState(state).charge([(event, 3)], 1e-5)
    return state


def plain() -> RecordDict:
    """Return the state of a party whose labels left it without."""
    state = RecordDict()
    PartyState(state).charge([(NonPrivateEvent(unit="example", reason="labels"), 1)], 1e-5)
    return state


def test_one_bit_leaves_with_leave_only() -> None:
    """And never where privacy was promised, by the server's word or the party's own record."""
    leave = {"compare_at_home": True, "tell_verdict": True, "learner_fn": Wrong}
    noise: dict[str, Any] = {"gamma": 0.5, "vote-weights": "none"}

    assert told(evaluated(delivered(), plain(), **leave))[keys.BETTER_THAN_ALONE] == 1.0
    for answer in (
        evaluated(delivered(), noisy(), **leave),
        evaluated(delivered(), RecordDict(), **leave),  # it has not answered in this run
        evaluated(delivered(**noise, **{"privacy-level": "L1"}), plain(), **leave),
        evaluated(delivered(**noise, **{"privacy-level": "L2"}), plain(), **leave),
        evaluated(delivered(), plain(), **leave, x_test=None, y_test=None),
        evaluated(delivered(), plain(), **{**leave, "tell_verdict": False}),
    ):
        assert keys.BETTER_THAN_ALONE not in told(answer)


def test_a_party_with_a_journal_tells_nothing(tmp_path: Path) -> None:
    """Not one bit, whatever its settings say; it compares all the same."""
    party = toy_party(0)
    journal = PartyJournal(
        tmp_path / "party", fingerprint=data_fingerprint(party.x, party.y), delta=1e-5
    )
    leave = {"compare_at_home": True, "tell_verdict": True, "learner_fn": Counting}
    Counting.num_fits = 0

    metrics = told(evaluated(delivered(), **leave, journal=journal))

    assert Counting.num_fits == 1
    assert keys.BETTER_THAN_ALONE not in metrics
    figures = [metrics[name] for name in ("accuracy", "balanced-accuracy", "macro-f1")]
    assert np.isnan(figures).all()


def test_the_server_averages_what_it_is_told() -> None:
    """Of four parties three say so, and one of these gained."""

    def load(context: Context) -> Party:
        party = load_toy_party(context)
        number = party.partition_id
        # Two own models learn far too little; only one of them may say that it gained.
        few = replace(party, x=party.x[:1], y=party.y[:1]) if number < 2 else party
        return replace(few, compare_at_home=True, tell_verdict=number > 0)

    result = run_local(toy_fedkt(num_splits=1, num_teachers=1), client_app(load), 4)

    metrics = result.evaluate_metrics_clientapp[1]
    assert metrics[keys.BETTER_THAN_ALONE] == pytest.approx(1 / 3)


def test_leave_without_a_comparison_is_refused() -> None:
    """There would be nothing to tell."""
    with pytest.raises(InvalidParameter, match="tell_verdict must be false without compare_at"):
        replace(toy_party(0), tell_verdict=True)
