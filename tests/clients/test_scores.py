"""ScoreLearner: what all learners from scores share, and trees of scores as arrays."""

import math
from collections.abc import Callable, Mapping
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

from clients.checks import check_learner
from clients.tabular.base import MIN_PROBABILITY, ScoreLearner, targets_of
from clients.tabular.kernel import (
    Kernel,
    KernelRidgeLearner,
    RandomFeaturesLearner,
    RidgeLearner,
)
from clients.tabular.sklearn import ForestScores
from clients.tabular.trees import MAX_LEVELS, NativeTree, Trees, round_down
from clients.tabular.xgboost import XGBoostScores
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch, NotFitted
from fl_strategies.learners import (
    Link,
    PortableLearner,
    Recipe,
    SoftLearner,
    Task,
    quality,
)
from tests.clients.digits import generator

Maker = Callable[..., ScoreLearner]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4))
SHARES = RNG.dirichlet(np.ones(3), size=60)


def kernels(kernel: Kernel, **settings: Any) -> Maker:
    return lambda **own: KernelRidgeLearner(kernel=kernel, reveal_rows=True, **settings, **own)


def forest(kind: type, **settings: Any) -> Maker:
    return lambda **own: ForestScores(kind(**settings), **own)


MAKERS: Mapping[str, Maker] = {
    "boosting": lambda **own: XGBoostScores(num_rounds=60, max_depth=4, **own),
    "tree": forest(DecisionTreeRegressor),
    "random-forest": forest(RandomForestRegressor, n_estimators=12),
    "extra-trees": forest(ExtraTreesRegressor, n_estimators=12),
    "linear": kernels("linear"),
    "rbf": kernels("rbf", ridge=1e-6),
    "polynomial": kernels("polynomial"),
    "laplace": kernels("laplace"),
    "ridge": RidgeLearner,
    "random-features": lambda **own: RandomFeaturesLearner(num_features=200, **own),
}
each_learner = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
# These fit any targets of distinct rows.
EXACT: Mapping[str, Maker] = {
    "boosting": lambda **own: XGBoostScores(num_rounds=60, reg_lambda=0.0, **own),
    "tree": MAKERS["tree"],
    "rbf": kernels("rbf", ridge=0.0, gamma=2.0),
}
each_exact_learner = pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)


def distilled(
    make: Maker, targets: Array, task: Task = "single-label", **recipe: Any
) -> ScoreLearner:
    learner = make(num_classes=targets.shape[1], task=task)
    return learner.distill(X, targets, rng=generator(), recipe=Recipe(**recipe))


# --- labels and scores --------------------------------------------------------------------


@each_learner
def test_every_learner_keeps_the_contract(make: Maker) -> None:
    """Each one can be used in all strategies, learns from scores, and travels."""
    learner = make(num_classes=3)

    assert isinstance(learner, SoftLearner)
    assert isinstance(learner, PortableLearner)
    check_learner(lambda: make(num_classes=3))


@each_learner
def test_labels_are_learned_as_one_hot_probabilities(make: Maker) -> None:
    """Learning labels equals learning their one-hot rows with link softmax."""
    y = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 1)

    fitted = make(num_classes=3).fit(X, y, rng=generator())

    assert np.array_equal(
        fitted.logits(X), distilled(make, np.eye(3)[y], link="softmax").logits(X)
    )
    assert (fitted.predict(X) == y).mean() > 0.7


@each_exact_learner
def test_scores_come_back_as_logits(make: Maker) -> None:
    """With link identity, logits are the scores and the class is the largest."""
    scores = 5 * RNG.normal(size=(60, 3))

    learner = distilled(make, scores)

    assert np.abs(learner.logits(X) - scores).max() < 0.1
    assert np.array_equal(learner.predict(X), learner.logits(X).argmax(axis=1))


@each_exact_learner
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_softmax_of_logits_is_what_was_taught(make: Maker, temperature: float) -> None:
    """Probabilities of classes come back from logits divided by the temperature."""
    learner = distilled(make, SHARES, link="softmax", temperature=temperature)

    powers = np.exp(learner.logits(X) / temperature)

    assert np.abs(powers / powers.sum(axis=1, keepdims=True) - SHARES).max() < 0.02
    assert np.array_equal(learner.predict(X), SHARES.argmax(axis=1))


@each_exact_learner
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_sigmoid_of_logits_is_what_was_taught(make: Maker, temperature: float) -> None:
    """Probabilities of labels come back the same way, also for a single label."""
    learner = distilled(
        make, SHARES[:, :1], "multi-label", link="sigmoid", temperature=temperature
    )

    taught = 1 / (1 + np.exp(-learner.logits(X) / temperature))

    assert np.abs(taught - SHARES[:, :1]).max() < 0.02
    assert np.array_equal(learner.predict(X), (learner.logits(X) > 0).astype(np.int64))


