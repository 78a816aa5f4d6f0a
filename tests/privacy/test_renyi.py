"""Renyi curves, zero-concentrated privacy and their conversions."""

import itertools
import math
import tracemalloc
import warnings
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from fl_strategies._util import Array, FloatArray
from fl_strategies.privacy.accountant import Loss
from fl_strategies.privacy.bounds.moments import (
    data_dependent_epsilon,
    data_dependent_moments,
    default_moments,
    log_error_probability,
    moments_epsilon,
    moments_to_epsilon,
)
from fl_strategies.privacy.bounds.theorems import (
    default_orders,
    gaussian_delta,
    gaussian_epsilon,
    rdp_of_pure,
    rdp_of_zcdp,
    rdp_to_delta,
    rdp_to_epsilon,
    zcdp_to_epsilon,
)
from tests.privacy.oracles import textbook_zcdp_epsilon

ORDERS = default_orders()


def opacus_rdp() -> Any:
    """Import Opacus' own accountant, whose dependencies warn on import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("opacus.accountants.analysis.rdp")


def randomised_response_rdp(epsilon0: float, order: float) -> float:
    """Compute the divergence of two coins in fifty digits."""
    with mpmath.workdps(50):
        p, q = (1 / (1 + mpmath.exp(s * mpmath.mpf(epsilon0))) for s in (-1, 1))
        moment = p**order * q ** (1 - order) + q**order * p ** (1 - order)
        return float(mpmath.log(moment) / (order - 1))


@pytest.mark.parametrize("epsilon0", [1e-8, 1e-4, 0.08, 1.0, 6.0, 40.0, 900.0])
@pytest.mark.parametrize("order", [1.001, 1.5, 2.0, 17.0, 400.0, 1e6])
def test_pure_curve_is_that_of_randomised_response(epsilon0: float, order: float) -> None:
    """The curve equals the divergence of randomised response, however small or large."""
    assert rdp_of_pure(epsilon0, np.array([order]))[0] == pytest.approx(
        randomised_response_rdp(epsilon0, order), rel=1e-9
    )


def test_pure_curve_is_below_both_usual_bounds() -> None:
    """The tight curve never exceeds epsilon0^2 a / 2 nor epsilon0, and grows with order."""
    for epsilon0 in (0.01, 0.3, 2.0):
        curve = rdp_of_pure(epsilon0, ORDERS)

        assert (curve <= np.minimum(epsilon0**2 * ORDERS / 2, epsilon0) * (1 + 1e-12)).all()
        assert (np.diff(curve) >= -1e-13).all()


def test_pure_curve_broadcasts_and_handles_the_ends() -> None:
    """Many strengths at once equal one at a time; 0 is free and infinity stays."""
    strengths = np.array([[0.0], [0.2], [np.inf]])
    curves = rdp_of_pure(strengths, ORDERS)

    assert curves.shape == (3, ORDERS.size)
    assert (curves[0] == 0).all()
    np.testing.assert_array_equal(curves[1], rdp_of_pure(0.2, ORDERS))
    assert np.isinf(curves[2]).all()


@pytest.mark.parametrize(
    ("grid", "least", "most"), [(ORDERS, 1.001, 1e6), (default_moments(), 0.125, 1024)]
)
def test_default_grids_are_increasing_and_protected(
    grid: FloatArray, least: float, most: float
) -> None:
    """The shared orders and moments cannot be changed by accident."""
    assert (np.diff(grid) > 0).all()
    assert grid.size >= 32
    assert grid[0] == pytest.approx(least)
    assert grid[-1] == pytest.approx(most)
    with pytest.raises(ValueError, match="read-only"):
        grid[0] = 2.0


def test_gaussian_curve_equals_opacus() -> None:
    """Composed Gaussian noise has the same curve in Opacus."""
    orders = [1.5, 2.0, 8.0, 33.0]
    theirs = opacus_rdp().compute_rdp(q=1.0, noise_multiplier=3.0, steps=25, orders=orders)

    np.testing.assert_allclose(
        25 * rdp_of_zcdp(Loss(mu=1 / 3).rho, np.array(orders)), theirs, rtol=1e-12
    )


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("rho", [1e-3, 0.05, 2.0])
def test_conversion_equals_other_libraries(rho: float, delta: float) -> None:
    """The same curve on the same orders gives the same epsilon in Opacus and dp-accounting."""
    orders = np.linspace(1.1, 60, 300)
    accountant = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    with warnings.catch_warnings():
        # It complains that the best order is the last one; we compare, not optimise.
        warnings.simplefilter("ignore")
        of_opacus, _ = opacus_rdp().get_privacy_spent(
            orders=orders, rdp=rho * orders, delta=delta
        )
    theirs, _ = accountant.compute_epsilon(orders, rho * orders, delta)

    ours = rdp_to_epsilon(orders, rho * orders, delta)
    assert ours == pytest.approx(max(of_opacus, 0.0), rel=1e-12, abs=1e-12)
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_epsilon_and_delta_invert_each_other() -> None:
    """Converting there and back returns the same numbers at the best order."""
    curve = rdp_of_zcdp(0.1, ORDERS)
    epsilon = rdp_to_epsilon(ORDERS, curve, 1e-6)

    assert rdp_to_delta(ORDERS, curve, epsilon) == pytest.approx(1e-6, rel=1e-9)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0])
def test_conversions_stay_above_the_exact_gaussian(mu: float) -> None:
    """A curve proves no less than the truth, known exactly for Gaussian noise."""
    curve = rdp_of_zcdp(Loss(mu=mu).rho, ORDERS)
    for delta in (1e-8, 1e-3, 0.2):
        assert rdp_to_epsilon(ORDERS, curve, delta) >= gaussian_epsilon(mu, delta) - 1e-12
    for epsilon in (0.0, 0.3, 4.0):
        assert rdp_to_delta(ORDERS, curve, epsilon) >= float(gaussian_delta(mu, epsilon))


def test_delta_that_is_already_met_costs_nothing() -> None:
    """When the two outputs are closer than delta, epsilon is exactly 0."""
    curve = rdp_of_zcdp(1e-6, ORDERS)

    assert rdp_to_epsilon(ORDERS, curve, 0.01) == 0
    assert rdp_to_delta(ORDERS, curve, 0.0) <= 0.01
    assert rdp_to_delta(ORDERS, curve, math.inf) == 0
    assert rdp_to_delta(ORDERS, np.full(ORDERS.size, np.inf), 3.0) == 1
    assert rdp_to_epsilon(ORDERS, np.full(ORDERS.size, np.inf), 0.1) == math.inf
    assert zcdp_to_epsilon(0.0, 1e-5) == 0
    assert zcdp_to_epsilon(math.inf, 1e-5) == math.inf


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
@pytest.mark.parametrize("rho", [1e-8, 1e-3, 0.032, 1.0, 200.0])
def test_zcdp_optimum_over_real_orders(rho: float, delta: float) -> None:
    """No grid of orders beats the continuous optimum, which is never above the textbook."""
    epsilon = zcdp_to_epsilon(rho, delta)
    grid = rdp_to_epsilon(ORDERS, rdp_of_zcdp(rho, ORDERS), delta)

    assert epsilon <= grid + 1e-9
    assert grid <= epsilon * 1.01 + 1e-5
    assert epsilon <= textbook_zcdp_epsilon(rho, delta)


@settings(deadline=None, max_examples=40)
@given(rho=st.floats(1e-7, 50), delta=st.floats(1e-12, 0.5))
def test_zcdp_is_monotone(rho: float, delta: float) -> None:
    """A larger loss or a smaller delta never lower epsilon."""
    epsilon = zcdp_to_epsilon(rho, delta)
    slack = 1e-8 * (1 + epsilon)

    assert zcdp_to_epsilon(1.2 * rho, delta) >= epsilon - slack
    assert zcdp_to_epsilon(rho, delta / 2) >= epsilon - slack


DELTA = 1e-5


def class_probabilities(votes: Array, gamma: float) -> FloatArray:
    """Integrate the chance of every class between the kinks of the densities."""
    places = gamma * np.asarray(votes, dtype=float)
    edges = np.concatenate([[places.min() - 40], np.unique(places), [places.max() + 40]])
    nodes, weights = np.polynomial.legendre.leggauss(200)
    chances = np.zeros(len(places))
    for low, high in itertools.pairwise(edges):
        x = ((low + high) / 2 + (high - low) / 2 * nodes)[:, None]
        density = np.exp(-np.abs(x - places)) / 2
        below = np.where(x < places, density, 1 - density)
        for winner in range(len(places)):
            others = np.delete(below, winner, axis=1).prod(axis=1)
            chances[winner] += (high - low) / 2 * weights @ (density[:, winner] * others)
    return chances


def log_q_by_mpmath(votes: list[int], gamma: float) -> float:
    """Add up Lemma 7 in fifty digits."""
    with mpmath.workdps(50):
        gaps = [mpmath.mpf(gamma) * (max(votes) - v) for v in sorted(votes)[:-1]]
        total = mpmath.fsum((2 + x) / (4 * mpmath.exp(x)) for x in gaps)
        return float(mpmath.log(min(total, 1 - mpmath.mpf(1) / len(votes))))


def moment_by_mpmath(votes: list[int], gamma: float, order: float) -> float:
    """Evaluate Theorem 2 of FedKT, minimum with its data-independent terms, in fifty digits."""
    with mpmath.workdps(50):
        e = 2 * mpmath.mpf(gamma)
        q = mpmath.exp(mpmath.mpf(log_q_by_mpmath(votes, gamma)))
        bounds = [e**2 / 2 * order * (order + 1), e * order]
        if q < (mpmath.exp(e) - 1) / (mpmath.exp(2 * e) - 1):
            grown = ((1 - q) / (1 - mpmath.exp(e) * q)) ** order
            bounds.append(mpmath.log((1 - q) * grown + q * mpmath.exp(e * order)))
        return float(min(bounds))


@pytest.mark.parametrize(
    "votes", [[40, 10], [10, 40], [5, 5], [6, 3, 1], [1, 2, 3, 4], [900, 0, 0], [0, 0]]
)
@pytest.mark.parametrize("gamma", [0.01, 0.5, 2.0])
def test_error_probability_equals_high_precision(votes: list[int], gamma: float) -> None:
    """Lemma 7 keeps its digits even where the probability itself underflows."""
    found = log_error_probability(np.array([votes]), gamma)[0]

    assert found == pytest.approx(log_q_by_mpmath(votes, gamma), rel=1e-12)


@pytest.mark.parametrize("gap", [0, 1, 7, 30])
def test_error_probability_is_exact_for_two_classes(gap: int) -> None:
    """With two classes Lemma 7 is the integral, not a bound."""
    votes = np.array([gap + 3, 3])

    assert math.exp(log_error_probability(votes[None], 0.1)[0]) == pytest.approx(
        class_probabilities(votes, 0.1)[1], rel=1e-9
    )


def test_error_probability_bounds_three_classes() -> None:
    """With three classes the exact chance of an error, 0.236549, is below the bound."""
    votes = np.array([6, 3, 1])
    exact = 1 - class_probabilities(votes, 0.5)[0]

    assert exact == pytest.approx(0.236549, abs=6e-7)
    assert exact < math.exp(log_error_probability(votes[None], 0.5)[0])


def test_laplace_noise_exceeds_its_range_with_three_classes() -> None:
    """Three classes break the bounded range 2 gamma, so only two may be accounted so."""
    before = class_probabilities(np.array([0, 1, 1]), 0.5)
    after = class_probabilities(np.array([1, 1, 0]), 0.5)

    assert np.ptp(np.log(before / after)) > 1.1 * 2 * 0.5


@pytest.mark.parametrize("votes", [[50, 0], [30, 20], [26, 24], [10, 0, 0, 0], [9, 8, 3]])
@pytest.mark.parametrize("gamma", [0.04, 0.4])
def test_paper_moments_equal_high_precision(votes: list[int], gamma: float) -> None:
    """Every moment of one query equals Theorem 2 in fifty digits."""
    orders = np.array([0.5, 1.0, 8.0, 60.0, 399.0])
    found = data_dependent_moments(np.array([votes]), gamma, orders=orders, bound="paper")
    expected = [moment_by_mpmath(votes, gamma, order) for order in orders]

    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("gamma", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("bound", ["tight", "paper"])
def test_moments_bound_the_exact_divergence(gamma: float, bound: str) -> None:
    """For two classes the true moment of all neighbours stays below the bound."""
    orders = np.array([0.5, 1.0, 4.0, 20.0, 100.0])
    for first in range(21):
        votes = np.array([first, 20 - first])
        limit = data_dependent_moments(votes[None], gamma, orders=orders, bound=bound)  # type: ignore[arg-type]
        own = class_probabilities(votes, gamma)
        for step in (-1, 1):
            other = class_probabilities(votes + np.array([step, -step]), gamma)
            logs = (orders[:, None] + 1) * np.log(own) - orders[:, None] * np.log(other)
            exact = np.logaddexp(logs[:, 0], logs[:, 1])
            assert (exact <= limit * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize("votes", [[40, 10], [5, 5], [6, 3, 1], [0, 0, 0], [90_000, 0, 0]])
@pytest.mark.parametrize("gamma", [0.01, 0.5])
def test_gumbel_error_is_what_softmax_leaves(votes: list[int], gamma: float) -> None:
    """The chance is exact for any number of classes, also where it underflows."""
    with mpmath.workdps(60):
        rivals = mpmath.fsum(
            mpmath.exp(mpmath.mpf(gamma) * (v - max(votes))) for v in sorted(votes)[:-1]
        )
        expected = float(mpmath.log(rivals / (1 + rivals)))

    found = log_error_probability(np.array([votes]), gamma, "gumbel")[0]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found <= log_error_probability(np.array([votes]), gamma)[0] + 1e-12


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("splits", [1, 2])
def test_gumbel_moments_bound_the_exact_divergence(gamma: float, splits: int) -> None:
    """For three classes the true moment of every neighbour stays below the bound."""
    orders = np.array([0.5, 1.0, 4.0, 20.0, 100.0])[:, None]
    steps = [
        splits * (up - down)
        for up, down in itertools.product(np.eye(4, 3, dtype=int), repeat=2)
    ]
    for row in itertools.product(range(splits, 11), repeat=3):
        votes = np.array(row)
        limit = data_dependent_moments(
            votes[None], gamma, splits, orders.ravel(), noise="gumbel"
        )
        own = log_softmax(gamma * votes)
        for step in steps:
            powers = (orders + 1) * own - orders * log_softmax(gamma * (votes + step))
            exact = np.logaddexp.reduce(powers, axis=1)
            assert (exact <= limit * (1 + 1e-9) + 1e-12).all()


def test_gumbel_noise_never_costs_more_than_laplace_noise() -> None:
    """It errs less often, and its bounded range helps where votes are tied."""
    votes = np.random.default_rng(0).multinomial(60, [0.7, 0.2, 0.1], size=100)
    tied = np.tile([20, 20], (100, 1))
    rho = 0.2**2 / 8

    assert (
        data_dependent_moments(votes, 0.1, noise="gumbel") <= data_dependent_moments(votes, 0.1)
    ).all()
    np.testing.assert_allclose(
        data_dependent_moments(tied, 0.1, orders=np.array([1.0, 3.0]), noise="gumbel"),
        100 * rho * np.array([1.0 * 2, 3.0 * 4]),
    )
    assert data_dependent_epsilon(tied[:2], 0.1, delta=1e-9, noise="gumbel") == pytest.approx(
        0.4
    )
    assert data_dependent_epsilon(tied[:0], 0.1, delta=DELTA, noise="gumbel") == 0


def test_bound_holds_in_one_direction_only() -> None:
    """The reverse divergence exceeds the bound: the number is a diagnostic, not a promise."""
    orders, gamma = np.array([8.0]), 0.5
    votes, neighbour = np.array([50, 0]), np.array([49, 1])
    # The integral cannot resolve chances of 1e-10; Lemma 7 is exact for two classes.
    wrong, moved = (
        math.exp(log_error_probability(v[None], gamma)[0]) for v in (votes, neighbour)
    )
    own, other = np.array([1 - wrong, wrong]), np.array([1 - moved, moved])
    reverse = np.log((other ** (orders + 1) * own ** (-orders)).sum())

    assert reverse > 1.5 * data_dependent_moments(votes[None], gamma, orders=orders)[0]


def test_tight_bound_is_never_above_the_papers() -> None:
    """The exact pure curve improves on the papers' two terms, at every moment."""
    rng = np.random.default_rng(3)
    votes = rng.multinomial(30, [0.6, 0.3, 0.1], size=50)
    tight = data_dependent_moments(votes, 0.2)
    paper = data_dependent_moments(votes, 0.2, bound="paper")

    assert (tight <= paper * (1 + 1e-12)).all()
    assert (tight < paper).any()


