"""Cells of the space of rows, made of public rows alone, and what a histogram of them says.

Public rows are centred and scaled by their own columns, turned to their principal components
and clustered; a cell holds everything that is nearest to one centre. Whatever the centres
are, a record is in exactly one cell, so that replacing it moves a histogram of records by
cell and class by one in two places.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from scipy.cluster.vq import kmeans2

from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.strategies.sums.summary import Summary, are_float32

USUAL_COMPONENTS: Final = 20
_ROUNDS: Final = 20
MOST_RECEIVED: Final = 2**16
"""Most cells that a party takes from a server, which could otherwise keep it busy for ever."""
_VALUES_AT_ONCE: Final = 2**22
_NEARLY_CONSTANT: Final = 1e-6
_NAMES: Final = ("mean", "turn", "centres")


@dataclass(frozen=True, eq=False)
class Cells(Summary):
    """A division of the space of rows.

    Parameters
    ----------
    mean : (num_values,)
    turn : (num_values, num_components)
        Scales and turns centred rows.
    centres : (num_cells, num_components)
    """

    kind: ClassVar[str] = "cells"
    signed: ClassVar[bool] = False

    mean: FloatArray
    turn: FloatArray
    centres: FloatArray

    @classmethod
    def of_rows(
        cls, rows: Array, num_cells: int, num_components: int, rng: np.random.Generator
    ) -> "Cells":
        """Divide the space by public rows (n, ...)."""
        flat = rows.reshape(len(rows), -1).astype(np.float64)
        mean, scales = flat.mean(axis=0), column_scales(flat)
        scaled = (flat - mean) * scales
        _, axes = np.linalg.eigh(scaled.T @ scaled / len(flat))
        turn = scales[:, None] * axes[:, ::-1][:, :num_components]
        centres, _ = kmeans2((flat - mean) @ turn, num_cells, _ROUNDS, minit="++", rng=rng)
        return cls(mean, turn, centres)

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return len(self.centres)

    def find(self, rows: Array) -> IntArray:
        """Return the cell of every row, (n,); each row has one, whatever its values."""
        flat = rows.reshape(len(rows), -1)
        found = np.empty(len(flat), dtype=np.int64)
        norms = np.square(self.centres).sum(axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            step = max(1, _VALUES_AT_ONCE // max(self.num_cells, flat.shape[1]))
            for start in range(0, len(flat), step):
                part = slice(start, start + step)
                placed = (flat[part] - self.mean) @ self.turn
                found[part] = np.argmin(norms - 2 * placed @ self.centres.T, axis=1)
        return found

    def shape(self, num_classes: int, task: Task) -> tuple[int, ...]:
        """Return cells by classes, or by those without and with each of several labels."""
        several = task == "multi-label"
        return (self.num_cells, 2, num_classes) if several else (self.num_cells, num_classes)

    def of_records(self, x: Array, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return how many records each cell has of each class."""
        return count_records(self.find(x), y, self.shape(num_classes, task), task)

    def moved(self, num_classes: int, task: Task) -> float:
        """Return the root of 2: a record leaves one count and enters another.

        With several labels it does so for each of them.
        """
        return math.sqrt(2 * (num_classes if task == "multi-label" else 1))

    def to_arrays(self) -> dict[str, Array]:
        """Return what parties need, as float32."""
        return {name: getattr(self, name).astype(np.float32) for name in _NAMES}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], num_values: int) -> "Cells":
        """Read what a server sent; raise `KnowledgeMismatch` for anything else."""
        problem = KnowledgeMismatch(
            f"Server: cells must be {', '.join(_NAMES)} for rows of {num_values} values, at "
            f"most {MOST_RECEIVED}, finite and float32, got others."
        )
        if not are_float32(arrays, _NAMES):
            raise problem
        if not (0,) < arrays["centres"].shape[:1] <= (MOST_RECEIVED,):
            raise problem
        mean, turn, centres = (arrays[name].astype(np.float64) for name in _NAMES)
        shaped = mean.shape == (num_values,) and turn.ndim == centres.ndim == 2
        if not shaped or turn.shape != (num_values, *centres.shape[1:]):
            raise problem
        # Rows have no more principal components than values; more would fill a memory.
        if not 0 < turn.shape[1] <= num_values:
            raise problem
        if not all(np.isfinite(part).all() for part in (mean, turn, centres)):
            raise problem
        return cls(mean, turn, centres)


def column_scales(rows: FloatArray) -> FloatArray:
    """Return what columns are multiplied by: 1 if they share a unit, or one over the spread.

    They do if most columns span about as much as the widest: pixels, indicators, frequencies.
    """
    spans, spread = np.ptp(rows, axis=0), rows.std(axis=0)
    if np.median(spans) >= spans.max(initial=0.0) / 2:
        return np.ones(rows.shape[1])
    varies = spread > _NEARLY_CONSTANT * np.abs(rows).max(axis=0, initial=0.0)
    return np.where(varies, 1.0 / np.where(varies, spread, 1.0), 0.0)


def count_records(cells: IntArray, y: Array, shape: tuple[int, ...], task: Task) -> IntArray:
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
