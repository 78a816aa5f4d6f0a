"""Limits on the sums of one party, given its number of records.

The number of a party's records is public, and what public rows are like is too. Limits made
of these alone depend on no record, and each moves two sums no farther apart than they are:

    possible     sums without noise that no records give are refused (`Summary.possible`)
    believed     a party counts for as many records as its claim makes likely
                 (`aggregation.evidence.believed_sizes`)
    plausible    sums are moved to the nearest that rows like the public ones give, whatever
                 their labels; with noise, as far as the noise is unlikely to reach

Which party contradicts the others depends on all of them. That is free where noise was added
before sums were sent, or where nothing is promised, and is done nowhere else.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import scipy

from fl_strategies._util.arrays import FloatArray, IntArray
from fl_strategies._util.threads import one_blas_thread

FARTHEST: Final = 2.0
"""Square of the length of a mean of features times labels, where the features of public rows
have deviation 1 in every direction. Labels of rows like these give 1 at most, the rows of one
class alone up to 1 divided by its share."""
LEAST_KNOWN: Final = 0.25
"""A party is judged by classes of which it has this share of its mean class, at least."""
LEAST_AGREEMENT: Final = 0.5
"""With noise, nobody is judged where the median party agrees less than this with others: small
parties' sums are mostly noise then."""
_CHANCE: Final = 1e-6
"""That noise alone reaches a limit."""


class PartySums(NamedTuple):
    """What a party sent: its sums, and how many records it says they are of.

    The number is 1 at L1, where nobody asks for it.
    """

    sums: IntArray
    num_records: int


def most_of_noise(noise: float, number: int = 1) -> float:
    """Return what none of so many draws of noise exceeds, but for a chance of 1e-6.

    Examples
    --------
    >>> round(most_of_noise(1.0), 2), round(most_of_noise(2.0, 1000), 2)
    (5.26, 12.88)
    """
    return noise * math.sqrt(2 * math.log(number / _CHANCE))


def plausible_counts(counts: IntArray, num_records: int, noise: float) -> FloatArray | IntArray:
    """Return noisy counts (divisions, cells, ...) as a party of so many records may have them.

    A class has as many records in each division, so that the mean of its totals has little
    noise; they are what one party could add to a class everywhere. Counts that are plausible
    are returned as they are.
    """
    divisions, cells = counts.shape[:2]
    classes = int(np.prod(counts.shape[2:]))
    labels = counts.shape[3] if counts.ndim == 4 else 1
    room = most_of_noise(noise, counts.size)
    found = np.clip(counts, -room, num_records + room)
    totals = found.sum(axis=1).mean(axis=0)
    room = most_of_noise(noise * math.sqrt(cells / divisions), classes)
    found = found - (totals - np.clip(totals, -room, num_records + room)) / cells
    # Records of a cell at most, and noise of the usual length.
    longest = num_records * math.sqrt(divisions * labels)
    longest += noise * math.sqrt(counts.size) + most_of_noise(noise)
    found = found * min(1.0, longest / max(float(np.linalg.norm(found)), 1e-300))
    return counts if np.array_equal(found, counts) else np.asarray(found)


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """Means of features times labels that rows like the public ones give.

    By the inequality of Bessel, a mean m of features times numbers from -1 to 1 has
    m' S^-1 m at most 1, where S is the mean square of the features. Projections on a convex
    set bring no two points farther apart.

    Parameters
    ----------
    squares : (num_features,)
        Mean squares of features along the axes.
    axes : (num_features, num_features)
        One a column.
    """

    squares: FloatArray
    axes: FloatArray

    @classmethod
    @one_blas_thread()
    def of_features(cls, features: IntArray, longest: float) -> "Ellipsoid":
        """Return that of public rows, and of one more that is as long as rows can be."""
        squares, axes = np.linalg.eigh(features.T @ features / len(features))
        return cls(np.maximum(squares, 0.0) + longest**2 / len(features), axes)

    @one_blas_thread()
    def project(
        self, sums: IntArray, num_records: int, noise: float, num_labels: int = 1
    ) -> FloatArray | IntArray:
        """Return the nearest plausible sums; plausible ones as they are.

        Parameters
        ----------
        sums : (num_features, columns)
        num_records : int
        noise : float
            Deviation of the noise on each sum.
        num_labels : int
            Labels of a record.
        """
        variance = (noise / num_records) ** 2
        squares = self.squares + variance
        parts = variance / squares
        # Means of few rows are as much longer as there are features.
        usual = num_labels * (FARTHEST + len(squares) / num_records)
        by_noise = math.sqrt(sums.shape[1] * float(parts.sum()))
        by_noise += most_of_noise(math.sqrt(float(parts.max())))
        most = (math.sqrt(usual) + by_noise) ** 2
        along = self.axes.T @ (sums / num_records)
        energy = np.square(along).sum(axis=1)

        def beyond(shift: float) -> float:
            return float((energy * squares / (squares + shift) ** 2).sum()) - most

        if beyond(0.0) <= 0:
            return sums
        largest = math.sqrt(float((energy * squares).sum()) / most)
        shift = scipy.optimize.brentq(beyond, 0.0, largest, xtol=1e-300, rtol=1e-15)
        nearest = self.axes @ (along * (squares / (squares + shift))[:, None])
        return np.asarray(nearest * num_records)


def known_classes(counts: FloatArray, noise: float) -> FloatArray:
    """Return 1 for the classes that a party with these counts can be judged by, else 0."""
    least = max(LEAST_KNOWN * float(counts.mean()), 2 * noise)
    return np.asarray(counts >= max(least, 1.0), dtype=np.float64)
