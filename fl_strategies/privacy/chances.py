"""How likely noise leaves a label as it would be without noise."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from fl_strategies.arrays import Array, FloatArray
from fl_strategies.privacy.events import Noise

_GRID: Final = (np.arange(4096) + 0.5) / 4096
_ROWS_AT_ONCE: Final = 2**22


def chance_kept(
    noise: Noise, gaps: Array, scale: float, times: Array | None = None
) -> FloatArray:
    """Return how likely the leading class is still the largest after noise on all classes.

    Parameters
    ----------
    noise : "gumbel", "laplace" or "gaussian"
        Gumbel noise by its closed form, a softmax; the others by quadrature.
    gaps : (n, num_gaps)
        By how much the leading class is ahead of each other class.
    scale : float
    times : (num_gaps,), optional
        How many classes each gap stands for; one by default.

    Examples
    --------
    >>> lead = np.array([[0.0], [1.0], [3.0]])
    >>> [chance_kept(noise, lead, 1.0).round(3).tolist() for noise in ("gumbel", "gaussian")]
    [[0.5, 0.731, 0.953], [0.5, 0.76, 0.983]]
    """
    ahead = np.asarray(gaps, dtype=np.float64) / scale
    power = np.ones(ahead.shape[1]) if times is None else np.asarray(times, dtype=np.float64)
    if noise == "gumbel":
        return np.asarray(1 / (1 + np.exp(-ahead) @ power))
    step = max(1, _ROWS_AT_ONCE // (_GRID.size * ahead.shape[1]))
    parts = [ahead[start : start + step] for start in range(0, len(ahead), step)]
    return np.concatenate([_by_quadrature(noise, part, power) for part in parts])


def _by_quadrature(noise: Noise, ahead: FloatArray, power: FloatArray) -> FloatArray:
    # Noise of the leading class at the middle of equally likely intervals.
    quantile, below = _DISTRIBUTIONS[noise]
    others_below = below(quantile(_GRID) + ahead[:, :, None]) ** power[:, None]
    return np.asarray(others_below.prod(axis=1).mean(axis=1))


def _laplace_quantile(chance: FloatArray) -> FloatArray:
    return np.where(chance < 0.5, np.log(2 * chance), -np.log(2 * (1 - chance)))


def _laplace_below(value: FloatArray) -> FloatArray:
    tail = np.exp(-np.abs(value)) / 2
    return np.where(value < 0, tail, 1 - tail)


_DISTRIBUTIONS: Final[
    Mapping[
        Noise, tuple[Callable[[FloatArray], FloatArray], Callable[[FloatArray], FloatArray]]
    ]
] = {
    "laplace": (_laplace_quantile, _laplace_below),
    "gaussian": (ndtri, ndtr),
}


def chance_of_plurality(num_leading: int, num_other: int, kept: float, classes: int) -> float:
    """Return how likely voters that answer at random still elect the leading class.

    Every voter names its own class with chance `kept` and each of the others equally often;
    ties are broken at random. Exact for two classes; for more, the counts of classes are
    taken as independent of each other, which they nearly are.

    Parameters
    ----------
    num_leading, num_other : int
        Voters of the leading class, and of the second; nobody is for a third.
    kept : float
    classes : int

    Examples
    --------
    >>> [round(chance_of_plurality(7, 3, kept, 2), 3) for kept in (0.5, 0.7, 1.0)]
    [0.5, 0.704, 1.0]
    """
    moved = (1 - kept) / (classes - 1)
    leading = _sum_of_binomials(num_leading, kept, num_other, moved)
    if classes == 2:
        middle = (num_leading + num_other) / 2
        votes = np.arange(leading.size)
        return float(leading[votes > middle].sum() + leading[votes == middle].sum() / 2)
    second = _sum_of_binomials(num_leading, moved, num_other, kept)
    rest = binom.pmf(np.arange(leading.size), num_leading + num_other, moved)
    # Sharing a tie with k others is the integral of s**k, which so many nodes have exactly.
    nodes, weights = np.polynomial.legendre.leggauss(min(classes, 64) // 2 + 1)
    won = 0.0
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        behind = [np.cumsum(part) - (1 - node) * part for part in (second, rest)]
        won += weight * float((leading * behind[0] * behind[1] ** (classes - 2)).sum())
    return won


def _sum_of_binomials(first: int, chance: float, second: int, other: float) -> FloatArray:
    one = binom.pmf(np.arange(first + 1), first, chance)
    two = binom.pmf(np.arange(second + 1), second, other)
    return np.convolve(one, two)
