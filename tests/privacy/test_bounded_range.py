"""Composition of bounded-range mechanisms."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy.bounds import curves
from fl_strategies.privacy.bounds.curves import (
    bounded_range_optimal,
    bounded_range_optimal_delta,
)
from fl_strategies.privacy.bounds.losses import Loss
from fl_strategies.privacy.bounds.pure import pure_optimal
from fl_strategies.privacy.bounds.renyi import rdp_of_zcdp, zcdp_to_epsilon


def worst_pair(eta: float, location: float) -> tuple[float, float]:
    """Return the chances of one of two outcomes whose log-ratios are t and t - eta."""
    second = (math.exp(-location) - math.exp(-eta)) / (1 - math.exp(-eta))
    return math.exp(location) * second, second


def delta_at_location(eta: float, count: int, epsilon: float, location: float) -> float:
    """Sum the hockey stick of `count` equal pairs over the number of upper outcomes."""
    first, second = worst_pair(eta, location)
    upper = np.arange(count + 1)
    own, other = binom.pmf(upper, count, first), binom.pmf(upper, count, second)
    return float(np.maximum(own - math.exp(epsilon) * other, 0).sum())


def delta_by_search(eta: float, count: int, epsilon: float) -> float:
    """Take the numerical supremum over the location of the two losses."""
    grid = np.linspace(0, eta, 501)[1:-1]
    deltas = [delta_at_location(eta, count, epsilon, t) for t in grid]
    near = grid[int(np.argmax(deltas))] + np.linspace(-1, 1, 201) * eta / 500
    inside = near[(near > 0) & (near < eta)]
    return max(delta_at_location(eta, count, epsilon, t) for t in inside)


def delta_by_enumeration(eta: float, locations: tuple[float, ...], epsilon: float) -> float:
    """Go through every outcome of pairs with different locations."""
    delta = 0.0
    pairs = [worst_pair(eta, location) for location in locations]
    for outcome in itertools.product([True, False], repeat=len(locations)):
        own = math.prod(p if up else 1 - p for up, (p, _) in zip(outcome, pairs, strict=True))
        other = math.prod(q if up else 1 - q for up, (_, q) in zip(outcome, pairs, strict=True))
        delta += max(0.0, own - math.exp(epsilon) * other)
    return delta


@pytest.mark.parametrize(("eta", "count"), [(0.08, 40), (0.5, 12), (1.5, 5), (3.0, 1)])
@pytest.mark.parametrize("share", [0.02, 0.2, 0.4])
def test_delta_equals_numerical_supremum(eta: float, count: int, share: float) -> None:
    """The finite set of candidates holds the worst location."""
    epsilon = share * eta * count
    exact = bounded_range_optimal_delta(eta, count, epsilon)
    found = delta_by_search(eta, count, epsilon)

    assert found <= exact * (1 + 1e-9)
    assert found == pytest.approx(exact, rel=1e-5)


def test_different_locations_are_never_worse() -> None:
    """Random mechanisms of the same range, all different, stay below the optimum."""
    rng = np.random.default_rng(0)
    eta, count, epsilon = 0.7, 5, 0.8
    limit = bounded_range_optimal_delta(eta, count, epsilon)
    deltas = [
        delta_by_enumeration(eta, tuple(rng.uniform(0.01, eta - 0.01, count)), epsilon)
        for _ in range(200)
    ]

    assert 0 < max(deltas) <= limit


def test_one_exponential_mechanism_is_within_the_bound() -> None:
    """Noisy max over Gumbel noise, any classes and any neighbour, respects the curve."""
    rng = np.random.default_rng(1)
    gamma = 0.4
    for _ in range(300):
        votes = rng.integers(0, 9, size=5).astype(float)
        moved = votes.copy()
        moved[rng.integers(5)] += 1
        moved[rng.integers(5)] -= 1
        own, other = (np.exp(gamma * v) / np.exp(gamma * v).sum() for v in (votes, moved))
        ratios = np.log(own / other)
        assert np.ptp(ratios) <= 2 * gamma + 1e-12
        for epsilon in (0.0, 0.1, 0.3):
            stick = np.maximum(own - math.exp(epsilon) * other, 0).sum()
            assert stick <= bounded_range_optimal_delta(2 * gamma, 1, epsilon) + 1e-12


def test_laplace_noise_is_bounded_range_for_two_classes() -> None:
    """With two classes the log-odds move by no more than the gap, and almost by it."""

    def log_odds(gap: float) -> float:
        wrong = (2 + abs(gap)) / 4 * math.exp(-abs(gap))
        return math.copysign(math.log((1 - wrong) / wrong), gap)

    gaps = np.linspace(-300, 300, 4001)
    moves = [log_odds(gap + 0.5) - log_odds(gap) for gap in gaps]

    assert max(moves) <= 0.5 + 1e-12
    assert max(moves) == pytest.approx(0.5, abs=5e-3)


@pytest.mark.parametrize("count", [1, 7, 1000, 20_000])
def test_search_finds_the_largest_candidate(count: int) -> None:
    """Zooming in gives the same maximum as looking at every candidate."""
    eta = 2 / math.sqrt(count)
    for epsilon in (0.0, 0.3, 1.1):
        index = np.arange(curves._num_candidates(eta, count, epsilon), dtype=float)
        every = curves._candidate_deltas(eta, count, epsilon, index)

        assert bounded_range_optimal_delta(eta, count, epsilon) == pytest.approx(
            every.max(), rel=1e-12
        )


def test_answer_does_not_rest_on_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the search missed the worst candidate, the final check would still find it."""
    expected = bounded_range_optimal(0.08, 40, 1e-5)

    search = curves._searched_range

    def blind(eta: float, count: int, epsilon: float) -> float:
        return 0.5 * search(eta, count, epsilon)

    monkeypatch.setattr(curves, "_searched_range", blind)

    assert bounded_range_optimal(0.08, 40, 1e-5) == pytest.approx(expected, abs=1e-7)


