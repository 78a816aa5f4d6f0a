"""Composition theorems: Gaussian noise, Renyi curves, pure privacy, bounded range, samples.

Gaussian noise
    Composed Gaussian releases are one Gaussian release: everything depends on
    ``mu = sensitivity * sqrt(count) / sigma`` alone, also for vectors and for releases chosen
    adaptively.
Renyi curves
    A bound on the Renyi divergence at every order. Curves of mechanisms that run one after
    the other, each chosen with knowledge of the earlier answers, add up.
Pure privacy
    Of all epsilon0-differentially private mechanisms, randomised response is the worst, so the
    composition of ``count`` of them is exactly that of ``count`` coin flips, adaptive or not:
    with j "flips" the privacy loss is ``(count - 2 j) epsilon0``, and j is binomial.
Bounded range
    A mechanism has range eta when, between neighbouring inputs, the logarithms of the
    probability ratios of any two outputs differ by at most eta. The exponential mechanism
    (noisy max with Gumbel noise) has it for any number of classes; noisy max with Laplace
    noise has it for two classes only. Every such mechanism is eta-differentially private,
    but composes like one of about half that strength.
Samples used in the clear (noise-free differential privacy)
    A record that is not drawn leaves no trace; one that is drawn is used in the clear. The
    exact statement is therefore (0, delta), where delta is the chance to be drawn, for records
    that replace one another and a public number of records. The theorems of FedMD-NFDP add a
    positive epsilon that buys nothing: delta does not fall as epsilon grows. Both hold only if
    nothing else touches the data, the sample stays fixed and its draw stays secret.

References
----------
Balle, Wang (2018), Improving the Gaussian mechanism for differential privacy.
Dong, Roth, Su (2019), Gaussian differential privacy.
Mironov (2017), Renyi differential privacy.
Bun, Steinke (2016), Concentrated differential privacy.
Canonne, Kamath, Steinke (2020), The discrete Gaussian for differential privacy, Prop. 12.
Kairouz, Oh, Viswanath (2015), The composition theorem for differential privacy, Thm 3.3.
Murtagh, Vadhan (2016), The complexity of computing the optimal composition.
Durfee, Rogers (2019), Practical differentially private top-k selection.
Dong, Durfee, Rogers (2020), Optimal differential privacy composition for exponential
mechanisms and the cost of adaptivity, Theorem 3.
Sun, Lyu (2021), Federated model distillation with noise-free differential privacy,
Theorems 1 and 2. The epsilons of its Table 2 are decimal logarithms; these are natural.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import check_count, check_delta, require

# Below this a float64 has lost its digits; no accountant distinguishes smaller deltas.
_TINY = 1e-300


def check_loss(owner: str, name: str, value: float) -> None:
    """Raise `InvalidParameter` unless a privacy loss is at least 0; infinity is allowed."""
    require(value >= 0, owner, name, "at least 0", value)


def smallest_epsilon(
    delta_at: Callable[[float], float], delta: float, upper: float, *, tolerance: float = 1e-13
) -> float:
    """Return the smallest epsilon in [0, upper] with ``delta_at(epsilon) <= delta``.

    `delta_at` decreases, and is at most `delta` at `upper`. The tolerance is absolute.
    """

    def excess(epsilon: float) -> float:
        # Logarithms make the curve almost a line, which halves the number of steps.
        return math.log(max(delta_at(epsilon), _TINY)) - math.log(delta)

    if upper == 0 or excess(0.0) <= 0:
        return 0.0
    if excess(upper) >= 0:
        return upper
    return float(scipy.optimize.brentq(excess, 0.0, upper, xtol=tolerance, rtol=1e-14))


# Gaussian noise.


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
    delta = np.where(regular, _regular_delta(safe_mu, safe_epsilon), 0.0)
    delta = np.where(np.isinf(mu) & np.isfinite(epsilon), 1.0, delta)
    return delta[()]


def _regular_delta(mu: float | FloatArray, epsilon: float | FloatArray) -> FloatArray:
    """Return delta for finite arguments, without checks: searches ask thousands of times."""
    above = scipy.special.log_ndtr(mu / 2 - epsilon / mu)
    below = scipy.special.log_ndtr(-mu / 2 - epsilon / mu)
    # Both terms may be tiny: their ratio is taken before the exponential.
    return np.asarray(np.exp(above) * -np.expm1(np.minimum(epsilon + below - above, 0.0)))


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
    return smallest_epsilon(lambda epsilon: float(_regular_delta(mu, epsilon)), delta, upper)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu, that is the least noise, that keeps (epsilon, delta)."""
    check_loss("gaussian_mu", "epsilon", epsilon)
    check_delta("gaussian_mu", delta)
    if math.isinf(epsilon):
        return math.inf

    def excess(mu: float) -> float:
        return math.log(max(float(_regular_delta(mu, epsilon)), _TINY)) - math.log(delta)

    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    lower = upper / 2
    while excess(lower) > 0:
        lower /= 2
    return float(scipy.optimize.brentq(excess, lower, upper, xtol=1e-300, rtol=1e-14))


