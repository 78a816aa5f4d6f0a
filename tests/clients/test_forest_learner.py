"""ForestLearner: the trees that a plain loop over rows grows."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.ensemble import RandomForestClassifier

from clients.tabular import forest as forest_growing
from clients.tabular.forest import ForestLearner, Limits, Planting, class_bits, grow_forests
from clients.tabular.trees import Trees, bit_table, bits_above, choose_thresholds, pack, unpack
from fl_strategies._util import Array, IntArray
from fl_strategies.learners import Recipe
from tests.clients.digits import DIGITS, NUM_CLASSES, digits


def same_trees(one: Trees, other: Trees) -> bool:
    return all(
        np.array_equal(getattr(one, each.name), getattr(other, each.name))
        for each in fields(Trees)
    )


# --- bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 200])
def test_bits_hold_what_was_packed(num_rows: int) -> None:
    """Any number of rows fits into words, and comes back."""
    flags = np.random.default_rng(0).random((3, 4, num_rows)) < 0.5

    words = pack(flags)

    assert words.shape == (3, 4, -(-num_rows // 64))
    assert np.array_equal(unpack(words, num_rows), flags)
    assert np.array_equal(np.bitwise_count(words).sum(axis=-1), flags.sum(axis=-1))


def test_thresholds_separate_neighbouring_values() -> None:
    """Few distinct values give all gaps; constant columns none; many are spread evenly."""
    rng = np.random.default_rng(1)
    columns = [rng.integers(3, size=500), np.full(500, 7), rng.normal(size=500)]
    x = np.stack(columns, axis=1).astype(np.float32)

    features, values = choose_thresholds(x)

    assert values[features == 0].tolist() == [0.5, 1.5]
    assert not (features == 1).any()
    shares = (x[:, 2] <= values[features == 2][:, np.newaxis]).mean(axis=1)
    assert len(shares) == 32
    assert np.allclose(shares, np.arange(32) / 32, atol=1 / 32)


def test_neighbouring_numbers_are_separated() -> None:
    """Where no number lies between two values the smaller one is the threshold."""
    low = np.float32(1)
    high = np.nextafter(low, np.float32(2))
    x = np.array([[low], [high]])

    assert unpack(bits_above(x, choose_thresholds(x)), 2).tolist() == [[0, 1]]


# --- growing ------------------------------------------------------------------------------


def grow(x: Array, y: IntArray, *, depth: int = 60, trees: int = 6, seed: int = 0) -> Trees:
    keys = np.random.default_rng(seed).integers(2**64, size=trees, dtype=np.uint64)
    planting = Planting(bit_table(x), class_bits(y, int(y.max()) + 1, trees), keys)
    return grow_forests([planting], Limits(depth, 8))[0]


def test_leaves_hold_the_classes_of_their_rows() -> None:
    """A row-by-row walk finds in every leaf the class shares that the bits counted."""
    x, y = digits(num_rows=300)
    rows, trees = x.astype(np.float32), grow(x.astype(np.float32), y, depth=4)

    leaves = trees._leaves_by_walk(rows).reshape(len(trees.sizes), -1)

    for own in leaves:
        for leaf in np.unique(own):
            shares = np.bincount(y[own == leaf], minlength=NUM_CLASSES) / (own == leaf).sum()
            assert np.allclose(trees.values[leaf], shares, atol=1e-6)


def test_every_split_is_the_best_of_its_candidates() -> None:
    """The gain of the root equals the best that a loop over its candidates finds."""
    x, y = digits(num_rows=120)
    rows = x.astype(np.float32)
    trees, table = grow(rows, y, depth=1), bit_table(rows)
    keys = np.random.default_rng(0).integers(2**64, size=6, dtype=np.uint64)
    stage = next(
        forest_growing._first_stages(
            [Planting(table, class_bits(y, NUM_CLASSES, 6), keys)], Limits(1, 8)
        )
    )

    def impurity(labels: IntArray) -> float:
        counts = np.bincount(labels, minlength=NUM_CLASSES)
        return float(len(labels) - (counts**2).sum() / max(1, len(labels)))

    def after(feature: int, threshold: float) -> float:
        right = rows[:, feature] > threshold
        return impurity(y[right]) + impurity(y[~right])

    drawn = forest_growing._draw_columns(stage, 8)
    for tree, columns in enumerate(drawn.T):
        thresholds = table.thresholds
        least = min(after(thresholds.features[c], thresholds.values[c]) for c in columns)
        assert after(trees.features[tree], trees.thresholds[tree]) == pytest.approx(least)


def test_trees_without_a_limit_tell_rows_apart() -> None:
    """They split until leaves are pure, but where no candidate separates a row."""
    x, y = digits(num_rows=400)
    rows = x.astype(np.float32)

    assert grow(rows, y, depth=6).values.max(axis=1).mean() < 0.9
    assert grow(rows, y).values.max(axis=1).mean() > 0.98


@pytest.mark.parametrize(
    "changes",
    [{"_is_sparse": lambda *_: False}, {"_STAGE_BYTES": 2**14, "_WORDS_AT_ONCE": 2**9}],
    ids=["packing", "memory"],
)
def test_how_trees_are_grown_changes_nothing(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deep nodes with words of their own rows, or small portions, give the same trees."""
    x, y = digits(num_rows=700)
    rows = x.astype(np.float32)
    usual = grow(rows, y)

    for name, value in changes.items():
        monkeypatch.setattr(forest_growing, name, value)

    assert same_trees(usual, grow(rows, y))


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_bits_and_steps_find_the_same_leaves(depth: int) -> None:
    """Rows go down shallow trees in sets; a walk row by row ends in the same leaves."""
    x, y = digits(num_rows=300)
    trees = grow(x.astype(np.float32), y, depth=depth)
    unseen = DIGITS[300:777].astype(np.float32)

    assert np.array_equal(trees._leaves_by_bits(unseen), trees._leaves_by_walk(unseen))


