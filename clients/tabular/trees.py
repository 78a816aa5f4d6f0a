"""Trees of any library as plain arrays, grown, walked and checked in numpy.

Nodes are in level order: the root, then its children, then theirs. The children of the
j-th split of a tree are then its nodes 2 j + 1 and 2 j + 2, so one bit per node, leaf or
not, is the whole structure. No child index is on the wire, and no native code walks a
received tree but the loops of `clients.tabular.boosted_trees`, which are written for them.

Forests are grown on rows as bits, one per threshold that a tree may split at: sixty-four rows
are compared, selected and counted in one step of the processor.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Final, NamedTuple, Self

import numpy as np

from clients.tabular.base import (
    MAX_LEVELS,
    MAX_TREES,
    require_array,
    require_memory,
    require_names,
    require_steps,
)
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import require_known
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES

WORD: Final = 64
MOST_THRESHOLDS: Final = 32
FEWEST_THRESHOLDS: Final = 4
# Columns of bits that a table may have; wide tables get fewer thresholds a feature.
MOST_COLUMNS: Final = 4096
_BYTES_AT_ONCE: Final = 2**24


class Thresholds(NamedTuple):
    """Possible splits: a row goes right where its feature is above the threshold."""

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
    parts = [np.zeros((0, num_words(len(x))), dtype=np.uint64)]
    for start in range(0, len(thresholds.features), step):
        features, values = (each[start : start + step] for each in thresholds)
        parts.append(pack(columns[features] > values[:, np.newaxis]))
    return np.concatenate(parts)


def bit_table(x: Array) -> BitTable:
    """Return the bits of rows (n, d) of float32 at thresholds of their own."""
    thresholds = choose_thresholds(x)
    starts = np.flatnonzero(np.diff(thresholds.features, prepend=-1))
    counts = np.diff(starts, append=len(thresholds.features))
    return BitTable(thresholds, starts, counts, bits_above(x, thresholds), len(x))


_NAMES: Final = {"tree-sizes", "leaf-bits", "features", "thresholds", "values"}
VALUES_AT_ONCE: Final = 2**18
# Up to here sets of rows go down a tree faster than row after row.
_LEVELS_BY_BITS: Final = 8
# What `Trees` takes for a node, and for a tree beside its nodes.
_NODE_BYTES: Final = 48
_TREE_BYTES: Final = 64


class NativeTree(NamedTuple):
    """One tree as libraries hold it: arrays over its nodes, children -1 for leaves.

    A row goes left where its feature is at most the threshold. `values` is (nodes, m).
    """

    left: IntArray
    right: IntArray
    features: IntArray
    thresholds: FloatArray
    values: FloatArray


def sklearn_tree(tree: Any, values: FloatArray) -> NativeTree:
    """Return a tree of scikit-learn, whose leaves say `values` (nodes, m)."""
    left, right = tree.children_left, tree.children_right
    return NativeTree(left, right, tree.feature, tree.threshold, values)


def num_received_trees(owner: str, arrays: Mapping[str, Array]) -> int:
    """Return how many trees a received forest has, which is its sender's choice."""
    count = int(np.size(arrays.get("tree-sizes", ())))
    known = 1 <= count <= MAX_TREES or "tree-sizes" not in arrays
    require_known(known, owner, "tree-sizes", f"those of 1 to {MAX_TREES} trees", count)
    return count


