"""Rows as bits: one bit a row for every threshold that a forest may split at.

Sixty-four rows are compared, selected and counted in one step of the processor, so that a
forest is grown in a few passes of numpy over all its trees.
"""

from typing import Final, NamedTuple

import numpy as np

from fl_strategies.arrays import Array, FloatArray, IntArray

WORD: Final = 64
MOST_THRESHOLDS: Final = 32
FEWEST_THRESHOLDS: Final = 4
# Columns of bits that a table may have; wide tables get fewer thresholds a feature.
MOST_COLUMNS: Final = 4096
_BYTES_AT_ONCE: Final = 2**24


class Thresholds(NamedTuple):
    """Where rows can be split: a row goes right where its feature is above the threshold."""

    features: IntArray
    values: FloatArray


class BitTable(NamedTuple):
    """Rows of a training set, one line of bits for each threshold."""

    thresholds: Thresholds
    starts: IntArray
    """First threshold of every feature that has any, (u,)."""
    counts: IntArray
    words: Array
    """Whether rows are above a threshold, (m, w) of uint64."""
    num_rows: int


def num_words(num_rows: int) -> int:
    """Return how many words hold one bit a row."""
    return -(-num_rows // WORD)


def pack(flags: Array) -> Array:
    """Return flags (..., n) as words (..., w) of uint64, the first row in the lowest bit."""
    packed = np.packbits(np.ascontiguousarray(flags), axis=-1, bitorder="little")
    spare = 8 * num_words(flags.shape[-1]) - packed.shape[-1]
    if spare:
        packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, spare)])
    return packed.view("<u8").astype(np.uint64, copy=False)


def unpack(words: Array, num_rows: int) -> Array:
    """Return words (..., w) as flags (..., num_rows) of 0 and 1."""
    octets = np.ascontiguousarray(words, dtype="<u8").view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=num_rows, bitorder="little")


def choose_thresholds(x: Array) -> Thresholds:
    """Return thresholds between neighbouring values, spread over the quantiles of rows (n, d).

    Examples
    --------
    >>> choose_thresholds(np.array([[0.0, 7.0], [1.0, 7.0], [3.0, 7.0]], dtype=np.float32))
    Thresholds(features=array([0, 0]), values=array([0.5, 2. ], dtype=float32))
    """
    num_rows, width = x.shape
    most = min(MOST_THRESHOLDS, max(FEWEST_THRESHOLDS, MOST_COLUMNS // width))
    ordered = np.sort(np.ascontiguousarray(x.T), axis=1)
    features, places = np.nonzero(ordered[:, 1:] > ordered[:, :-1])
    # Of the gaps in each share of the rows the first is taken.
    shares = features * most + (places + 1) * most // num_rows
    first = np.ones(len(shares), dtype=bool)
    first[1:] = shares[1:] != shares[:-1]
    features, places = features[first], places[first]
    below, above = ordered[features, places], ordered[features, places + 1]
    middle = below / 2 + above / 2
    # Between neighbouring numbers there is none: the smaller one then stays below.
    return Thresholds(features, np.where(middle < above, middle, below))


def bits_above(x: Array, thresholds: Thresholds) -> Array:
    """Return which rows (n, d) of float32 are above each threshold, (m, w)."""
    columns = np.ascontiguousarray(x.T)
    step = max(1, _BYTES_AT_ONCE // (4 * max(1, len(x))))
    parts = [
        pack(columns[features] > values[:, np.newaxis])
        for features, values in (
            (thresholds.features[start : start + step], thresholds.values[start : start + step])
            for start in range(0, len(thresholds.features), step)
        )
    ]
    empty = np.zeros((0, num_words(len(x))), dtype=np.uint64)
    return np.concatenate(parts) if parts else empty


def bit_table(x: Array) -> BitTable:
    """Return the bits of rows (n, d) of float32 at thresholds of their own."""
    thresholds = choose_thresholds(x)
    starts = np.flatnonzero(np.diff(thresholds.features, prepend=-1))
    counts = np.diff(starts, append=len(thresholds.features))
    return BitTable(thresholds, starts, counts, bits_above(x, thresholds), len(x))