def test_epsilon_and_delta_invert_each_other() -> None:
    """Delta at the epsilon found for a delta is that delta."""
    for eta, count in [(0.08, 40), (0.01, 5000), (1.0, 50)]:
        epsilon = bounded_range_optimal(eta, count, 1e-5)

        assert bounded_range_optimal_delta(eta, count, epsilon) == pytest.approx(1e-5, rel=1e-8)


def test_large_losses_are_rounded_up() -> None:
    """Where a tail underflows the answer errs on the safe side, below the plain sum."""
    epsilon = bounded_range_optimal(2.0, 4000, 1e-5)

    assert 700 < epsilon < 8000
    assert epsilon < zcdp_to_epsilon(4000 * Loss(spread=2.0).rho, 1e-5)


def test_trivial_compositions() -> None:
    """Nothing costs nothing, no privacy stays infinite, and a large delta is met at 0."""
    assert bounded_range_optimal(0.3, 0, 1e-5) == 0
    assert bounded_range_optimal(0.0, 9, 1e-5) == 0
    assert bounded_range_optimal(math.inf, 1, 1e-5) == math.inf
    assert bounded_range_optimal(0.01, 1, 0.5) == 0
    assert bounded_range_optimal_delta(0.1, 2, 0.2) == 0
    assert bounded_range_optimal_delta(0.1, 0, 0.0) == 0
    assert bounded_range_optimal_delta(math.inf, 1, 3.0) == 1
    assert Loss(spread=0.4).rho == pytest.approx(0.02)


def test_a_location_that_rounds_past_the_range_is_not_a_negative_chance() -> None:
    """Here the last candidate lies 5e-16 beyond eta; its share of delta is zero, not NaN."""
    delta = bounded_range_optimal_delta(2.9657910259125346, 180, 275.8185654098657)

    assert 0 < delta < 1
    assert bounded_range_optimal(2.9657910259125346, 180, delta) == pytest.approx(275.81856541)


@settings(deadline=None, max_examples=30)
@given(eta=st.floats(1e-3, 3.0), count=st.integers(1, 200), delta=st.floats(1e-10, 0.3))
def test_epsilon_is_monotone_and_between_its_neighbours(
    eta: float, count: int, delta: float
) -> None:
    """More range, more events or less delta cost more; pure and zCDP bounds lie above."""
    epsilon = bounded_range_optimal(eta, count, delta)
    slack = 1e-8 + 1e-8 * epsilon

    assert epsilon <= pure_optimal(eta, count, delta) + slack
    assert epsilon <= zcdp_to_epsilon(count * Loss(spread=eta).rho, delta) + slack
    assert bounded_range_optimal(1.1 * eta, count, delta) >= epsilon - slack
    assert bounded_range_optimal(eta, count + 1, delta) >= epsilon - slack
    assert bounded_range_optimal(eta, count, delta / 2) >= epsilon - slack


@pytest.mark.parametrize("eta", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("order", [1.5, 4.0, 40.0])
def test_zcdp_bounds_every_location(eta: float, order: float) -> None:
    """eta^2 / 8 bounds the Renyi divergence of every two-outcome mechanism of range eta."""
    limit = rdp_of_zcdp(Loss(spread=eta).rho, np.array([order]))[0]
    for location in np.linspace(0, eta, 201)[1:-1]:
        p, q = worst_pair(eta, location)
        moment = p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)

        assert math.log(moment) / (order - 1) <= limit + 1e-12


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [((-1.0, 1, 0.1), "eta"), ((0.1, -1, 0.1), "count"), ((0.1, 1, 1.5), "delta")],
)
def test_wrong_use_names_the_parameter(
    arguments: tuple[float, int, float], parameter: str
) -> None:
    """A wrong argument is refused in one sentence that names it."""
    with pytest.raises(InvalidParameter, match=f"bounded_range_optimal: {parameter} must be"):
        bounded_range_optimal(*arguments)
