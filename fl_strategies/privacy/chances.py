"""How likely noise leaves a label as it would be without noise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import scipy

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


def _gaussian_quantile(chance: FloatArray) -> FloatArray:
    return np.asarray(scipy.special.ndtri(chance))


def _gaussian_below(value: FloatArray) -> FloatArray:
    return np.asarray(scipy.special.ndtr(value))


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
    "gaussian": (_gaussian_quantile, _gaussian_below),
}


def chance_of_plurality(votes: Sequence[int], kept: float, num_classes: int) -> float:
    """Return how likely voters that answer at random still elect the leading class.

    Every voter names its own class with chance `kept` and each of the others equally often;
    ties are broken at random. Exact for two classes. For more, it is as if each voter were
    loyal or answered blindly, and blind answers came to the classes independently of each
    other (Poisson), which leaves means and variances of all leads as they are.

    Parameters
    ----------
    votes : sequence of int
        Voters of the leading class, of the second and so on; nobody is for the rest.
    kept : float
    num_classes : int

    Examples
    --------
    >>> [round(chance_of_plurality([7, 3], kept, 2), 3) for kept in (0.5, 0.7, 1.0)]
    [0.5, 0.704, 1.0]
    """
    first, total, moved = votes[0], sum(votes), (1 - kept) / (num_classes - 1)
    if num_classes == 2:
        law = np.convolve(_binomial(first, kept), _binomial(total - first, moved))
        counts = np.arange(total + 1)
        return float(law[2 * counts > total].sum() + law[2 * counts == total].sum() / 2)
    sizes, times = np.unique([*votes[1:], 0], return_counts=True)
    times[0] += num_classes - len(votes) - 1
    loyal = max(kept - moved, 0.0)
    blind = scipy.stats.poisson.pmf(np.arange(total + 1), (1 - loyal) * total / num_classes)
    laws = [np.convolve(_binomial(own, loyal), blind)[: total + 1] for own in sizes.tolist()]
    leading = np.convolve(_binomial(first, loyal), blind)[: total + 1]
    # Sharing a tie with k others is the integral of s**k; so many nodes have it exactly.
    nodes, weights = np.polynomial.legendre.leggauss(min(num_classes, 64) // 2 + 1)
    won = 0.0
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        behind = np.ones(total + 1)
        for law, power in zip(laws, times, strict=True):
            behind *= (np.cumsum(law) - (1 - node) * law) ** power
        won += weight * float((leading * behind).sum())
    return won


def _binomial(number: int, chance: float) -> FloatArray:
    return np.asarray(scipy.stats.binom.pmf(np.arange(number + 1), number, chance))
