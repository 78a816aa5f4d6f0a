"""Noisy max with Gaussian noise (GNMax), and the threshold test of Confident-GNMax.

One neighbour moves ``splits`` votes from one class to another, an L2 distance of
``splits * sqrt(2)``; the leading count moves by at most ``splits``. The functions that
take votes return private numbers that bound the divergence of the true votes from
neighbouring ones, not the reverse.

References
----------
Papernot et al. (2018), Scalable private learning with PATE, Theorem 6, Propositions 7 to
10 and Algorithm 1.
"""

import math

import numpy as np
import scipy

from fl_strategies.arrays import Array, FloatArray
from fl_strategies.exceptions import require
from fl_strategies.privacy._numeric import (
    check_count,
    check_positive,
    check_votes,
    log1mexp,
    log_union_bound,
    total_over_queries,
)


def log_error_probability_gaussian(votes: Array, sigma: float) -> FloatArray:
    """Bound the log-probability that GNMax does not answer the leading class.

    Exact for two classes; a union bound over the rivals for more (Proposition 7).

    Parameters
    ----------
    votes : (num_queries, num_classes)
    sigma : float
        Standard deviation of the noise on every count.

    Returns
    -------
    log_q : (num_queries,)
    """
    check_positive("log_error_probability_gaussian", "sigma", sigma)
    check_votes("log_error_probability_gaussian", votes)
    return log_union_bound(
        votes, lambda gap: np.asarray(scipy.special.log_ndtr(-gap / (sigma * math.sqrt(2))))
    )


def theorem_6(log_q: FloatArray, sigma: float, orders: FloatArray) -> FloatArray:
    """Return the data-dependent bound without its conditions; broadcasts.

    `sigma` is relative to one vote. The two auxiliary orders are those of Proposition 10.
    """
    second = sigma * np.sqrt(-log_q)
    first = second + 1
    stay = log1mexp(log_q)
    shrunk = np.minimum((log_q + second / sigma**2) * (1 - 1 / second), 0.0)
    kept = stay + (orders - 1) * (stay - log1mexp(shrunk))
    lost = log_q + (orders - 1) * (first / sigma**2 - log_q / second)
    return np.asarray(np.logaddexp(kept, lost) / (orders - 1))


def _theorem_6_holds(log_q: FloatArray, sigma: float, orders: FloatArray) -> FloatArray:
    second = sigma * np.sqrt(-log_q)
    # The bound must grow with q (Lemma 9), since only an upper bound on q is known.
    growing = np.log((second + 1) / (second - 1)) <= (2 * second - 1) / sigma**2
    return np.asarray((second + 1 > orders) & growing)


def gaussian_error_rdp(log_q: FloatArray, sigma: float, orders: FloatArray) -> FloatArray:
    """Bound the total Renyi divergence of Gaussian selections that err with chance q.

    Parameters
    ----------
    log_q : (num_queries,)
    sigma : float
        Relative to one vote; a change of the input is worth sqrt(2) / sigma.
    orders : (num_orders,)

    Returns
    -------
    rdp : (num_orders,)
        Never above the data-independent ``num_queries * orders / sigma**2``.
    """
    independent = orders / sigma**2
    # With one auxiliary order at most 1 the theorem is empty; q = 0 costs nothing.
    usable = sigma * np.sqrt(-log_q) > 1
    dependent = usable & np.isfinite(log_q)

    def curve(log_q: FloatArray) -> FloatArray:
        holds = _theorem_6_holds(log_q, sigma, orders)
        return np.where(
            holds, np.minimum(theorem_6(log_q, sigma, orders), independent), independent
        )

    total = total_over_queries(log_q[dependent], orders, curve)
    return np.asarray(total + np.count_nonzero(~usable) * independent)


def _relative(owner: str, sigma: float, splits: int, orders: Array) -> tuple[float, FloatArray]:
    check_positive(owner, "sigma", sigma)
    check_count(owner, "splits", splits, least=1)
    orders = np.asarray(orders, dtype=float)
    good = orders.ndim == 1 and orders.min(initial=math.inf) > 1
    require(bool(good), owner, "orders", "a flat array of numbers greater than 1", orders)
    return sigma / splits, orders


def gnmax_rdp(votes: Array, sigma: float, orders: Array, splits: int = 1) -> FloatArray:
    """Add up the data-dependent curves of all queries: private, do not publish.

    Parameters
    ----------
    votes : (num_queries, num_classes)
    sigma : float
        Standard deviation of the noise on every count.
    orders : (num_orders,)
    splits : int
        Votes that one neighbour moves.

    Returns
    -------
    rdp : (num_orders,)
    """
    relative, orders = _relative("gnmax_rdp", sigma, splits, orders)
    return gaussian_error_rdp(log_error_probability_gaussian(votes, sigma), relative, orders)


def threshold_rdp(
    votes: Array, sigma: float, threshold: float, orders: Array, splits: int = 1
) -> FloatArray:
    """Add up the data-dependent curves of asking "is the lead at least `threshold`?".

    Gaussian noise of deviation `sigma` is added to the leading count. The answer is a
    choice between two, so Theorem 6 applies to the less likely of them. Private.

    Returns
    -------
    rdp : (num_orders,)
    """
    relative, orders = _relative("threshold_rdp", sigma, splits, orders)
    check_votes("threshold_rdp", votes)
    require(math.isfinite(threshold), "threshold_rdp", "threshold", "finite", threshold)
    lead = np.max(votes, axis=1).astype(float) if len(votes) else np.zeros(0)
    log_q = scipy.special.log_ndtr(-np.abs(lead - threshold) / sigma)
    # The lead moves by one vote where two counts of GNMax move: sqrt(2) times the noise.
    return gaussian_error_rdp(log_q, relative * math.sqrt(2), orders)
