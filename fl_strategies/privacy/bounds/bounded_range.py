"""Composition of bounded-range mechanisms, such as the exponential mechanism.

A mechanism has range eta when, between neighbouring inputs, the logarithms of the
probability ratios of any two outputs differ by at most eta. The exponential mechanism
(noisy max with Gumbel noise) has it for any number of classes; noisy max with Laplace
noise has it for two classes only. Every such mechanism is eta-differentially private,
but composes like one of about half that strength.

References
----------
Durfee, Rogers (2019), Practical differentially private top-k selection.
Dong, Durfee, Rogers (2020), Optimal differential privacy composition for exponential
mechanisms and the cost of adaptivity, Theorem 3.
"""

import math

import numpy as np
import scipy

from fl_strategies.arrays import Array, FloatArray
from fl_strategies.privacy._numeric import (
    check_count,
    check_delta,
    check_loss,
    smallest_epsilon,
)

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
    with np.errstate(divide="ignore"):
        # An underflow to zero drops what would be subtracted: the safe direction.
        deltas: FloatArray = np.maximum(own - np.exp(epsilon + np.log(other)), 0.0)
    return deltas


def _num_candidates(eta: float, count: int, epsilon: float) -> int:
    return max(0, math.ceil(count - epsilon / eta))


def _searched_delta(eta: float, count: int, epsilon: float) -> float:
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
    found = _searched_delta(eta, count, epsilon)
    return _full_delta(eta, count, epsilon, max(found, 1e-300)) if found > 0 else 0.0


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
    found = smallest_epsilon(lambda e: _searched_delta(eta, count, e), delta, upper)
    if _full_delta(eta, count, found, delta) <= delta * (1 + 1e-10):
        return found
    return smallest_epsilon(
        lambda e: _full_delta(eta, count, e, delta * 1e-3), delta, upper, tolerance=1e-9
    )
