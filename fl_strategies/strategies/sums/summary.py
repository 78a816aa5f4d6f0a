"""What a party says of its records: one vector of whole numbers, and how far a record moves it.

Public rows alone decide how records are summed up. Whatever a server sends as that decision,
one record moves the vector by no more than `Summary.moved` says, so that noise for this
distance protects it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple, Self

import numpy as np

from fl_strategies.arrays import Array, FloatArray, IntArray, column_scales
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import KnowledgeMismatch

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