def test_queries_add_up_in_any_order_and_grouping() -> None:
    """The total is the sum of single queries, whatever their order or class order."""
    rng = np.random.default_rng(4)
    votes = rng.multinomial(25, [0.5, 0.2, 0.2, 0.1], size=300)
    single = sum(data_dependent_moments(row[None], 0.3) for row in votes)
    total = data_dependent_moments(votes, 0.3)

    np.testing.assert_allclose(total, single, rtol=1e-10)
    shuffled = rng.permuted(rng.permutation(votes), axis=1)
    np.testing.assert_allclose(data_dependent_moments(shuffled, 0.3), total, rtol=1e-10)
    np.testing.assert_allclose(
        data_dependent_moments(votes.astype(float), 0.3), total, rtol=1e-10
    )


def test_large_counts_are_not_truncated() -> None:
    """Counts beyond 16 bits are compared as they are."""
    votes = np.array([[70_000, 69_990], [100_000, 0]])

    np.testing.assert_allclose(
        log_error_probability(votes, 0.5),
        log_error_probability(np.array([[10, 0], [100_000, 0]]), 0.5),
    )


def test_only_the_product_of_splits_and_gamma_matters() -> None:
    """Twice the votes with half the gamma is the same mechanism."""
    votes = np.array([[12, 3], [8, 7]])

    np.testing.assert_allclose(
        data_dependent_moments(2 * votes, 0.1, splits=2),
        data_dependent_moments(votes, 0.2),
        rtol=1e-12,
    )
    assert moments_epsilon(0.02, 2, 40, DELTA) == moments_epsilon(0.04, 1, 40, DELTA)


