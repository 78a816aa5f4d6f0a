"""A forest of randomised trees without any library but numpy.

A node is a line of bits for each class: which of its rows have that class. What a split would
send to the right is counted by one operation on the words of the line, for all candidates of
all nodes together. Every node draws its candidates from a key of its own, so that a tree is
the same however many others grow beside it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import numpy as np

from clients.tabular.base import SharedRows, TabularLearner, WeightedLabels, to_float32
from clients.tabular.trees import (
    WORD,
    BitTable,
    Trees,
    bit_table,
    num_received_trees,
    pack,
    unpack,
)
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import require, require_known
from fl_strategies.learners import TrainingSet

MOST_LEVELS: Final = 60
"""Deepest split of a tree without a limit; receivers accept somewhat more on average."""
_LEVELS_PER_STAGE: Final = 6
_WORDS_AT_ONCE: Final = 2**15
_STAGE_BYTES: Final = 2**25
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)
_BY_NODE: Final = ("lines", "models", "ids", "keys")
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)


class Planting(NamedTuple):
    """Inputs of the trees of one model."""

    table: BitTable
    classes: Array
    """Whether a row counts for a class in a tree, (k, w, num_trees) of uint64."""
    keys: Array
    """Start of each tree's randomness, (num_trees,) of uint64."""


class Limits(NamedTuple):
    """Limits of growth."""

    max_depth: int
    num_candidates: int


def class_bits(labels: IntArray, num_classes: int, num_trees: int) -> Array:
    """Return the bits of labels (n,), or (num_trees, n), for every class and tree."""
    flags = np.stack([labels == number for number in range(num_classes)])
    words = np.moveaxis(pack(flags), -1, 1)
    if labels.ndim == 2:
        return words
    return np.repeat(words[:, :, np.newaxis], num_trees, axis=2)


def grow_forests(plantings: Sequence[Planting], limits: Limits) -> list[Trees]:
    """Return the trees of every model; leaves hold the shares of its classes.

    All models have the same number of trees and of classes.
    """
    grown = _Grown(sum(len(each.keys) for each in plantings))
    waiting = list(_first_stages(plantings, limits))
    while waiting:
        waiting.extend(_grow_stage(waiting.pop(), limits, grown))
    return grown.trees([len(each.keys) for each in plantings])


@dataclass(frozen=True, eq=False)
class _Tables:
    """The candidates of all models, one after the other."""

    features: IntArray
    thresholds: FloatArray
    starts: IntArray
    counts: Array
    first_start: IntArray
    num_usable: Array
    first_column: IntArray

    @classmethod
    def join(cls, tables: Sequence[BitTable]) -> "_Tables":
        usable = np.array([len(each.starts) for each in tables])
        columns = np.array([len(each.words) for each in tables])
        return cls(
            features=np.concatenate([each.thresholds.features for each in tables]),
            thresholds=np.concatenate([each.thresholds.values for each in tables]),
            starts=np.concatenate([each.starts for each in tables]),
            counts=np.concatenate([each.counts for each in tables]).astype(np.uint64),
            first_start=np.cumsum(usable) - usable,
            num_usable=usable.astype(np.uint64),
            first_column=np.cumsum(columns) - columns,
        )


@dataclass(frozen=True, eq=False)
class _Stage:
    """Nodes of one level that split the same words.

    Parameters
    ----------
    tables : _Tables
    words : (w, lines)
        Whether rows are above a threshold.
    lines : (n,)
        Where in `words` the table of a node begins.
    models : (n,)
        Whose thresholds a node chooses from.
    ids, keys : (n,)
    classes : (k, w, n)
    depth : int
    """

    tables: _Tables
    words: Array
    lines: IntArray
    models: IntArray
    ids: IntArray
    keys: Array
    classes: Array
    depth: int

    def at(self, nodes: IntArray | slice) -> "_Stage":
        """Return some of the nodes, in their order; without a copy if they are neighbours."""
        own = {name: getattr(self, name)[nodes] for name in _BY_NODE}
        if isinstance(nodes, slice):
            return replace(self, classes=self.classes[:, :, nodes], **own)
        return replace(self, classes=self.classes.take(nodes, axis=2), **own)


