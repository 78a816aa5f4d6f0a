"""Numbers known from elsewhere: two-route reference values and published tables."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from fl_strategies.privacy.accountant import Loss
from fl_strategies.privacy.bounds.distributions import dpsgd_epsilon, two_class_laplace_epsilon
from fl_strategies.privacy.bounds.moments import (
    data_dependent_epsilon,
    gnmax_rdp,
    log_error_probability,
    moments_epsilon,
)
from fl_strategies.privacy.bounds.theorems import (
    bounded_range_optimal,
    default_orders,
    gaussian_epsilon,
    gaussian_mu,
    nfdp_theorem,
    nfdp_tight,
    pure_optimal,
    pure_optimal_delta,
    rdp_of_pure,
    rdp_to_epsilon,
    zcdp_to_epsilon,
)
from tests.privacy.oracles import (
    gaussian_pld_epsilon,
    laplace_pld_epsilon,
    textbook_zcdp_epsilon,
)

DELTA = 1e-5
WHOLE = np.arange(2, 401)
SIX_DIGITS = 6e-7


def moments(gamma: float, queries: int) -> Callable[[], float]:
    return lambda: moments_epsilon(gamma, 1, queries, DELTA, max_order=8, with_pure=False)


def kov(epsilon0: float, count: int) -> Callable[[], float]:
    return lambda: pure_optimal(epsilon0, count, DELTA)


def ranged(eta: float, count: int) -> Callable[[], float]:
    return lambda: bounded_range_optimal(eta, count, DELTA)


def gaussian(mu: float) -> Callable[[], float]:
    return lambda: gaussian_epsilon(mu, DELTA)


def laplace_votes(row: list[int], gamma: float, queries: int) -> Callable[[], float]:
    votes = np.tile(row, (queries, 1))
    return lambda: data_dependent_epsilon(
        votes, gamma, delta=DELTA, orders=WHOLE - 1, bound="paper"
    )


def gaussian_votes(row: list[int], sigma: float, queries: int) -> Callable[[], float]:
    votes = np.tile(row, (queries, 1))
    return lambda: rdp_to_epsilon(WHOLE, gnmax_rdp(votes, sigma, WHOLE), DELTA)


def log_q(row: list[int], gamma: float) -> float:
    return float(log_error_probability(np.array([row]), gamma)[0])


def tight_pure() -> float:
    return rdp_to_epsilon(default_orders(), 40 * rdp_of_pure(0.08, default_orders()), DELTA)


REFERENCE = {
    "A1": (moments(0.04, 20), 2.015116),
    "A2": (moments(0.04, 40), 2.591116),
    "A3": (moments(0.04, 81), 3.718304),
    "A5": (moments(0.05, 74), 4.508821),
    "A6": (moments(0.05, 297), 9.777642),
    "A8": (moments(0.1, 74), 9.757642),
    "B1": (kov(0.08, 20), 1.269948),
    "B2": (kov(0.08, 40), 1.932272),
    "B3": (kov(0.08, 81), 2.941853),
    "B5": (kov(0.2, 74), 8.004993),
    "B7": (kov(1.0, 50), 45.676143),
    "B8": (lambda: pure_optimal_delta(0.08, 40, 1.28), 0.001412),
    "C1": (tight_pure, 2.083930),
    "D1": (ranged(0.08, 20), 0.637843),
    "D2": (ranged(0.08, 40), 0.934913),
    "D4": (ranged(0.12, 74), 2.058773),
    "D5": (ranged(0.2, 74), 3.664191),
    "D7": (ranged(1.0, 50), 20.156112),
    "D8": (lambda: zcdp_to_epsilon(40 * Loss(spread=0.08).rho, DELTA), 1.025440),
    "D9": (lambda: textbook_zcdp_epsilon(0.032, DELTA), 1.245942),
    "E1": (gaussian(0.294510), 1.109007),
    "E3": (gaussian(1.0), 4.377178),
    "E4": (gaussian(1.666031), 8.000002),
    "E5": (gaussian(math.sqrt(2e5) / 1e4), 0.141685),
    "E6": (lambda: math.sqrt(2 * 100_000) / gaussian_mu(8.0, DELTA), 268.430602),
    "F1": (laplace_votes([50, 0], 0.04, 40), 1.722315),
    "F3": (laplace_votes([30, 20], 0.1, 74), 9.757642),
    "F4": (laplace_votes([10] + [0] * 9, 0.5, 50), 25.409792),
    "F6": (laplace_votes([25, 0], 0.05, 297), 9.777642),
    "F7": (lambda: log_q([40, 10], 0.1), -2.776856),
    "F8": (lambda: math.exp(log_q([40, 10], 0.1)), 0.062234),
    "F9-bound": (lambda: math.exp(log_q([6, 3, 1], 0.5)), 0.287585),
    "G1": (gaussian_votes([240, 5, 2, 1, 1, 1, 0, 0, 0, 0], 40.0, 100), 0.261690),
    "I1d": (lambda: nfdp_tight(2880, 18).delta, 0.006232),
    "I2d": (lambda: nfdp_tight(2880, 60).delta, 0.020621),
    "I3d": (lambda: nfdp_tight(2880, 300).delta, 0.098941),
    "I4d": (lambda: nfdp_tight(2880, 2880).delta, 0.632184),
    "I6d": (lambda: nfdp_tight(300, 60).delta, 0.181543),
    "I8d": (lambda: nfdp_tight(300, 300).delta, 0.632735),
    "I9": (lambda: nfdp_theorem(2880, 300, replacement=False).epsilon, 0.109961),
}

# The same, by dp-accounting's grid of losses.
REFERENCE_PLD = {
    "E5-pld": (lambda: gaussian_pld_epsilon(1e4 / math.sqrt(2), 100_000, DELTA), 0.141685),
    "H1": (lambda: two_class_laplace_epsilon(0.04, 50, 40, DELTA), 1.007666),
    "J1": (lambda: laplace_pld_epsilon(0.1, 2000, DELTA), 27.685883),
    "K1": (lambda: dpsgd_epsilon(2880, 64, 900, 1.0, DELTA), 4.151097),
    "K2": (lambda: dpsgd_epsilon(2880, 64, 1800, 1.0, DELTA), 5.979993),
    "K5": (lambda: dpsgd_epsilon(300, 32, 400, 2.0, 1e-4), 4.572031),
}


@pytest.mark.parametrize(("compute", "value"), REFERENCE.values(), ids=REFERENCE.keys())
def test_reference_value(compute: Callable[[], float], value: float) -> None:
    """A value known from two independent routes holds to all six digits."""
    assert compute() == pytest.approx(value, abs=SIX_DIGITS)


@pytest.mark.parametrize(("compute", "value"), REFERENCE_PLD.values(), ids=REFERENCE_PLD.keys())
def test_reference_value_by_loss_distribution(
    compute: Callable[[], float], value: float
) -> None:
    """A value known from two independent routes holds on a grid of losses."""
    pytest.importorskip("dp_accounting")

    assert compute() == pytest.approx(value, abs=1.5e-6)


# Row, gamma, queries, bound with moments up to 8, with moments up to 200 and plain summation,
# plain summation alone. What the papers print is one of the first two, rounded.
PUBLISHED = [
    ("adult-L1-0.1%", 0.04, 8, 1.670, 0.640, 0.64),
    ("adult-L1-0.5%", 0.04, 40, 2.591, 2.559, 3.20),
    ("adult-L1-1%", 0.04, 81, 3.718, 3.718, 6.48),
    ("adult-L1-0.1%-0.06", 0.06, 8, 1.958, 0.960, 0.96),
    ("cod-L1-0.1%", 0.04, 14, 1.842, 1.120, 1.12),
    ("cod-L1-0.5%-0.06", 0.06, 74, 5.499, 5.499, 8.88),
    ("cod-L1-0.5%-0.1", 0.1, 74, 9.758, 9.758, 14.80),
    ("cod-L1-0.1%-0.1", 0.1, 14, 3.879, 2.800, 2.80),
    ("cod-L2-0.5%", 0.05, 74, 4.509, 4.509, 7.40),
    ("cod-L2-2%", 0.05, 297, 9.778, 9.778, 29.70),
    ("cod-L2-2%-0.04", 0.04, 297, 7.630, 7.630, 23.76),
    ("cod-L2-2%-0.06", 0.06, 297, 12.172, 12.172, 35.64),
    ("cod-L2-1.5%", 0.05, 223, 8.298, 8.298, 22.30),
    ("cod-L2-1.5%-0.04", 0.04, 223, 6.446, 6.446, 17.84),
]


@pytest.mark.parametrize(
    ("gamma", "queries", "short", "long", "plain"),
    [row[1:] for row in PUBLISHED],
    ids=[row[0] for row in PUBLISHED],
)
def test_data_independent_columns(
    gamma: float, queries: int, short: float, long: float, plain: float
) -> None:
    """Both variants of the papers' accountant give the recomputed columns."""
    of_eight = moments_epsilon(gamma, 1, queries, DELTA, max_order=8, with_pure=False)

    assert of_eight == pytest.approx(short, abs=5.1e-4)
    assert moments_epsilon(gamma, 1, queries, DELTA, max_order=200) == pytest.approx(
        long, abs=5.1e-4
    )
    assert 2 * gamma * queries == pytest.approx(plain)


