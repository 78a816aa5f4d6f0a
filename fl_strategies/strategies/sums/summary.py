"""Sums of records as all heads have them: the interface, limits, and what a party sends.

Public rows alone decide how records are summed. Whatever a server sends as that decision, one
record moves the vector by no more than `Summary.moved` says, so that noise for this distance
protects it.

The number of a party's records is public, and so are the public rows. Limits made of these
alone depend on no record, and each moves two sums no farther apart than they are:

    possible     sums without noise that no records give are refused (`Summary.possible`)
    believed     a party counts for as many records as its claim makes likely
                 (`aggregation.evidence.believed_sizes`)
    plausible    sums are moved to the nearest that rows like the public ones give, whatever
                 their labels; with noise, as far as the noise is unlikely to reach

Which party contradicts the others depends on all of them. That is free where noise was added
before sums were sent, or where nothing is promised, and is done nowhere else.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple, Self

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray, column_scales
from fl_strategies.errors import KnowledgeMismatch, require_known
from fl_strategies.learners import Task

LARGEST_SUM: Final = 2**31 - 1
"""Largest number that travels; larger ones are clipped."""
MOST_EXACT: Final = 2**21
"""Most sums of one party; with noise there are fewer, `privacy.mechanisms.MOST_SUMS`."""
DIRECTION: Final = 2**12
"""Length of the vector of a party where all parties weigh the same."""
VALUES_AT_ONCE: Final = 2**22
"""Most values of rows that are placed at once, which bounds memory."""
LEAST_KNOWN: Final = 0.25
"""A party is compared by the classes of which it has this share of its mean class, at least."""
_CHANCE: Final = 1e-6
"""That noise alone reaches a limit."""


class PartySums(NamedTuple):
    """What a party sent: its sums, and how many records it claims; 1 at L1."""

    sums: IntArray
    num_records: int


class Summary(ABC):
    """A way to sum records that public rows define; it travels as arrays."""

    kind: ClassVar[str]
    """Its name in messages."""
    signed: ClassVar[bool]
    """Whether sums may be below 0."""
    names: ClassVar[tuple[str, ...]]
    """Arrays that it travels as and is made of: a mean and a rotation of rows first."""
    most: ClassVar[int]
    """Most cells or components that a party accepts from a server."""

    def check_task(self, num_classes: int, task: Task) -> None:
        """Raise `KnowledgeMismatch` unless records of such targets can be summed like this."""
        rule = f"with {num_classes} classes or labels"
        require_known(task != "regression", "Server", self.kind, rule, "numeric targets")

    @abstractmethod
    def shape(self, num_classes: int, task: Task) -> tuple[int, ...]:
        """Return the shape of a sum."""

    @abstractmethod
    def of_records(self, x: Array, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return the sum of some records, as integers."""

    @abstractmethod
    def moved(self, num_classes: int, task: Task) -> float:
        """Return the most, in L2 norm, by which replacing one record moves a sum.

        Of the multiplied sum, where there are `multiples`.
        """

    def multiples(self, num_classes: int, task: Task) -> IntArray | int:  # noqa: ARG002
        """Return whole numbers by which sums are multiplied before noise is added.

        The noise is as strong on each, so that a larger multiple has less of it.
        """
        return 1

    def unused(self, num_classes: int, task: Task) -> float:  # noqa: ARG002
        """Return how much less than `moved` replacing one record moves a sum, at least."""
        return 0.0

    @abstractmethod
    def possible(self, sums: IntArray, num_records: int, task: Task) -> bool:
        """Return whether so many records can have these sums, without noise.

        Those of records always can, so that a refusal tells nothing about a record.
        """

    @classmethod
    @abstractmethod
    def _fits(cls, arrays: Mapping[str, Array]) -> bool:
        """Return whether received arrays with a sound mean and rotation are of this kind."""

    def to_arrays(self) -> dict[str, Array]:
        """Return what parties need, as float32."""
        return {name: getattr(self, name).astype(np.float32) for name in self.names}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], num_values: int) -> Self:
        """Read what a server sent; raise `KnowledgeMismatch` for anything else."""
        if not (cls._is_sound(arrays, num_values) and cls._fits(arrays)):
            raise KnowledgeMismatch(
                f"Server: {cls.kind} must be {', '.join(cls.names)} for rows of {num_values} "
                f"values, at most {cls.most}, finite and float32, got others."
            )
        return cls(*(arrays[name].astype(np.float64) for name in cls.names))

    @classmethod
    def _is_sound(cls, arrays: Mapping[str, Array], num_values: int) -> bool:
        """Return whether all arrays are there and finite, a mean and a rotation of rows first.

        Products of numbers beyond float32 overflow, and those of smaller ones take a hundred
        times as long. Rows have no more principal components than values; more would fill
        memory.
        """
        if set(arrays) != set(cls.names) or any(a.dtype != np.float32 for a in arrays.values()):
            return False
        mean, turn = (arrays[name] for name in cls.names[:2])
        if mean.shape != (num_values,) or turn.ndim != 2 or len(turn) != num_values:
            return False
        finite = all(bool(np.isfinite(array).all()) for array in arrays.values())
        return finite and 0 < turn.shape[1] <= num_values

    @property
    def moved_by_party(self) -> float:
        """The most by which replacing one party moves the sum of directions.

        Two vectors of length `DIRECTION` are at most twice that apart; without negative
        entries they are at most at right angles.
        """
        return DIRECTION * (2.0 if self.signed else math.sqrt(2))


class Axes(NamedTuple):
    """Public rows less their mean, and their principal axes, largest first."""

    centred: FloatArray
    """Rows (n, num_values), unscaled."""
    mean: FloatArray
    scales: FloatArray
    """Factors of the columns before axes are found."""
    variances: FloatArray
    axes: FloatArray
    """One per column, (num_values, num_values)."""


def principal_axes(rows: Array) -> Axes:
    """Find the principal axes of public rows (n, ...)."""
    flat = rows.reshape(len(rows), -1).astype(np.float64)
    mean, scales = flat.mean(axis=0), column_scales(flat)
    centred = flat - mean
    scaled = centred * scales
    variances, axes = np.linalg.eigh(scaled.T @ scaled / len(flat))
    return Axes(centred, mean, scales, variances[::-1], axes[:, ::-1])


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
    """Return whether a received vector is at most `DIRECTION` long, in exact integers."""
    # Entries beyond it are found first, because their squares may overflow.
    return bool(np.abs(sums).max() <= DIRECTION) and int(np.square(sums).sum()) <= DIRECTION**2


def most_of_noise(noise: float, number: int = 1) -> float:
    """Return what none of so many draws of noise exceeds, but for a chance of 1e-6.

    Examples
    --------
    >>> round(most_of_noise(1.0), 2), round(most_of_noise(2.0, 1000), 2)
    (5.26, 12.88)
    """
    return noise * math.sqrt(2 * math.log(number / _CHANCE))


def known_classes(counts: FloatArray, noise: float) -> FloatArray:
    """Return 1 for the classes that a party with these counts can be compared by, else 0."""
    least = max(LEAST_KNOWN * float(counts.mean()), 2 * noise)
    return np.asarray(counts >= max(least, 1.0), dtype=np.float64)
