"""Rows that are mostly zeros, or mostly the same in every column, without what is the same."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from clients.compiled.dense import Rows, count_others, list_others
from clients.networks.training import as_float32
from fl_strategies._util import Array, FloatArray

ROWS_PER_CHUNK: Final = 512
MOST_ASKED: Final = 63
FEW_ASKED: Final = 15
TOO_LARGE: Final = 4


def share_of_others(x: Array) -> float:
    """Return the share of numbers that differ from the background, by some of the rows."""
    asked = _some(x)
    return float((asked != _background(asked)).mean())


def sparse_rows(x: Array) -> Rows:
    """Return rows (n, ...) as float32 and flat; refuse numbers beyond its range."""
    background = _background(_some(x))
    counts = np.empty(len(x), dtype=np.int64)
    places, values = [], []
    for start in range(0, len(x), ROWS_PER_CHUNK):
        rows = _flat(x[start : start + ROWS_PER_CHUNK])
        own = counts[start : start + ROWS_PER_CHUNK]
        count_others(rows, background, own)
        found = int(own.sum())
        places.append(np.empty(found + 1, dtype=np.uint32))
        values.append(np.empty(found + 1, dtype=np.float32))
        list_others(rows, background, places[-1], values[-1])
    starts = np.append(0, np.cumsum(counts)).astype(np.uint64)
    return Rows(starts, _joined(places), _joined(values), background)


def _joined(parts: Sequence[Array]) -> Array:
    """Return parts as one, each without the last number, which `list_others` may waste."""
    return np.concatenate([part[:-1] for part in parts])


def _flat(x: Array) -> FloatArray:
    return as_float32("x", [x]).reshape(len(x), -1)


def _some(x: Array) -> FloatArray:
    """Return an odd number of rows from all over a set."""
    count = min(MOST_ASKED, (len(x) - 1) // 2 * 2 + 1)
    return _flat(x[np.linspace(0, len(x) - 1, count).astype(np.int64)])


def _background(rows: FloatArray) -> FloatArray:
    """Return the number that most rows have in a column, 0 where there is none.

    If more than half of an odd number are equal, their median is what they are. Numbers far
    above all others are skipped: a difference to them would have no digits of the others.
    Few rows have none: what they have in common would be rounding to Adam, which takes the
    smallest slopes for large if it has seen no others.
    """
    background = np.zeros(rows.shape[1], dtype=np.float32)
    if len(rows) < FEW_ASKED:
        return background
    rest = 2 * (rows == 0).sum(axis=0) <= len(rows)
    middle = np.median(rows[:, rest], axis=0)
    common = 2 * (rows[:, rest] == middle).sum(axis=0) > len(rows)
    background[rest] = np.where(common, middle, 0)
    largest = np.abs(rows, where=rows != background, out=np.zeros_like(rows)).max(initial=0)
    background[np.abs(background) > TOO_LARGE * largest] = 0
    return background
