"""Cells of the space of rows, made of public rows alone, and what a histogram of them says.

Public rows are centred and scaled by their own columns, turned to their principal components
and clustered, several times from different starts; a cell holds everything that is nearest to
one centre. Whatever the centres are, a record is in exactly one cell of each division, so that
replacing it moves a histogram of records by cell and class by one in two places of each.

Several divisions cost nothing: noise on counts grows with the root of their number, and falls
by as much when a row takes the mean of the cells that it is in. But rows at the rim of a cell
of one division are inside a cell of another.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import scipy

from fl_strategies.arrays import NEARLY_CONSTANT, Array, FloatArray, IntArray
from fl_strategies.core.tasks import Task
from fl_strategies.strategies.sums.summary import Summary, principal_axes
from fl_strategies.threads import one_blas_thread

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
