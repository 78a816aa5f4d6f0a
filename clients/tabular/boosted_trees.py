"""XGBoost's histogram trees, compiled: a learner, how its trees grow and what they answer.

A tree of few nodes is asked from its leaves up: every node takes the number of one of its
children, for a block of rows at once, until the root has the answers. That is a few
instructions for sixteen rows, without any jump. Larger trees are walked, row by row.
"""

from typing import Final, NamedTuple

import numpy as np
from scipy.special import expit, softmax

from clients.compiled import compiled, part
from clients.compiled.boosting import Bins, Draft, Growth, Rule, Stack, Work, bin_rows, boost
from clients.tabular.base import SharedRows, WeightedLabels, to_float32
from clients.tabular.boosting import BoostedLearner, BoostingSettings
from clients.tabular.trees import Trees
from fl_strategies._util import Array, FloatArray, IntArray

BLOCK: Final = 128
MOST_NODES: Final = 255
"""Trees with more are walked."""


class _Tree(NamedTuple):
    """One of `Trees`."""

    leaf: Array
    features: IntArray
    thresholds: FloatArray
    values: FloatArray


def sum_of_trees(trees: Trees, x: Array, offsets: FloatArray) -> FloatArray:
    """Return `Trees.sums` of rows (n, d) of float32, the other way round: (k, n).

    Trees may have been received: `Trees.from_arrays` has seen that all of them are whole and
    have no other columns than the rows. More is not indexed here.
    """
    scores = np.repeat(offsets[:, np.newaxis], len(x), axis=1)
    largest = int(trees.sizes.max())
    length = min(BLOCK, len(x))
    columns = np.empty((x.shape[1], length), dtype=np.float32)
    answers = np.empty((min(largest, MOST_NODES), length), dtype=np.float32)
    number = np.empty(largest if largest > MOST_NODES else 0, dtype=np.int64)
    arrays = _Tree(trees.leaf, trees.features, trees.thresholds, trees.values[:, 0])
    # Another kind of array, such as a read-only one, would be compiled for anew.
    rows = np.require(x, requirements=("C", "W"))
    add_trees(rows, trees.sizes, arrays, columns, answers, number, scores)
    return np.nan_to_num(scores, copy=False)


@compiled
def add_trees(
    x: Array,
    sizes: Array,
    trees: _Tree,
    columns: Array,
    answers: Array,
    number: Array,
    scores: Array,
) -> None:
    """Add what whole trees say of rows to scores (k, n), block by block."""
    for first in range(0, len(x), BLOCK):
        rows = x[first : first + BLOCK]
        for i in range(len(rows)):
            for j in range(rows.shape[1]):
                columns[j, i] = rows[i, j]
        nodes = splits = 0
        for t in range(len(sizes)):
            end, last = nodes + sizes[t], splits + (sizes[t] - 1) // 2
            tree = _Tree(
                trees.leaf[nodes:end],
                trees.features[splits:last],
                trees.thresholds[splits:last],
                trees.values[nodes - splits : end - last],
            )
            out = scores[t % len(scores), first : first + len(rows)]
            if sizes[t] <= MOST_NODES:
                _blend(tree, columns, answers, out)
            else:
                _walk(tree, rows, number, out)
            nodes, splits = end, last


@part
def _blend(tree: _Tree, columns: Array, answers: Array, out: Array) -> None:
    """Add what a tree says of a block of columns, children before parents."""
    splits, leaves = len(tree.features), len(tree.values)
    for node in range(len(tree.leaf) - 1, -1, -1):
        own = answers[node]
        if tree.leaf[node]:
            leaves -= 1
            for i in range(len(out)):
                own[i] = tree.values[leaves]
        else:
            splits -= 1
            column, threshold = columns[tree.features[splits]], tree.thresholds[splits]
            left, right = answers[2 * splits + 1], answers[2 * splits + 2]
            for i in range(len(out)):
                lower, upper = left[i], right[i]
                own[i] = upper if column[i] > threshold else lower
    for i in range(len(out)):
        out[i] += answers[0, i]


