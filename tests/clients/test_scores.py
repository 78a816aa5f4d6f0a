"""ScoreLearner: what all learners from scores share, checked on each of them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import ExtraTreesRegressor, RandomForestRegressor
from sklearn.tree import DecisionTreeRegressor

from clients.checks import check_learner
from clients.tabular.base import MIN_PROBABILITY, ScoreLearner, targets_of
from clients.tabular.kernel import (
    Kernel,
    KernelRidgeLearner,
    RandomFeaturesLearner,
    RidgeLearner,
)
from clients.tabular.sklearn import ForestScores
from clients.tabular.xgboost import XGBoostScores
from fl_strategies._util import Array
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch, NotFitted
from fl_strategies.learners import (
    Link,
    PortableLearner,
    Recipe,
    SoftLearner,
    Task,
    quality,
)

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


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


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
    """A twin that knows nothing of the recipe gives the same logits to the bit."""
    sender = distilled(make, SHARES, link=link, temperature=temperature)

    twin = make(num_classes=3).from_arrays(sender.to_arrays())

    assert np.array_equal(sender.logits(X), twin.logits(X))
    assert np.array_equal(sender.predict(X), twin.predict(X))


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


def test_a_link_must_suit_the_task() -> None:
    """A softmax model is no model of a regression, whoever sent it."""
    arrays = distilled(MAKERS["ridge"], SHARES, link="softmax").to_arrays()

    with pytest.raises(KnowledgeMismatch, match="link must be one of"):
        RidgeLearner(num_classes=3, task="regression").from_arrays(arrays)


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
    """Shape, type, NaN and size of targets are checked before anything is learned."""
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
    with pytest.raises(NotFitted):
        learner.to_arrays()


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_scores_are_no_probabilities(link: Link) -> None:
    """Logits that are passed off as probabilities are found."""
    with pytest.raises(InvalidData, match="targets must be probabilities"):
        distilled(MAKERS["ridge"], SHARES * 3, link=link)


@pytest.mark.parametrize(
    ("task", "link"),
    [("multi-label", "softmax"), ("regression", "softmax"), ("regression", "sigmoid")],
)
def test_links_that_make_no_sense_are_refused(task: Task, link: Link) -> None:
    """Each task names the links it can learn from."""
    with pytest.raises(InvalidParameter, match=f"link must be one of .* for {task} tasks"):
        distilled(MAKERS["ridge"], SHARES, task, link=link)


@each_learner
def test_bad_settings_and_rows_are_refused(make: Maker) -> None:
    """Class lists, tasks, empty sets and large rows are named."""
    with pytest.raises(InvalidParameter, match="num_classes must be at least 2"):
        make(num_classes=1)
    with pytest.raises(InvalidParameter, match="task must be one of"):
        make(num_classes=2, task="ranking")
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
