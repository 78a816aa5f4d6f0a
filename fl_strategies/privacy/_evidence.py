"""The statistics of an audit: exact chances, fit, and what bets prove about epsilon.

Independent of the mechanisms on purpose: an error made twice would not be noticed.

References
----------
Clopper, Pearson (1934), The use of confidence or fiducial limits.
"""

from typing import Any

import numpy as np
import scipy

from fl_strategies.arrays import Array, FloatArray, IntArray

SIGNIFICANCE = 1e-6
"""Chance that a correct mechanism fails either of the two tests."""

CELLS = 8
"""Quantiles of noise that a table tells apart, per entry."""

# Cells in which fewer hits are expected are pooled: chi-square is an approximation.
_LEAST_EXPECTED = 10.0


def selection_chances(scaled: FloatArray, noise: Any) -> FloatArray:
    """Integrate density times the rivals' distribution functions, (num_classes,)."""
    # Laplace densities have a kink at every count: panels end there, and are exact between.
    steps = np.arange(scaled.min() - 40, scaled.max() + 41)
    ends = np.unique(np.concatenate([scaled, steps]))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half, middle = np.diff(ends) / 2, (ends[:-1] + ends[1:]) / 2
    points = (middle[:, None] + half[:, None] * nodes).ravel()
    gaps = points - scaled[:, None]
    below = noise.cdf(gaps)
    rivals = np.stack(
        [np.delete(below, own, axis=0).prod(axis=0) for own in range(len(scaled))]
    )
    return np.asarray((noise.pdf(gaps) * rivals) @ (half[:, None] * weights).ravel())


def fit(observed: IntArray, chances: FloatArray) -> float:
    """Return the p-value of tables (num_tables, num_cells) under their exact chances."""
    return corrected(
        np.array([_chi_square(*pair) for pair in zip(observed, chances, strict=True)])
    )


def corrected(p_values: Array) -> float:
    """Return the smallest p-value, corrected for choosing it among several."""
    return min(1.0, float(np.size(p_values) * np.min(p_values)))


def _chi_square(observed: IntArray, chances: FloatArray) -> float:
    expected = observed.sum() * chances
    # Cells too rare for the approximation join the rarest that is not.
    kept = max(1, int(np.count_nonzero(expected >= _LEAST_EXPECTED)))
    group = np.empty(expected.size, dtype=np.int64)
    group[np.argsort(-expected)] = np.minimum(np.arange(expected.size), kept - 1)
    counted = np.bincount(group, weights=observed)
    foreseen = np.bincount(group, weights=expected)
    statistic = ((counted - foreseen) ** 2 / foreseen).sum()
    return float(scipy.stats.chi2.sf(statistic, kept - 1)) if kept > 1 else 1.0


def pair_tables(uniform: FloatArray) -> IntArray:
    """Count cells of neighbouring entries, (num_pairs, num_cells); evenly filled if right.

    Pairs rather than single entries show noise that entries share.
    """
    cells = np.minimum((uniform * CELLS).astype(np.int64), CELLS - 1)
    codes = cells if cells.shape[1] == 1 else cells[:, :-1] * CELLS + cells[:, 1:]
    width = CELLS ** min(2, cells.shape[1])
    return np.stack([np.bincount(column, minlength=width) for column in codes.T])


def symmetric(span: float, count: int) -> FloatArray:
    """Return `count` thresholds for log-ratios between -span and span."""
    # Rounding must not keep the most telling outputs just below the last threshold.
    return np.linspace(-span, span, count) * (1 - 1e-9)


def reached(ratios: FloatArray, thresholds: FloatArray) -> IntArray:
    """Count the runs whose ratio is at least each threshold, (num_thresholds,)."""
    return ratios.size - np.searchsorted(np.sort(ratios), thresholds)


def lower_bounds(hits: IntArray, runs: int, deltas: Array) -> FloatArray:
    """Return what bets on sets of outputs prove about epsilon, (num_deltas,).

    Parameters
    ----------
    hits : (2, num_sets)
        How often each set was hit under the first and under the second input.
    runs : int
    deltas : (num_deltas,)
    """
    both = np.concatenate([hits, runs - hits], axis=1)
    # All bounds hold together: the upper bound of a set is the lower one of its complement.
    level = SIGNIFICANCE / both.size
    least = np.where(both > 0, scipy.stats.beta.ppf(level, both, runs - both + 1), 0.0)
    most = 1 - np.roll(least, hits.shape[1], axis=1)
    surplus = np.maximum(least - np.reshape(deltas, (-1, 1, 1)), 0.0)
    with np.errstate(divide="ignore"):
        proved = np.log(surplus / most[::-1])
    return np.asarray(np.maximum(proved.max(axis=(1, 2)), 0.0))