def test_disagreement_costs_the_data_independent_price() -> None:
    """Where votes are tied nothing is gained, to the last digit."""
    votes = np.tile([10, 10], (40, 1))
    orders = default_moments()
    expected = 40 * orders * rdp_of_pure(0.08, orders + 1)

    np.testing.assert_allclose(data_dependent_moments(votes, 0.04), expected, rtol=1e-12)
    grid = default_orders()
    assert data_dependent_epsilon(votes, 0.04, delta=DELTA) == pytest.approx(
        rdp_to_epsilon(grid, 40 * rdp_of_pure(0.08, grid), DELTA), rel=1e-3
    )


def test_unanimity_costs_next_to_nothing_and_no_query_nothing() -> None:
    """Thousands of unanimous voters make a query free; an empty table has no moments."""
    votes, empty = np.tile([100_000, 0], (10, 1)), np.zeros((0, 3), dtype=np.int64)

    assert data_dependent_moments(votes, 0.1).max() < 1e-12
    assert data_dependent_epsilon(votes, 0.1, delta=DELTA) < 0.02
    assert (data_dependent_moments(empty, 0.1) == 0).all()
    assert data_dependent_epsilon(empty, 0.1, delta=DELTA) == 0
    assert data_dependent_epsilon(empty, 0.1, delta=DELTA, bound="paper") == 0
    assert moments_epsilon(0.1, 1, 0, DELTA) == 0


