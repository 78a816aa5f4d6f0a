"""BoostedTreesLearner: XGBoost's trees by a plain definition, and a door for received ones."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xgboost
from scipy.special import expit, softmax
from sklearn.datasets import load_breast_cancer

from clients.compiled import boosting as boosting_bins
from clients.compiled.boosting import Bins, Rule, bin_rows
from clients.tabular import boosted_trees as boosting
from clients.tabular.boosted_trees import BoostedTreesLearner
from clients.tabular.xgboost import XGBoostLearner
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.learners import Recipe, SoftLearner
from tests import lopsided_trees
from tests.clients.digits import NUM_CLASSES, digits, generator, same

ROOT = Path(__file__).parent.parent.parent


def learner(**settings: Any) -> BoostedTreesLearner:
    chosen = {"num_classes": NUM_CLASSES, "num_rounds": 4, "max_depth": 3, **settings}
    return BoostedTreesLearner(**chosen)


def fitted(classes: list[int] | None = None, **settings: Any) -> BoostedTreesLearner:
    x, y = digits(classes)
    return learner(**settings).fit(x, y, rng=generator())


# --- bins ---------------------------------------------------------------------------------


def cuts_of(bins: Bins, place: int) -> FloatArray:
    """Return the cuts of a column without the last, which is infinite."""
    return bins.cuts[bins.starts[place] : bins.starts[place + 1] - 1]


def test_few_values_have_a_bin_each_and_constant_columns_none() -> None:
    """Also where some are rare; the first column stays in any case."""
    rare = np.full(500, 2)
    rare[[3, 7, 9]] = 0, 1, 5
    x = np.stack([np.full(500, 7), rare, np.full(500, 2)], axis=1).astype(np.float32)

    bins = bin_rows(x, 4)

    assert bins.columns.tolist() == [0, 1]
    assert bins.starts.tolist() == [0, 1, 5]
    assert bins.cuts.tolist() == [math.inf, 0.5, 1.5, 3.5, math.inf]


@pytest.mark.parametrize("max_bin", [2, 3, 16, 64])
def test_bins_of_many_values_hold_as_many_rows_each(max_bin: int) -> None:
    """So do those beside a value that half of the rows have."""
    rng = generator(1)
    smooth = rng.normal(size=2000)
    heavy = np.where(np.arange(2000) % 2, smooth, 0.0)
    bins = bin_rows(np.stack([smooth, heavy], axis=1).astype(np.float32), max_bin)

    first, second = (
        np.bincount(codes - start)
        for codes, start in zip(bins.codes.T, bins.starts[:2], strict=True)
    )

    assert len(first) == max_bin
    assert np.ptp(first) <= 1
    assert max_bin // 2 <= len(second) <= max_bin
    others = np.delete(second, second.argmax())
    assert others.max() <= 2 * 2000 / max_bin


def test_a_row_is_in_the_first_bin_that_takes_it() -> None:
    """Counted column by column, on rows that lie on cuts too."""
    x = generator(2).integers(0, 40, size=(300, 5)).astype(np.float32)
    bins = bin_rows(x, 10)
    for place, column in enumerate(bins.columns):
        below = x[:, column, np.newaxis] > cuts_of(bins, place)
        assert np.array_equal(bins.codes[:, place] - bins.starts[place], below.sum(axis=1))


def test_neighbouring_numbers_are_separated() -> None:
    """Where no number lies between two values the smaller one is the cut, however it rounds."""
    x = np.array([[0x3F800000], [0x3F800001], [0x3F800002]], dtype=np.uint32).view(np.float32)

    assert bin_rows(x, 3).codes.ravel().tolist() == [0, 1, 2]


# --- growing: a plain definition ----------------------------------------------------------


class Node(NamedTuple):
    """A leaf with its value, or a split with two nodes."""

    value: float
    column: int = 0
    threshold: float = 0.0
    children: "tuple[Node, Node] | None" = None

    def says(self, row: Array) -> float:
        if self.children is None:
            return self.value
        return self.children[int(row[self.column] > self.threshold)].says(row)


def middles(values: Array) -> Array:
    """Return the thresholds between all values that a column has."""
    distinct = np.unique(values)
    return (distinct[1:] + distinct[:-1]) / 2


def reference_tree(
    x: Array,
    thresholds: list[Array],
    g: FloatArray,
    h: FloatArray,
    levels: int,
    settings: dict[str, float],
) -> Node:
    """Return the tree that XGBoost's paper defines, by trying every split of every column."""
    penalty = settings["reg_lambda"]

    def worth(inside: Array) -> float:
        return float(g[inside].sum() ** 2 / (h[inside].sum() + penalty))

    everything = np.ones(len(x), dtype=bool)
    weight = -g.sum() / (h.sum() + penalty) if h.sum() >= 1 else 0.0
    best, chosen = 1e-6, None
    for column in range(x.shape[1] if levels else 0):
        for threshold in thresholds[column]:
            right = x[:, column] > threshold
            if min(h[right].sum(), h[~right].sum()) < 1:
                continue
            gain = worth(right) + worth(~right) - worth(everything)
            if gain > best + 1e-9 and gain >= settings["gamma"]:
                best, chosen = gain, (column, float(threshold), right)
    if chosen is None:
        return Node(settings["learning_rate"] * weight)
    column, threshold, right = chosen
    left_tree, right_tree = (
        reference_tree(x[side], thresholds, g[side], h[side], levels - 1, settings)
        for side in (~right, right)
    )
    return Node(0.0, column, threshold, (left_tree, right_tree))