def test_probabilities_are_clipped() -> None:
    """Nothing taught with certainty gives an infinite logit, on either side."""
    tree, certain = MAKERS["tree"], np.eye(2)[(X[:, 0] > 0).astype(int)]
    odds = np.log(1 - MIN_PROBABILITY) - np.log(MIN_PROBABILITY)

    softmax = distilled(tree, certain, link="softmax").logits(X)
    sigmoid = distilled(tree, certain, "multi-label", link="sigmoid").logits(X)

    assert np.allclose(softmax, np.where(certain == 1, 0, np.log(MIN_PROBABILITY)))
    assert np.allclose(sigmoid, np.where(certain == 1, odds, -odds))


def test_the_class_is_found_below_the_clip() -> None:
    """Scores below zero share one logit, but the highest of them still names the class."""
    x, scores = np.array([[1.0], [2.0]]), np.array([[0.5, 0.25], [1.0, 0.5]])
    learner = RidgeLearner(num_classes=2, intercept=False, ridge=0.0)
    learner.distill(x, scores, rng=generator(), recipe=Recipe(link="softmax"))

    assert learner.predict(-x).tolist() == [1, 1]
    assert (learner.logits(-x) == np.log(MIN_PROBABILITY)).all()


@each_learner
def test_every_lesson_starts_anew(make: Maker) -> None:
    """What a learner knew before has no effect on what it learns."""
    learner = make(num_classes=3).fit(X, np.arange(60) % 3, rng=generator(5))

    learner.distill(X, SHARES, rng=generator())

    assert np.array_equal(learner.logits(X), distilled(make, SHARES).logits(X))


@pytest.mark.parametrize("loss", ["l1", "l2", "mse"])
def test_every_norm_is_squared_error(loss: str) -> None:
    """These learners only know squares and say so."""
    learner = distilled(MAKERS["ridge"], SHARES, loss=loss)

    assert np.array_equal(learner.logits(X), distilled(MAKERS["ridge"], SHARES).logits(X))


# --- other tasks --------------------------------------------------------------------------


@each_learner
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_regressions_return_their_outputs(make: Maker, num_outputs: int) -> None:
    """Outputs of any number and size are learned, and predict returns them."""
    y = 1000 * X[:, :num_outputs] + 50

    learner = make(num_classes=num_outputs, task="regression").fit(X, y, rng=generator())

    assert learner.predict(X).shape == (60, num_outputs)
    assert np.array_equal(learner.predict(X), learner.logits(X))
    assert quality(learner, X, y, "regression") < 0.2 * y.var()
    assert learner.logits(X[:0]).shape == (0, num_outputs)


@each_learner
def test_labels_that_are_known_in_part_are_learned(make: Maker) -> None:
    """Multi-label rows with gaps are learned, also next to a label that nobody knows."""
    y = np.stack([X[:, 0] > 0, X[:, 1] > 0, X[:, 2] > 0], axis=1).astype(np.int64)
    known = np.where(RNG.random(y.shape) < 0.2, -1, y)
    known[:, 2] = -1

    learner = make(num_classes=3, task="multi-label").fit(X, known, rng=generator())

    assert learner.predict(X).dtype == np.int64
    assert set(learner.predict(X).ravel()) == {0, 1}
    assert quality(learner, X, known, "multi-label") > 0.9


def test_unknown_labels_are_filled_by_the_mean() -> None:
    """The mean of what is known of a column, one half where nothing is."""
    y = np.array([[1, -1, 0], [0, -1, 0], [1, -1, -1], [-1, -1, 0]])

    filled = targets_of(y, 3, "multi-label")

    expected = [[1, 0.5, 0], [0, 0.5, 0], [1, 0.5, 0], [2 / 3, 0.5, 0]]
    assert np.allclose(filled, expected)


# --- travel -------------------------------------------------------------------------------


@each_learner
@pytest.mark.parametrize(
    ("link", "temperature"), [("identity", 1), ("softmax", 3), ("sigmoid", 3)]
)
def test_link_and_temperature_travel(make: Maker, link: Link, temperature: float) -> None:
    """A twin that knows nothing of the recipe gives the same logits to the bit.

    Unless the link is none of its task: a softmax model is no model of a regression.
    """
    sender = distilled(make, SHARES, link=link, temperature=temperature)

    twin = make(num_classes=3).from_arrays(sender.to_arrays())

    assert np.array_equal(sender.logits(X), twin.logits(X))
    assert np.array_equal(sender.predict(X), twin.predict(X))
    if link != "identity":
        with pytest.raises(KnowledgeMismatch, match="link must be one of"):
            make(num_classes=3, task="regression").from_arrays(sender.to_arrays())


@each_learner
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", np.array([0])),
        ("width", np.array([2**40])),
        ("width", np.array([4.0])),
        ("link", np.array([3])),
        ("link", np.array([-1])),
        ("link", np.array([[0]])),
        ("temperature", np.array([0.0])),
        ("temperature", np.array([-1.0])),
        ("temperature", np.array([np.inf])),
        ("temperature", np.array([1])),
    ],
)
def test_a_forged_head_is_refused(make: Maker, name: str, value: Array) -> None:
    """Width, link and temperature are checked before anything else."""
    arrays = {**distilled(make, SHARES).to_arrays(), name: value}

    with pytest.raises(KnowledgeMismatch, match=f"{name} must be"):
        make(num_classes=3).from_arrays(arrays)