# Renyi curves.

# sinh overflows near 710; logarithms of sums take over long before that.
_LARGE_EXPONENT = 30.0
_LARGEST_ORDER = 1e8


@cache
def default_orders() -> FloatArray:
    """Return the orders at which curves are kept, from 1.001 to 1e6; read-only.

    Dense up to 64, where the optimum of realistic settings lies; the sparse upper part
    serves very small losses.
    """
    low, high = 1 + np.logspace(-3, 0, 61)[:-1], np.logspace(np.log10(64), 6, 201)[1:]
    orders: FloatArray = np.concatenate([low, np.linspace(2, 64, 1241), high])
    orders.flags.writeable = False
    return orders


def _check_orders(owner: str, orders: Array) -> None:
    least = np.min(orders, initial=np.inf)
    require(bool(least > 1), owner, "orders", "all greater than 1", float(least))


def rdp_of_pure(epsilon0: float | Array, orders: Array) -> FloatArray:
    """Return the tight curve of a mechanism that is epsilon0-differentially private.

    It is the curve of randomised response, the worst such mechanism, and lies below both
    usual bounds, ``epsilon0**2 * order / 2`` and ``epsilon0``. The arguments broadcast.

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
    """Return the smallest epsilon that a curve, (num_orders,), proves at `delta`.

    Examples
    --------
    >>> orders = default_orders()
    >>> round(rdp_to_epsilon(orders, 40 * rdp_of_pure(0.08, orders), 1e-5), 5)
    2.08393
    """
    check_delta("rdp_to_epsilon", delta)
    return _epsilon_of(*_check_curve("rdp_to_epsilon", orders, rdp), delta)


def _epsilon_of(orders: FloatArray, rdp: FloatArray, delta: float) -> float:
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
        return _epsilon_of(orders, rho * orders, delta)

    limits, options = (-12.0, math.log(_LARGEST_ORDER)), {"xatol": 1e-9}
    best = scipy.optimize.minimize_scalar(
        epsilon_at, bounds=limits, method="bounded", options=options
    )
    return float(best.fun)


# Pure privacy.

# 40 standard deviations hold all but 1e-300 of a binomial.
_WINDOW_DEVIATIONS = 40
_WINDOW_LEAST = 400
# Atoms of a convolved loss distribution: a million take 16 MB and some 20 ms.
_MOST_ATOMS = 1 << 20
_MOST_DISTINCT = 16
# Share of delta that may be spent on cutting off the tails of a loss distribution.
_TAIL_SHARE = 1e-9

# Privacy losses and their probabilities, both (num_atoms,).
_Atoms: TypeAlias = tuple[FloatArray, FloatArray]


def _loss_distribution(epsilon0: float, count: int) -> _Atoms:
    """Return privacy losses, decreasing, and their probabilities."""
    flip = float(scipy.special.expit(-epsilon0))
    mode = min(count, int((count + 1) * flip))
    reach = math.ceil(_WINDOW_DEVIATIONS * math.sqrt(count * flip * (1 - flip))) + _WINDOW_LEAST
    first, last = max(0, mode - reach), min(count, mode + reach)
    flips = np.arange(first, last + 1)
    # Ratios of neighbours, summed outwards from the mode: accurate to 1e-13 also for a
    # million events, where log-factorials have lost nine digits.
    steps = np.log((count - flips[:-1]) / (flips[:-1] + 1.0)) - epsilon0
    above = np.cumsum(steps[mode - first :])
    below = -np.cumsum(steps[: mode - first][::-1])[::-1]
    masses = np.exp(np.concatenate([below, [0.0], above]))
    return (count - 2.0 * flips) * epsilon0, masses / masses.sum()


def _delta_of(losses: FloatArray, masses: FloatArray, epsilon: float) -> float:
    return float(masses @ -np.expm1(np.minimum(epsilon - losses, 0.0)))


def pure_optimal_delta(epsilon0: float, count: int, epsilon: float) -> float:
    """Return the exact delta at `epsilon` of `count` epsilon0-DP mechanisms together."""
    check_loss("pure_optimal_delta", "epsilon0", epsilon0)
    check_count("pure_optimal_delta", "count", count)
    check_loss("pure_optimal_delta", "epsilon", epsilon)
    if epsilon >= count * epsilon0 or count == 0:
        return 0.0
    if math.isinf(epsilon0):
        return 1.0
    return _delta_of(*_loss_distribution(epsilon0, count), epsilon)


def pure_optimal(epsilon0: float, count: int, delta: float) -> float:
    """Return the exact epsilon at `delta` of `count` epsilon0-DP mechanisms together.

    No valid bound that knows only epsilon0 and count is smaller.

    Examples
    --------
    >>> round(pure_optimal(0.08, 40, 1e-5), 6)
    1.932272
    """
    check_loss("pure_optimal", "epsilon0", epsilon0)
    check_count("pure_optimal", "count", count)
    check_delta("pure_optimal", delta)
    if count == 0 or epsilon0 == 0 or math.isinf(epsilon0):
        return epsilon0 if count else 0.0
    losses, masses = _loss_distribution(epsilon0, count)
    return smallest_epsilon(
        lambda epsilon: _delta_of(losses, masses, epsilon), delta, count * epsilon0
    )


def _coarsened(losses: FloatArray, masses: FloatArray, most: int) -> _Atoms:
    """Split every loss between two of `most` evenly spaced ones: an upper bound on delta.

    Delta is an average of a convex function of exp(-loss). Splitting an atom so that the
    mean of exp(-loss) stays can therefore only raise delta, and only to second order.
    """
    if losses.size <= most:
        return losses, masses
    grid = np.linspace(losses.min(), losses.max(), most)
    width = grid[1] - grid[0]
    cells = np.minimum(((losses - grid[0]) / width).astype(np.int64), most - 2)
    beyond = np.clip(losses - grid[cells], 0.0, width)
    upper = masses * (np.expm1(-beyond) / np.expm1(-width))
    split = np.zeros(most)
    split += np.bincount(cells, weights=masses - upper, minlength=most)
    split += np.bincount(cells + 1, weights=upper, minlength=most)
    return grid, split


def _without_tails(losses: FloatArray, masses: FloatArray, tail: float) -> _Atoms:
    """Cut both tails of at most `tail` each; the caller adds the upper one to delta."""
    first = int(np.searchsorted(np.cumsum(masses), tail))
    rest = np.cumsum(masses[::-1])
    last = masses.size - int(np.searchsorted(rest, tail))
    kept = masses[first:last].copy()
    # The lower tail may not vanish: it moves up to the least loss that is kept.
    kept[-1] += rest[masses.size - last - 1] if last < masses.size else 0.0
    return losses[first:last], kept


def _renyi_bound(epsilons: FloatArray, counts: FloatArray, delta: float) -> float:
    def epsilon_at(log_order: float) -> float:
        order = np.array([1 + math.exp(log_order)])
        total = counts @ rdp_of_pure(epsilons, order)
        return _epsilon_of(order, np.array([total]), delta)

    # Every order is valid, so a search that stops at a local minimum is still a bound.
    best = scipy.optimize.minimize_scalar(
        epsilon_at, bounds=(-7.0, 14.0), method="bounded", options={"xatol": 1e-6}
    )
    return float(best.fun)


def _distinct(
    epsilons: Sequence[float] | FloatArray, counts: Sequence[int] | IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the distinct strengths above 0, and how many events have each."""
    owner = "pure_heterogeneous"
    require(len(epsilons) == len(counts), owner, "counts", "one per epsilon", len(counts))
    strengths, numbers = np.asarray(epsilons, dtype=float), np.asarray(counts, dtype=float)
    require(bool((strengths >= 0).all()), owner, "epsilons", "all at least 0", epsilons)
    whole = (numbers >= 0) & (numbers == np.floor(numbers))
    require(bool(whole.all()), owner, "counts", "whole numbers, at least 0", counts)
    values, kinds = np.unique(strengths, return_inverse=True)
    totals: FloatArray = np.bincount(kinds.ravel(), weights=numbers).astype(float)
    spent = (values > 0) & (totals > 0)
    return values[spent], totals[spent]


