"""Noise and numbers of answers that just keep a promise."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy.accountant import Entry, claim
from fl_strategies.privacy.events import (
    GaussianEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    SubsampleEvent,
    ThresholdEvent,
)
from fl_strategies.privacy.noise import calibrate_scale

DELTA = 1e-5
PARTY: Any = {"unit": "party", "relation": "replace-one"}


def votes(noise: Any, count: int, num_classes: int = 10) -> Callable[[float], Sequence[Entry]]:
    def entries(scale: float) -> Sequence[Entry]:
        event = NoisyMaxEvent(
            **PARTY, noise=noise, scale=scale, sensitivity=1.0, num_classes=num_classes
        )
        return [(event, count)]

    return entries


@pytest.mark.parametrize(
    ("noise", "num_classes", "target", "scale"),
    [
        ("gumbel", 10, 0.9349135, 25.0),
        ("laplace", 2, 0.9349135, 25.0),
        ("laplace", 10, 1.9322720, 25.0),
        ("gaussian", 10, 4.3771780, math.sqrt(80)),
    ],
)
def test_known_epsilons_give_back_their_scales(
    noise: str, num_classes: int, target: float, scale: float
) -> None:
    """Reference values, read backwards."""
    found = calibrate_scale(votes(noise, 40, num_classes), target, DELTA)

    assert found == pytest.approx(scale, rel=1e-5)


@settings(deadline=None, max_examples=12)
@given(
    noise=st.sampled_from(["laplace", "gumbel", "gaussian"]),
    count=st.integers(1, 200),
    target=st.floats(0.01, 30.0),
)
def test_the_promise_is_kept_and_not_overdone(noise: str, count: int, target: float) -> None:
    """The claim is at most the target; a hair less noise would exceed it."""
    make = votes(noise, count)
    scale = calibrate_scale(make, target, DELTA)

    assert claim(make(scale), DELTA).epsilon <= target
    assert claim(make(scale * (1 - 1e-5)), DELTA).epsilon > target


def test_several_events_may_share_the_scale() -> None:
    """Both steps of Confident-GNMax are calibrated together."""

    def entries(scale: float) -> Sequence[Entry]:
        test = ThresholdEvent(**PARTY, scale=3 * scale, sensitivity=1.0)
        return [(test, 100), *votes("gaussian", 20)(scale)]

    scale = calibrate_scale(entries, 4.377178, DELTA)

    assert scale == pytest.approx(math.sqrt(100 / 9 + 40), rel=1e-5)


def test_an_earlier_release_leaves_less() -> None:
    """What is already spent asks for more noise in what follows."""
    earlier: list[Entry] = [(votes("gaussian", 1)(10.0)[0][0], 5)]
    alone = calibrate_scale(votes("gaussian", 40), 2.0, DELTA)
    after = calibrate_scale(lambda scale: [*earlier, *votes("gaussian", 40)(scale)], 2.0, DELTA)

    assert after > 1.01 * alone


@pytest.mark.parametrize(
    "earlier",
    [
        NonPrivateEvent(unit="party", reason="models left"),
        NoisyMaxEvent(**PARTY, noise="gumbel", scale=1.0, sensitivity=1.0, num_classes=2),
    ],
)
def test_a_promise_that_is_broken_already_cannot_be_kept(earlier: Any) -> None:
    """No noise helps; the sentence says what is the least possible."""
    with pytest.raises(InvalidParameter, match=r"target_epsilon must be at least .*, got 0\.5"):
        calibrate_scale(lambda scale: [(earlier, 9), *votes("gumbel", 4)(scale)], 0.5, DELTA)


def test_a_sample_that_needs_more_delta_cannot_be_calibrated() -> None:
    """Noise does not bring back the delta of a secret sample."""
    sample = SubsampleEvent(records=100, samples=5, replacement=False)

    def entries(scale: float) -> Sequence[Entry]:
        event = GaussianEvent(
            unit="example", relation="replace-one", scale=scale, l2_sensitivity=1.0
        )
        return [(sample, 1), (event, 1)]

    with pytest.raises(InvalidParameter, match="must be at least inf"):
        calibrate_scale(entries, 1.0, 0.04)
    assert calibrate_scale(entries, 1.0, 0.06) > 0


def test_a_generous_target_needs_almost_no_noise() -> None:
    """The search goes down as well as up."""
    assert calibrate_scale(votes("gumbel", 1), 19.0, DELTA) == pytest.approx(2 / 19, rel=0.01)


def test_a_target_that_drawn_noise_cannot_prove_is_not_used_up() -> None:
    """Beyond some epsilon the precision of sampling is all that protects."""
    scale = calibrate_scale(votes("gumbel", 1), 1e5, DELTA)

    assert claim(votes("gumbel", 1)(scale), DELTA).epsilon < 25


@pytest.mark.parametrize(
    ("target", "delta"),
    [(0.0, DELTA), (-1.0, DELTA), (math.inf, DELTA), (1.0, 0.0), (1.0, 1.0)],
)
def test_impossible_targets_are_refused(target: float, delta: float) -> None:
    """Epsilon is positive and finite, delta inside (0, 1)."""
    with pytest.raises(InvalidParameter, match=r"^calibrate_scale: "):
        calibrate_scale(votes("gumbel", 40), target, delta)