def test_few_queries_cost_their_sum() -> None:
    """With few queries plain summation wins, unless it is switched off."""
    assert moments_epsilon(0.04, 1, 8, DELTA) == pytest.approx(0.64)
    assert moments_epsilon(0.04, 1, 8, DELTA, with_pure=False) > 0.64
    votes = np.tile([5, 5], (3, 1))
    assert data_dependent_epsilon(votes, 0.04, delta=1e-9) == pytest.approx(0.24)
    assert data_dependent_epsilon(votes, 0.04, delta=1e-9, bound="paper") == pytest.approx(0.24)


def test_old_conversion_is_a_minimum_over_moments() -> None:
    """Theorem 8 divides moment and log(1 / delta) by the order and takes the least."""
    assert moments_to_epsilon(
        np.array([1.0, 2.0]), np.array([3.0, 5.0]), math.exp(-4)
    ) == pytest.approx(4.5)


def test_memory_does_not_grow_with_the_number_of_orders() -> None:
    """A table of queries by orders is never held at once."""
    votes = np.random.default_rng(5).random((20_000, 4)) * 50
    orders = np.arange(1, 1001)
    tracemalloc.start()
    data_dependent_moments(votes, 0.2, orders=orders)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 20_000 * 1000 * 8 / 10


@settings(deadline=None, max_examples=40)
@given(
    gamma=st.floats(1e-3, 2.0),
    queries=st.integers(1, 500),
    delta=st.floats(1e-10, 0.1),
)
def test_published_accountant_is_monotone(gamma: float, queries: int, delta: float) -> None:
    """More noise, fewer queries or a larger delta never raise epsilon; more orders neither."""
    epsilon = moments_epsilon(gamma, 1, queries, delta)
    slack = 1e-9 * (1 + epsilon)

    assert moments_epsilon(1.1 * gamma, 1, queries, delta) >= epsilon - slack
    assert moments_epsilon(gamma, 1, queries + 1, delta) >= epsilon - slack
    assert moments_epsilon(gamma, 1, queries, delta / 2) >= epsilon - slack
    assert moments_epsilon(gamma, 1, queries, delta, max_order=8) >= epsilon - slack


@settings(deadline=None, max_examples=40)
@given(
    votes=st.lists(
        st.lists(st.integers(0, 60), min_size=3, max_size=3), min_size=1, max_size=8
    ),
    gamma=st.floats(1e-3, 1.5),
)
def test_votes_never_cost_more_than_without_looking(
    votes: list[list[int]], gamma: float
) -> None:
    """The data-dependent epsilon is at most the data-independent one, and not negative."""
    table = np.array(votes)
    whole = np.arange(1, 401)
    found = data_dependent_epsilon(table, gamma, delta=DELTA, orders=whole, bound="paper")

    assert 0 <= found <= moments_epsilon(gamma, 1, len(votes), DELTA) + 1e-9


@settings(deadline=None, max_examples=30)
@given(lead=st.integers(1, 80), gamma=st.floats(0.01, 1.0))
def test_a_larger_lead_never_costs_more(lead: int, gamma: float) -> None:
    """Moments fall as the leader pulls ahead."""
    near = data_dependent_moments(np.array([[100 + lead, 100 - lead]]), gamma)
    far = data_dependent_moments(np.array([[101 + lead, 99 - lead]]), gamma)

    assert (far <= near + 1e-12).all()
