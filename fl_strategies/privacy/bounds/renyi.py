"""Renyi and zero-concentrated differential privacy: curves, and what they promise.

A curve gives a bound on the Renyi divergence at every order. Curves of mechanisms that
run one after the other, each chosen with knowledge of the earlier answers, add up.

References
----------
Mironov (2017), Renyi differential privacy.
Bun, Steinke (2016), Concentrated differential privacy.
Canonne, Kamath, Steinke (2020), The discrete Gaussian for differential privacy, Prop. 12.
"""

import math
from functools import cache

import numpy as np
import scipy

from fl_strategies._util.arrays import Array, FloatArray
from fl_strategies.errors import require
from fl_strategies.privacy._numeric import check_delta, check_loss

# sinh overflows near 710; logarithms of sums take over long before that.
_LARGE_EXPONENT = 30.0
_LARGEST_ORDER = 1e8


@cache
def default_orders() -> FloatArray:
    """Return the orders at which curves are kept, from 1.001 to 1e6; read-only.

    Dense up to 64, where the optimum of realistic settings lies; the sparse upper part
    serves very small losses.
    """
    orders: FloatArray = np.concatenate(
        [
            1 + np.logspace(-3, 0, 61)[:-1],
            np.linspace(2, 64, 1241),
            np.logspace(np.log10(64), 6, 201)[1:],
        ]
    )
    orders.flags.writeable = False
    return orders


def _check_orders(owner: str, orders: Array) -> None:
    least = np.min(orders, initial=np.inf)
    require(bool(least > 1), owner, "orders", "all greater than 1", float(least))


def rdp_of_pure(epsilon0: float | Array, orders: Array) -> FloatArray:
    """Return the tight curve of a mechanism that is epsilon0-differentially private.

    It is the curve of randomised response, the worst such mechanism, and lies below both
    usual bounds, ``epsilon0**2 * order / 2`` and ``epsilon0``.

    Parameters
    ----------
    epsilon0, orders : arrays that broadcast together

    Examples
    --------
    >>> float(rdp_of_pure(1.0, np.array([2.0]))[0]).__round__(6)
    0.735326
    """
    orders = np.asarray(orders, dtype=float)
    _check_orders("rdp_of_pure", orders)
    epsilon0 = np.asarray(epsilon0, dtype=float)
    require(bool((epsilon0 >= 0).all()), "rdp_of_pure", "epsilon0", "at least 0", epsilon0)
    orders, epsilon0 = np.broadcast_arrays(orders, epsilon0)
    small = np.where(orders * epsilon0 < _LARGE_EXPONENT, epsilon0, 0.0)
    large = np.where(np.isinf(epsilon0), 0.0, epsilon0)
    # log(cosh((a - 1/2) e) / cosh(e / 2)); the first form does not cancel when e is tiny.
    growth = np.log1p(
        2 * np.sinh(orders * small / 2) * np.sinh((orders - 1) * small / 2) / np.cosh(small / 2)
    )
    asymptote = np.logaddexp(orders * large, (1 - orders) * large) - np.logaddexp(0.0, large)
    curve = np.where(orders * epsilon0 < _LARGE_EXPONENT, growth, asymptote) / (orders - 1)
    return np.where(np.isinf(epsilon0), np.inf, curve)


def rdp_of_zcdp(rho: float, orders: Array) -> FloatArray:
    """Return the curve ``rho * order`` of a rho-zCDP mechanism, shape of `orders`."""
    check_loss("rdp_of_zcdp", "rho", rho)
    _check_orders("rdp_of_zcdp", orders)
    return np.asarray(rho * np.asarray(orders, dtype=float))


def _check_curve(owner: str, orders: Array, rdp: Array) -> tuple[FloatArray, FloatArray]:
    orders, rdp = np.asarray(orders, dtype=float), np.asarray(rdp, dtype=float)
    require(orders.size > 0, owner, "orders", "at least one number", orders.size)
    require(rdp.shape == orders.shape, owner, "rdp", "of the shape of orders", rdp.shape)
    require(bool((rdp >= 0).all()), owner, "rdp", "at least 0 at every order", rdp.min())
    _check_orders(owner, orders)
    return orders, rdp


def _distance_bound(rdp: FloatArray) -> float:
    # Every order bounds the Kullback-Leibler divergence, and that the total variation
    # distance, which is delta at epsilon 0 (Pinsker; Bretagnolle and Huber).
    divergence = float(rdp.min())
    return math.sqrt(min(divergence / 2, -math.expm1(-divergence)))


def rdp_to_epsilon(orders: Array, rdp: Array, delta: float) -> float:
    """Return the smallest epsilon that a curve proves at `delta`.

    Parameters
    ----------
    orders, rdp : (num_orders,)
    delta : float

    Examples
    --------
    >>> orders = default_orders()
    >>> round(rdp_to_epsilon(orders, 40 * rdp_of_pure(0.08, orders), 1e-5), 5)
    2.08393
    """
    check_delta("rdp_to_epsilon", delta)
    orders, rdp = _check_curve("rdp_to_epsilon", orders, rdp)
    if _distance_bound(rdp) <= delta:
        return 0.0
    epsilons = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(epsilons.min()))


def rdp_to_delta(orders: Array, rdp: Array, epsilon: float) -> float:
    """Return the smallest delta that a curve proves at `epsilon`, at most 1."""
    check_loss("rdp_to_delta", "epsilon", epsilon)
    orders, rdp = _check_curve("rdp_to_delta", orders, rdp)
    if math.isinf(epsilon):
        return 0.0
    logs = (orders - 1) * (rdp + np.log1p(-1 / orders) - epsilon) - np.log(orders)
    return min(1.0, math.exp(min(0.0, float(logs.min()))), _distance_bound(rdp))


def zcdp_to_epsilon(rho: float, delta: float) -> float:
    """Return the smallest epsilon that rho-zCDP proves at `delta`, over all real orders.

    Examples
    --------
    >>> round(zcdp_to_epsilon(0.032, 1e-5), 5)
    1.02544
    """
    check_loss("zcdp_to_epsilon", "rho", rho)
    check_delta("zcdp_to_epsilon", delta)
    if rho == 0 or math.isinf(rho):
        return rho

    def epsilon_at(log_order: float) -> float:
        orders = np.array([1 + math.exp(log_order)])
        return rdp_to_epsilon(orders, rho * orders, delta)

    best = scipy.optimize.minimize_scalar(
        epsilon_at,
        bounds=(-12.0, math.log(_LARGEST_ORDER)),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return float(best.fun)
