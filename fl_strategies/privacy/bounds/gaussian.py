"""Gaussian noise, Renyi curves, and privacy loss distributions.

Composed Gaussian releases are one Gaussian release: everything depends on
``mu = sensitivity * sqrt(count) / sigma`` alone, also for vectors and for releases chosen
adaptively.

A Renyi curve gives a bound on the Renyi divergence at every order. Curves of mechanisms that
run one after the other, each chosen with knowledge of the earlier answers, add up.

Privacy loss distributions come from Google's dp-accounting where that is installed. Only the
distribution objects are used: the accountant class that comes with them ignores how often
randomised response was repeated (0.080 instead of 1.932 for forty times 0.08);
`pure_optimal` composes it exactly.

References
----------
Balle, Wang (2018), Improving the Gaussian mechanism for differential privacy.
Dong, Roth, Su (2019), Gaussian differential privacy.
Mironov (2017), Renyi differential privacy.
Bun, Steinke (2016), Concentrated differential privacy.
Canonne, Kamath, Steinke (2020), The discrete Gaussian for differential privacy, Prop. 12.
"""

import importlib
import math
from functools import cache, lru_cache, reduce
from typing import Any, TypeAlias

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import MissingExtra, require
from fl_strategies.privacy._numeric import (
    check_count,
    check_delta,
    check_loss,
    check_positive,
    smallest_epsilon,
)
from fl_strategies.privacy.bounds.composition import LossLaw, compose_losses


def gaussian_delta(mu: float | Array, epsilon: float | Array) -> FloatArray:
    """Return delta of a Gaussian release at `epsilon`; the arguments broadcast.

    Examples
    --------
    >>> float(gaussian_delta(1.0, 1.0)).__round__(6)
    0.126937
    """
    mu, epsilon = np.broadcast_arrays(np.asarray(mu, float), np.asarray(epsilon, float))
    check_loss("gaussian_delta", "mu", float(mu.min()))
    check_loss("gaussian_delta", "epsilon", float(epsilon.min()))
    regular = (mu > 0) & np.isfinite(mu) & np.isfinite(epsilon)
    safe_mu, safe_epsilon = np.where(regular, mu, 1.0), np.where(regular, epsilon, 0.0)
    above = scipy.special.log_ndtr(safe_mu / 2 - safe_epsilon / safe_mu)
    below = scipy.special.log_ndtr(-safe_mu / 2 - safe_epsilon / safe_mu)
    # Both terms may be tiny: their ratio is taken before the exponential.
    delta = np.exp(above) * -np.expm1(np.minimum(safe_epsilon + below - above, 0.0))
    delta = np.where(np.isinf(mu) & np.isfinite(epsilon), 1.0, np.where(regular, delta, 0.0))
    return delta[()]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of a Gaussian release at `delta`.

    Examples
    --------
    >>> round(gaussian_epsilon(1.0, 1e-5), 6)
    4.377178
    """
    check_loss("gaussian_epsilon", "mu", mu)
    check_delta("gaussian_epsilon", delta)
    if mu == 0 or math.isinf(mu):
        return mu
    upper = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))
    return smallest_epsilon(lambda epsilon: float(gaussian_delta(mu, epsilon)), delta, upper)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu, that is the least noise, that keeps (epsilon, delta)."""
    check_loss("gaussian_mu", "epsilon", epsilon)
    check_delta("gaussian_mu", delta)
    if math.isinf(epsilon):
        return math.inf

    def excess(mu: float) -> float:
        return math.log(max(float(gaussian_delta(mu, epsilon)), 1e-300)) - math.log(delta)

    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    lower = upper / 2
    while excess(lower) > 0:
        lower /= 2
    return float(scipy.optimize.brentq(excess, lower, upper, xtol=1e-300, rtol=1e-14))


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


# Width of the grid of losses. The rounding is always upwards, to second order in it.
INTERVAL = 1e-4
_POINTS_PER_EVENT = 200

Runs: TypeAlias = tuple[tuple[float, float, int], ...]
"""Noise multiplier, chance of a record, and steps, of each kind."""
Laws: TypeAlias = tuple[tuple[LossLaw, int], ...]


def _distributions(owner: str) -> Any:
    try:
        return importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    except ImportError as error:
        raise MissingExtra(owner, "dp-accounting", "accounting") from error


@lru_cache(maxsize=16)
def sgd_distribution(runs: Runs) -> Any:
    """Compose runs of DP-SGD, each a noise multiplier, the chance of a record, and steps."""
    distributions = _distributions("DPSGDEvent")
    composed = [
        distributions.from_gaussian_mechanism(
            noise, sampling_prob=chance, value_discretization_interval=INTERVAL
        ).self_compose(steps)
        for noise, chance, steps in runs
    ]
    return reduce(lambda total, run: total.compose(run), composed)


