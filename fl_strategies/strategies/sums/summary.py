"""Summaries of records: the interface, and the histogram of cells.

What a party says of its records: one vector of whole numbers, and how far a record moves it.

Public rows alone decide how records are summed up. Whatever a server sends as that decision,
one record moves the vector by no more than `Summary.moved` says, so that noise for this
distance protects it.

Cells of the space of rows, made of public rows alone, and what a histogram of them says.

Public rows are centred and scaled by their own columns, turned to their principal components
and clustered, several times from different starts; a cell holds everything that is nearest to
one centre. Whatever the centres are, a record is in exactly one cell of each division, so that
replacing it moves a histogram of records by cell and class by one in two places of each.

Several divisions cost nothing: noise on counts grows with the root of their number, and falls
by as much when a row takes the mean of the cells that it is in. But rows at the rim of a cell
of one division are inside a cell of another.

Limits on the sums of one party, given its number of records.

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
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Self

import numpy as np
import scipy

from fl_strategies._util import (
    NEARLY_CONSTANT,
    Array,
    FloatArray,
    IntArray,
    column_scales,
    one_blas_thread,
)
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.learners import Task

LARGEST_SUM: Final = 2**31 - 1
"""Largest number that travels; larger ones are cut."""
DIRECTION: Final = 2**12
"""Length of the vector of a party where all parties weigh the same."""


class Summary(ABC):
    """A way to sum records up that public rows define; it travels as arrays."""

    kind: ClassVar[str]
    """What it is called in messages."""
    signed: ClassVar[bool]
    """Whether sums may be below 0."""
    names: ClassVar[tuple[str, ...]]
    """Arrays that it travels as and is made of: a mean and a turn of rows first."""
    most: ClassVar[int]
    """Most cells or components that a party takes from a server."""

    @abstractmethod
    def shape(self, num_classes: int, task: Task) -> tuple[int, ...]:
        """Return the shape of a sum."""

    @abstractmethod
    def of_records(self, x: Array, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return the sum of some records, as whole numbers."""

    @abstractmethod
    def moved(self, num_classes: int, task: Task) -> float:
        """Return the most, in L2 norm, by which replacing one record moves a sum."""

    def unused(self, num_classes: int, task: Task) -> float:  # noqa: ARG002
        """Return how much less than `moved` replacing one record moves a sum, at least."""
        return 0.0

    @abstractmethod
    def possible(self, sums: IntArray, num_records: int, task: Task) -> bool:
        """Tell whether so many records can have these sums, without noise.

        Those of records always can, so that a refusal tells of no record.
        """

    @classmethod
    @abstractmethod
    def _fits(cls, arrays: Mapping[str, Array]) -> bool:
        """Tell whether received arrays with a sound mean and turn are of this kind."""

    def to_arrays(self) -> dict[str, Array]:
        """Return what parties need, as float32."""
        return {name: getattr(self, name).astype(np.float32) for name in self.names}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], num_values: int) -> Self:
        """Read what a server sent; raise `KnowledgeMismatch` for anything else."""
        if not (_are_turn(arrays, cls.names, num_values) and cls._fits(arrays)):
            raise KnowledgeMismatch(
                f"Server: {cls.kind} must be {', '.join(cls.names)} for rows of {num_values} "
                f"values, at most {cls.most}, finite and float32, got others."
            )
        return cls(*(arrays[name].astype(np.float64) for name in cls.names))

    @property
    def moved_by_party(self) -> float:
        """The most by which replacing one party moves the sum of directions.

        Two vectors of length `DIRECTION` are at most twice that apart; without negative
        entries they are at most at right angles.
        """
        return DIRECTION * (2.0 if self.signed else math.sqrt(2))


class Axes(NamedTuple):
    """Public rows less their mean, and the principal axes of them, largest first."""

    centred: FloatArray
    """Rows (n, num_values) as they are otherwise."""
    mean: FloatArray
    scales: FloatArray
    """What columns are multiplied by before axes are found."""
    variances: FloatArray
    axes: FloatArray
    """One a column, (num_values, num_values)."""


def principal_axes(rows: Array) -> Axes:
    """Find the principal axes of public rows (n, ...)."""
    flat = rows.reshape(len(rows), -1).astype(np.float64)
    mean, scales = flat.mean(axis=0), column_scales(flat)
    centred = flat - mean
    scaled = centred * scales
    variances, axes = np.linalg.eigh(scaled.T @ scaled / len(flat))
    return Axes(centred, mean, scales, variances[::-1], axes[:, ::-1])


