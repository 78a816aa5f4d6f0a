"""Events: what they refuse, and that files give back exactly what was written."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidData, InvalidParameter, StrategyError
from fl_strategies.privacy.accountant import Loss, loss_of, sampling_error
from fl_strategies.privacy.bounds.distributions import LossLaw
from fl_strategies.privacy.events import (
    EVENT_TYPES,
    DPSGDEvent,
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    OneVoteEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
    as_replace_one,
    check_event,
    event_from_json,
    event_to_json,
)

REPLACE: dict[str, Any] = {"unit": "party", "relation": "replace-one"}
NOISY_MAX: dict[str, Any] = {
    **REPLACE,
    "noise": "laplace",
    "scale": 25.0,
    "sensitivity": 1.0,
    "num_classes": 2,
}
EVENTS = [
    NoisyMaxEvent(**NOISY_MAX),
    NoisyMaxEvent(**{**NOISY_MAX, "noise": "gumbel", "seeded": True}),
    ThresholdEvent(**REPLACE, scale=40.0, sensitivity=2.0),
    LaplaceEvent(**REPLACE, scale=0.1, l1_sensitivity=2.0),
    GaussianEvent(unit="example", relation="add-remove-one", scale=3.0, l2_sensitivity=0.3),
    SubsampleEvent(records=2880, samples=60, replacement=True),
    DPSGDEvent(noise_multiplier=1.0, records=2880, batch_size=64, steps=900),
    NonPrivateEvent(unit="party", reason="students left as models"),
    OneVoteEvent(unit="example", noise="gumbel", scale=2.0, num_classes=7),
]
IDS = [type(event).__name__ for event in EVENTS]


@pytest.mark.parametrize("event", EVENTS, ids=IDS)
def test_a_file_gives_back_what_was_written(event: PrivacyEvent) -> None:
    """Text and back is the same event, of the same class."""
    again = event_from_json(json.loads(json.dumps(event_to_json(event))))

    assert again == event
    assert type(again) is type(event)


def test_every_kind_of_event_is_tried_here() -> None:
    """The list above leaves no class out."""
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES.values())


positive = st.floats(min_value=1e-12, max_value=1e12)


@settings(deadline=None, max_examples=50)
@given(
    scale=positive, sensitivity=positive, classes=st.integers(2, 2**53), seeded=st.booleans()
)
def test_no_digit_is_lost(scale: float, sensitivity: float, classes: int, seeded: bool) -> None:
    """Any float survives the file to the last bit."""
    event = NoisyMaxEvent(
        **REPLACE,
        noise="gaussian",
        scale=scale,
        sensitivity=sensitivity,
        num_classes=classes,
        seeded=seeded,
    )

    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


def test_numbers_of_any_type_make_equal_events() -> None:
    """An int, a numpy scalar and a float describe the same noise and fit into JSON."""
    mixed = {**NOISY_MAX, "scale": np.float32(25), "sensitivity": 1, "num_classes": np.int64(2)}
    event = NoisyMaxEvent(**mixed)

    assert event == EVENTS[0]
    assert hash(event) == hash(EVENTS[0])
    assert json.dumps(event_to_json(event)) == json.dumps(event_to_json(EVENTS[0]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unit", "record"),
        ("unit", None),
        ("unit", ["party"]),
        ("relation", "replace"),
        ("seeded", 0),
        ("noise", "cauchy"),
        ("scale", 0.0),
        ("scale", -1.0),
        ("scale", math.nan),
        ("scale", math.inf),
        ("scale", 10**400),
        ("scale", True),
        ("scale", "25"),
        ("sensitivity", 0),
        ("sensitivity", 1e200),
        ("num_classes", 1),
        ("num_classes", 2.0),
        ("num_classes", True),
        ("num_classes", 2**60),
    ],
)
def test_a_wrong_value_is_refused(field: str, value: object) -> None:
    """The sentence names the event and the field, from code and from a file alike."""
    with pytest.raises(InvalidParameter, match=rf"^NoisyMaxEvent: {field} must be .*, got"):
        NoisyMaxEvent(**{**NOISY_MAX, field: value})
    with pytest.raises(InvalidData, match=rf"^NoisyMaxEvent: {field} must be"):
        event_from_json({**event_to_json(EVENTS[0]), field: value})


SAMPLE: dict[str, Any] = {"records": 10, "samples": 5, "replacement": True}
TRAINING: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "records": 10,
    "batch_size": 5,
    "steps": 1,
}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ThresholdEvent, {**REPLACE, "scale": 1.0, "sensitivity": 0.0}),
        (LaplaceEvent, {**REPLACE, "scale": 1.0, "l1_sensitivity": -1.0}),
        (GaussianEvent, {**REPLACE, "scale": 0.0, "l2_sensitivity": 1.0}),
        (SubsampleEvent, {**SAMPLE, "samples": 11, "replacement": False}),
        (SubsampleEvent, {**SAMPLE, "records": 0, "samples": 0}),
        (SubsampleEvent, {**SAMPLE, "replacement": 1}),
        (SubsampleEvent, {**SAMPLE, "unit": "party"}),
        (SubsampleEvent, {**SAMPLE, "relation": "add-remove-one"}),
        (DPSGDEvent, {**TRAINING, "batch_size": 11}),
        (DPSGDEvent, {**TRAINING, "steps": 0}),
        (DPSGDEvent, {**TRAINING, "relation": "replace-one"}),
        (NonPrivateEvent, {"unit": "party", "reason": " "}),
        (NonPrivateEvent, {"unit": "party", "reason": 3}),
    ],
)
def test_each_event_checks_its_own_fields(kind: Any, values: dict[str, Any]) -> None:
    """No class lets an impossible description through."""
    with pytest.raises(InvalidParameter, match=rf"^{kind.__name__}: "):
        kind(**values)


def test_a_sample_with_replacement_may_exceed_the_records() -> None:
    """Drawing more often than there are records is a legal, if careless, design."""
    assert SubsampleEvent(**{**SAMPLE, "samples": 30}).samples == 30


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema must be 1, got 2"),
        ({"schema": True}, "schema must be 1, got True"),
        ({"type": "noisy-min"}, "type must be one of"),
        ({"type": ["noisy-max"]}, "type must be one of"),
        ({"colour": "red"}, "got a difference in colour"),
        ({7: "red"}, "got a difference in 7"),
    ],
)
def test_a_foreign_file_is_refused(change: dict[Any, Any], words: str) -> None:
    """What this version does not know is an error, never ignored, and so is no mapping."""
    with pytest.raises(InvalidData, match=words):
        event_from_json({**event_to_json(EVENTS[0]), **change})
    for other in (None, [], "noisy-max", 3, {}):
        with pytest.raises(StrategyError, match=r"^PrivacyEvent: "):
            event_from_json(other)


@pytest.mark.parametrize("event", EVENTS, ids=IDS)
def test_a_missing_field_is_refused(event: PrivacyEvent) -> None:
    """Also one that has a default in code: files say everything."""
    for name in event_to_json(event).keys() - {"num_values"}:
        data = event_to_json(event)
        del data[name]
        with pytest.raises(InvalidData):
            event_from_json(data)


@pytest.mark.parametrize("event", EVENTS[3:5], ids=IDS[3:5])
def test_a_vector_from_an_older_file_counts_as_a_long_one(event: PrivacyEvent) -> None:
    """It said nothing of its entries, each of which is drawn with some error."""
    data = event_to_json(event)
    del data["num_values"]

    assert sampling_error(event_from_json(data)) == 1000 * sampling_error(event)


def test_only_listed_classes_are_events() -> None:
    """Neither the base class, nor a subclass, nor a lookalike is accepted."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Free(NoisyMaxEvent):
        """Would inherit trust if subclasses were accepted."""

    for stranger in (PrivacyEvent(**REPLACE), Free(**NOISY_MAX), "noisy-max", None):
        with pytest.raises(InvalidParameter, match=r"^ledger: event must be one of Noisy"):
            check_event("ledger", stranger)
        with pytest.raises(InvalidParameter):
            event_to_json(stranger)  # type: ignore[arg-type]
    check_event("ledger", EVENTS[0])