@lru_cache(maxsize=16)
def joined_distribution(runs: Runs, laws: Laws) -> Any:
    """Return the law of DP-SGD and of other losses, on the same grid, together.

    The other losses have the same law whichever neighbour comes first. None if theirs would
    take too much memory.
    """
    noise = compose_losses(laws, INTERVAL)
    if noise is None:
        return None
    distributions = _distributions("DPSGDEvent")
    pmf = distributions.pld_pmf.DensePLDPmf(
        INTERVAL, noise.first, noise.masses, noise.beyond, pessimistic_estimate=True
    )
    return sgd_distribution(runs).compose(distributions.PrivacyLossDistribution(pmf))


@lru_cache(maxsize=1024)  # a search in Python, and every reply of a run asks again
def sgd_epsilon(runs: Runs, delta: float, laws: Laws = ()) -> float:
    """Return epsilon of DP-SGD, and of the other losses where there are any."""
    both = joined_distribution(runs, laws) if laws else sgd_distribution(runs)
    return float(both.get_epsilon_for_delta(delta))


def dpsgd_epsilon(
    records: int, batch: int, steps: int, noise_multiplier: float, delta: float
) -> float:
    """Return epsilon of DP-SGD with Poisson-sampled batches, one record blanked.

    Parameters
    ----------
    records, batch : int
        Every record is in a batch with chance ``batch / records``, independently.
    steps : int
        Noisy gradient steps over the whole life of the data.
    noise_multiplier : float
        Deviation of the noise divided by the clipping norm.
    delta : float
    """
    owner = "dpsgd_epsilon"
    check_count(owner, "records", records, least=1)
    check_count(owner, "batch", batch, least=1)
    require(batch <= records, owner, "batch", f"at most {records}, the records", batch)
    check_count(owner, "steps", steps)
    check_positive(owner, "noise_multiplier", noise_multiplier)
    check_delta(owner, delta)
    # Asked for here, so that the error of a missing package names this function.
    _distributions(owner)
    if steps == 0:
        return 0.0
    return sgd_epsilon(((noise_multiplier, batch / records, steps),), delta)


def _chance_of_first(gap: FloatArray) -> FloatArray:
    """Return how likely noisy max answers the first of two classes at a scaled lead."""
    wrong = (2 + np.abs(gap)) / 4 * np.exp(-np.abs(gap))
    return np.where(gap >= 0, 1 - wrong, wrong)


def _worst_deltas(epsilons: FloatArray, step: float, num_voters: int) -> FloatArray:
    """Return the largest delta of one two-class query over all votes of the voters."""
    leads = np.arange(-num_voters, num_voters - 1, dtype=float)
    # Exchanging the classes turns a step back into a step forward: these cover both.
    first, second = _chance_of_first(leads * step), _chance_of_first((leads + 2) * step)
    factors = np.exp(epsilons)[:, None]
    one = np.maximum(first - factors * second, 0.0)
    other = np.maximum((1 - first) - factors * (1 - second), 0.0)
    deltas: FloatArray = (one + other).max(axis=1)
    return deltas


def two_class_laplace_epsilon(
    gamma: float, num_voters: int, queries: int, delta: float, *, splits: int = 1
) -> float:
    """Return epsilon of two-class noisy max with Laplace noise, for queries chosen freely.

    Holds for adaptive queries, where `bounded_range_optimal` does not, and uses that the
    lead is a whole number between -num_voters and num_voters.

    Parameters
    ----------
    gamma : float
        Inverse scale of the noise on each count.
    num_voters : int
        Voters, each with `splits` votes or none; one of them is replaced.
    queries : int
    delta : float
    splits : int
    """
    owner = "two_class_laplace_epsilon"
    check_positive(owner, "gamma", gamma)
    check_count(owner, "num_voters", num_voters, least=1)
    check_count(owner, "queries", queries)
    check_count(owner, "splits", splits, least=1)
    check_delta(owner, delta)
    distributions = _distributions(owner)
    if queries == 0:
        return 0.0
    step = gamma * splits
    interval = min(INTERVAL, 2 * step / _POINTS_PER_EVENT)
    reach = math.ceil(2 * step / interval)
    losses = np.arange(-reach, reach + 1)
    pmf = distributions.pld_pmf.create_pmf_pessimistic_connect_dots(
        interval, losses, _worst_deltas(losses * interval, step, num_voters)
    )
    composed = distributions.PrivacyLossDistribution(pmf).self_compose(queries)
    return float(composed.get_epsilon_for_delta(delta))
