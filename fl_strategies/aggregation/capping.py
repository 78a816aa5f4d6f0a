"""What parties claim, cut to what the claims of all others make plausible.

A claim is a number of records, or how loud a party's scores are. Sums are kept in groups of
claims a factor of two wide, so that a claim can be cut after the last party has answered and
nothing but sums is kept of any.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from fl_strategies.arrays import Array, FloatArray

_LARGEST_GROUP: Final = 41
MOST_TIMES_LOUDNESS: Final = 2.0
"""A party is heard as loudly as so many times the median party at most."""


class Claims:
    """Claims of parties, each of which belongs to a group.

    Parameters
    ----------
    believe : callable
        What is believed of all claims, (num_parties,) to (num_parties,).
    """

    def __init__(self, believe: Callable[[FloatArray], FloatArray]) -> None:
        self._believe = believe
        self._claimed: list[float] = []

    def add(self, claim: float) -> int:
        """Take a claim and return its group."""
        self._claimed.append(claim)
        return _group(claim)

    def parts(self) -> dict[int, float]:
        """Return the groups that are cut, and which part of them is believed."""
        parts: dict[int, float] = {}
        for claimed, part in zip(self._claimed, self._believed_parts(), strict=True):
            if part < 1:
                group = _group(claimed)
                parts[group] = min(parts.get(group, 1.0), float(part))
        return parts

    @property
    def num_cut(self) -> int:
        """How many claims are not believed in full."""
        return int((self._believed_parts() < 1).sum())

    def _believed_parts(self) -> FloatArray:
        claimed = np.array(self._claimed)
        if not len(claimed):
            return claimed
        believed = self._believe(claimed)
        return np.where(claimed > 0, believed / np.where(claimed > 0, claimed, 1.0), 1.0)


def _group(claim: float) -> int:
    """Return the exponent of the smallest power of two above a claim, within reason."""
    return min(max(math.frexp(claim)[1], 0), _LARGEST_GROUP)


def loudness(scores: Array) -> float:
    """Return the root of the mean square of scores."""
    return float(np.sqrt(np.mean(np.square(scores, dtype=np.float64))))


def believed_loudness(claimed: FloatArray) -> FloatArray:
    """Return how loudly each party is heard.

    Examples
    --------
    >>> believed_loudness(np.array([1.0, 2.0, 3.0, 100.0]))
    array([1., 2., 3., 5.])
    """
    return np.asarray(np.minimum(claimed, MOST_TIMES_LOUDNESS * float(np.median(claimed))))