ADD: dict[str, Any] = {"unit": "party", "relation": "add-remove-one"}


@pytest.mark.parametrize(
    ("noise", "num_classes", "replaced", "added"),
    [
        ("laplace", 2, Loss(0.4, 0.4, published=True), Loss(0.2, 0.2, published=True)),
        ("laplace", 3, Loss(0.4, published=True), Loss(0.2, published=True)),
        ("gumbel", 2, Loss(0.4, 0.4), Loss(0.2, 0.2)),
        ("gumbel", 9, Loss(0.4, 0.4), Loss(0.2, 0.2)),
        ("gaussian", 9, Loss(mu=0.2 * math.sqrt(2)), Loss(mu=0.2)),
    ],
)
def test_what_a_vote_can_tell(
    noise: Any, num_classes: int, replaced: Loss, added: Loss
) -> None:
    """Replacing moves two counts; Laplace noise has bounded range for two classes only."""
    settings: dict[str, Any] = {"scale": 10.0, "sensitivity": 2.0, "num_classes": num_classes}

    assert loss_of(NoisyMaxEvent(**REPLACE, noise=noise, **settings)) == replaced
    assert loss_of(NoisyMaxEvent(**ADD, noise=noise, **settings)) == added


def test_what_other_releases_can_tell() -> None:
    """Sensitivity over scale, in the currency of the noise; the rest is unbounded."""
    assert loss_of(EVENTS[2]) == Loss(mu=0.05)
    assert loss_of(EVENTS[3]) == Loss(pure=20.0, law=LossLaw(20.0, smooth=True))
    assert loss_of(EVENTS[4]).mu == pytest.approx(0.1)
    for event in EVENTS[5:8]:
        assert loss_of(event) == Loss(pure=math.inf)


@pytest.mark.parametrize(
    ("loss", "rho"),
    [
        (Loss(pure=2.0), 2.0),
        (Loss(pure=2.0, spread=2.0), 0.5),
        (Loss(mu=2.0), 2.0),
        (Loss(), math.inf),
    ],
)
def test_rho_is_the_smallest_known(loss: Loss, rho: float) -> None:
    """Bounded range is worth a quarter of the same pure loss; nothing known is infinite."""
    assert loss.rho == rho


def test_replacing_is_removing_and_adding() -> None:
    """Vectors move twice as far; votes keep their sensitivity, which is that of adding."""
    vector = LaplaceEvent(**ADD, scale=1.0, l1_sensitivity=3.0)
    votes = NoisyMaxEvent(**{**NOISY_MAX, **ADD})
    test = ThresholdEvent(**ADD, scale=1.0, sensitivity=2.0)

    assert as_replace_one(vector) == LaplaceEvent(**REPLACE, scale=1.0, l1_sensitivity=6.0)
    assert loss_of(as_replace_one(EVENTS[4])).mu == pytest.approx(0.2)
    assert as_replace_one(votes) == EVENTS[0]
    assert loss_of(as_replace_one(test)) == loss_of(test)
    assert as_replace_one(EVENTS[0]) is EVENTS[0]
