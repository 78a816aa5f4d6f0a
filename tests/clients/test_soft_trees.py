"""XGBoostScores and ForestScores: their libraries' trees, walked and checked in numpy."""

import math
from typing import Any

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesRegressor, RandomForestClassifier, RandomForestRegressor
from sklearn.tree import DecisionTreeRegressor, ExtraTreeRegressor

from clients.tabular.sklearn import ForestScores
from clients.tabular.trees import MAX_LEVELS, NativeTree, Trees, round_down
from clients.tabular.xgboost import XGBoostScores
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch

DIGITS = load_digits().data[:300] / 7.0
SCORES = np.random.default_rng(1).normal(size=(300, 3)) + DIGITS[:, 20:23]
REGRESSORS = [
    RandomForestRegressor(n_estimators=9),
    RandomForestRegressor(n_estimators=9, max_depth=3, max_features=0.3),
    ExtraTreesRegressor(n_estimators=9, min_samples_leaf=4),
    DecisionTreeRegressor(),
    DecisionTreeRegressor(max_leaf_nodes=12),
    ExtraTreeRegressor(),
]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def boosted(targets: FloatArray = SCORES, **own: Any) -> XGBoostScores:
    chosen = {"num_classes": targets.shape[1], "num_rounds": 6, "max_depth": 3, **own}
    if targets.shape[1] == 1:
        chosen["task"] = "regression"
    return XGBoostScores(**chosen).distill(DIGITS, targets, rng=generator())


# --- boosting -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("gamma", [0.0, 3.0])
def test_scores_are_those_of_xgboost(num_outputs: int, gamma: float) -> None:
    """The walk in numpy equals XGBoost's own prediction on standardised targets."""
    targets = SCORES[:, :num_outputs]
    mean, deviation = targets.mean(axis=0), targets.std(axis=0)
    data = xgboost.DMatrix(DIGITS, label=(targets - mean) / deviation)
    parameters = {"max_depth": 3, "nthread": 1, "base_score": 0.0, "gamma": gamma}
    native = xgboost.train(parameters, data, 6).predict(data).reshape(-1, num_outputs)

    actual = boosted(targets, gamma=gamma).logits(DIGITS)

    assert np.allclose(actual, mean + deviation * native, atol=1e-5)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_the_size_of_scores_has_no_effect(size: float) -> None:
    """Scores of any size are learned as well as those around one."""
    actual = boosted(SCORES * size).logits(DIGITS)

    assert np.allclose(actual / size, boosted().logits(DIGITS), atol=1e-4)


def test_constant_scores_are_returned() -> None:
    """A column without variation is its mean, also when that is not a round number."""
    targets = np.column_stack([SCORES[:, 0], np.full(300, 0.1), np.full(300, -7.0)])

    actual = boosted(targets).logits(DIGITS)

    assert np.allclose(actual[:, 1:], targets[:, 1:], atol=1e-12)


# --- forests ------------------------------------------------------------------------------


@pytest.mark.parametrize("regressor", REGRESSORS, ids=str)
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_scores_are_those_of_scikit_learn(regressor: Any, num_outputs: int) -> None:
    """Leaves are those of scikit-learn for the same random state, in float32."""
    targets = SCORES[:, :num_outputs]
    seed = int(generator().integers(np.iinfo(np.int32).max))
    native = clone(regressor).set_params(random_state=seed)
    native.fit(DIGITS[:200], targets[:200].squeeze())

    actual = ForestScores(regressor, num_classes=num_outputs, task="regression")
    actual.distill(DIGITS[:200], targets[:200], rng=generator())

    expected = native.predict(DIGITS).reshape(-1, num_outputs)
    assert np.allclose(actual.predict(DIGITS), expected, rtol=1e-6, atol=1e-6)
    assert not hasattr(regressor, "n_features_in_")


def test_other_estimators_are_refused() -> None:
    """A classifier, or a class instead of an object, is named."""
    for estimator in (RandomForestClassifier(), DecisionTreeRegressor, None):
        with pytest.raises(InvalidParameter, match="ForestScores: estimator must be one of"):
            ForestScores(estimator, num_classes=2)


# --- trees as arrays ----------------------------------------------------------------------


def tree_arrays(**changes: Array) -> dict[str, Array]:
    """Return the arrays of a tree of three splits and one of a single leaf."""
    return {
        "tree-sizes": np.array([7, 1]),
        "leaf-bits": np.packbits([0, 0, 1, 1, 0, 1, 1, 1]),
        "features": np.array([0, 1, 0], dtype=np.uint8),
        "thresholds": np.array([0.0, 5.0, -3.0], dtype=np.float32),
        "values": np.array([[2], [3], [5], [6], [7]], dtype=np.float32),
        **changes,
    }


def received(arrays: dict[str, Array], num_trees: int = 2) -> Trees:
    return Trees.from_arrays("Test", arrays, num_trees=num_trees, width=2, num_values=1)


def walked(trees: Trees, x: Array) -> Array:
    return np.concatenate(list(trees.leaf_values(x)), axis=1)[..., 0]


def test_rows_find_their_leaves() -> None:
    """Rows go left up to and including the threshold, level by level."""
    x = np.array([[1, 0], [0, 5], [-1, 6], [-3, 6], [-4, 9]], dtype=np.float32)

    actual = walked(received(tree_arrays()), x)

    assert actual.tolist() == [[2, 3, 6, 5, 5], [7, 7, 7, 7, 7]]


