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

from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.strategies.sums.summary import Summary, are_float32

USUAL_COMPONENTS: Final = 30
_ROUNDS: Final = 20
_STARTS: Final = 5
_FLATTENED: Final = 0.25
"""Components are divided by this power of their spread, so that the first decide less alone."""
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
        variances, axes = np.linalg.eigh(scaled.T @ scaled / len(flat))
        least = _NEARLY_CONSTANT * max(float(variances[-1]), np.finfo(float).tiny)
        flatter = np.maximum(variances, least) ** (-_FLATTENED / 2)
        turn = scales[:, None] * (axes * flatter)[:, ::-1][:, :num_components]
        placed = (flat - mean) @ turn
        found = [_cluster(placed, num_cells, rng) for _ in range(_STARTS)]
        return cls(mean, turn, min(found, key=lambda centres: _spread(placed, centres)))

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return len(self.centres)

    def find(self, rows: Array) -> IntArray:
        """Return the cell of every row, (n,); each row has one, whatever its values."""
        flat = rows.reshape(len(rows), -1)
        found = np.empty(len(flat), dtype=np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            step = max(1, _VALUES_AT_ONCE // max(self.num_cells, flat.shape[1]))
            for start in range(0, len(flat), step):
                part = slice(start, start + step)
                placed = (flat[part] - self.mean) @ self.turn
                found[part] = np.argmin(_distances(placed, self.centres), axis=1)
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


def _cluster(rows: FloatArray, num_cells: int, rng: np.random.Generator) -> FloatArray:
    """Return centres of k-means, (num_cells, d), from rows that are far from each other."""
    centres = _far_rows(rows, num_cells, rng)
    for _ in range(_ROUNDS):
        nearest = np.argmin(_distances(rows, centres), axis=1)
        sums, counts = np.zeros_like(centres), np.bincount(nearest, minlength=num_cells)
        np.add.at(sums, nearest, rows)
        centres = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
    return centres


def _far_rows(rows: FloatArray, number: int, rng: np.random.Generator) -> FloatArray:
    """Draw rows in proportion to their squared distance from those drawn (k-means++)."""
    chosen = [int(rng.integers(len(rows)))]
    least = np.full(len(rows), np.inf)
    for _ in range(number - 1):
        least = np.minimum(least, np.square(rows - rows[chosen[-1]]).sum(axis=1))
        total = float(least.sum())
        shares = least / total if total > 0 else None
        chosen.append(int(rng.choice(len(rows), p=shares)))
    return rows[chosen]


def _spread(rows: FloatArray, centres: FloatArray) -> float:
    """Return the sum of squared distances of rows from their centres, but for a constant."""
    return float(_distances(rows, centres).min(axis=1).sum())


def _distances(rows: FloatArray, centres: FloatArray) -> FloatArray:
    """Return squared distances less those of rows from zero, (n, k)."""
    distances: FloatArray = np.square(centres).sum(axis=1) - 2 * rows @ centres.T
    return distances


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