# --- learning -----------------------------------------------------------------------------


@pytest.mark.parametrize("data", [load_digits, load_breast_cancer], ids=["digits", "cancer"])
def test_it_is_as_accurate_as_a_random_forest(data: Any) -> None:
    """On unseen rows, within two points of scikit-learn's forest on average."""
    x, y = data(return_X_y=True)
    differences = []
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(x))
        learned, unseen = order[:200], order[200:]
        ours = ForestLearner(num_classes=int(y.max()) + 1, max_depth=6)
        ours.fit(x[learned], y[learned], rng=np.random.default_rng(seed))
        theirs = RandomForestClassifier(max_depth=6, random_state=seed)
        theirs.fit(x[learned], y[learned])
        hits = [(each.predict(x[unseen]) == y[unseen]).mean() for each in (ours, theirs)]
        differences.append(hits[0] - hits[1])

    assert np.mean(differences) > -0.02


def test_soft_targets_become_the_scores() -> None:
    """Leaves hold mean targets, not drawn labels: two kinds of rows, two distributions."""
    x = np.repeat([[0.0], [1.0]], 40, axis=0)
    shares = np.repeat([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]], 40, axis=0)
    soft = ForestLearner(num_classes=3, num_trees=30)

    soft.distill(x, shares, rng=np.random.default_rng(0), recipe=Recipe(link="softmax"))

    actual = np.exp(soft.logits(x[[0, -1]]))
    assert np.allclose(actual, [[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]], atol=1e-5)


def test_labels_are_drawn_by_their_weights() -> None:
    """Trees see a class of a row as often as its weight says, and no other class."""
    from clients.tabular.base import weigh
    from clients.tabular.forest import _drawn_labels

    labels = weigh(np.array([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0], [0.25, 0.25, 0.5]]))

    drawn = _drawn_labels(labels, 3, 20_000, np.random.default_rng(0))

    found = np.stack([(drawn == number).mean(axis=0) for number in range(3)], axis=1)
    assert np.allclose(found, [[0.7, 0.3, 0], [0, 0, 1], [0.25, 0.25, 0.5]], atol=0.015)
    assert (drawn[:, 1] == 2).all()


def test_constant_rows_give_shares() -> None:
    """Nothing can be split: every row gets the shares of the classes."""
    x, y = np.ones((8, 3)), np.array([0, 0, 0, 1, 1, 1, 1, 1])

    learner = ForestLearner(num_classes=NUM_CLASSES, num_trees=12)
    scores = learner.fit(x, y, rng=np.random.default_rng(0)).logits(x[:1])

    assert np.allclose(np.exp(scores[0, :2]), [0.375, 0.625])
