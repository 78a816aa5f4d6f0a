"""Renyi curves, zero-concentrated privacy and their conversions."""

import math
import warnings
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy.bounds import renyi
from fl_strategies.privacy.bounds.gaussian import gaussian_delta, gaussian_epsilon
from fl_strategies.privacy.bounds.losses import Loss
from fl_strategies.privacy.bounds.renyi import (
    default_orders,
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


def test_default_orders_are_increasing_and_protected() -> None:
    """The shared grid covers 1.001 to a million and cannot be changed by accident."""
    assert (np.diff(ORDERS) > 0).all()
    assert ORDERS[0] == pytest.approx(1.001)
    assert ORDERS[-1] == pytest.approx(1e6)
    with pytest.raises(ValueError, match="read-only"):
        ORDERS[0] = 2.0


def test_gaussian_curve_equals_opacus() -> None:
    """Composed Gaussian noise has the same curve in Opacus."""
    orders = [1.5, 2.0, 8.0, 33.0]
    theirs = opacus_rdp().compute_rdp(q=1.0, noise_multiplier=3.0, steps=25, orders=orders)

    np.testing.assert_allclose(
        25 * rdp_of_zcdp(Loss(mu=1 / 3).rho, np.array(orders)), theirs, rtol=1e-12
    )


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("rho", [1e-3, 0.05, 2.0])
def test_conversion_equals_opacus(rho: float, delta: float) -> None:
    """The same curve on the same orders gives the same epsilon in Opacus."""
    orders = np.linspace(1.1, 60, 300)
    accountant = opacus_rdp()
    with warnings.catch_warnings():
        # It complains that the best order is the last one; we compare, not optimise.
        warnings.simplefilter("ignore")
        theirs, _ = accountant.get_privacy_spent(orders=orders, rdp=rho * orders, delta=delta)

    assert rdp_to_epsilon(orders, rho * orders, delta) == pytest.approx(
        max(theirs, 0.0), rel=1e-12, abs=1e-12
    )


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("rho", [1e-3, 0.05, 2.0])
def test_conversion_equals_dp_accounting(rho: float, delta: float) -> None:
    """The same curve on the same orders gives the same epsilon in dp-accounting."""
    theirs = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    orders = np.linspace(1.1, 60, 300)
    epsilon, _ = theirs.compute_epsilon(orders, rho * orders, delta)

    assert rdp_to_epsilon(orders, rho * orders, delta) == pytest.approx(epsilon, rel=1e-12)


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


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
@pytest.mark.parametrize("rho", [1e-8, 1e-3, 0.032, 1.0, 200.0])
def test_zcdp_optimum_over_real_orders(rho: float, delta: float) -> None:
    """No grid of orders beats the continuous optimum, which is never above the textbook."""
    epsilon = zcdp_to_epsilon(rho, delta)
    grid = rdp_to_epsilon(ORDERS, rdp_of_zcdp(rho, ORDERS), delta)

    assert epsilon <= grid + 1e-9
    assert grid <= epsilon * 1.01 + 1e-5
    assert epsilon <= textbook_zcdp_epsilon(rho, delta)


def test_zcdp_ends() -> None:
    """No loss is free and an infinite one stays infinite."""
    assert zcdp_to_epsilon(0.0, 1e-5) == 0
    assert zcdp_to_epsilon(math.inf, 1e-5) == math.inf


@settings(deadline=None, max_examples=40)
@given(rho=st.floats(1e-7, 50), delta=st.floats(1e-12, 0.5))
def test_zcdp_is_monotone(rho: float, delta: float) -> None:
    """A larger loss or a smaller delta never lower epsilon."""
    epsilon = zcdp_to_epsilon(rho, delta)
    slack = 1e-8 * (1 + epsilon)

    assert zcdp_to_epsilon(1.2 * rho, delta) >= epsilon - slack
    assert zcdp_to_epsilon(rho, delta / 2) >= epsilon - slack


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rdp_of_pure", (-0.1, np.array([2.0]))),
        ("rdp_of_pure", (0.1, np.array([1.0]))),
        ("rdp_of_zcdp", (-0.1, np.array([2.0]))),
        ("rdp_of_zcdp", (0.1, np.array([0.5]))),
        ("rdp_to_epsilon", (np.array([2.0]), np.array([1.0]), 0.0)),
        ("rdp_to_epsilon", (np.array([]), np.array([]), 0.1)),
        ("rdp_to_epsilon", (np.array([2.0]), np.array([1.0, 2.0]), 0.1)),
        ("rdp_to_epsilon", (np.array([2.0]), np.array([np.nan]), 0.1)),
        ("rdp_to_epsilon", (np.array([1.0]), np.array([1.0]), 0.1)),
        ("rdp_to_delta", (np.array([2.0]), np.array([-1.0]), 0.1)),
        ("rdp_to_delta", (np.array([2.0]), np.array([1.0]), -0.1)),
        ("zcdp_to_epsilon", (-1.0, 0.1)),
        ("zcdp_to_epsilon", (1.0, 2.0)),
        ("zcdp_to_epsilon", (1.0, 0.0)),
    ],
)
def test_wrong_use_is_refused(name: str, arguments: tuple[Any, ...]) -> None:
    """A wrong argument is refused in one sentence that names the function."""
    with pytest.raises(InvalidParameter, match="must be"):
        getattr(renyi, name)(*arguments)