@part
def _walk(tree: _Tree, rows: Array, number: Array, out: Array) -> None:
    """Add what a tree says of a block of rows; `number` counts splits and leaves apart."""
    splits = 0
    for node in range(len(tree.leaf)):
        number[node] = node - splits if tree.leaf[node] else splits
        splits += not tree.leaf[node]
    for i in range(len(rows)):
        node = 0
        while not tree.leaf[node]:
            split = number[node]
            above = rows[i, tree.features[split]] > tree.thresholds[split]
            node = 2 * split + 1 + above
        out[i] += tree.values[number[node]]


# Nodes of all trees for which there is room at first.
_FIRST_ROOM: Final = 2**14


def boost_trees(
    bins: Bins, targets: Array, offsets: FloatArray, num_rounds: int, rule: Rule
) -> tuple[Trees, FloatArray]:
    """Return trees, round by round one for each score, and what they say of the rows, (k, n).

    Parameters
    ----------
    targets : (k, n) of float32
        How much of every row is the second of two classes, k = 1, or each of several.
    offsets : (k,) of float32
        Scores before the first tree.
    """
    num_scores, num_rows = targets.shape
    scores = np.repeat(offsets[:, np.newaxis], num_rows, axis=1)
    # Every leaf has a row at least.
    most = min(2 * num_rows, 2 ** (min(rule.max_depth, num_rows) + 1))
    kinds, room = (bool, np.int64, np.float32, np.float32), num_scores * most + _FIRST_ROOM
    sizes = np.empty(num_rounds * num_scores, dtype=np.int64)
    growth = Growth(sizes, *(np.empty(room, dtype=kind) for kind in kinds))
    used = np.zeros(3, dtype=np.int64)
    left, column, cut, order = np.empty((4, most), dtype=np.int64)
    draft = Draft(left, column, cut, np.empty(most, dtype=np.float32), order)
    work, stack = _work(bins), _stack(bins)
    chances = np.empty_like(scores)
    while True:
        boost(bins, rule, targets, scores, chances, work, stack, draft, growth, used)
        sizes, *nodes = growth
        if used[0] == len(sizes):
            break
        # There is no room for another round.
        growth = Growth(sizes, *(np.concatenate([each, np.empty_like(each)]) for each in nodes))
    _, num_nodes, num_splits = used.tolist()
    trees = Trees(
        growth.sizes,
        growth.leaf[:num_nodes].copy(),
        growth.features[:num_splits].copy(),
        growth.thresholds[:num_splits].copy(),
        growth.values[: num_nodes - num_splits, np.newaxis].copy(),
    )
    return trees, scores


def _work(bins: Bins) -> Work:
    num_rows, num_bins = len(bins.codes), len(bins.cuts)
    rows, spare = np.empty((2, num_rows), dtype=np.uint32)
    packed, below = np.empty(num_rows, dtype=np.int64), np.empty(num_bins, dtype=np.int64)
    gains = np.empty(num_bins)
    return Work(packed, rows, spare, below, gains, gains.view(np.int64))


def _stack(bins: Bins) -> Stack:
    height = len(bins.codes).bit_length() + 1  # only smaller halves are stacked
    node, start, stop, level, total = np.empty((5, height), dtype=np.int64)
    sums = np.empty((height, len(bins.cuts)), dtype=np.int64)
    return Stack(node, start, stop, level, total, sums)


OWNER: Final = "BoostedTreesLearner"


