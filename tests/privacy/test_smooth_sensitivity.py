"""Releasing a data-dependent cost with smooth sensitivity."""

import itertools
import math
from collections.abc import Iterator

import mpmath
import numpy as np
import pytest

from fl_strategies.arrays import FloatArray
from fl_strategies.exceptions import InvalidData, InvalidParameter
from fl_strategies.privacy.bounds.gaussian import gaussian_epsilon
from fl_strategies.privacy.bounds.gnmax import gnmax_rdp, log_error_probability_gaussian
from fl_strategies.privacy.bounds.renyi import rdp_to_epsilon
from fl_strategies.privacy.smooth_sensitivity import (
    CostCurve,
    ReleasedEpsilon,
    local_sensitivity,
    release_epsilon,
    smooth_release_rdp,
    smooth_sensitivity,
)
from tests.privacy.oracles import gnmax_mu


def all_votes(num_voters: int, num_classes: int) -> Iterator[tuple[int, ...]]:
    """Go through all counts of voters who may abstain."""
    counts = itertools.product(range(num_voters + 1), repeat=num_classes)
    return (row for row in counts if sum(row) <= num_voters)


def neighbours(row: tuple[int, ...], num_voters: int) -> Iterator[tuple[int, ...]]:
    """Let one voter change their mind, abstain or stop abstaining."""
    for leave, join in itertools.product(range(-1, len(row)), repeat=2):
        moved = list(row)
        if leave >= 0:
            moved[leave] -= 1
        if join >= 0:
            moved[join] += 1
        if min(moved) >= 0 and sum(moved) <= num_voters:
            yield tuple(moved)


def test_published_bounds_from_near_unanimity() -> None:
    """The values the authors of PATE publish for ten unanimous voters come out."""
    bounds = local_sensitivity(np.array([[10, 0, 0]]), 0.5, 1.5, num_voters=10)

    np.testing.assert_allclose(
        bounds[:10],
        [3.13503646e-17, 1.60178280e-08, 5.90681786e-03] + [5.99981308] * 7,
        rtol=1e-8,
    )


def test_published_bounds_from_disagreement() -> None:
    """The values the authors of PATE publish for divided voters come out."""
    votes = np.array([[1000, 500, 300, 200, 0]])
    bounds = local_sensitivity(votes, 250.0, 10.0, num_voters=2000)

    np.testing.assert_allclose(
        bounds[:2000],
        [0.0] * 298 + [2.77693450548e-7, 2.10853979548e-6] + [2.73113623988e-6] * 1700,
        rtol=1e-8,
        atol=1e-18,
    )


@pytest.mark.parametrize(("sigma", "holds"), [(20.0, False), (30.0, True)])
def test_published_conditions(sigma: float, holds: bool) -> None:
    """The conditions hold and fail where the authors of PATE say so."""
    assert CostCurve(sigma, 25.0, 10).holds() is holds


def test_order_that_fails_the_conditions_is_refused() -> None:
    """Where the proof does not apply there is no sensitivity to return."""
    with pytest.raises(InvalidParameter, match="order must be one that meets conditions"):
        local_sensitivity(np.array([[9] + [0] * 9]), 20.0, 25.0, num_voters=9)


SMALL = [(8, 3, 0.5, 1.5), (9, 2, 0.7, 2.0), (7, 3, 1.2, 1.3)]


@pytest.mark.parametrize(("num_voters", "num_classes", "sigma", "order"), SMALL)
def test_sensitivity_bounds_every_neighbour(
    num_voters: int, num_classes: int, sigma: float, order: float
) -> None:
    """By brute force: no voter, not even one who abstains, changes the cost by more."""
    curve = CostCurve(sigma, order, num_classes)
    rows = list(all_votes(num_voters, num_classes))
    chances = log_error_probability_gaussian(np.array(rows), sigma)
    costs = dict(zip(rows, curve.cost(chances), strict=True))
    bounds = {
        row: local_sensitivity(np.array([row]), sigma, order, num_voters=num_voters)
        for row in rows
    }

    for row in rows:
        for other in neighbours(row, num_voters):
            assert abs(costs[row] - costs[other]) <= bounds[row][0] + 1e-12
            # What a neighbour reaches in d steps is reached from here in d + 1.
            assert (bounds[other][:-1] <= bounds[row][1:] + 1e-12).all()


