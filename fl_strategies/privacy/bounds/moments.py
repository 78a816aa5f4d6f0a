"""The moments accountants of FedKT and PATE for noisy max, and what votes do to them.

The l-th moment is l times the Renyi divergence of order l + 1. The data-independent bound may
be published. The data-dependent ones are smaller where the voters agree, but are themselves
computed from private votes, and bound the divergence in one direction only (true votes against
neighbouring ones): a diagnostic, not a guarantee. Every function that takes votes is private.

``splits`` is the number of votes by which one neighbour changes a count: s for a party at
level L1, 1 for a record at level L2 (whose releases number s times the queries), t for a
party at level L2.

Laplace and Gumbel noise
    Each query is ``2 * splits * gamma``-differentially private; that, and the chance that the
    leading class is not answered, is all that the data-dependent theorem asks for.
Gaussian noise (GNMax, and the threshold test of Confident-GNMax)
    A neighbour moves ``splits`` votes from one class to another, an L2 distance of
    ``splits * sqrt(2)``; the leading count moves by at most ``splits``.

References
----------
Papernot et al. (2017), Semi-supervised knowledge transfer, Theorem 3 and Lemma 4.
Li, He, Song (2021), Practical one-shot federated learning, Theorems 1 to 3.
Papernot et al. (2018), Scalable private learning with PATE, Theorem 6, Propositions 7 to
10 and Algorithm 1.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import check_count, check_delta, check_positive, require
from fl_strategies.privacy.bounds.theorems import rdp_of_pure, rdp_of_zcdp, rdp_to_epsilon
from fl_strategies.privacy.events import check_votes

Bound: TypeAlias = Literal["tight", "paper"]
SelectionNoise: TypeAlias = Literal["laplace", "gumbel"]

# Rows and table cells worked on at once: temporaries then stay in the processor's cache.
_CHUNK_ROWS = 1 << 12
_CHUNK_CELLS = 1 << 16


def _log1mexp(x: FloatArray) -> FloatArray:
    """Return ``log(1 - exp(x))`` for x <= 0 without losing digits at either end."""
    with np.errstate(divide="ignore"):
        # Near 0 the difference cancels, far below it the exponential vanishes.
        answer: FloatArray = np.where(
            x > -math.log(2), np.log(-np.expm1(np.maximum(x, -1.0))), np.log1p(-np.exp(x))
        )
    return answer


def _log_sum_over_rivals(
    votes: Array, log_chance: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Return the logarithm of the sum of ``exp(log_chance(lead))`` over rivals, (num_queries,).

    `log_chance` decreases with the lead in votes.
    """
    most = votes.max(initial=0)
    small = votes.dtype.kind in "iu" and most < np.iinfo(np.int16).max
    # Whole counts have few gaps: their chances are worked out once and looked up.
    table = log_chance(np.arange(int(most) + 1.0)) if small else np.zeros(0)
    total = np.empty(len(votes))
    for start in range(0, len(votes), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        # Sorting makes permuted rows equal to the last bit, so duplicates are found later.
        ranked = np.sort(votes[rows].astype(np.int16) if small else votes[rows], axis=1)
        ranks = np.ascontiguousarray(ranked.T[::-1])
        gaps = ranks[0] - ranks[1:]
        logs = table.take(gaps) if small else log_chance(gaps.astype(float))
        total[rows] = logs[0] + np.log1p(np.exp(logs[1:] - logs[0]).sum(axis=0))
    return total


def _log_union_bound(
    votes: Array, log_chance: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Bound the log-chance that the leader loses, (num_queries,), by those of single rivals.

    `log_chance` maps a lead in votes to the log-chance that noise reverses it.
    """
    # The leader is never less likely to win than any other class.
    limit = math.log1p(-1 / votes.shape[1])
    return np.minimum(_log_sum_over_rivals(votes, log_chance), limit)


def _total_over_queries(
    log_q: FloatArray, orders: FloatArray, curve: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Add up ``curve(log_q[:, None])``, (num_queries, num_orders), over the queries.

    Queries with equal chances cost the same, and votes of a few dozen parties take few
    distinct values, so each value is worked out once.
    """
    values, counts = np.unique(log_q, return_counts=True)
    rows = max(1, _CHUNK_CELLS // max(1, orders.size))
    total = np.zeros(orders.size)
    for start in range(0, values.size, rows):
        total += counts[start : start + rows] @ curve(values[start : start + rows, None])
    return total


# Gaussian noise.


def log_error_probability_gaussian(votes: Array, sigma: float) -> FloatArray:
    """Bound the log-probability that GNMax does not answer the leading class, (num_queries,).

    Exact for two classes; a union bound over the rivals for more (Proposition 7). `sigma` is
    the standard deviation of the noise on every count.
    """
    check_positive("log_error_probability_gaussian", "sigma", sigma)
    check_votes("log_error_probability_gaussian", votes)
    return _log_union_bound(
        votes, lambda gap: np.asarray(scipy.special.log_ndtr(-gap / (sigma * math.sqrt(2))))
    )


def _theorem_6(log_q: FloatArray, sigma: float, orders: FloatArray) -> FloatArray:
    """Return the data-dependent bound without its conditions; broadcasts.

    `sigma` is relative to one vote. The two auxiliary orders are those of Proposition 10.
    """
    second = sigma * np.sqrt(-log_q)
    first = second + 1
    stay = _log1mexp(log_q)
    shrunk = np.minimum((log_q + second / sigma**2) * (1 - 1 / second), 0.0)
    kept = stay + (orders - 1) * (stay - _log1mexp(shrunk))
    lost = log_q + (orders - 1) * (first / sigma**2 - log_q / second)
    return np.asarray(np.logaddexp(kept, lost) / (orders - 1))


def _theorem_6_holds(log_q: FloatArray, sigma: float, orders: FloatArray) -> FloatArray:
    second = sigma * np.sqrt(-log_q)
    # The bound must grow with q (Lemma 9), since only an upper bound on q is known.
    growing = np.log((second + 1) / (second - 1)) <= (2 * second - 1) / sigma**2
    return np.asarray((second + 1 > orders) & growing)


def gaussian_error_rdp(log_q: FloatArray, sigma: float, orders: FloatArray) -> FloatArray:
    """Bound the total Renyi divergence of Gaussian selections that err with chance q.

    `sigma` is relative to one vote; a change of the input is worth sqrt(2) / sigma. Never above
    the data-independent ``num_queries * orders / sigma**2``.
    """
    independent = orders / sigma**2
    # With one auxiliary order at most 1 the theorem is empty; q = 0 costs nothing.
    usable = sigma * np.sqrt(-log_q) > 1
    dependent = usable & np.isfinite(log_q)

    def curve(log_q: FloatArray) -> FloatArray:
        holds = _theorem_6_holds(log_q, sigma, orders)
        smaller = np.minimum(_theorem_6(log_q, sigma, orders), independent)
        return np.where(holds, smaller, independent)

    total = _total_over_queries(log_q[dependent], orders, curve)
    return np.asarray(total + np.count_nonzero(~usable) * independent)


def _relative(owner: str, sigma: float, splits: int, orders: Array) -> tuple[float, FloatArray]:
    check_positive(owner, "sigma", sigma)
    check_count(owner, "splits", splits, least=1)
    orders = np.asarray(orders, dtype=float)
    good = orders.ndim == 1 and orders.min(initial=math.inf) > 1
    require(bool(good), owner, "orders", "a flat array of numbers greater than 1", orders)
    return sigma / splits, orders


def gnmax_rdp(votes: Array, sigma: float, orders: Array, splits: int = 1) -> FloatArray:
    """Add up the data-dependent curves of all queries, (num_orders,).

    `sigma` is the standard deviation of the noise on every count.
    """
    relative, orders = _relative("gnmax_rdp", sigma, splits, orders)
    return gaussian_error_rdp(log_error_probability_gaussian(votes, sigma), relative, orders)


def threshold_rdp(
    votes: Array, sigma: float, threshold: float, orders: Array, splits: int = 1
) -> FloatArray:
    """Add up the curves of asking "is the lead at least `threshold`?", (num_orders,).

    Gaussian noise of deviation `sigma` is added to the leading count. The answer is a
    choice between two, so Theorem 6 applies to the less likely of them.
    """
    relative, orders = _relative("threshold_rdp", sigma, splits, orders)
    check_votes("threshold_rdp", votes)
    require(math.isfinite(threshold), "threshold_rdp", "threshold", "finite", threshold)
    lead = np.max(votes, axis=1).astype(float) if len(votes) else np.zeros(0)
    log_q = scipy.special.log_ndtr(-np.abs(lead - threshold) / sigma)
    # The lead moves by one vote where two counts of GNMax move: sqrt(2) times the noise.
    return gaussian_error_rdp(log_q, relative * math.sqrt(2), orders)


# Laplace and Gumbel noise.


@cache
def default_moments() -> FloatArray:
    """Return the moments l at which votes are accounted, from 0.125 to 1024; read-only."""
    moments: FloatArray = np.concatenate(
        [np.arange(0.125, 8, 0.125), np.arange(8, 128), np.geomspace(128, 1024, 25).round()]
    )
    moments.flags.writeable = False
    return moments


def log_error_probability(
    votes: Array, gamma: float, noise: SelectionNoise = "laplace"
) -> FloatArray:
    """Bound the log-probability that noisy max does not answer the leading class.

    With Laplace noise exact for two classes, a union bound over the rivals for more (Lemma 7);
    with Gumbel noise exact, a softmax of votes. `gamma` is the inverse scale of the noise.

    Examples
    --------
    >>> log_error_probability(np.array([[40, 10]]), 0.1).round(6)
    array([-2.776856])
    >>> log_error_probability(np.array([[40, 10]]), 0.1, "gumbel").round(6)
    array([-3.048587])
    """
    check_positive("log_error_probability", "gamma", gamma)
    check_votes("log_error_probability", votes)
    if noise == "gumbel":
        rivals = _log_sum_over_rivals(votes, lambda gap: np.asarray(-gamma * gap))
        return np.asarray(-np.logaddexp(0.0, -rivals))

    def log_chance(gap: FloatArray) -> FloatArray:
        x = gamma * gap
        return np.asarray(np.log1p(x / 2) - math.log(2) - x)

    return _log_union_bound(votes, log_chance)


def _epsilon_of_query(owner: str, gamma: float, splits: int) -> float:
    check_positive(owner, "gamma", gamma)
    check_count(owner, "splits", splits, least=1)
    return 2 * splits * gamma


def _data_independent(epsilon0: float, orders: FloatArray, bound: Bound) -> FloatArray:
    if bound == "tight":
        return np.asarray(orders * rdp_of_pure(epsilon0, orders + 1))
    return np.asarray(np.minimum(epsilon0**2 / 2 * orders * (orders + 1), epsilon0 * orders))


def _data_dependent(log_q: FloatArray, epsilon0: float, orders: FloatArray) -> FloatArray:
    """Return Theorem 2 of FedKT for valid log_q (num_rows, 1), as (num_rows, num_orders)."""
    stay = _log1mexp(log_q)
    kept = stay + (stay - _log1mexp(np.minimum(epsilon0 + log_q, 0.0))) * orders
    lost = log_q + epsilon0 * orders
    # log(exp(kept) + exp(lost)), in place: numpy's logaddexp takes three times as long.
    gap = kept - lost
    np.exp(np.negative(np.abs(gap, out=gap), out=gap), out=gap)
    np.maximum(kept, lost, out=kept)
    kept += np.log1p(gap, out=gap)
    return np.asarray(kept)


def _check_moments(owner: str, orders: Array | None) -> FloatArray:
    if orders is None:
        return default_moments()
    moments = np.asarray(orders, dtype=float)
    least = moments.min(initial=math.inf)
    good = moments.ndim == 1 and moments.size > 0 and least > 0
    require(bool(good), owner, "orders", "a flat array of numbers greater than 0", orders)
    return moments


def moments_to_epsilon(orders: Array, moments: Array, delta: float) -> float:
    """Return ``min (moment + log(1 / delta)) / l``, the conversion of Theorem 8."""
    check_delta("moments_to_epsilon", delta)
    return float(((np.asarray(moments) - math.log(delta)) / np.asarray(orders)).min())


def moments_epsilon(
    gamma: float,
    splits: int,
    queries: int,
    delta: float,
    *,
    max_order: int = 400,
    with_pure: bool = True,
) -> float:
    """Return the papers' data-independent epsilon, as their tables print it.

    Kept to reproduce publications; `pure_optimal` proves a smaller one for the same noise.

    Whole moments up to `max_order` are tried; the authors' script stops at 8. With `with_pure`
    plain summation may win, as it does for few queries.

    Examples
    --------
    >>> round(moments_epsilon(0.04, 1, 40, 1e-5, max_order=8), 2)
    2.59
    >>> round(moments_epsilon(0.04, 1, 40, 1e-5), 2)
    2.56
    """
    epsilon0 = _epsilon_of_query("moments_epsilon", gamma, splits)
    check_count("moments_epsilon", "queries", queries)
    check_delta("moments_epsilon", delta)
    check_count("moments_epsilon", "max_order", max_order, least=1)
    orders = np.arange(1.0, max_order + 1)
    total = queries * _data_independent(epsilon0, orders, "paper")
    epsilon = moments_to_epsilon(orders, total, delta)
    return min(epsilon, queries * epsilon0) if with_pure else epsilon


def data_dependent_moments(
    votes: Array,
    gamma: float,
    splits: int = 1,
    orders: Array | None = None,
    *,
    noise: SelectionNoise = "laplace",
    bound: Bound = "tight",
) -> FloatArray:
    """Add up the data-dependent moments of all queries, (num_orders,).

    Parameters
    ----------
    votes : (num_queries, num_classes)
        The counts before noise.
    gamma : float
        Inverse scale of the noise.
    splits : int
        Votes by which one neighbour changes a count.
    orders : (num_orders,), optional
        Moments l > 0, not necessarily whole.
    noise : "laplace" or "gumbel"
    bound : "tight" or "paper"
        The cost of a query where the votes do not help: the exact curve of pure differential
        privacy (and with Gumbel noise its bounded range, where that is less), or the two
        looser terms of the papers.
    """
    owner = "data_dependent_moments"
    require(bound in ("tight", "paper"), owner, "bound", '"tight" or "paper"', bound)
    epsilon0 = _epsilon_of_query(owner, gamma, splits)
    moments = _check_moments(owner, orders)
    cap = _data_independent(epsilon0, moments, bound)
    if noise == "gumbel":
        cap = np.minimum(cap, moments * rdp_of_zcdp(epsilon0 * epsilon0 / 8, moments + 1))
    log_q = log_error_probability(votes, gamma, noise)
    sure = log_q < -np.logaddexp(0.0, epsilon0)

    def curve(log_q: FloatArray) -> FloatArray:
        return np.minimum(_data_dependent(log_q, epsilon0, moments), cap)

    total = _total_over_queries(log_q[sure], moments, curve)
    return np.asarray(total + np.count_nonzero(~sure) * cap)


def data_dependent_epsilon(
    votes: Array,
    gamma: float,
    splits: int = 1,
    *,
    delta: float,
    orders: Array | None = None,
    noise: SelectionNoise = "laplace",
    bound: Bound = "tight",
) -> float:
    """Return the data-dependent epsilon of all queries.

    Parameters are those of `data_dependent_moments`. ``bound="paper"`` also converts as
    the papers do.

    Examples
    --------
    >>> votes = np.tile([50, 0], (40, 1))
    >>> whole = np.arange(1, 400)
    >>> round(data_dependent_epsilon(votes, 0.04, delta=1e-5, orders=whole, bound="paper"), 6)
    1.722315
    >>> round(data_dependent_epsilon(votes, 0.1, delta=1e-5, noise="gumbel"), 6)
    0.891386
    """
    check_delta("data_dependent_epsilon", delta)
    moments = _check_moments("data_dependent_epsilon", orders)
    total = data_dependent_moments(votes, gamma, splits, moments, noise=noise, bound=bound)
    pure = len(votes) * _epsilon_of_query("data_dependent_epsilon", gamma, splits)
    if bound == "paper":
        return min(pure, moments_to_epsilon(moments, total, delta))
    return min(pure, rdp_to_epsilon(moments + 1, total / moments, delta))