def _are_turn(arrays: Mapping[str, Array], names: Sequence[str], num_values: int) -> bool:
    """Tell whether received arrays are these, finite, and a mean and a turn of rows first.

    Products of numbers beyond float32 overflow, and those of smaller ones take a hundred
    times as long. Rows have no more principal components than values; more would fill a
    memory.
    """
    if set(arrays) != set(names) or any(a.dtype != np.float32 for a in arrays.values()):
        return False
    mean, turn = (arrays[name] for name in names[:2])
    if mean.shape != (num_values,) or turn.ndim != 2 or len(turn) != num_values:
        return False
    finite = all(bool(np.isfinite(array).all()) for array in arrays.values())
    return finite and 0 < turn.shape[1] <= num_values


def direction(sums: IntArray) -> IntArray:
    """Return a vector of length `DIRECTION` or slightly less that points where `sums` does.

    Rounded towards zero, so that its length is never more.

    Examples
    --------
    >>> direction(np.array([[3, 0], [0, -4]]))
    array([[ 2457,     0],
           [    0, -3276]])
    """
    length = float(np.linalg.norm(sums.astype(np.float64)))
    if length == 0:
        return np.zeros_like(sums)
    shortened: IntArray = np.trunc(sums * ((DIRECTION - 0.5) / length)).astype(np.int64)
    return shortened


def is_direction(sums: IntArray) -> bool:
    """Tell whether a received vector is at most `DIRECTION` long; exactly, by whole numbers."""
    # Entries beyond it are found first, because their squares may overflow.
    return bool(np.abs(sums).max() <= DIRECTION) and int(np.square(sums).sum()) <= DIRECTION**2


USUAL_COMPONENTS: Final = 30
_ROUNDS: Final = 20
_FLATTENED: Final = 0.25
"""Components are divided by this power of their spread, so that the first decide less alone."""
MOST_DIVISIONS: Final = 64
MOST_RECEIVED: Final = 2**16
"""Most cells that a party takes from a server, which could otherwise keep it busy for ever."""
_VALUES_AT_ONCE: Final = 2**22


