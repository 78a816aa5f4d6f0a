"""Rows as small numbers: which of a column's bins every value falls into."""

from typing import NamedTuple

import numpy as np

from clients.compiling import compiled, part
from fl_strategies.arrays import Array, FloatArray, IntArray


class Bins(NamedTuple):
    """Rows of a training set whose columns are cut into bins, all of them numbered through.

    Constant columns are dropped, but the first is not: there is a bin in any case.
    """

    codes: Array
    """Bin of every row in each column that is left, (n, u) of uint32."""
    starts: IntArray
    """First bin of each of these columns, and the number of all bins, (u + 1,)."""
    cuts: FloatArray
    """Largest number that every bin takes, (starts[-1],) of float32."""
    columns: IntArray
    """Numbers of the columns that are left, (u,)."""


def bin_rows(x: Array, max_bin: int) -> Bins:
    """Return the bins of rows (n, d) of float32, at most `max_bin` a column.

    Every value has a bin of its own where there are few enough; else bins are of about as many
    rows each. Cuts lie midway between the values of neighbouring bins.

    Examples
    --------
    >>> bins = bin_rows(np.array([[0, 7], [1, 7], [3, 7]], dtype=np.float32), 64)
    >>> bins.codes.ravel(), bins.cuts
    (array([0, 1, 2], dtype=uint32), array([0.5, 2. , inf], dtype=float32))
    """
    num_rows, width = x.shape
    ordered = np.sort(np.ascontiguousarray(x.T), axis=1)
    cuts = np.empty(width * min(max_bin, num_rows), dtype=np.float32)
    starts = np.zeros(width + 1, dtype=np.int64)
    columns = np.zeros(width, dtype=np.int64)
    kept = cut_columns(ordered, max_bin, cuts, starts, columns)
    starts, columns = starts[: kept + 1], columns[:kept]
    cuts = cuts[: starts[-1]].copy()
    codes = np.empty((num_rows, kept), dtype=np.uint32)
    # Another kind of array, such as a read-only one, would be compiled for anew.
    encode(np.require(x, requirements=("C", "W")), starts, cuts, columns, codes)
    return Bins(codes, starts, cuts, columns)


@compiled
def cut_columns(
    ordered: Array, max_bin: int, cuts: Array, starts: Array, columns: Array
) -> int:
    """Write the cuts of sorted columns (d, n), and return how many columns have any."""
    kept = used = 0
    for column in range(ordered.shape[0]):
        num_cuts = cut_column(ordered[column], max_bin, cuts[used:])
        if num_cuts or column == 0:
            cuts[used + num_cuts] = np.inf
            used += num_cuts + 1
            columns[kept] = column
            kept += 1
            starts[kept] = used
    return kept


@part
def cut_column(values: Array, max_bin: int, cuts: Array) -> int:
    """Write the cuts between sorted values (n,), and return how many there are."""
    num_rows, num_distinct = len(values), 1
    for i in range(1, num_rows):
        num_distinct += values[i] > values[i - 1]
    num_cuts = below = 0
    for i in range(1, num_rows):
        # A bin is full when it has its share of the rows that the bins before have left.
        full = (i - below) * (max_bin - num_cuts) >= num_rows - below
        if values[i] > values[i - 1] and (full or num_distinct <= max_bin):
            middle = values[i - 1] / np.float32(2) + values[i] / np.float32(2)
            # Between neighbouring numbers there is none: the smaller one is the cut.
            cuts[num_cuts] = middle if middle < values[i] else values[i - 1]
            num_cuts += 1
            below = i
            if num_cuts == max_bin - 1:
                break
    return num_cuts


@compiled
def encode(x: Array, starts: Array, cuts: Array, columns: Array, codes: Array) -> None:
    """Write the bin of every row: the first whose cut is not below the value."""
    for i in range(x.shape[0]):
        for j in range(len(columns)):
            value = x[i, columns[j]]
            code, left = starts[j], starts[j + 1] - starts[j] - 1
            while left:
                half = (left + 1) >> 1
                code += half if value > cuts[code + half - 1] else 0
                left -= half
            codes[i, j] = code
