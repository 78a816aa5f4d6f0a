"""Optimal composition of pure differential privacy, any mechanism, adaptive or not.

Of all epsilon0-differentially private mechanisms, randomised response is the worst, so
the composition of ``count`` of them is exactly that of ``count`` coin flips: with j
"flips" the privacy loss is ``(count - 2 j) epsilon0``, and j is binomial.

References
----------
Kairouz, Oh, Viswanath (2015), The composition theorem for differential privacy, Thm 3.3.
Murtagh, Vadhan (2016), The complexity of computing the optimal composition.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import scipy

from fl_strategies._util.arrays import FloatArray, IntArray
from fl_strategies.errors import require
from fl_strategies.privacy._numeric import (
    check_count,
    check_delta,
    check_loss,
    smallest_epsilon,
)
from fl_strategies.privacy.bounds.renyi import rdp_of_pure, rdp_to_epsilon

# 40 standard deviations hold all but 1e-300 of a binomial.
_WINDOW_DEVIATIONS = 40
_WINDOW_LEAST = 400
# Atoms of a convolved loss distribution: a million take 16 MB and some 20 ms.
_MOST_ATOMS = 1 << 20
_MOST_DISTINCT = 16
# Share of delta that may be spent on cutting off the tails of a loss distribution.
_TAIL_SHARE = 1e-9

# Privacy losses and their probabilities, both (num_atoms,).
_Distribution: TypeAlias = tuple[FloatArray, FloatArray]


def _loss_distribution(epsilon0: float, count: int) -> _Distribution:
    """Return privacy losses, decreasing, and their probabilities, both (num_atoms,)."""
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


def _check(owner: str, epsilon0: float, count: int) -> None:
    check_loss(owner, "epsilon0", epsilon0)
    check_count(owner, "count", count)


def pure_optimal_delta(epsilon0: float, count: int, epsilon: float) -> float:
    """Return the exact delta at `epsilon` of `count` epsilon0-DP mechanisms together."""
    _check("pure_optimal_delta", epsilon0, count)
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
    _check("pure_optimal", epsilon0, count)
    check_delta("pure_optimal", delta)
    if count == 0 or epsilon0 == 0 or math.isinf(epsilon0):
        return epsilon0 if count else 0.0
    losses, masses = _loss_distribution(epsilon0, count)
    return smallest_epsilon(
        lambda epsilon: _delta_of(losses, masses, epsilon), delta, count * epsilon0
    )


def _coarsened(losses: FloatArray, masses: FloatArray, most: int) -> _Distribution:
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


def _without_tails(losses: FloatArray, masses: FloatArray, tail: float) -> _Distribution:
    """Cut both tails of at most `tail` each; the caller adds the upper one to delta."""
    first = int(np.searchsorted(np.cumsum(masses), tail))
    rest = np.cumsum(masses[::-1])
    last = masses.size - int(np.searchsorted(rest, tail))
    kept = masses[first:last].copy()
    # The lower tail may not vanish: it moves up to the least loss that is kept.
    kept[-1] += rest[masses.size - last - 1] if last < masses.size else 0.0
    return losses[first:last], kept


def _convolved(
    groups: Sequence[tuple[float, int]], delta: float
) -> tuple[FloatArray, FloatArray, float]:
    tail = delta * _TAIL_SHARE / len(groups)
    losses: FloatArray = np.zeros(1)
    masses: FloatArray = np.ones(1)
    for epsilon0, count in groups:
        more = _without_tails(*_loss_distribution(epsilon0, count), tail)
        more_losses, more_masses = _coarsened(*more, 2048)
        losses, masses = _coarsened(losses, masses, _MOST_ATOMS // more_losses.size)
        losses = np.add.outer(losses, more_losses).ravel()
        masses = np.multiply.outer(masses, more_masses).ravel()
    return losses, masses, tail * len(groups)


def _renyi_bound(epsilons: FloatArray, counts: FloatArray, delta: float) -> float:
    def epsilon_at(log_order: float) -> float:
        order = np.array([1 + math.exp(log_order)])
        total = counts @ rdp_of_pure(epsilons, order)
        return rdp_to_epsilon(order, np.array([total]), delta)

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

    Parameters
    ----------
    epsilons, counts : (num_kinds,)
        Strength and number of each kind of event.
    delta : float

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
    groups = [(float(e), int(n)) for e, n in zip(values, totals, strict=True)]
    losses, masses, tail = _convolved(groups, delta)
    bound = smallest_epsilon(
        lambda epsilon: _delta_of(losses, masses, epsilon), delta - tail, total, tolerance=1e-10
    )
    return min(total, bound, _renyi_bound(values, totals, delta))
