"""Exact accounting of Gaussian noise."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy.bounds.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu


def delta_by_mpmath(mu: float, epsilon: float) -> float:
    """Evaluate the two normal tails in sixty digits."""
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))


def delta_by_quadrature(mu: float, epsilon: float) -> float:
    """Integrate the hockey stick of two normal densities."""
    edge = epsilon / mu + mu / 2
    return float(
        mpmath.quad(
            lambda x: mpmath.npdf(x, mu, 1) - mpmath.exp(epsilon) * mpmath.npdf(x, 0, 1),
            [edge, edge + 2, edge + 6, edge + 20, edge + 60],
        )
    )


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 2.0, 20.0])
def test_delta_equals_high_precision_tails(mu: float, epsilon: float) -> None:
    """Delta keeps ten digits where both tails are tiny or almost cancel."""
    expected = delta_by_mpmath(mu, epsilon)

    assert float(gaussian_delta(mu, epsilon)) == pytest.approx(expected, rel=1e-9, abs=1e-290)


def test_delta_equals_quadrature() -> None:
    """The closed form is the integral of the hockey stick."""
    for mu, epsilon in [(0.5, 0.2), (1.5, 3.0)]:
        assert float(gaussian_delta(mu, epsilon)) == pytest.approx(
            delta_by_quadrature(mu, epsilon), rel=1e-8
        )


def test_delta_broadcasts() -> None:
    """Arrays of mu and epsilon give a table."""
    table = gaussian_delta(np.array([[0.5], [1.0]]), np.array([0.0, 1.0, 2.0]))

    assert table.shape == (2, 3)
    assert table[1, 1] == gaussian_delta(1.0, 1.0)


def test_ends() -> None:
    """No release is free, no noise has no privacy, infinite epsilon needs no delta."""
    assert gaussian_delta(0.0, 0.0) == 0
    assert gaussian_delta(math.inf, 1.0) == 1
    assert gaussian_delta(1.0, math.inf) == 0
    assert gaussian_epsilon(0.0, 1e-5) == 0
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert gaussian_epsilon(1e-4, 0.1) == 0
    assert gaussian_mu(math.inf, 1e-5) == math.inf


@pytest.mark.parametrize("noise_multiplier", [0.5, 2.0, 30.0])
def test_epsilon_equals_dp_accounting(noise_multiplier: float) -> None:
    """An independent library finds the same epsilon and the same noise."""
    theirs = pytest.importorskip("dp_accounting.gaussian_mechanism")
    epsilon = gaussian_epsilon(1 / noise_multiplier, 1e-6)

    assert epsilon == pytest.approx(
        theirs.get_epsilon_gaussian(noise_multiplier, 1e-6), abs=1e-7
    )
    assert 1 / gaussian_mu(epsilon, 1e-6) == pytest.approx(noise_multiplier, rel=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "sigma", "one_round"),
    [(1, 1668, 373), (2, 892, 199), (4, 484, 108), (8, 268, 60)],
)
def test_noise_of_distillation_with_local_privacy(
    epsilon: float, sigma: float, one_round: float
) -> None:
    """Noise for 100 000 softmax vectors, and for one round of 5000, is as tabulated."""
    mu = gaussian_mu(epsilon, 1e-5)

    assert round(math.sqrt(2 * 100_000) / mu) == sigma
    assert round(math.sqrt(2 * 5000) / mu) == one_round


@pytest.mark.parametrize(
    ("sigma", "epsilon"), [(1e4, 0.141685), (1e5, 0.011030), (1e6, 0.000723), (1e7, 0.000019)]
)
def test_tiny_losses_keep_their_digits(sigma: float, epsilon: float) -> None:
    """Very much noise still gives all six digits of epsilon."""
    assert gaussian_epsilon(math.sqrt(2e5) / sigma, 1e-5) == pytest.approx(epsilon, abs=6e-7)


@settings(deadline=None, max_examples=60)
@given(mu=st.floats(1e-3, 20.0), delta=st.floats(1e-12, 0.4))
def test_epsilon_is_monotone_and_inverted_by_calibration(mu: float, delta: float) -> None:
    """More mu or less delta cost more, and calibration finds the noise again."""
    epsilon = gaussian_epsilon(mu, delta)

    assert gaussian_epsilon(1.1 * mu, delta) >= epsilon
    assert gaussian_epsilon(mu, delta / 2) >= epsilon
    if epsilon > 1e-6:
        assert float(gaussian_delta(mu, epsilon)) == pytest.approx(delta, rel=1e-6)
        assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)
    else:
        assert gaussian_mu(epsilon, delta) >= mu * (1 - 1e-6)


def test_wrong_use_is_refused() -> None:
    """A wrong argument is refused in one sentence that names it."""
    with pytest.raises(InvalidParameter, match="gaussian_epsilon: mu must be at least 0"):
        gaussian_epsilon(-1.0, 1e-5)
    with pytest.raises(InvalidParameter, match="gaussian_epsilon: delta must be"):
        gaussian_epsilon(1.0, 0.0)
    with pytest.raises(InvalidParameter, match="gaussian_delta: epsilon must be"):
        gaussian_delta(1.0, -1.0)
    with pytest.raises(InvalidParameter, match="gaussian_mu: epsilon must be"):
        gaussian_mu(math.nan, 1e-5)