@dataclass(frozen=True, eq=False)
class Trees:
    """Trees whose leaves hold m numbers each.

    Parameters
    ----------
    sizes : (num_trees,)
        Nodes of every tree.
    leaf : (num_nodes,) of bool
        Whether a node is a leaf, in level order, tree after tree.
    features, thresholds : (num_splits,)
        A row goes left where this column, as float32, is at most the threshold.
    values : (num_leaves, m)
    """

    sizes: IntArray
    leaf: Array
    features: IntArray
    thresholds: FloatArray
    values: FloatArray

    @classmethod
    def grow(cls, native: Iterable[NativeTree]) -> Self:
        """Return the trees of a library."""
        sizes, parts = [], []
        for tree in native:
            order = _level_order(tree.left, tree.right)
            leaf = tree.left[order] < 0
            split = order[~leaf]
            thresholds = round_down(tree.thresholds[split])
            parts.append((leaf, tree.features[split], thresholds, tree.values[order[leaf]]))
            sizes.append(len(order))
        leaf, features, thresholds, values = map(np.concatenate, zip(*parts, strict=True))
        return cls(np.array(sizes), leaf, features.astype(np.int64), thresholds, values)

    def to_arrays(self, width: int) -> dict[str, Array]:
        """Return the trees of rows with `width` columns as arrays for the wire."""
        return {
            "tree-sizes": self.sizes.copy(),
            "leaf-bits": np.packbits(self.leaf),
            "features": self.features.astype(np.min_scalar_type(width - 1)),
            "thresholds": self.thresholds.copy(),
            "values": self.values.copy(),
        }

    @classmethod
    def from_arrays(
        cls,
        owner: str,
        arrays: Mapping[str, Array],
        *,
        num_trees: int,
        width: int,
        num_values: int,
        dtype: Any = np.float32,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> Self:
        """Return received trees; raise `KnowledgeMismatch` for all that are not whole."""
        require_names(owner, arrays, _NAMES)
        sizes = require_array(owner, arrays, "tree-sizes", np.int64, (num_trees,))
        total = sum(sizes.tolist())
        require_known(sizes.min() > 0, owner, "tree-sizes", "at least 1", sizes.min())
        needed = _NODE_BYTES * total + _TREE_BYTES * num_trees
        require_memory(owner, arrays, needed, max_bytes)
        bits = require_array(owner, arrays, "leaf-bits", np.uint8, (math.ceil(total / 8),))
        leaf = np.unpackbits(bits, count=total).astype(bool)
        num_splits, num_leaves = int((~leaf).sum()), int(leaf.sum())
        narrow = np.min_scalar_type(width - 1)
        features = require_array(owner, arrays, "features", narrow, (num_splits,))
        inside = bool((features < width).all())
        require_known(inside, owner, "features", f"below {width}", "a larger index")
        thresholds = require_array(owner, arrays, "thresholds", np.float32, (num_splits,))
        values = require_array(owner, arrays, "values", dtype, (num_leaves, num_values))
        _check_levels(owner, sizes, leaf)
        return cls(sizes, leaf, features.astype(np.int64), thresholds, values)

    def leaf_values(self, x: Array) -> Iterator[FloatArray]:
        """Yield the leaves' numbers, (num_trees, b, m), for the next b rows of float32."""
        num_trees, m = len(self.sizes), self.values.shape[1]
        step = max(1, VALUES_AT_ONCE // (num_trees * m))
        for start in range(0, len(x), step):
            leaves = self._leaves(x[start : start + step])
            yield self.values[leaves].reshape(num_trees, -1, m)

    def sums(self, x: Array, offsets: FloatArray) -> FloatArray:
        """Return offsets (k,) plus the numbers of the trees, (n, k), for rows of float32.

        Leaves hold one number. The trees belong to the k sums in turn and are added one after
        the other, as XGBoost does: the last bit of a sum depends on it. Trees may have been
        received: a sum that is not finite becomes a number nevertheless.
        """
        parts = [self._added(leaf_values, offsets) for leaf_values in self.leaf_values(x)]
        return np.concatenate(parts) if parts else np.empty((0, len(offsets)), np.float32)

    @staticmethod
    def _added(leaf_values: FloatArray, offsets: FloatArray) -> FloatArray:
        leaves = leaf_values.reshape(-1, len(offsets), leaf_values.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):
            start = np.broadcast_to(offsets[:, np.newaxis], leaves.shape[1:])
            total = reduce(np.add, leaves, start)
        return np.nan_to_num(total).T

    def mean_values(self, x: Array) -> FloatArray:
        """Return the mean of the leaves' numbers over all trees, (n, m), for float32 rows."""
        num_trees, columns = len(self.sizes), self.values.T.astype(np.float64)
        means = np.empty((len(x), len(columns)))
        step = max(1, 2 * VALUES_AT_ONCE // num_trees)
        for start in range(0, len(x), step):
            leaves = self._leaves(x[start : start + step]).reshape(num_trees, -1)
            for means_of, values in zip(means.T, columns, strict=True):
                means_of[start : start + step] = values.take(leaves).sum(axis=0) / num_trees
        return means

    def leaf_means(self, x: Array, targets: FloatArray) -> FloatArray:
        """Return the mean targets (n, m) of the rows in every leaf; some must be in each."""
        leaves = self._leaves(x)
        sizes = np.bincount(leaves, minlength=len(self.values))
        tiled = (np.tile(column, len(self.sizes)) for column in targets.T)
        sums = [np.bincount(leaves, weights=own, minlength=len(sizes)) for own in tiled]
        return np.asarray((np.stack(sums, axis=1) / sizes[:, np.newaxis]).astype(np.float32))

    def _leaves(self, x: Array) -> IntArray:
        """Return the number of the leaf that every row falls into, tree by tree, flat."""
        shallow = self._num_levels <= _LEVELS_BY_BITS
        return self._leaves_by_bits(x) if shallow else self._leaves_by_walk(x)

    def _leaves_by_walk(self, x: Array) -> IntArray:
        """Move every row down every tree."""
        nodes = np.repeat(self._roots, len(x))
        rows = np.tile(np.arange(len(x)), len(self.sizes))
        walking = np.flatnonzero(~self.leaf[nodes])
        while walking.size:
            splits = self._number[nodes[walking]]
            columns = x[rows[walking], self.features[splits]]
            reached = self._left[splits] + (columns > self.thresholds[splits])
            nodes[walking] = reached
            walking = walking[~self.leaf[reached]]
        leaves: IntArray = self._number[nodes]
        return leaves

    def _leaves_by_bits(self, x: Array) -> IntArray:
        """Split whole sets of rows, one bit a row.

        Where rows turn right, level by level, are the digits of a number that no two leaves
        of a tree share.
        """
        lines, line_of = self._splits
        above = bits_above(x, lines)
        nodes, trees = self._roots, np.arange(len(self.sizes))
        rows, numbers = np.full((len(nodes), above.shape[1]), ~np.uint64(0)), nodes * 0
        turns = np.zeros((len(nodes), len(x)), dtype=np.uint8)
        leaf_at = np.zeros((len(nodes), 2**_LEVELS_BY_BITS), dtype=np.int64)
        for level in range(_LEVELS_BY_BITS + 1):
            leaf = self.leaf[nodes]
            leaf_at[trees[leaf], numbers[leaf]] = self._number[nodes[leaf]]
            if leaf.all():
                break
            split = self._number[nodes[~leaf]]
            trees, rows, numbers = trees[~leaf], rows[~leaf], numbers[~leaf]
            right = rows & above[line_of[split]]
            first = np.flatnonzero(np.diff(trees, prepend=-1))
            turned = unpack(np.bitwise_or.reduceat(right, first, axis=0), len(x))
            turns[trees[first]] |= turned << np.uint8(level)
            nodes = _pairs(self._left[split], self._left[split] + 1)
            rows, numbers = _pairs(rows ^ right, right), _pairs(numbers, numbers | 1 << level)
            trees = np.repeat(trees, 2)
        first = np.arange(0, leaf_at.size, leaf_at.shape[1])
        leaves: IntArray = leaf_at.reshape(-1).take(turns + first[:, np.newaxis])
        return leaves.reshape(-1)

    @cached_property
    def _num_levels(self) -> int:
        """Most splits that a row passes in a tree, up to one more than bits are used for."""
        nodes = self._roots
        for level in range(_LEVELS_BY_BITS + 1):
            nodes = nodes[~self.leaf[nodes]]
            if not len(nodes):
                return level
            left = self._left[self._number[nodes]]
            nodes = _pairs(left, left + 1)
        return _LEVELS_BY_BITS + 1

    @cached_property
    def _splits(self) -> tuple[Thresholds, IntArray]:
        """The distinct splits of all trees, and which of them each split is."""
        bits = np.ascontiguousarray(self.thresholds, dtype=np.float32).view(np.uint32)
        keys = self.features.astype(np.uint64) << np.uint64(32) | bits
        distinct, line = np.unique(keys, return_inverse=True)
        features = (distinct >> np.uint64(32)).astype(np.int64)
        values = (distinct & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
        return Thresholds(features, values), line

    @cached_property
    def _roots(self) -> IntArray:
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def _number(self) -> IntArray:
        """Number of every node among the splits, or among the leaves, of all trees."""
        return np.where(self.leaf, np.cumsum(self.leaf), np.cumsum(~self.leaf)) - 1

    @cached_property
    def _left(self) -> IntArray:
        """Left child of every split; the right one is the next node."""
        splits_of_tree = (self.sizes - 1) // 2
        before = np.repeat(np.cumsum(splits_of_tree) - splits_of_tree, splits_of_tree)
        number_in_tree = np.arange(len(before)) - before
        return np.repeat(self._roots, splits_of_tree) + 2 * number_in_tree + 1


def _pairs(left: Array, right: Array) -> Array:
    """Return left[0], right[0], left[1], right[1] and so on, along the first axis."""
    return np.stack([left, right], axis=1).reshape(-1, *left.shape[1:])


def _level_order(left: IntArray, right: IntArray) -> IntArray:
    """Return the nodes below the root 0, level after level, children side by side."""
    levels = [np.zeros(1, dtype=np.int64)]
    while levels[-1].size:
        split = levels[-1][left[levels[-1]] >= 0]
        levels.append(np.stack([left[split], right[split]], axis=1).reshape(-1))
    return np.concatenate(levels)


def round_down(thresholds: FloatArray) -> FloatArray:
    """Return float32 thresholds that split float32 numbers exactly as the float64 ones do.

    Examples
    --------
    >>> bool(round_down(np.array([0.7]))[0] <= 0.7 < np.float32(0.7) + 1e-7)
    True
    """
    narrow = thresholds.astype(np.float32)
    lower = np.nextafter(narrow, np.float32(-np.inf))
    rounded: FloatArray = np.where(narrow > thresholds, lower, narrow)
    return rounded


def _check_levels(owner: str, sizes: IntArray, leaf: Array) -> None:
    """Raise unless the bits of every tree are exactly one tree in level order.

    A tree whose first nodes up to `end` hold s splits continues up to node 2 s + 1. It is
    whole if this ends at its size: every node but the root then has one parent before it.
    """
    splits_before = np.concatenate([[0], np.cumsum(~leaf)])
    roots = np.cumsum(sizes) - sizes
    end, levels = np.ones_like(sizes), np.zeros_like(sizes)
    for _ in range(MAX_LEVELS + 1):
        reached = roots + np.minimum(end, sizes)
        following = 2 * (splits_before[reached] - splits_before[roots]) + 1
        if np.array_equal(following, end):
            break
        levels += following > end
        end = following
    require_steps(owner, levels)
    whole = np.array_equal(end, sizes)
    require_known(whole, owner, "leaf-bits", "whole trees", "a part or more than a tree")