def pure_heterogeneous(
    epsilons: Sequence[float] | FloatArray, counts: Sequence[int] | IntArray, delta: float
) -> float:
    """Return an epsilon that holds for pure mechanisms of different strengths together.

    Up to sixteen distinct strengths are convolved: exact while there are few events, and
    otherwise on a grid that overstates delta. More are bounded by their tight Renyi curves. The
    plain sum is never exceeded. All three hold for adaptive composition.

    Examples
    --------
    >>> round(pure_heterogeneous([0.08, 0.2], [40, 10], 1e-5), 3)
    3.203
    """
    check_delta("pure_heterogeneous", delta)
    values, totals = _distinct(epsilons, counts)
    total = float(values @ totals)
    if not values.size or math.isinf(total):
        return total
    if values.size > _MOST_DISTINCT:
        return min(total, _renyi_bound(values, totals, delta))
    tail = delta * _TAIL_SHARE / values.size
    losses: FloatArray = np.zeros(1)
    masses: FloatArray = np.ones(1)
    for epsilon0, count in zip(values, totals, strict=True):
        more = _without_tails(*_loss_distribution(float(epsilon0), int(count)), tail)
        more_losses, more_masses = _coarsened(*more, 2048)
        losses, masses = _coarsened(losses, masses, _MOST_ATOMS // more_losses.size)
        losses = np.add.outer(losses, more_losses).ravel()
        masses = np.multiply.outer(masses, more_masses).ravel()
    bound = smallest_epsilon(
        lambda epsilon: _delta_of(losses, masses, epsilon),
        delta - tail * values.size,
        total,
        tolerance=1e-10,
    )
    return min(total, bound, _renyi_bound(values, totals, delta))


# Bounded range.

# Candidates looked at while searching; the answer is then checked against all of them.
_SEARCH_CANDIDATES = 256


def _worst_pair(
    eta: float, count: int, epsilon: float, index: Array
) -> tuple[FloatArray, FloatArray]:
    """Return the probabilities of the upper of two outcomes, under both inputs."""
    # Each candidate is the location t of the two losses, t and t - eta, that is worst
    # when up to `index` of the `count` outcomes are the lower one.
    # Rounding may carry the last one past eta, where its probability would be negative.
    location = np.minimum((epsilon + (index + 1) * eta) / (count + 1), eta)
    first = np.expm1(location - eta) / math.expm1(-eta)
    return first, np.exp(-location) * first


def _candidate_deltas(eta: float, count: int, epsilon: float, index: Array) -> FloatArray:
    first, second = _worst_pair(eta, count, epsilon, index)
    own = scipy.special.betainc(count - index, index + 1.0, first)
    other = scipy.special.betainc(count - index, index + 1.0, second)
    # An underflow or overflow drops what would be subtracted: the safe direction.
    with np.errstate(divide="ignore", over="ignore"):
        deltas: FloatArray = np.maximum(own - np.exp(epsilon + np.log(other)), 0.0)
    return deltas


def _num_candidates(eta: float, count: int, epsilon: float) -> int:
    return max(0, math.ceil(count - epsilon / eta))


def _searched_range(eta: float, count: int, epsilon: float) -> float:
    """Return the largest candidate found by zooming in on a coarse grid."""
    low, high = 0, _num_candidates(eta, count, epsilon) - 1
    if high < 0:
        return 0.0
    while True:
        index = np.unique(np.linspace(low, high, _SEARCH_CANDIDATES).round())
        deltas = _candidate_deltas(eta, count, epsilon, index)
        best = int(deltas.argmax())
        if high - low < _SEARCH_CANDIDATES:
            return float(deltas[best])
        low, high = index[max(best - 2, 0)], index[min(best + 2, index.size - 1)]


def _full_delta(eta: float, count: int, epsilon: float, floor: float) -> float:
    """Return the largest of all candidates, or `floor` if none exceeds it."""
    index = np.arange(_num_candidates(eta, count, epsilon), dtype=float)
    first, _ = _worst_pair(eta, count, epsilon, index)
    share = index / count
    # Chernoff: most candidates provably stay below the floor without being computed.
    exponent = -count * (
        scipy.special.rel_entr(share, 1 - first) + scipy.special.rel_entr(1 - share, first)
    )
    possible = (share >= 1 - first) | (exponent > math.log(floor))
    deltas = _candidate_deltas(eta, count, epsilon, index[possible])
    return float(np.max(deltas, initial=floor))


def bounded_range_optimal_delta(eta: float, count: int, epsilon: float) -> float:
    """Return the exact delta at `epsilon` of `count` mechanisms of range `eta`.

    The mechanisms and their inputs must be fixed in advance.
    """
    owner = "bounded_range_optimal_delta"
    check_loss(owner, "eta", eta)
    check_count(owner, "count", count)
    check_loss(owner, "epsilon", epsilon)
    if count == 0 or epsilon >= count * eta:
        return 0.0
    if math.isinf(eta):
        return 1.0
    found = _searched_range(eta, count, epsilon)
    return _full_delta(eta, count, epsilon, max(found, _TINY)) if found > 0 else 0.0


def bounded_range_optimal(eta: float, count: int, delta: float) -> float:
    """Return the exact epsilon at `delta` of `count` mechanisms of range `eta`.

    Optimal when the queries are fixed before the first answer. If later queries depend
    on earlier answers it is too small: compose the ``eta**2 / 8`` of zCDP instead.

    Examples
    --------
    >>> round(bounded_range_optimal(0.08, 40, 1e-5), 6)
    0.934913
    """
    check_loss("bounded_range_optimal", "eta", eta)
    check_count("bounded_range_optimal", "count", count)
    check_delta("bounded_range_optimal", delta)
    if count == 0 or eta == 0 or math.isinf(eta):
        return eta if count else 0.0
    upper = count * eta
    found = smallest_epsilon(lambda e: _searched_range(eta, count, e), delta, upper)
    if _full_delta(eta, count, found, delta) <= delta * (1 + 1e-10):
        return found
    return smallest_epsilon(
        lambda e: _full_delta(eta, count, e, delta * 1e-3), delta, upper, tolerance=1e-9
    )


# Samples used in the clear.


class Guarantee(NamedTuple):
    """One (epsilon, delta) statement."""

    epsilon: float
    delta: float


def check_sample(owner: str, records: int, samples: int, replacement: bool) -> None:
    """Raise `InvalidParameter` unless so many of the records can be drawn."""
    check_count(owner, "records", records, least=1)
    check_count(owner, "samples", samples)
    fits = replacement or samples <= records
    require(fits, owner, "samples", f"at most {records}, the records", samples)


def nfdp_tight(
    records: int, samples: int, *, replacement: bool = True, runs: int = 1
) -> Guarantee:
    """Return the exact statement, (0, chance that a given record is ever drawn).

    Each of several `runs` draws an independent sample of the same records.

    Examples
    --------
    >>> nfdp_tight(100, 10, replacement=False)
    Guarantee(epsilon=0.0, delta=0.1)
    """
    check_sample("nfdp_tight", records, samples, replacement)
    check_count("nfdp_tight", "runs", runs)
    if not replacement and runs == 1:
        return Guarantee(0.0, samples / records)
    draws, missed = (samples * runs, 1 / records) if replacement else (runs, samples / records)
    if missed == 1:
        return Guarantee(0.0, float(draws > 0))
    return Guarantee(0.0, -math.expm1(draws * math.log1p(-missed)))


def nfdp_theorem(records: int, samples: int, *, replacement: bool = True) -> Guarantee:
    """Return (epsilon, delta) as the paper's theorems state them.

    Examples
    --------
    >>> nfdp_theorem(2880, 60).epsilon.__round__(6)
    0.02083
    """
    check_sample("nfdp_theorem", records, samples, replacement)
    delta = nfdp_tight(records, samples, replacement=replacement).delta
    if replacement:
        return Guarantee(samples * math.log1p(1 / records), delta)
    return Guarantee(-math.log1p(-samples / (records + 1)), delta)
