"""Noisy max with Gaussian noise, with and without a threshold."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.privacy.bounds.gaussian import gaussian_epsilon
from fl_strategies.privacy.bounds.moments import (
    gaussian_error_rdp,
    gnmax_rdp,
    log_error_probability_gaussian,
    threshold_rdp,
)
from fl_strategies.privacy.bounds.renyi import default_orders, rdp_to_epsilon
from tests.privacy.oracles import gnmax_mu

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


@pytest.mark.parametrize("sigma", [0.8, 2.0, 5.0])
def test_bound_covers_the_exact_divergence(sigma: float) -> None:
    """For two classes the true divergence to every neighbour stays below the bound."""
    for first in range(16):
        lead = 2 * first - 15
        limit = gnmax_rdp(np.array([[first, 15 - first]]), sigma, ORDERS)
        own = norm.logcdf(np.array([lead, -lead]) / (sigma * math.sqrt(2)))
        for step in (-2, 2):
            moved = lead + step
            other = norm.logcdf(np.array([moved, -moved]) / (sigma * math.sqrt(2)))
            logs = ORDERS[:, None] * own + (1 - ORDERS[:, None]) * other
            exact = np.logaddexp(logs[:, 0], logs[:, 1]) / (ORDERS - 1)
            assert (exact <= limit * (1 + 1e-9) + 1e-14).all()


def test_threshold_bound_covers_the_exact_divergence() -> None:
    """The cost of the test is above the true divergence of its two answers."""
    sigma, threshold = 1.5, 12.0
    for lead in range(26):
        limit = threshold_rdp(np.array([[lead, 0]]), sigma, threshold, ORDERS)
        own = norm.logcdf(np.array([lead - threshold, threshold - lead]) / sigma)
        for moved in (lead - 1, lead + 1):
            other = norm.logcdf(np.array([moved - threshold, threshold - moved]) / sigma)
            logs = ORDERS[:, None] * own + (1 - ORDERS[:, None]) * other
            exact = np.logaddexp(logs[:, 0], logs[:, 1]) / (ORDERS - 1)
            assert (exact <= limit * (1 + 1e-9) + 1e-14).all()


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


def test_wrong_use_is_refused() -> None:
    """A wrong argument is refused in one sentence that names it."""
    votes = np.array([[3, 1]])
    with pytest.raises(InvalidParameter, match="gnmax_rdp: sigma must be"):
        gnmax_rdp(votes, 0.0, ORDERS)
    with pytest.raises(InvalidParameter, match="gnmax_rdp: splits must be"):
        gnmax_rdp(votes, 1.0, ORDERS, splits=0)
    with pytest.raises(InvalidParameter, match="gnmax_rdp: orders must be"):
        gnmax_rdp(votes, 1.0, np.array([1.0]))
    with pytest.raises(InvalidData, match="votes must be"):
        gnmax_rdp(-votes, 1.0, ORDERS)
    with pytest.raises(InvalidParameter, match="threshold_rdp: threshold must be"):
        threshold_rdp(votes, 1.0, math.nan, ORDERS)
