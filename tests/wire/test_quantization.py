"""Scores on a grid: how far they move, what they cost, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch
from fl_strategies.wire.formats import PlainScores, Quantizer, score_format

bounds = st.floats(min_value=1e-6, max_value=1e6)
levels = st.integers(min_value=2, max_value=2**16)


def values_within(bound: float, size: int = 50) -> np.ndarray:
    return np.random.default_rng(0).uniform(-bound, bound, size)


@given(bound=bounds, num_levels=levels, share=st.floats(-1, 1))
def test_nearest_errs_by_half_a_step(bound: float, num_levels: int, share: float) -> None:
    """Within the bound, a value moves by at most half the distance of two levels."""
    quantizer = Quantizer(num_levels=num_levels, bound=bound)
    value = np.array([share * bound])

    moved = np.abs(quantizer.decode(quantizer.encode(value)) - value)

    assert moved[0] <= quantizer.step * (0.5 + 1e-9)


@given(bound=bounds, num_levels=levels, share=st.floats(-1, 1), seed=st.integers(0, 99))
def test_stochastic_errs_by_less_than_a_step(
    bound: float, num_levels: int, share: float, seed: int
) -> None:
    """Rounding at random goes to one of the two neighbouring levels."""
    quantizer = Quantizer(num_levels=num_levels, bound=bound, rounding="stochastic")
    value = np.array([share * bound])

    codes = quantizer.encode(value, np.random.default_rng(seed))

    assert 0 <= codes[0] < num_levels
    assert np.abs(quantizer.decode(codes) - value)[0] <= quantizer.step * (1 + 1e-9)


def test_stochastic_is_right_on_average() -> None:
    """The mean of many roundings is the value; that of the nearest level is not."""
    value, many = 0.3, 40_000
    fair = Quantizer(num_levels=3, bound=1.0, rounding="stochastic")
    near = Quantizer(num_levels=3, bound=1.0)
    rng = np.random.default_rng(1)

    mean = fair.decode(fair.encode(np.full(many, value), rng)).mean()

    # The deviation of one rounding is below 1/2, that of the mean below 0.0025.
    assert abs(mean - value) < 0.0125
    assert near.decode(near.encode(np.full(1, value)))[0] == 0.0


@pytest.mark.parametrize("num_levels", [2, 3, 200, 256, 257, 1000])
def test_ends_are_levels_and_what_is_beyond_is_moved_there(num_levels: int) -> None:
    """The grid reaches from -bound to bound, both included."""
    quantizer = Quantizer(num_levels=num_levels, bound=2.5)

    decoded = quantizer.decode(quantizer.encode(np.array([-1e300, -2.5, 2.5, 1e300])))

    assert decoded == pytest.approx([-2.5, -2.5, 2.5, 2.5], abs=1e-12)


@pytest.mark.parametrize(("num_levels", "bits"), [(2, 1), (16, 4), (200, 8), (257, 9)])
def test_the_wire_takes_the_bits_it_should(num_levels: int, bits: int) -> None:
    """A value takes ceil(log2 S) bits, and arrives as the level it left as."""
    quantizer = Quantizer(num_levels=num_levels, bound=1.0)
    values = values_within(1.0, 70).reshape(7, 10)

    packed = quantizer.to_wire(values, np.random.default_rng(0))
    received = quantizer.from_wire(packed, (7, 10))

    assert packed.dtype == np.uint8
    assert packed.size == math.ceil(70 * bits / 8)
    assert (received == quantizer.encode(values)).all()


def test_more_levels_are_nearer() -> None:
    """Ten times the levels move values about ten times less."""
    values = values_within(4.0, 1000)
    errors = [
        np.abs(q.decode(q.encode(values)) - values).mean()
        for q in (Quantizer(num_levels=n, bound=4.0) for n in (20, 200))
    ]

    assert 8 < errors[0] / errors[1] < 12


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (np.zeros(9, np.uint8), "must be 10 bytes"),
        (np.zeros(11, np.uint8), "must be 10 bytes"),
        (np.zeros((2, 5), np.uint8), "must be 10 bytes"),
        (np.zeros(10, np.int8), "must be 10 bytes"),
        (np.full(10, 200, np.uint8), "values must be below 200, got 200"),
    ],
)
def test_other_bytes_are_refused(packed: np.ndarray, reason: str) -> None:
    """Wrong length, shape, type or level: one sentence each."""
    with pytest.raises(KnowledgeMismatch, match=reason):
        Quantizer(num_levels=200, bound=1.0).from_wire(packed, (2, 5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_must_be_finite(bad: float) -> None:
    """A party learns that its own model is broken before anything leaves."""
    with pytest.raises(InvalidData, match="must be finite"):
        Quantizer(num_levels=5, bound=1.0).encode(np.array([0.0, bad]))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_levels": 1}, "num_levels must be from 2"),
        ({"num_levels": 2**17}, "num_levels must be from 2"),
        ({"bound": 0.0}, "bound must be finite and above 0"),
        ({"bound": math.nan}, "bound must be finite and above 0"),
        ({"bound": math.inf}, "bound must be finite and above 0"),
        ({"rounding": "up"}, "rounding must be 'nearest' or 'stochastic'"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], rule: str) -> None:
    """The sentence has the parameter, the rule and the value."""
    with pytest.raises(InvalidParameter, match=rule):
        Quantizer(**{"num_levels": 5, "bound": 1.0, **changes})  # type: ignore[arg-type]


def test_rounding_at_random_needs_a_generator() -> None:
    """No hidden source of randomness is used."""
    with pytest.raises(InvalidData, match="rng must be given"):
        Quantizer(num_levels=5, bound=1.0, rounding="stochastic").encode(np.zeros(2))


def test_plain_scores_travel_as_float32_within_the_bound() -> None:
    """Without levels, scores are only cut and checked."""
    plain = score_format(None, 2.0, "nearest")
    assert isinstance(plain, PlainScores)
    sent = plain.to_wire(np.array([[0.5, 7.0]]), np.random.default_rng(0))

    assert plain.decode(plain.from_wire(sent, (1, 2))).tolist() == [[0.5, 2.0]]
    with pytest.raises(KnowledgeMismatch, match=r"float32 of shape \(1, 3\)"):
        plain.from_wire(sent, (1, 3))
    with pytest.raises(KnowledgeMismatch, match="finite"):
        plain.from_wire(np.array([[np.nan, 0]], np.float32), (1, 2))
    hostile = plain.from_wire(np.array([[1e30, 0]], np.float32), (1, 2))
    assert hostile.max() == 2.0
