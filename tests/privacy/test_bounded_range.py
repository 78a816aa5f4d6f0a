"""Composition of bounded-range mechanisms."""

import itertools
import math
from collections import Counter

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from fl_strategies._util import FloatArray
from fl_strategies.privacy.accountant import Loss
from fl_strategies.privacy.bounds import theorems
from fl_strategies.privacy.bounds.moments import (
    gaussian_error_rdp,
    gnmax_rdp,
    log_error_probability_gaussian,
    threshold_rdp,
)
from fl_strategies.privacy.bounds.theorems import (
    bounded_range_optimal,
    bounded_range_optimal_delta,
    default_orders,
    gaussian_epsilon,
    nfdp_theorem,
    nfdp_tight,
    pure_optimal,
    rdp_of_zcdp,
    rdp_to_epsilon,
    zcdp_to_epsilon,
)
from tests.privacy.oracles import gnmax_mu


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
        index = np.arange(theorems._num_candidates(eta, count, epsilon), dtype=float)
        every = theorems._candidate_deltas(eta, count, epsilon, index)

        assert bounded_range_optimal_delta(eta, count, epsilon) == pytest.approx(
            every.max(), rel=1e-12
        )


def test_answer_does_not_rest_on_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the search missed the worst candidate, the final check would still find it."""
    expected = bounded_range_optimal(0.08, 40, 1e-5)

    search = theorems._searched_range

    def blind(eta: float, count: int, epsilon: float) -> float:
        return 0.5 * search(eta, count, epsilon)

    monkeypatch.setattr(theorems, "_searched_range", blind)

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


ORDERS = np.array([1.5, 2.0, 5.0, 12.0, 40.0])


def theorem_by_mpmath(log_q: float, sigma: float, order: float) -> float:
    """Evaluate Theorem 6 of PATE with its conditions in fifty digits."""
    with mpmath.workdps(50):
        log_chance, variance = mpmath.mpf(log_q), mpmath.mpf(sigma) ** 2
        q = mpmath.exp(log_chance)
        independent = order / variance
        second = mpmath.sqrt(-log_chance * variance)
        first = second + 1
        if second <= 1 or first <= order:
            return float(independent)
        e1, e2 = first / variance, second / variance
        limit = (
            mpmath.exp((second - 1) * e2)
            / (first / (first - 1) * second / (second - 1)) ** second
        )
        if q > limit:
            return float(independent)
        a = (1 - q) / (1 - (q * mpmath.exp(e2)) ** ((second - 1) / second))
        b = mpmath.exp(e1) / q ** (1 / (first - 1))
        moment = (1 - q) * a ** (order - 1) + q * b ** (order - 1)
        return float(min(independent, mpmath.log(moment) / (order - 1)))


@pytest.mark.parametrize("sigma", [0.7, 3.0, 40.0, 1500.0])
@pytest.mark.parametrize("log_q", [-0.5, -2.0, -6.0, -11.5, -80.0, -600.0])
def test_theorem_equals_high_precision(sigma: float, log_q: float) -> None:
    """The data-dependent bound and its conditions agree with fifty digits."""
    found = gaussian_error_rdp(np.array([log_q]), sigma, ORDERS)
    expected = [theorem_by_mpmath(log_q, sigma, order) for order in ORDERS]

    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-15)


@pytest.mark.parametrize(
    ("sigma", "order", "negative_log_q0"),
    [
        (1.5, 1.1, 2.8),
        (1.5, 2.5, 2.6),
        (1.5, 32, 427),
        (15, 1.1, 4.8),
        (15, 2.5, 4.0),
        (15, 32, 4.7),
        (15, 250, 275),
        (1500, 1.1, 9.6),
        (1500, 2.5, 8.8),
        (1500, 32, 6.0),
        (1500, 250, 4),
        (15000, 1.1, 12),
        (15000, 2.5, 11.2),
        (15000, 32, 8.6),
        (15000, 250, 6.4),
    ],
)
def test_published_crossover(sigma: float, order: float, negative_log_q0: float) -> None:
    """Below the crossover known from PATE votes help, ever more; above it they do not."""
    orders = np.array([float(order)])
    halved = -negative_log_q0 - np.log([1, 2, 4, 8])
    costs = [gaussian_error_rdp(np.array([x]), sigma, orders)[0] for x in halved]

    assert (np.diff(costs) < 0).all()
    above = np.log(math.exp(-negative_log_q0) + np.array([0.1, 0.2, 0.3, 0.4]))
    for log_q in above:
        cost = gaussian_error_rdp(np.array([log_q]), sigma, orders)[0]
        assert cost == pytest.approx(order / sigma**2)


@pytest.mark.parametrize("votes", [[240, 10], [30, 20, 5], [7, 7], [5000, 0, 0]])
def test_error_probability_equals_normal_tails(votes: list[int]) -> None:
    """Proposition 7 is a sum of normal tails, at most 1 - 1 / classes."""
    gaps = max(votes) - np.sort(votes)[:-1]
    tails = norm.logsf(gaps / (20 * math.sqrt(2)))
    expected = min(np.logaddexp.reduce(tails), math.log(1 - 1 / len(votes)))

    assert log_error_probability_gaussian(np.array([votes]), 20.0)[0] == pytest.approx(
        expected, rel=1e-12
    )


def divergence(own: list[float], other: list[float], deviation: float) -> FloatArray:
    """Return the Renyi divergences of two answers that normal noise decides by these leads."""
    first, second = (norm.logcdf(np.array(leads) / deviation) for leads in (own, other))
    logs = ORDERS[:, None] * first + (1 - ORDERS[:, None]) * second
    return np.asarray(np.logaddexp(logs[:, 0], logs[:, 1]) / (ORDERS - 1))


@pytest.mark.parametrize("sigma", [0.8, 2.0, 5.0])
def test_bound_covers_the_exact_divergence(sigma: float) -> None:
    """For two classes the true divergence to every neighbour stays below the bound."""
    for first in range(16):
        lead = 2 * first - 15
        limit = gnmax_rdp(np.array([[first, 15 - first]]), sigma, ORDERS)
        for moved in (lead - 2, lead + 2):
            exact = divergence([lead, -lead], [moved, -moved], sigma * math.sqrt(2))
            assert (exact <= limit * (1 + 1e-9) + 1e-14).all()
    for lead in range(26):
        limit = threshold_rdp(np.array([[lead, 0]]), 1.5, 12.0, ORDERS)
        for moved in (lead - 1, lead + 1):
            exact = divergence([lead - 12, 12 - lead], [moved - 12, 12 - moved], 1.5)
            assert (exact <= limit * (1 + 1e-9) + 1e-14).all(), "of the test of agreement"


def test_votes_never_cost_more_than_without_looking() -> None:
    """The data-dependent curve is capped by the data-independent one."""
    rng = np.random.default_rng(0)
    votes = rng.multinomial(100, [0.6, 0.3, 0.1], size=200)
    curve = gnmax_rdp(votes, 10.0, ORDERS)

    assert (curve <= 200 * ORDERS / 100 * (1 + 1e-12)).all()
    assert (curve < 200 * ORDERS / 100 * 0.9).any()


def test_few_voters_gain_nothing_under_strong_noise() -> None:
    """At fifty voters and noise 15 even unanimity does not beat the exact Gaussian epsilon."""
    orders = default_orders()
    votes = np.tile([50] + [0] * 9, (50, 1))
    looked = rdp_to_epsilon(orders, gnmax_rdp(votes, 15.0, orders), 1e-5)

    assert gaussian_epsilon(gnmax_mu(15.0, 50), 1e-5) < looked


def test_splits_scale_votes_and_noise_together() -> None:
    """Three votes a party at three times the noise is the same mechanism."""
    votes = np.array([[80, 20], [55, 45]])

    np.testing.assert_allclose(
        gnmax_rdp(3 * votes, 30.0, ORDERS, splits=3), gnmax_rdp(votes, 10.0, ORDERS)
    )
    np.testing.assert_allclose(
        threshold_rdp(3 * votes, 30.0, 180.0, ORDERS, splits=3),
        threshold_rdp(votes, 10.0, 60.0, ORDERS),
    )


def test_a_distant_threshold_is_almost_free() -> None:
    """A test whose answer is certain costs nothing; one on the edge costs in full."""
    votes = np.array([[500, 0]])

    assert threshold_rdp(votes, 5.0, 100.0, ORDERS).max() < 1e-9
    np.testing.assert_allclose(threshold_rdp(votes, 5.0, 500.0, ORDERS), ORDERS / 50)


def test_certainty_and_emptiness_cost_nothing() -> None:
    """A chance of exactly 0, and no queries at all, are free."""
    assert (gaussian_error_rdp(np.array([-np.inf]), 3.0, ORDERS) == 0).all()
    assert (gnmax_rdp(np.zeros((0, 3)), 3.0, ORDERS) == 0).all()
    assert (threshold_rdp(np.zeros((0, 3)), 3.0, 5.0, ORDERS) == 0).all()


@settings(deadline=None, max_examples=40)
@given(lead=st.integers(0, 60), sigma=st.floats(0.5, 50.0))
def test_a_larger_lead_never_costs_more(lead: int, sigma: float) -> None:
    """The curve falls as the leader pulls ahead."""
    near = gnmax_rdp(np.array([[60 + lead, 60 - lead, 0]]), sigma, ORDERS)
    far = gnmax_rdp(np.array([[61 + lead, max(59 - lead, 0), 0]]), sigma, ORDERS)

    assert (far <= near + 1e-12).all()


def samples_of(records: list[str], samples: int, replacement: bool) -> Counter[tuple[str, ...]]:
    """Count every ordered sample that can be drawn."""
    if replacement:
        return Counter(itertools.product(records, repeat=samples))
    return Counter(itertools.permutations(records, samples))


def nfdp_delta_by_enumeration(
    records: int, samples: int, replacement: bool, epsilon: float
) -> float:
    """Compare all samples of a data set with those after one record was replaced."""
    shared = [f"record {i}" for i in range(records - 1)]
    own = samples_of([*shared, "mine"], samples, replacement)
    other = samples_of([*shared, "yours"], samples, replacement)
    total = sum(own.values())
    return sum(
        max(0.0, n / total - math.exp(epsilon) * other[s] / total) for s, n in own.items()
    )


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("records", "samples"), [(2, 1), (4, 2), (5, 3), (5, 5), (3, 0)])
def test_tight_statement_equals_enumeration(
    records: int, samples: int, replacement: bool
) -> None:
    """Delta is exact at epsilon 0 and does not fall for any larger epsilon."""
    tight = nfdp_tight(records, samples, replacement=replacement)
    stated = nfdp_theorem(records, samples, replacement=replacement)

    assert tight.epsilon == 0
    for epsilon in (0.0, stated.epsilon, 5.0):
        assert nfdp_delta_by_enumeration(
            records, samples, replacement, epsilon
        ) == pytest.approx(tight.delta, abs=1e-12)


@pytest.mark.parametrize(("records", "samples"), [(300, 60), (2880, 300), (10**9, 3)])
def test_closed_forms_in_high_precision(records: int, samples: int) -> None:
    """The natural logarithms and powers agree with forty digits."""
    with mpmath.workdps(40):
        n, k = mpmath.mpf(records), samples
        with_replacement = (k * mpmath.log((n + 1) / n), 1 - ((n - 1) / n) ** k)
        without = (mpmath.log((n + 1) / (n + 1 - k)), k / n)

    assert nfdp_theorem(records, samples) == pytest.approx(
        [float(x) for x in with_replacement], rel=1e-12
    )
    assert nfdp_theorem(records, samples, replacement=False) == pytest.approx(
        [float(x) for x in without], rel=1e-12
    )


def test_fresh_samples_compose() -> None:
    """Ten fresh samples of 300 in 2880 reach a record with chance 0.647; all records all."""
    assert nfdp_tight(2880, 300, runs=10).delta == pytest.approx(0.647, abs=5e-4)
    assert nfdp_tight(10, 1, replacement=False, runs=2).delta == pytest.approx(0.19)
    assert nfdp_tight(10, 1, runs=0).delta == 0
    assert nfdp_tight(7, 7, replacement=False).delta == 1
    assert nfdp_tight(7, 7, replacement=False, runs=3).delta == 1
    assert nfdp_tight(1, 1).delta == 1
    assert nfdp_tight(1, 0).delta == 0


@settings(deadline=None, max_examples=80)
@given(records=st.integers(1, 10_000), data=st.data())
def test_replacement_is_never_less_private(records: int, data: st.DataObject) -> None:
    """Lemma 1: with replacement both numbers are at most those without."""
    samples = data.draw(st.integers(0, records))
    repeated = nfdp_theorem(records, samples)
    distinct = nfdp_theorem(records, samples, replacement=False)

    assert repeated.epsilon <= distinct.epsilon + 1e-12
    assert repeated.delta <= distinct.delta + 1e-12


@settings(deadline=None, max_examples=50)
@given(records=st.integers(2, 1000), samples=st.integers(0, 1000))
def test_guarantee_is_monotone(records: int, samples: int) -> None:
    """More samples never help and more records never hurt."""
    here = nfdp_theorem(records, samples)

    assert nfdp_theorem(records, samples + 1).delta >= here.delta
    assert nfdp_theorem(records, samples + 1).epsilon >= here.epsilon
    assert nfdp_theorem(records + 1, samples).delta <= here.delta + 1e-15