@pytest.mark.parametrize(("num_voters", "num_classes", "sigma", "order"), SMALL)
def test_smooth_sensitivity_is_smooth(
    num_voters: int, num_classes: int, sigma: float, order: float
) -> None:
    """By brute force: one voter changes it by a factor of at most exp(smoothness)."""
    smoothness = 0.3
    rows = list(all_votes(num_voters, num_classes))
    smooth = {
        row: smooth_sensitivity(
            local_sensitivity(np.array([row]), sigma, order, num_voters=num_voters), smoothness
        )
        for row in rows
    }

    for row in rows:
        for other in neighbours(row, num_voters):
            assert smooth[other] <= math.exp(smoothness) * smooth[row] * (1 + 1e-12)


def test_sensitivity_adds_up_over_queries_and_ignores_scale() -> None:
    """Queries add up; two votes a voter at twice the noise change nothing."""
    votes = np.array([[8, 1, 0], [3, 3, 2], [0, 9, 0], [8, 1, 0]])
    total = local_sensitivity(votes, 0.5, 1.5, num_voters=9)
    single = sum(local_sensitivity(row[None], 0.5, 1.5, num_voters=9) for row in votes)

    np.testing.assert_allclose(total, single, rtol=1e-12)
    np.testing.assert_allclose(
        local_sensitivity(2 * votes, 1.0, 1.5, num_voters=9, splits=2), total, rtol=1e-12
    )


def test_smooth_sensitivity_discounts_distance() -> None:
    """It is the largest bound after discounting by the distance."""
    bounds = np.array([1.0, 2.0, 10.0])

    assert smooth_sensitivity(bounds, 0.1) == pytest.approx(10 * math.exp(-0.2))
    assert smooth_sensitivity(bounds, 5.0) == pytest.approx(1.0)


def divergence_by_quadrature(order: float, ratio: float, shift: float) -> float:
    """Integrate the Renyi divergence of N(0, 1) from N(shift, ratio^2)."""
    with mpmath.workdps(20):
        power = order / 2 - (order - 1) / (2 * mpmath.mpf(ratio) ** 2)
        width = 1 / mpmath.sqrt(2 * power)
        centre = -(order - 1) * shift / ratio**2 / (2 * power)

        def integrand(x: mpmath.mpf) -> mpmath.mpf:
            own = -x * x / 2
            other = -(((x - shift) / ratio) ** 2) / 2 - mpmath.log(ratio)
            return mpmath.exp(order * own + (1 - order) * other) / mpmath.sqrt(2 * mpmath.pi)

        points = [centre + k * width for k in range(-16, 17, 4)]
        return float(mpmath.log(mpmath.quad(integrand, points)) / (order - 1))


@pytest.mark.parametrize(("order", "share"), [(2.0, 0.1), (5.0, 0.4), (20.0, 0.49)])
def test_price_is_the_worst_divergence(order: float, share: float) -> None:
    """The price equals the integral for the worst neighbours and exceeds all others."""
    smoothness, multiplier = share / order, 10.0
    price = smooth_release_rdp(order, smoothness, multiplier)
    worst = divergence_by_quadrature(
        order, math.exp(-smoothness), math.exp(-smoothness) / multiplier
    )

    assert price == pytest.approx(worst, rel=1e-8)
    for log_ratio in np.linspace(-smoothness, smoothness, 5):
        ratio = math.exp(log_ratio)
        for part in (0.0, 1.0):
            shift = part * min(1.0, ratio) / multiplier
            assert divergence_by_quadrature(order, ratio, shift) <= price * (1 + 1e-8)


def test_closed_form_of_the_authors_is_too_small() -> None:
    """The price in the authors' code lies below the divergence it should bound."""
    order, smoothness, multiplier = 20.0, 0.0245, 10.0
    printed = order * math.exp(2 * smoothness) / multiplier**2 + (
        smoothness * order - math.log(1 - 2 * order * smoothness) / 2
    ) / (order - 1)

    assert printed == pytest.approx(0.339, abs=1e-3)
    assert smooth_release_rdp(order, smoothness, multiplier) == pytest.approx(2.239, abs=1e-3)


def test_price_is_infinite_beyond_the_pole() -> None:
    """Too little smoothness control at an order means no finite price."""
    assert smooth_release_rdp(20.0, 0.03, 10.0) == math.inf
    assert smooth_release_rdp(20.0, 1e-9, 10.0) == pytest.approx(20 / 200, rel=1e-4)


VOTES = np.tile([240, 5, 2, 1, 1, 1, 0, 0, 0, 0], (100, 1))


def release(seed: int, multiplier: float = 20.0) -> ReleasedEpsilon:
    """Release the cost of a hundred near-unanimous queries of 250 voters."""
    return release_epsilon(
        VOTES,
        40.0,
        delta=1e-5,
        order=12.0,
        noise_multiplier=multiplier,
        num_voters=250,
        rng=np.random.default_rng(seed),
    )