def _first_stages(plantings: Sequence[Planting], limits: Limits) -> Iterator[_Stage]:
    """Yield the roots of all trees, as many at a time as memory is meant to take."""
    first_ids = np.cumsum([0, *(len(each.keys) for each in plantings)])
    by_size: dict[int, list[int]] = {}
    for number, each in enumerate(plantings):
        by_size.setdefault(each.table.words.shape[1], []).append(number)
    for size, numbers in by_size.items():
        roots = _roots([plantings[number] for number in numbers], first_ids[numbers])
        levels = min(limits.max_depth, _LEVELS_PER_STAGE)
        step = max(1, _STAGE_BYTES // (8 * size * len(roots.classes) * 2**levels))
        for start in range(0, len(roots.ids), step):
            yield roots.at(slice(start, start + step))


def _roots(plantings: Sequence[Planting], first_ids: IntArray) -> _Stage:
    """Return the roots of models whose tables have the same number of words."""
    shared = {id(each.table): each.table for each in plantings}
    places = {key: place for place, key in enumerate(shared)}
    tables = _Tables.join(list(shared.values()))
    sizes = [len(each.keys) for each in plantings]
    models = np.repeat([places[id(each.table)] for each in plantings], sizes)
    own = np.concatenate([np.arange(size) for size in sizes])
    return _Stage(
        tables=tables,
        words=np.ascontiguousarray(np.concatenate([each.words for each in shared.values()]).T),
        lines=tables.first_column[models],
        models=models,
        ids=np.repeat(first_ids, sizes) + own,
        keys=np.concatenate([each.keys for each in plantings]),
        classes=np.concatenate([each.classes for each in plantings], axis=2),
        depth=0,
    )


def _grow_stage(stage: _Stage, limits: Limits, grown: "_Grown") -> list[_Stage]:
    """Grow nodes to the end, or until their rows are few and worth packing anew."""
    while len(stage.ids):
        counts = (
            np.bitwise_count(stage.classes).sum(axis=-2, dtype=np.uint32).T.astype(np.float64)
        )
        splittable = stage.tables.num_usable[stage.models] > 0
        mixed = counts.max(axis=1) < counts.sum(axis=1)
        open_nodes = splittable & mixed & (stage.depth < limits.max_depth)
        grown.add_leaves(stage.ids[~open_nodes], counts[~open_nodes])
        if not open_nodes.all():
            stage, counts = stage.at(np.flatnonzero(open_nodes)), counts[open_nodes]
        if _is_sparse(stage, counts):
            return list(_packed_anew(stage, counts))
        columns = _best_columns(stage, counts, limits.num_candidates)
        found = columns >= 0
        grown.add_leaves(stage.ids[~found], counts[~found])
        stage = _children(stage.at(np.flatnonzero(found)), columns[found], grown)
    return []


def _best_columns(stage: _Stage, counts: FloatArray, num_candidates: int) -> IntArray:
    """Return the candidate of every node that separates classes best, -1 where none does."""
    step = max(1, _WORDS_AT_ONCE // (num_candidates * len(stage.words)))
    parts = [
        _best_of(stage.at(some), counts[some], num_candidates)
        for some in (slice(start, start + step) for start in range(0, len(counts), step))
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _best_of(stage: _Stage, counts: FloatArray, num_candidates: int) -> IntArray:
    columns = _draw_columns(stage, num_candidates)
    above = stage.words.take(columns + stage.lines, axis=1)
    bits = (np.bitwise_count(above & own[:, np.newaxis]) for own in stage.classes)
    right = np.stack([own.sum(axis=0, dtype=np.uint32).astype(np.float64) for own in bits])
    left = counts.T[:, np.newaxis] - right
    # The sum of squared class counts over rows, on both sides: the larger, the purer.
    with np.errstate(divide="ignore", invalid="ignore"):
        purity = (right**2).sum(axis=0) / right.sum(axis=0)
        purity += (left**2).sum(axis=0) / left.sum(axis=0)
    before = (counts**2).sum(axis=1) / counts.sum(axis=1)
    gains = np.where(np.isnan(purity), -1.0, purity - before)
    best = gains.argmax(axis=0)
    nodes = np.arange(len(best))
    return np.where(gains[best, nodes] > 1e-9 * before, columns[best, nodes], -1)


def _draw_columns(stage: _Stage, num_candidates: int) -> IntArray:
    """Return random thresholds of random features for every node, (c, n), of its own table."""
    tables, models = stage.tables, stage.models
    steps = _GOLDEN * np.arange(1, num_candidates + 1, dtype=np.uint64)
    drawn = _mixed(stage.keys + steps[:, np.newaxis])
    feature = _below(drawn >> _HALF, tables.num_usable[models]) + tables.first_start[models]
    return np.asarray(
        tables.starts[feature] + _below(drawn & _LOW_HALF, tables.counts[feature])
    )


def _below(drawn: Array, ends: Array) -> IntArray:
    """Return numbers below `ends`, of random numbers of 32 bits."""
    return np.asarray((drawn * ends >> _HALF).astype(np.int64))


def _mixed(keys: Array) -> Array:
    """Return other random-looking keys: the finaliser of SplitMix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(keys ^ (keys >> np.uint64(31)))


def _children(stage: _Stage, columns: IntArray, grown: "_Grown") -> _Stage:
    """Return the children of split nodes, left and right side by side."""
    above = stage.words.take(columns + stage.lines, axis=1)
    right = stage.classes & above
    both = np.stack([stage.classes ^ right, right], axis=-1)
    ids = grown.add_splits(
        stage.ids,
        stage.tables.features[columns + stage.tables.first_column[stage.models]],
        stage.tables.thresholds[columns + stage.tables.first_column[stage.models]],
    )
    key = _mixed(stage.keys)
    return _Stage(
        tables=stage.tables,
        words=stage.words,
        lines=np.repeat(stage.lines, 2),
        models=np.repeat(stage.models, 2),
        ids=ids,
        keys=np.stack([key, _mixed(key + _GOLDEN)], axis=1).reshape(-1),
        classes=both.reshape(*both.shape[:2], -1),
        depth=stage.depth + 1,
    )


def _is_sparse(stage: _Stage, counts: FloatArray) -> bool:
    """Tell whether the nodes' rows fill so little of their words that a copy pays."""
    return bool(0 < counts.sum() < len(counts) * len(stage.words))


def _packed_anew(stage: _Stage, counts: FloatArray) -> Iterator[_Stage]:
    """Yield the nodes with words of their own rows only, those of similar size together."""
    num_rows = counts.sum(axis=1).astype(np.int64)
    sizes = 2 ** np.ceil(np.log2(np.maximum(num_rows / WORD, 1))).astype(np.int64)
    ends = np.append(stage.tables.first_column[1:], len(stage.tables.features))
    num_lines = (ends - stage.tables.first_column)[stage.models]
    for size in np.unique(sizes).tolist():
        nodes = np.flatnonzero(sizes == size)
        nodes = nodes[np.argsort(stage.lines[nodes], kind="stable")]
        step = max(1, _STAGE_BYTES // (size * WORD * int(num_lines[nodes].max())))
        for start in range(0, len(nodes), step):
            some = nodes[start : start + step]
            yield _pack_nodes(stage.at(some), num_rows[some], num_lines[some], size)


def _pack_nodes(stage: _Stage, num_rows: IntArray, num_lines: IntArray, size: int) -> _Stage:
    """Return nodes with `size` words of their own; bits beyond their rows have no class."""
    members = unpack(np.bitwise_or.reduce(stage.classes, axis=0).T, len(stage.words) * WORD)
    rows = np.zeros((len(num_rows), size * WORD), dtype=np.int64)
    inside = np.arange(size * WORD) < num_rows[:, np.newaxis]
    rows[inside] = np.nonzero(members)[1]
    tables = np.flatnonzero(np.diff(stage.lines, prepend=-1))
    words = [
        _pack_table(stage, rows[start:end], slice(line, line + count))
        for start, end, line, count in zip(
            tables,
            [*tables[1:], len(rows)],
            stage.lines[tables],
            num_lines[tables],
            strict=True,
        )
    ]
    own = stage.classes[:, rows // WORD, np.arange(len(rows))[:, np.newaxis]]
    flags = (own >> (rows % WORD).astype(np.uint64) & np.uint64(1)).astype(bool) & inside
    return replace(
        stage,
        words=np.concatenate(words, axis=1),
        lines=np.cumsum(num_lines) - num_lines,
        classes=np.ascontiguousarray(pack(flags).transpose(0, 2, 1)),
    )


def _pack_table(stage: _Stage, rows: IntArray, lines: slice) -> Array:
    """Return the lines of one table for the rows (n, r) of its nodes, node after node."""
    flags = unpack(stage.words[:, lines].T, len(stage.words) * WORD)
    packed = pack(flags.take(rows, axis=1)).transpose(2, 1, 0)
    return packed.reshape(len(packed), -1)


class _Grown:
    """Nodes of all trees as they are found, in any order; the first are the roots."""

    def __init__(self, num_roots: int) -> None:
        self._size = num_roots
        self._splits: list[tuple[IntArray, IntArray, IntArray, FloatArray]] = []
        self._leaves: list[tuple[IntArray, FloatArray]] = []

    def add_leaves(self, ids: IntArray, counts: FloatArray) -> None:
        """Take nodes with the counts of their classes, (n, k)."""
        shares = counts / counts.sum(axis=1, keepdims=True)
        self._leaves.append((ids, shares.astype(np.float32)))

    def add_splits(self, ids: IntArray, features: IntArray, thresholds: FloatArray) -> IntArray:
        """Take nodes that were split; return the numbers of their children, in pairs."""
        children = self._size + np.arange(2 * len(ids))
        self._splits.append((ids, children[::2], features, thresholds))
        self._size += len(children)
        return children

    def trees(self, num_trees: Sequence[int]) -> list[Trees]:
        """Return the trees of each model in level order."""
        left = np.full(self._size, -1)
        features = np.zeros(self._size, dtype=np.int64)
        thresholds = np.zeros(self._size, dtype=np.float32)
        for ids, children, own_features, own_thresholds in self._splits:
            left[ids], features[ids], thresholds[ids] = children, own_features, own_thresholds
        values = np.zeros((self._size, self._leaves[0][1].shape[1]), dtype=np.float32)
        for ids, shares in self._leaves:
            values[ids] = shares
        forests = []
        for roots in np.split(np.arange(sum(num_trees)), np.cumsum(num_trees)[:-1]):
            order, sizes = _tree_by_tree(left, roots)
            leaf = left[order] < 0
            split = order[~leaf]
            forests.append(
                Trees(sizes, leaf, features[split], thresholds[split], values[order[leaf]])
            )
        return forests


def _tree_by_tree(left: IntArray, roots: IntArray) -> tuple[IntArray, IntArray]:
    """Return nodes in level order, tree after tree, and the number of nodes of each."""
    levels, owners = [roots], [np.arange(len(roots))]
    while levels[-1].size:
        split = np.flatnonzero(left[levels[-1]] >= 0)
        children = left[levels[-1][split]]
        levels.append(np.stack([children, children + 1], axis=1).reshape(-1))
        owners.append(np.repeat(owners[-1][split], 2))
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    return np.concatenate(levels)[order], np.bincount(owner, minlength=len(roots))


OWNER: Final = "ForestLearner"
FEWEST_CANDIDATES: Final = 8
_SHARED: Final[SharedRows[BitTable]] = SharedRows()


class ForestLearner(TabularLearner):
    """Extremely randomised trees on quantiles, grown all at once.

    Every node splits at the best of a few random thresholds of random features, by the Gini
    impurity; thresholds lie between quantiles of the training rows. All trees learn from all
    rows and differ by their candidates. In all this the forest is that of Geurts, Ernst and
    Wehenkel (Extremely randomized trees, 2006), and as accurate as scikit-learn's random
    forests, but rows are bits and all trees of a party's teachers or students grow in the same
    few steps of numpy: at six levels it takes a tenth of scikit-learn's time or less.

    Soft targets: every tree draws a label for each row, and leaves hold the mean targets of
    their rows.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list.
    num_trees : int (default: 100)
    max_depth : int, optional
        Levels of splits in a tree, at least 1; by default until leaves are pure or no candidate
        splits them, which may take twice as long as in scikit-learn.
    num_candidates : int, optional
        Splits that a node compares; by default the square root of the number of features, but
        at least 8.

    Examples
    --------
    >>> import numpy as np
    >>> learner = ForestLearner(num_classes=3, num_trees=10)
    >>> x, y = np.array([[0.0], [1.0], [2.0]]), np.array([0, 2, 2])
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(x)
    array([0, 2, 2])
    """

    def __init__(
        self,
        *,
        num_classes: int,
        num_trees: int = 100,
        max_depth: int | None = None,
        num_candidates: int | None = None,
    ) -> None:
        super().__init__(num_classes=num_classes)
        require(num_trees >= 1, OWNER, "num_trees", "at least 1", num_trees)
        deep = max_depth is None or 1 <= max_depth <= MOST_LEVELS
        require(deep, OWNER, "max_depth", f"from 1 to {MOST_LEVELS}", max_depth)
        some = num_candidates is None or num_candidates >= 1
        require(some, OWNER, "num_candidates", "at least 1", num_candidates)
        self._num_trees = num_trees
        self._max_depth = max_depth or MOST_LEVELS
        self._num_candidates = num_candidates
        self._trees: Trees

    def fit_many(
        self, sets: Sequence[TrainingSet], *, rngs: Sequence[np.random.Generator]
    ) -> list[Self]:
        """Return one new fitted twin per training set, each as `fit` makes it by itself."""
        twins, unfitted = self._twins(sets, rngs)
        waiting: dict[tuple[int, int], list[tuple[Self, Planting]]] = {}
        tables: dict[int, BitTable] = {}
        for twin, rows, labels, rng, is_shared in unfitted:
            if id(rows) not in tables:
                shared = _SHARED.get(rows, bit_table) if is_shared else bit_table(rows)
                tables[id(rows)] = shared
            planting = self._planting(tables[id(rows)], labels, twin._num_present, rng)
            waiting.setdefault((twin._width, twin._num_present), []).append((twin, planting))
        for (width, _), group in waiting.items():
            forests = grow_forests([planting for _, planting in group], self._limits(width))
            for (twin, _), trees in zip(group, forests, strict=True):
                twin._trees = trees
        return twins

    def _limits(self, width: int) -> Limits:
        usual = max(FEWEST_CANDIDATES, math.isqrt(width))
        return Limits(self._max_depth, self._num_candidates or usual)

    def _planting(
        self, table: BitTable, labels: IntArray, num_present: int, rng: np.random.Generator
    ) -> Planting:
        keys = rng.integers(2**64, size=self._num_trees, dtype=np.uint64)
        return Planting(table, class_bits(labels, num_present, self._num_trees), keys)

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        table = bit_table(to_float32(self._owner, x))
        planting = self._planting(table, y, int(y.max()) + 1, rng)
        self._trees = grow_forests([planting], self._limits(x.shape[1]))[0]

    @property
    def _takes_weights(self) -> bool:
        return True

    def _fit_weighted(self, x: Array, labels: WeightedLabels, rng: np.random.Generator) -> None:
        rows, num_present = to_float32(self._owner, x), int(labels.classes.max()) + 1
        drawn = _drawn_labels(labels, len(rows), self._num_trees, rng)
        planting = self._planting(bit_table(rows), drawn, num_present, rng)
        trees = grow_forests([planting], self._limits(x.shape[1]))[0]
        targets = np.zeros((len(rows), num_present))
        targets[labels.rows, labels.classes] = labels.weights
        self._trees = replace(trees, values=trees.leaf_means(rows, targets))

    def _probabilities(self, x: Array) -> FloatArray:
        return self._trees.mean_values(to_float32(self._owner, x))

    def _to_arrays(self) -> dict[str, Array]:
        return self._trees.to_arrays(self._width)

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        trees = Trees.from_arrays(
            OWNER,
            arrays,
            num_trees=num_received_trees(OWNER, arrays),
            width=self._width,
            num_values=self._num_present,
        )
        shares = trees.values
        sound = shares.min() >= 0 and np.allclose(shares.sum(axis=1), 1, atol=1e-4)
        require_known(bool(sound), OWNER, "values", "shares that sum to 1", "something else")
        self._trees = trees


def _drawn_labels(
    labels: WeightedLabels, num_rows: int, num_trees: int, rng: np.random.Generator
) -> IntArray:
    """Return a label for every row and tree, (num_trees, num_rows), by the labels' weights."""
    first = np.flatnonzero(np.diff(labels.rows, prepend=-1))
    last = np.append(first[1:], len(labels.rows)) - 1
    total = np.cumsum(labels.weights)
    before = total[first] - labels.weights[first]
    drawn = before + rng.random((num_trees, num_rows)) * (total[last] - before)
    places = np.clip(np.searchsorted(total, drawn, side="right"), first, last)
    chosen: IntArray = labels.classes[places]
    return chosen