class BoostedTreesLearner(BoostedLearner):
    """Boosted trees as XGBoost's, one sequence for two classes and one per class for more.

    Splits, leaves and first scores are those of `xgboost.train` with histograms; where every
    column has few values, so are the scores, but for rounding. Cuts lie midway between values
    and not at one of them, and a column of many values is cut into bins of about as many rows
    each. All rounds are one call of compiled code: a party's small models take a fifth of
    XGBoost's time or less.

    No step is random. Compiling takes some seconds when a machine first fits a model; the
    result is kept. A model travels as plain arrays.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list.
    num_rounds : int (default: 100)
        Boosting rounds.
    max_depth, learning_rate, gamma, reg_lambda, max_bin
        As in `XGBoostLearner`.

    Examples
    --------
    >>> import numpy as np
    >>> learner = BoostedTreesLearner(num_classes=3, num_rounds=5, reg_lambda=0.0)
    >>> x, y = np.repeat([[0.0], [1.0]], 8, axis=0), np.repeat([0, 2], 8)
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(x[[0, -1]])
    array([0, 2])
    """

    def __init__(
        self,
        *,
        num_classes: int,
        num_rounds: int = 100,
        max_depth: int = 6,
        learning_rate: float = 0.3,
        gamma: float = 0.0,
        reg_lambda: float = 1.0,
        max_bin: int = 64,
    ) -> None:
        super().__init__(num_classes=num_classes)
        BoostingSettings(
            num_rounds=num_rounds,
            max_depth=max_depth,
            learning_rate=learning_rate,
            gamma=gamma,
            reg_lambda=reg_lambda,
            max_bin=max_bin,
        ).checked(OWNER)
        self._num_rounds, self._max_bin = num_rounds, max_bin
        self._rule = Rule(max_depth, float(learning_rate), float(gamma), float(reg_lambda))
        self._offsets: FloatArray
        self._trees: Trees
        self._known: _Known | None = None

    @staticmethod
    def load_kernels() -> None:
        """Compile what this learner runs, or read it: processes forked later have it then."""
        x, shares = np.zeros((2, 1), dtype=np.float32), np.eye(2, dtype=np.float32)
        rule, offsets = Rule(1, 1.0, 0.0, 1.0), np.zeros(1, dtype=np.float32)
        trees, _ = boost_trees(bin_rows(x, 2), shares[1:], offsets, 1, rule)
        sum_of_trees(trees, x, offsets)

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:  # noqa: ARG002
        rows = to_float32(self._owner, x)
        self._boost(bin_rows(rows, self._max_bin), _shares(y))

    def _fit_weighted(
        self,
        x: Array,
        labels: WeightedLabels,
        rng: np.random.Generator,  # noqa: ARG002
    ) -> None:
        rows = to_float32(self._owner, x)
        shares = np.zeros((int(labels.classes.max()) + 1, len(rows)), dtype=np.float32)
        shares[labels.classes, labels.rows] = labels.weights
        self._boost(bin_rows(rows, self._max_bin), shares)

    def _fit_shared(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:  # noqa: ARG002
        rows, bins = _SHARED.get(
            x, lambda own: (own, bin_rows(own, self._max_bin)), self._max_bin
        )
        self._known = _Known(rows, self._boost(bins, _shares(y)))

    def _boost(self, bins: Bins, shares: Array) -> FloatArray:
        """Learn the shares (k, n) of the classes of rows, and return the rows' scores."""
        # The log-odds of the second of two classes, or centred logarithms of several.
        logs = np.log(shares.mean(axis=1, dtype=np.float64))
        first = logs[1:] - logs[:1] if len(logs) == 2 else logs - logs.mean()
        offsets = np.asarray(first, dtype=np.float32)
        targets = shares[1:] if len(shares) == 2 else shares
        trees, scores = boost_trees(bins, targets, offsets, self._num_rounds, self._rule)
        self._receive(offsets, trees)
        return scores

    def _probabilities(self, x: Array) -> FloatArray:
        rows, known = to_float32(self._owner, x), self._known
        if known is not None and np.array_equal(known.rows, rows):
            scores = known.scores.astype(np.float64)
        else:
            scores = sum_of_trees(self._trees, rows, self._offsets).astype(np.float64)
        if self._num_present == 2:
            return np.stack([expit(-scores[0]), expit(scores[0])], axis=1)
        return np.asarray(softmax(scores, axis=0).T)

    def _sent(self) -> tuple[FloatArray, Trees]:
        return self._offsets, self._trees

    def _receive(self, offsets: FloatArray, trees: Trees) -> None:
        self._offsets, self._trees, self._known = offsets, trees, None


class _Known(NamedTuple):
    """Training rows, and the scores (k, n) of float32 that the trees give them."""

    rows: Array
    scores: FloatArray


_SHARED: Final[SharedRows[tuple[Array, Bins]]] = SharedRows()


def _shares(y: IntArray) -> Array:
    """Return how much of every row is each class, all or nothing, (k, n) of float32."""
    return np.equal.outer(np.arange(int(y.max()) + 1), y).astype(np.float32)