def reference_scores(
    x: Array, shares: FloatArray, unseen: Array, rounds: int, levels: int, **settings: float
) -> FloatArray:
    """Return the scores (n, k) of unseen rows after boosting on shares (n, classes)."""
    means = np.log(shares.mean(axis=0))
    two = shares.shape[1] == 2
    first = means[1:] - means[:1] if two else means - means.mean()
    targets = shares[:, 1:] if two else shares
    scores, found = np.tile(first, (len(x), 1)), np.tile(first, (len(unseen), 1))
    thresholds = [middles(column) for column in x.T]
    for _ in range(rounds):
        p = expit(scores) if two else softmax(scores, axis=1)
        h = p * (1 - p) * (1 if two else 2)
        for k in range(scores.shape[1]):
            g = (p - targets)[:, k]
            tree = reference_tree(x, thresholds, g, h[:, k], levels, settings)
            scores[:, k] += [tree.says(row) for row in x]
            found[:, k] += [tree.says(row) for row in unseen]
    return found


def own_scores(model: BoostedTreesLearner, x: Array) -> FloatArray:
    rows = x.astype(np.float32)
    return boosting.sum_of_trees(model._trees, rows, model._offsets).T


SETTINGS = [
    {"reg_lambda": 1.0, "gamma": 0.0, "learning_rate": 0.3},
    {"reg_lambda": 0.0, "gamma": 0.5, "learning_rate": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("num_classes", [2, 3])
def test_trees_are_those_of_the_definition(
    num_classes: int, settings: dict[str, float]
) -> None:
    """Every value is a bin here; unseen rows tell where thresholds lie."""
    rng = generator(3)
    x, unseen = rng.normal(size=(60, 3)).astype(np.float32), rng.normal(size=(40, 3))
    y = (2 * x[:, 0] + x[:, 1] ** 2 + rng.normal(size=60) > 1).astype(int)
    y += (num_classes > 2) & (x[:, 2] > 0.5)
    expected = reference_scores(x, np.eye(num_classes)[y], unseen, 4, 3, **settings)

    model = learner(num_classes=num_classes, **settings).fit(x, y, rng=rng)

    assert np.allclose(own_scores(model, unseen), expected, atol=1e-5)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_shares_are_learned_as_the_definition_says(num_classes: int) -> None:
    """Soft targets take the place of labels in the gradient."""
    rng = generator(4)
    x = rng.normal(size=(50, 2)).astype(np.float32)
    shares = softmax(np.outer(np.tanh(x[:, 0]), np.arange(num_classes)), axis=1)
    expected = reference_scores(x, shares, x, 3, 3, **SETTINGS[0])

    model = learner(num_classes=num_classes, num_rounds=3)
    model.distill(x, shares, rng=rng, recipe=Recipe(link="softmax"))

    assert np.allclose(own_scores(model, x), expected, atol=1e-5)


GREEDY = {"reg_lambda": 0.0, "gamma": 0.0, "learning_rate": 1.0}


def test_nothing_is_added_to_what_is_nearly_certain() -> None:
    """A tree whose rows have hardly any curvature says 0, as in XGBoost."""
    x = np.arange(26, dtype=np.float32)[:, np.newaxis]
    y = (x[:, 0] >= 15).astype(int)
    expected = reference_scores(x, np.eye(2)[y], x, 8, 2, **GREEDY)

    model = learner(num_classes=2, num_rounds=8, max_depth=2, **GREEDY)
    model.fit(x, y, rng=generator())

    assert np.allclose(own_scores(model, x), expected, atol=1e-4)


def test_a_lopsided_tree_needs_few_histograms() -> None:
    """The interpreter, which sees any index that is too large, finds what is compiled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.lopsided_trees"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert np.allclose(lopsided_trees.scores(), json.loads(done.stdout), atol=1e-5)
    rows = np.zeros((lopsided_trees.NUM_ROWS, 1), dtype=np.float32)
    assert len(boosting._stack(bin_rows(rows, 2)).node) == 9


# --- growing: XGBoost ---------------------------------------------------------------------


def xgboost_margins(
    x: Array, y: IntArray, model: BoostedTreesLearner, rounds: int, **settings: Any
) -> FloatArray:
    """Return XGBoost's scores (n, k) of the rows that it learns, from the same first ones."""
    offsets = model.to_arrays()["offsets"]
    num_classes = int(y.max()) + 1
    objective: dict[str, Any] = {"objective": "binary:logistic"}
    if num_classes > 2:
        objective = {"objective": "multi:softprob", "num_class": num_classes}
    margin = np.tile(offsets, (len(x), 1)) if num_classes > 2 else np.repeat(offsets, len(x))
    data = xgboost.DMatrix(x, label=y, base_margin=margin, nthread=1)
    told = {**objective, "tree_method": "hist", "nthread": 1, **settings}
    margins = xgboost.train(told, data, rounds).predict(data, output_margin=True)
    return np.asarray(margins).reshape(len(x), -1)


@pytest.mark.parametrize("classes", [[3, 8], [3, 8, 9], None], ids=["two", "three", "all"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_depth": 6, "learning_rate": 0.3},
        {"max_depth": 3, "learning_rate": 0.05, "gamma": 1.0},
        {"max_depth": 8, "reg_lambda": 0.0, "gamma": 0.3},
    ],
)
def test_scores_are_those_of_xgboost(
    classes: list[int] | None, settings: dict[str, Any]
) -> None:
    """Where every value is a bin, after twenty rounds."""
    x, y = digits(classes, 400)
    _, encoded = np.unique(y, return_inverse=True)

    model = learner(num_rounds=20, **settings).fit(x, y, rng=generator())

    expected = xgboost_margins(x, encoded, model, 20, **settings)
    assert np.allclose(own_scores(model, x), expected, atol=2e-5)


def test_first_scores_are_logarithms_of_shares() -> None:
    """The log-odds of two classes, and centred logarithms of more."""
    x, y = generator().normal(size=(40, 2)), np.repeat([0, 1, 2], [10, 10, 20])

    def offsets(labels: IntArray) -> FloatArray:
        return learner().fit(x, labels, rng=generator()).to_arrays()["offsets"]

    assert np.allclose(offsets(np.minimum(y, 1)), math.log(3))
    assert np.allclose(offsets(y), np.array([-1, -1, 2]) * math.log(2) / 3)


def test_soft_targets_are_learned_as_xgboost_learns_weights() -> None:
    """One row with shares is worth as many rows with weights."""
    x, y = digits()
    shares = 0.6 * np.eye(NUM_CLASSES)[y] + 0.4 * np.eye(NUM_CLASSES)[(y + 1) % 10]
    told: Any = {"rng": generator(), "recipe": Recipe(link="softmax")}
    chosen: Any = {"num_classes": NUM_CLASSES, "num_rounds": 4, "max_depth": 3}

    own = BoostedTreesLearner(**chosen).distill(x, shares, **told)
    library = XGBoostLearner(**chosen).distill(x, shares, **told)

    assert isinstance(own, SoftLearner)
    # XGBoost takes first scores from the weighted rows too, but rounds them.
    assert np.allclose(own.logits(x), library.logits(x), atol=1e-4)


def test_as_accurate_as_xgboost_where_bins_are_shared_by_values() -> None:
    """On unseen rows of a table with hundreds of values a column."""
    x, y = load_breast_cancer(return_X_y=True)
    right: dict[type, list[float]] = {BoostedTreesLearner: [], XGBoostLearner: []}
    for seed in range(4):
        order = generator(seed).permutation(len(x))
        train, rest = order[:300], order[300:]
        for kind, found in right.items():
            model = kind(num_classes=2, num_rounds=30)
            model.fit(x[train], y[train], rng=generator())
            found.append(float((model.predict(x[rest]) == y[rest]).mean()))

    assert np.mean(right[BoostedTreesLearner]) > np.mean(right[XGBoostLearner]) - 0.01
    assert min(right[BoostedTreesLearner]) > 0.9


# --- learning -----------------------------------------------------------------------------


def test_rows_that_are_all_alike_have_one_leaf() -> None:
    """Nothing can be split, and scores are those of the classes' shares."""
    model = learner().fit(np.ones((8, 3)), np.arange(8) % 4 // 3, rng=generator())

    assert (model.to_arrays()["tree-sizes"] == 1).all()
    assert np.allclose(np.exp(model.logits(np.zeros((1, 3)))[0, :2]), [0.75, 0.25])


def test_two_rows_are_enough() -> None:
    """Their curvature does not allow a split, as in XGBoost."""
    model = learner().fit(np.array([[0.0], [1.0]]), np.array([0, 5]), rng=generator())

    assert model.predict(np.array([[0.0]])).tolist() == [0]


def test_trees_beyond_the_first_room_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for another round is made when there is none."""
    expected = fitted(num_rounds=9).to_arrays()
    monkeypatch.setattr(boosting, "_FIRST_ROOM", 0)

    assert same(fitted(num_rounds=9).to_arrays(), expected)


@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 129, 1500])
@pytest.mark.parametrize(("max_depth", "walked"), [(4, False), (12, True)])
def test_all_ways_to_ask_trees_agree_to_the_bit(
    num_rows: int, max_depth: int, walked: bool
) -> None:
    """In blocks or row by row, in numpy, and as training itself added them up."""
    rng = generator(5)
    x = rng.integers(0, 60, size=(1500, 3)).astype(np.float32)
    shares = np.eye(3, dtype=np.float32)[rng.integers(3, size=1500)].T.copy()
    offsets = np.array([-1.0, 0.1, 0.7], dtype=np.float32)
    rule = Rule(max_depth, learning_rate=0.3, gamma=0.0, reg_lambda=1.0)
    trees, scores = boosting.boost_trees(bin_rows(x, 64), shares, offsets, 2, rule)
    rows = x[:num_rows]

    compiled = boosting.sum_of_trees(trees, rows, offsets)

    assert (trees.sizes.max() > boosting.MOST_NODES) == walked
    assert np.array_equal(compiled, scores[:, :num_rows])
    for each in (rows, rows + np.float32(0.5)):  # the latter lie on thresholds
        scores = boosting.sum_of_trees(trees, each, offsets)
        assert np.array_equal(scores.T, trees.sums(each, offsets))


def test_kernels_are_compiled_for_one_kind_of_arrays_only() -> None:
    """What `load_kernels` has loaded serves everything, read-only rows too."""
    kernels: list[Any] = [
        boosting.boost,
        boosting_bins.cut_columns,
        boosting_bins.encode,
        boosting.add_trees,
    ]
    BoostedTreesLearner.load_kernels()
    before = [set(kernel.signatures) for kernel in kernels]
    x, y = digits()
    rows = x.astype(np.float32)
    rows.flags.writeable = False

    first, _ = learner().fit_many([(rows, y), (rows, y)], rngs=[generator(), generator()])
    for model in (first, learner().fit(x[::2], y[::2] % 2, rng=generator())):
        learner().from_arrays(model.to_arrays()).predict(rows[::3])

    assert [set(kernel.signatures) for kernel in kernels] == before