def test_thresholds_split_float32_exactly() -> None:
    """Rounding a threshold moves no float32 number to the other side."""
    thresholds = generator().normal(size=1000)
    near = thresholds.astype(np.float32)

    for x in (near, np.nextafter(near, np.float32(9)), np.nextafter(near, np.float32(-9))):
        assert np.array_equal(x <= round_down(thresholds), x.astype(np.float64) <= thresholds)


def test_large_sets_are_walked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows are walked at once has no effect."""
    model = boosted()
    together = model.logits(DIGITS)

    monkeypatch.setattr("clients.tabular.trees.VALUES_AT_ONCE", 700)

    assert np.array_equal(model.logits(DIGITS), together)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree-sizes": np.array([9, -1])}, "tree-sizes must be at least 1"),
        ({"tree-sizes": np.array([8, 0])}, "tree-sizes must be at least 1"),
        ({"tree-sizes": np.array([2**62, 2**62])}, "arrays must be those of a model"),
        ({"tree-sizes": np.array([1, 7])}, "leaf-bits must be whole"),
        ({"tree-sizes": np.array([5, 3])}, "leaf-bits must be whole"),
        ({"leaf-bits": np.packbits([1, 0, 0, 0, 1, 1, 1, 1])}, "leaf-bits must be whole"),
        ({"leaf-bits": np.packbits([0, 1, 1, 0, 0, 1, 1, 1])}, "leaf-bits must be whole"),
        ({"leaf-bits": np.packbits([0, 0, 1, 1, 1, 1, 1, 0])}, "leaf-bits must be whole"),
        ({"features": np.array([0, 2, 0], dtype=np.uint8)}, "features must be below 2"),
        ({"features": np.array([0, 1, 0])}, "features must be of uint8"),
        ({"thresholds": np.full(3, np.inf, dtype=np.float32)}, "thresholds must be finite"),
        ({"values": np.zeros((5, 2), dtype=np.float32)}, "values must be of shape"),
        ({"values": np.full((5, 1), np.nan, dtype=np.float32)}, "values must be finite"),
    ],
)
def test_forged_trees_are_refused(changes: dict[str, Array], message: str) -> None:
    """Whatever is not exactly the expected trees is named."""
    with pytest.raises(KnowledgeMismatch, match=message):
        received(tree_arrays(**changes))


def chain(num_splits: int) -> dict[str, Array]:
    """Return a tree in which every split has a leaf on its left."""
    return {
        "tree-sizes": np.array([2 * num_splits + 1]),
        "leaf-bits": np.packbits([0] + [1, 0] * (num_splits - 1) + [1, 1]),
        "features": np.zeros(num_splits, dtype=np.uint8),
        "thresholds": np.arange(num_splits, dtype=np.float32),
        "values": np.arange(num_splits + 1, dtype=np.float32)[:, np.newaxis],
    }


def test_a_chain_is_bounded() -> None:
    """A tree that would take thousands of steps a row is refused, a deep one is not."""
    x = np.array([[-1.0, 0.0], [100.5, 0.0]], dtype=np.float32)

    assert walked(received(chain(MAX_LEVELS), 1), x).tolist() == [[0, 101]]
    with pytest.raises(KnowledgeMismatch, match="at most 256 levels"):
        received(chain(MAX_LEVELS + 1), 1)


def is_tree(leaf: list[bool]) -> bool:
    """Tell by counting open places whether flags are one tree in level order."""
    places = 1
    for flag in leaf:
        if places == 0:
            return False
        places += -1 if flag else 1
    return places == 0


@given(leaf=st.lists(st.booleans(), min_size=1, max_size=15))
@settings(max_examples=300, deadline=None)
def test_exactly_the_trees_are_accepted(leaf: list[bool]) -> None:
    """Any flags are either one whole tree, which every row leaves by a leaf, or refused."""
    num_leaves = sum(leaf)
    arrays = tree_arrays(
        **{
            "tree-sizes": np.array([len(leaf)]),
            "leaf-bits": np.packbits(leaf),
            "features": np.zeros(len(leaf) - num_leaves, dtype=np.uint8),
            "thresholds": np.linspace(-1, 1, len(leaf) - num_leaves, dtype=np.float32),
            "values": np.zeros((num_leaves, 1), dtype=np.float32),
        }
    )

    if is_tree(leaf):
        assert walked(received(arrays, 1), np.zeros((3, 2), np.float32)).shape == (1, 3)
    else:
        with pytest.raises(KnowledgeMismatch, match="leaf-bits must be whole"):
            received(arrays, 1)


def test_order_and_lost_nodes_of_a_library_have_no_effect() -> None:
    """Trees come in level order, whatever order the library numbers its nodes in."""
    native = NativeTree(
        left=np.array([4, -1, -1, -1, 1]),
        right=np.array([2, -1, -1, -1, 3]),
        features=np.array([0, -2, -2, -2, 1]),
        thresholds=np.array([0.5, 0, 0, 0, 1.5]),
        values=np.array([[0.0], [1.0], [2.0], [3.0], [0.0]]),
    )

    actual = Trees.grow([native])

    assert actual.leaf.tolist() == [False, False, True, True, True]
    assert actual.values[:, 0].tolist() == [2, 1, 3]
    x = np.array([[1, 0], [0, 1], [0, 2]], dtype=np.float32)
    assert walked(actual, x).tolist() == [[2, 1, 3]]


def test_a_model_is_small() -> None:
    """A node takes a bit, and a split or leaf the five or four bytes of its numbers."""
    arrays = boosted().to_arrays()
    num_nodes = int(arrays["tree-sizes"].sum())

    size = sum(
        arrays[name].nbytes for name in ("leaf-bits", "features", "thresholds", "values")
    )

    assert size <= math.ceil(num_nodes / 8) + 5 * num_nodes