@dataclass(frozen=True, eq=False)
class Cells(Summary):
    """Divisions of the space of rows.

    Parameters
    ----------
    mean : (num_values,)
    turn : (num_values, num_components)
        Scales and turns centred rows.
    centres : (num_divisions, num_cells, num_components)
    """

    kind: ClassVar[str] = "cells"
    signed: ClassVar[bool] = False
    names: ClassVar[tuple[str, ...]] = ("mean", "turn", "centres")
    most: ClassVar[int] = MOST_RECEIVED

    mean: FloatArray
    turn: FloatArray
    centres: FloatArray

    @classmethod
    @one_blas_thread()
    def of_rows(
        cls,
        rows: Array,
        num_cells: int,
        num_components: int,
        rng: np.random.Generator,
        num_divisions: int = 1,
    ) -> "Cells":
        """Divide the space by public rows (n, ...)."""
        centred, mean, scales, variances, axes = principal_axes(rows)
        least = NEARLY_CONSTANT * max(float(variances[0]), np.finfo(float).tiny)
        flatter = np.maximum(variances, least) ** (-_FLATTENED / 2)
        turn = scales[:, None] * (axes * flatter)[:, :num_components]
        placed = centred @ turn
        return cls(
            mean,
            turn,
            np.stack([_cluster(placed, num_cells, rng) for _ in range(num_divisions)]),
        )

    @property
    def num_divisions(self) -> int:
        """Number of divisions."""
        return len(self.centres)

    @property
    def num_cells(self) -> int:
        """Number of cells of each division."""
        return int(self.centres.shape[1])

    @one_blas_thread()
    def find(self, rows: Array) -> Array:
        """Return the cell of every row in each division, (num_divisions, n).

        Each row has one, whatever its values.
        """
        flat = rows.reshape(len(rows), -1)
        # Two bytes a place are enough for `MOST_RECEIVED` cells, whoever has sent them.
        found = np.empty((self.num_divisions, len(flat)), dtype=np.uint16)
        with np.errstate(over="ignore", invalid="ignore"):
            step = max(1, _VALUES_AT_ONCE // max(self.num_cells, flat.shape[1]))
            for start in range(0, len(flat), step):
                part = slice(start, start + step)
                placed = (flat[part] - self.mean) @ self.turn
                for number, centres in enumerate(self.centres):
                    found[number, part] = np.argmin(_distances(placed, centres), axis=1)
        return found

    def shape(self, num_classes: int, task: Task) -> tuple[int, ...]:
        """Return cells by classes, or by those without and with each of several labels."""
        classes = (2, num_classes) if task == "multi-label" else (num_classes,)
        return (self.num_divisions, self.num_cells, *classes)

    def of_records(self, x: Array, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return how many records each cell has of each class."""
        shape = self.shape(num_classes, task)[1:]
        return np.stack([count_records(cells, y, shape, task) for cells in self.find(x)])

    def moved(self, num_classes: int, task: Task) -> float:
        """Return the root of 2 for each division: a record leaves one count and enters another.

        With several labels it does so for each of them.
        """
        labels = num_classes if task == "multi-label" else 1
        return math.sqrt(2 * labels * self.num_divisions)

    def possible(self, sums: IntArray, num_records: int, task: Task) -> bool:
        """Tell whether so many records can be counted like this.

        Each division has all of them, and as many of a class as any other.
        """
        totals = sums.sum(axis=1)
        if sums.min() < 0 or (totals != totals[0]).any():
            return False
        if task == "multi-label":
            return bool((totals[0].sum(axis=0) <= num_records).all())
        return int(totals[0].sum()) == num_records

    def counts_of(self, rows: Array, totals: FloatArray) -> FloatArray:
        """Return the mean counts of the cells that rows are in, (n, ...)."""
        by_division = zip(totals, self.find(rows), strict=True)
        return np.asarray(sum(total[cells] for total, cells in by_division) / len(totals))

    @classmethod
    def _fits(cls, arrays: Mapping[str, Array]) -> bool:
        centres = arrays["centres"]
        if centres.ndim != 3 or centres.shape[2:] != arrays["turn"].shape[1:]:
            return False
        num_divisions, num_cells, _ = centres.shape
        few = num_divisions <= MOST_DIVISIONS
        return bool(few and 0 < num_divisions * num_cells <= cls.most)


def _cluster(rows: FloatArray, num_cells: int, rng: np.random.Generator) -> FloatArray:
    """Return centres of k-means, (num_cells, d)."""
    with warnings.catch_warnings():
        # Rows that are equal leave cells empty, which harms nobody.
        warnings.simplefilter("ignore", UserWarning)
        centres, _ = scipy.cluster.vq.kmeans2(rows, num_cells, _ROUNDS, minit="points", rng=rng)
    return np.asarray(centres)


def _distances(rows: FloatArray, centres: FloatArray) -> FloatArray:
    """Return squared distances less those of rows from zero, (n, k)."""
    distances: FloatArray = np.square(centres).sum(axis=1) - 2 * rows @ centres.T
    return distances


def count_records(cells: Array, y: Array, shape: tuple[int, ...], task: Task) -> IntArray:
    """Return how many records each cell has of each class, or with and without each label.

    Parameters
    ----------
    cells : (n,)
    y : (n,) classes, or (n, num_labels) of -1 (unknown), 0 and 1
    shape : (num_cells, num_classes), or (num_cells, 2, num_labels) of multi-label learning
    """
    counts = np.zeros(shape, dtype=np.int64)
    if task == "single-label":
        np.add.at(counts, (cells, y), 1)
        return counts
    rows, labels = np.nonzero(y >= 0)
    np.add.at(counts, (cells[rows], y[rows, labels].astype(np.int64), labels), 1)
    return counts


def class_shares(counts: FloatArray, noise: float) -> FloatArray:
    """Return the shares of classes in every cell, (num_cells, num_classes).

    Counts within one deviation of the noise say nothing; where all do, the largest counts
    alone. With labels, counts (num_cells, 2, num_labels) give the share that has each.
    """
    heard = np.maximum(counts - noise, 0.0)
    largest = counts == counts.max(axis=1, keepdims=True)
    heard = np.where(heard.sum(axis=1, keepdims=True) > 0, heard, largest)
    shares = heard / heard.sum(axis=1, keepdims=True)
    return np.asarray(shares[:, 1] if counts.ndim == 3 else shares)


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
