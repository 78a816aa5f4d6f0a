"""Argument checks, root finding and votes, as every accountant needs them."""

import math
from collections.abc import Callable

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import require, require_data

# Below this a float64 has lost its digits; no accountant distinguishes smaller deltas.
_TINY = 1e-300
# Rows and table cells worked on at once: temporaries then stay in the processor's cache.
_CHUNK_ROWS = 1 << 12
_CHUNK_CELLS = 1 << 16


def check_delta(owner: str, delta: float) -> None:
    """Raise `InvalidParameter` unless delta is a probability strictly inside (0, 1)."""
    require(0 < delta < 1, owner, "delta", "greater than 0 and less than 1", delta)


def check_positive(owner: str, name: str, value: float) -> None:
    """Raise `InvalidParameter` unless a setting is a finite number above 0."""
    require(0 < value < math.inf, owner, name, "greater than 0 and finite", value)


def check_loss(owner: str, name: str, value: float) -> None:
    """Raise `InvalidParameter` unless a privacy loss is at least 0; infinity is allowed."""
    require(value >= 0, owner, name, "at least 0", value)


def check_count(owner: str, name: str, value: int, *, least: int = 0) -> None:
    """Raise `InvalidParameter` unless a number of things is a whole number."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(whole and value >= least, owner, name, f"a whole number, at least {least}", value)


def smallest_epsilon(
    delta_at: Callable[[float], float], delta: float, upper: float, *, tolerance: float = 1e-13
) -> float:
    """Return the smallest epsilon in [0, upper] with ``delta_at(epsilon) <= delta``.

    Parameters
    ----------
    delta_at : callable
        A decreasing function of epsilon, at most `delta` at `upper`.
    delta, upper : float
    tolerance : float
        Absolute error of the answer.
    """

    def excess(epsilon: float) -> float:
        # Logarithms make the curve almost a line, which halves the number of steps.
        return math.log(max(delta_at(epsilon), _TINY)) - math.log(delta)

    if upper == 0 or excess(0.0) <= 0:
        return 0.0
    if excess(upper) >= 0:
        return upper
    return float(scipy.optimize.brentq(excess, 0.0, upper, xtol=tolerance, rtol=1e-14))


def log1mexp(x: FloatArray) -> FloatArray:
    """Return ``log(1 - exp(x))`` for x <= 0 without losing digits at either end."""
    with np.errstate(divide="ignore"):
        # Near 0 the difference cancels, far below it the exponential vanishes.
        answer: FloatArray = np.where(
            x > -math.log(2), np.log(-np.expm1(np.maximum(x, -1.0))), np.log1p(-np.exp(x))
        )
    return answer


def check_votes(owner: str, votes: Array) -> None:
    """Raise `InvalidData` unless `votes` (num_queries, num_classes) are counts."""
    shaped = votes.ndim == 2 and votes.shape[1] >= 2
    require_data(shaped, owner, "votes", "a table (queries, classes >= 2)", votes.shape)
    numeric = votes.dtype.kind in "iuf"
    require_data(numeric, owner, "votes", "an array of numbers", votes.dtype)
    if votes.size:
        good = votes.min() >= 0 and np.isfinite(votes.max())
        require_data(bool(good), owner, "votes", "finite and at least 0", votes.min())


def log_sum_over_rivals(
    votes: Array, log_chance: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Return the logarithm of the sum of ``exp(log_chance(lead))`` over rivals, (num_queries,).

    Parameters
    ----------
    votes : (num_queries, num_classes)
    log_chance : callable
        Maps a lead in votes to a logarithm; decreasing.
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


def log_union_bound(votes: Array, log_chance: Callable[[FloatArray], FloatArray]) -> FloatArray:
    """Bound the log-chance that the leader loses, (num_queries,), by those of single rivals.

    `log_chance` maps a lead in votes to the log-chance that noise reverses it.
    """
    # The leader is never less likely to win than any other class.
    limit = math.log1p(-1 / votes.shape[1])
    return np.minimum(log_sum_over_rivals(votes, log_chance), limit)


def total_over_queries(
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
