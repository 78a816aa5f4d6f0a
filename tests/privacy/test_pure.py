"""Optimal composition of pure differential privacy."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.privacy.bounds import theorems
from fl_strategies.privacy.bounds.theorems import (
    default_orders,
    gaussian_epsilon,
    pure_heterogeneous,
    pure_optimal,
    pure_optimal_delta,
    rdp_of_pure,
    rdp_to_epsilon,
)


def delta_by_enumeration(strengths: list[float], epsilon: float) -> float:
    """Go through every outcome of independent randomised responses."""
    delta = 0.0
    for signs in itertools.product([1, -1], repeat=len(strengths)):
        pairs = list(zip(signs, strengths, strict=True))
        own = math.prod(1 / (1 + math.exp(-sign * e)) for sign, e in pairs)
        other = math.prod(1 / (1 + math.exp(sign * e)) for sign, e in pairs)
        delta += max(0.0, own - math.exp(epsilon) * other)
    return delta


def epsilon_by_mpmath(epsilon0: float, count: int, delta: float) -> float:
    """Bisect the binomial hockey-stick sum in forty digits."""
    with mpmath.workdps(40):
        strength = mpmath.mpf(epsilon0)
        heads = 1 / (1 + mpmath.exp(-strength))
        masses = [
            (mpmath.binomial(count, j) * heads ** (count - j) * (1 - heads) ** j)
            for j in range(count + 1)
        ]

        def excess(epsilon: mpmath.mpf) -> mpmath.mpf:
            losses = [(count - 2 * j) * strength for j in range(count + 1)]
            return mpmath.fsum(
                mass * (1 - mpmath.exp(epsilon - loss))
                for mass, loss in zip(masses, losses, strict=True)
                if loss > epsilon
            ) - mpmath.mpf(delta)

        low, high = mpmath.mpf(0), count * strength
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return float(high)


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("epsilon0", [0.05, 0.7, 3.0])
def test_delta_equals_enumeration(epsilon0: float, count: int) -> None:
    """Delta is the hockey-stick divergence summed over every outcome."""
    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        epsilon = share * count * epsilon0

        assert pure_optimal_delta(epsilon0, count, epsilon) == pytest.approx(
            delta_by_enumeration([epsilon0] * count, epsilon), rel=1e-10, abs=1e-15
        )


@pytest.mark.parametrize(
    ("epsilon0", "count", "delta"),
    [
        (0.08, 40, 1e-5),
        (0.3, 200, 1e-8),
        (0.001, 500, 1e-6),
        (2.0, 30, 1e-3),
        (0.02, 300, 1e-12),
    ],
)
def test_epsilon_equals_high_precision_bisection(
    epsilon0: float, count: int, delta: float
) -> None:
    """Epsilon agrees with forty-digit arithmetic to ten digits."""
    assert pure_optimal(epsilon0, count, delta) == pytest.approx(
        epsilon_by_mpmath(epsilon0, count, delta), rel=1e-10
    )


@pytest.mark.parametrize("flips", range(0, 20, 3))
def test_closed_form_of_theorem(flips: int) -> None:
    """At epsilon = (k - 2i) epsilon0 delta has the closed form of Theorem 3.3."""
    epsilon0, count = 0.15, 40
    weights = [
        math.comb(count, j)
        * (math.exp((count - j) * epsilon0) - math.exp((count - 2 * flips + j) * epsilon0))
        for j in range(flips)
    ]
    expected = sum(weights) / (1 + math.exp(epsilon0)) ** count

    assert pure_optimal_delta(epsilon0, count, (count - 2 * flips) * epsilon0) == pytest.approx(
        expected, rel=1e-9, abs=1e-18
    )


def test_epsilon_and_delta_invert_each_other() -> None:
    """Delta at the epsilon found for a delta is that delta, also for a million events."""
    for epsilon0, count in [(0.5, 7), (0.01, 10_000), (0.001, 1_000_000)]:
        epsilon = pure_optimal(epsilon0, count, 1e-6)

        assert pure_optimal_delta(epsilon0, count, epsilon) == pytest.approx(1e-6, rel=1e-8)


def test_many_weak_events_become_gaussian() -> None:
    """A million weak events cost what the Gaussian limit says, mu = epsilon0 sqrt(count)."""
    assert pure_optimal(1e-3, 1_000_000, 1e-5) == pytest.approx(
        gaussian_epsilon(1.0, 1e-5), rel=1e-3
    )


def test_trivial_compositions() -> None:
    """Nothing costs nothing, no privacy stays infinite, and a large delta is met at 0."""
    assert pure_optimal(0.3, 0, 1e-5) == 0
    assert pure_optimal(0.0, 9, 1e-5) == 0
    assert pure_optimal(math.inf, 0, 1e-5) == 0
    assert pure_optimal(math.inf, 1, 1e-5) == math.inf
    assert pure_optimal(0.01, 1, 0.5) == 0
    assert pure_optimal(0.08, 40, 1e-305) == 3.2
    assert pure_optimal_delta(math.inf, 2, 5.0) == 1
    assert pure_optimal_delta(0.1, 2, math.inf) == 0
    assert pure_optimal_delta(0.1, 0, 0.0) == 0


@settings(deadline=None, max_examples=40)
@given(
    epsilon0=st.floats(1e-4, 3.0),
    count=st.integers(1, 300),
    delta=st.floats(1e-12, 0.5),
)
def test_epsilon_is_monotone(epsilon0: float, count: int, delta: float) -> None:
    """More strength, more events or a smaller delta never lower epsilon, nor beat the sum."""
    epsilon = pure_optimal(epsilon0, count, delta)
    slack = 1e-9 + 1e-9 * epsilon

    assert 0 <= epsilon <= count * epsilon0 + slack
    assert pure_optimal(1.1 * epsilon0, count, delta) >= epsilon - slack
    assert pure_optimal(epsilon0, count + 1, delta) >= epsilon - slack
    assert pure_optimal(epsilon0, count, delta / 2) >= epsilon - slack


@settings(deadline=None, max_examples=15)
@given(epsilon0=st.floats(1e-3, 1.0), count=st.integers(1, 200))
def test_optimum_is_below_the_renyi_bound(epsilon0: float, count: int) -> None:
    """No valid bound beats the optimum; the tight Renyi curve stays above it."""
    orders = default_orders()
    bound = rdp_to_epsilon(orders, count * rdp_of_pure(epsilon0, orders), 1e-6)

    assert pure_optimal(epsilon0, count, 1e-6) <= min(bound, count * epsilon0) + 1e-9


@pytest.mark.parametrize(
    ("strengths", "counts"),
    [([0.3, 0.9], [4, 3]), ([0.1, 0.5, 1.3], [3, 2, 2]), ([2.0, 0.2], [1, 6])],
)
def test_unequal_events_equal_enumeration(strengths: list[float], counts: list[int]) -> None:
    """For few events of different strengths the answer is exact."""
    every = [e for e, n in zip(strengths, counts, strict=True) for _ in range(n)]
    epsilon = pure_heterogeneous(strengths, counts, 1e-3)

    assert delta_by_enumeration(every, epsilon) == pytest.approx(1e-3, rel=1e-6)


def test_unequal_events_reduce_to_equal_ones() -> None:
    """Events of one strength in several entries, and zero entries, change nothing."""
    expected = pure_optimal(0.08, 40, 1e-5)

    assert pure_heterogeneous([0.08] * 4, [10] * 4, 1e-5) == pytest.approx(expected, rel=1e-7)
    assert pure_heterogeneous([0.08, 0.0, 5.0], [40, 9, 0], 1e-5) == pytest.approx(
        expected, rel=1e-7
    )


@pytest.mark.parametrize("kinds", [3, 8, 16])
def test_gridded_convolution_stays_just_above_the_optimum(kinds: int) -> None:
    """Almost equal strengths cost almost what equal ones do, and never less."""
    strengths = [0.05 + 1e-9 * i for i in range(kinds)]
    expected = pure_optimal(0.05, 100 * kinds, 1e-6)
    answer = pure_heterogeneous(strengths, [100] * kinds, 1e-6)

    assert expected - 1e-9 <= answer <= expected * 1.001


def test_many_strengths_fall_back_to_a_renyi_bound() -> None:
    """A hundred thousand different strengths are bounded between optimum and sum."""
    strengths = np.linspace(0.004, 0.006, 100_000)
    answer = pure_heterogeneous(strengths, np.ones(100_000, dtype=np.int64), 1e-6)

    assert pure_optimal(0.004, 100_000, 1e-6) < answer
    assert answer < 1.05 * pure_optimal(0.006, 100_000, 1e-6)


def test_few_events_cost_their_sum_at_most() -> None:
    """The plain sum is never exceeded, whichever route is taken."""
    assert pure_heterogeneous([0.1, 0.2], [1, 1], 1e-9) == pytest.approx(0.3, abs=1e-6)
    assert pure_heterogeneous([1e-9 * i for i in range(20)], [1] * 20, 1e-9) <= 1.9e-7
    assert pure_heterogeneous([], [], 1e-9) == 0
    assert pure_heterogeneous([math.inf], [1], 1e-9) == math.inf


def test_coarsening_never_lowers_delta() -> None:
    """Atoms split on a coarse grid keep their mass and dominate the original."""
    rng = np.random.default_rng(0)
    losses, masses = rng.normal(0.5, 1.0, 500), rng.dirichlet(np.ones(500))
    grid, split = theorems._coarsened(losses, masses, 40)

    assert grid.size == 40
    assert split.sum() == pytest.approx(1.0)
    assert split @ np.exp(-grid) == pytest.approx(masses @ np.exp(-losses))
    for epsilon in np.linspace(0, 3, 31):
        exact = theorems._delta_of(losses, masses, epsilon)
        assert exact - 1e-15 <= theorems._delta_of(grid, split, epsilon) <= exact + 0.01


def test_cut_tails_are_accounted_for() -> None:
    """What is cut from the top is below the tail; what is cut below moves up."""
    losses, masses = theorems._loss_distribution(0.1, 1000)
    kept_losses, kept = theorems._without_tails(losses, masses, 1e-6)

    assert kept.size < masses.size
    assert 1 - 1e-6 <= kept.sum() <= 1 + 1e-12
    assert kept_losses[0] < losses[0]
    assert kept[-1] > masses[losses == kept_losses[-1]][0]