def test_release_centres_on_the_cost() -> None:
    """Without limits in reach the noise is Gaussian around the private cost."""
    cost = gnmax_rdp(VOTES, 40.0, np.array([12.0]))[0]
    bounds = local_sensitivity(VOTES, 40.0, 12.0, num_voters=250)
    scale = 0.5 * smooth_sensitivity(bounds, 0.4 / 12)
    noises = [np.random.default_rng(seed).standard_normal() for seed in range(5)]
    limit = 100 * 12.0 / 40.0**2

    for seed, noise in enumerate(noises):
        expected = min(max(cost + scale * noise, 0.0), limit)
        assert release(seed, multiplier=0.5).labelling_rdp == pytest.approx(expected, rel=1e-9)


def test_release_includes_its_own_price() -> None:
    """Epsilon is the conversion of noisy cost and price at the one order."""
    released = release(0)
    total = np.array([released.labelling_rdp + released.release_rdp])

    assert released.release_rdp == pytest.approx(0.0933, abs=1e-4)
    assert released.epsilon == rdp_to_epsilon(np.array([12.0]), total, 1e-5)
    assert (released.order, released.delta) == (12.0, 1e-5)


def test_release_pays_for_many_agreeing_voters() -> None:
    """At 250 voters the released epsilon is usually below the exact data-independent one."""
    independent = gaussian_epsilon(gnmax_mu(40.0, 100), 1e-5)
    epsilons = [release(seed).epsilon for seed in range(20)]

    assert independent == pytest.approx(1.356, abs=1e-3)
    assert np.median(epsilons) < 0.75 * independent


def test_release_stays_within_public_limits() -> None:
    """However large the noise, the released cost is between 0 and the data-independent one."""
    costs = np.array([release(seed, multiplier=1e4).labelling_rdp for seed in range(12)])

    assert costs.min() == 0
    assert costs.max() == pytest.approx(100 * 12.0 / 40.0**2)


def test_release_depends_on_the_generator_only() -> None:
    """The same generator gives the same release, another one a different release."""
    assert release(1) == release(1)
    assert release(1) != release(2)


def test_cost_meets_the_data_independent_one_where_it_should() -> None:
    """The curve grows up to its crossover and is flat beyond."""
    curve = CostCurve(40.0, 12.0, 10)
    log_q: FloatArray = np.linspace(-60, math.log(0.9), 500)
    costs = curve.cost(log_q)

    assert (np.diff(costs) >= -1e-15).all()
    assert costs[-1] == curve.independent
    assert curve.log_q1 < curve.log_q0
    assert curve.cost(np.array([curve.log_q0 - 1e-9]))[0] <= curve.independent * (1 + 1e-6)


def test_no_queries_have_no_sensitivity() -> None:
    """Without queries there is nothing that a voter could change."""
    empty = np.zeros((0, 3), dtype=np.int64)

    assert (local_sensitivity(empty, 0.5, 1.5, num_voters=4) == 0).all()


def test_wrong_use_is_refused() -> None:
    """A wrong argument is refused in one sentence that names it."""
    votes = np.array([[8, 1, 0]])
    with pytest.raises(InvalidParameter, match="local_sensitivity: sigma must be"):
        local_sensitivity(votes, 0.0, 1.5, num_voters=9)
    with pytest.raises(InvalidParameter, match="local_sensitivity: order must be"):
        local_sensitivity(votes, 1.0, 1.0, num_voters=9)
    with pytest.raises(InvalidData, match="votes must be of 8 voters, got 9"):
        local_sensitivity(votes, 1.0, 1.5, num_voters=8)
    with pytest.raises(InvalidData, match="votes must be multiples of 2"):
        local_sensitivity(votes, 1.0, 1.5, num_voters=9, splits=2)
    with pytest.raises(InvalidParameter, match="smooth_release_rdp: order must be"):
        smooth_release_rdp(1.0, 0.1, 1.0)
    with pytest.raises(InvalidParameter, match="smooth_release_rdp: noise_multiplier must"):
        smooth_release_rdp(2.0, 0.1, 0.0)
    with pytest.raises(InvalidParameter, match="smooth_sensitivity: smoothness must be"):
        smooth_sensitivity(np.ones(3), 0.0)
    with pytest.raises(InvalidParameter, match="release_epsilon: delta must be"):
        release_epsilon(
            votes,
            1.0,
            delta=1.0,
            order=1.5,
            noise_multiplier=1.0,
            num_voters=9,
            rng=np.random.default_rng(0),
        )