def test_printed_rows_that_were_made_differently() -> None:
    """4.73, printed for gamma 0.04, is the bound for gamma 0.05; 2.56 needs nine moments."""
    assert moments_epsilon(0.04, 1, 81, DELTA) < 4
    assert moments_epsilon(0.05, 1, 81, DELTA) == pytest.approx(4.733, abs=1e-3)
    assert f"{moments_epsilon(0.04, 1, 40, DELTA, max_order=9):.2f}" == "2.56"


# Row, epsilon0, queries, optimal composition, bounded range, zCDP, add or remove.
SAME_MECHANISM = [
    ("adult-Q40", 0.08, 40, 1.932, 0.935, 1.025, 0.439),
    ("adult-Q81", 0.08, 81, 2.942, 1.381, 1.508, 0.646),
    ("cod-Q74-0.12", 0.12, 74, 4.440, 2.059, 2.243, 0.957),
    ("cod-Q74-0.2", 0.2, 74, 8.005, 3.664, 3.981, 1.681),
    ("cod-Q74-0.1", 0.1, 74, 3.586, 1.681, 1.834, 0.784),
    ("cod-Q297-0.1", 0.1, 297, 8.268, 3.683, 3.988, 1.687),
]


@pytest.mark.parametrize(
    ("epsilon0", "queries", "optimal", "bounded", "zcdp", "unbounded"),
    [row[1:] for row in SAME_MECHANISM],
    ids=[row[0] for row in SAME_MECHANISM],
)
def test_tighter_accounting_of_the_same_noise(
    epsilon0: float, queries: int, optimal: float, bounded: float, zcdp: float, unbounded: float
) -> None:
    """Each tighter method gives its column of the comparison table."""
    rho = queries * Loss(spread=epsilon0).rho

    assert pure_optimal(epsilon0, queries, DELTA) == pytest.approx(optimal, abs=5.1e-4)
    assert bounded_range_optimal(epsilon0, queries, DELTA) == pytest.approx(bounded, abs=5.1e-4)
    assert zcdp_to_epsilon(rho, DELTA) == pytest.approx(zcdp, abs=5.1e-4)
    assert bounded_range_optimal(epsilon0 / 2, queries, DELTA) == pytest.approx(
        unbounded, abs=5.1e-4
    )


# Records, samples, natural and decimal logarithm, delta; 18 is printed as 16.
NOISE_FREE = [
    (2880, 18, 0.006249, 0.0027, 0.0062),
    (2880, 60, 0.020830, 0.0090, 0.0206),
    (2880, 300, 0.104149, 0.0452, 0.0989),
    (2880, 2880, 0.999826, 0.4342, 0.6321),
    (300, 18, 0.059900, 0.0260, 0.0583),
    (300, 60, 0.199667, 0.0867, 0.1815),
    (300, 120, 0.399335, 0.1734, 0.3301),
    (300, 300, 0.998337, 0.4336, 0.6327),
]


@pytest.mark.parametrize(("records", "samples", "natural", "printed", "delta"), NOISE_FREE)
def test_noise_free_table(
    records: int, samples: int, natural: float, printed: float, delta: float
) -> None:
    """The published epsilons are ours in decimal logarithms; the deltas agree."""
    stated = nfdp_theorem(records, samples)

    assert stated.epsilon == pytest.approx(natural, abs=SIX_DIGITS)
    assert stated.epsilon / math.log(10) == pytest.approx(printed, abs=1e-4)
    assert stated.delta == pytest.approx(delta, abs=1e-4)