@each_learner
def test_other_shapes_and_names_are_refused(make: Maker) -> None:
    """Arrays of another class list, another width, one more or one less do not fit."""
    arrays = distilled(make, SHARES).to_arrays()

    for changed in (
        {**arrays, "more": np.zeros(1)},
        {**arrays, "width": np.array([300])},
        *({name: arrays[name] for name in arrays if name != left} for left in arrays),
    ):
        with pytest.raises(KnowledgeMismatch):
            make(num_classes=3).from_arrays(changed)
    with pytest.raises(KnowledgeMismatch):
        make(num_classes=4).from_arrays(arrays)


@each_learner
def test_every_array_is_checked_for_type_and_shape(make: Maker) -> None:
    """Another number type, one entry less or NaN in any array is refused."""
    arrays = distilled(make, SHARES).to_arrays()

    for name, array in arrays.items():
        forged = [array.astype(np.complex128), array[:-1], array[np.newaxis]]
        if array.dtype.kind == "f":
            forged.append(np.full_like(array, np.nan))
        for each in forged:
            with pytest.raises(KnowledgeMismatch):
                make(num_classes=3).from_arrays({**arrays, name: each})


@pytest.mark.parametrize("name", ["rbf", "polynomial", "ridge", "random-features", "boosting"])
def test_huge_received_numbers_stay_finite(name: str) -> None:
    """Numbers that overflow in use give large finite scores, not NaN."""
    make = MAKERS[name]
    arrays = distilled(make, SHARES).to_arrays()
    huge = {
        key: np.full_like(array, 1e308) if array.dtype == np.float64 else array
        for key, array in arrays.items()
        if key not in ("temperature", "kernel", "support-rows", "centre", "scales")
    }

    twin = make(num_classes=3).from_arrays({**arrays, **huge})

    assert np.isfinite(twin.logits(X)).all()
    assert np.abs(twin.logits(X)).max() > 1e38


# --- refusals -----------------------------------------------------------------------------


@each_learner
def test_bad_targets_are_refused(make: Maker) -> None:
    """Shape, type, NaN and size are checked before anything is learned, and probabilities."""
    learner = make(num_classes=3)
    cases: list[tuple[Array, str]] = [
        (SHARES[:-1], "targets must be of shape"),
        (SHARES[:, :2], "targets must be of shape"),
        (np.ones((60, 3), dtype=np.int64), "targets must be floating-point"),
        (np.where(SHARES > 0.5, np.nan, SHARES), "targets must be finite"),
        (SHARES * 1e300, "targets must be within the range of float32"),
    ]
    for targets, message in cases:
        with pytest.raises(InvalidData, match=message):
            learner.distill(X, targets, rng=generator())
    for link in ("softmax", "sigmoid"):
        with pytest.raises(InvalidData, match="targets must be probabilities"):
            learner.distill(X, SHARES * 3, rng=generator(), recipe=Recipe(link=link))
    with pytest.raises(NotFitted):
        learner.to_arrays()


@each_learner
def test_bad_settings_and_rows_are_refused(make: Maker) -> None:
    """Class lists, tasks and what they learn from, empty sets and large rows are named."""
    with pytest.raises(InvalidParameter, match="num_classes must be at least 2"):
        make(num_classes=1)
    with pytest.raises(InvalidParameter, match="task must be one of"):
        make(num_classes=2, task="ranking")
    links: list[tuple[Task, Link]] = [("multi-label", "softmax"), ("regression", "sigmoid")]
    for task, link in [*links, ("regression", "softmax")]:
        with pytest.raises(InvalidParameter, match=f"link must be one of .* for {task} tasks"):
            distilled(make, SHARES, task, link=link)
    learner = make(num_classes=3)
    with pytest.raises(InvalidData, match="at least one row"):
        learner.distill(X[:0], SHARES[:0], rng=generator())
    with pytest.raises(InvalidData, match="at least one column"):
        learner.distill(X[:, :0], SHARES, rng=generator())
    with pytest.raises(InvalidData, match="range of float32"):
        learner.distill(X * 1e300, SHARES, rng=generator())
    with pytest.raises(InvalidData, match="range of float32"):
        distilled(make, SHARES).logits(X * 1e300)


@each_learner
def test_a_single_row_is_enough(make: Maker) -> None:
    """One row of any shape teaches a model that answers."""
    learner = make(num_classes=3)

    learner.distill(X[:1].reshape(1, 2, 2), SHARES[:1], rng=generator())

    assert np.isfinite(learner.logits(X.reshape(-1, 2, 2))).all()


# --- trees --------------------------------------------------------------------------------


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
