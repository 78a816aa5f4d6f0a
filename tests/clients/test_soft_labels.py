"""Soft targets for models that are made to learn labels."""

import math
from typing import Any, get_args

import numpy as np
import pytest
from scipy.special import expit, logit, softmax
from sklearn.ensemble import (
    BaggingClassifier,
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier

from clients.tabular.base import (
    LARGEST_CUT,
    SMALLEST_CUT,
    check_soft_targets,
    class_shares,
    label_shares,
    weigh,
)
from clients.tabular.boosted_trees import BoostedTreesLearner
from clients.tabular.multilabel import MultiLabelLearner
from clients.tabular.sklearn import SklearnLearner, takes_weights
from clients.tabular.xgboost import XGBoostLearner
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import InvalidData, InvalidParameter, UnsupportedLearner
from fl_strategies.learners import (
    Learner,
    Link,
    Recipe,
    SoftLearner,
    can_travel,
    link_scores,
    mean_auc,
)
from simulations.config import Settings
from simulations.models import LEARNERS, learner_factory
from tests.clients.digits import generator

NUM_CLASSES = 3
SOFT = Recipe(loss="cross-entropy", link="softmax")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4))
SHARES: FloatArray = softmax(3 * X[:, :3], axis=1)
CLASSIFIERS = tuple(LEARNERS)[: tuple(LEARNERS).index("xgboost-scores")]
SCORERS = ("xgboost-scores", "forest-scores", "kernel-ridge", "ridge", "random-features")
FOR_VECTORS = (*CLASSIFIERS, *SCORERS, "mlp")
QUICK = Settings.of(num_trees=10, boosting_rounds=10, epochs=5)


def named(name: str, num_classes: int = NUM_CLASSES, **other: Any) -> SoftLearner:
    factory = learner_factory(
        name, row_shape=(4,), num_classes=num_classes, settings=QUICK, **other
    )
    learner = factory()
    assert isinstance(learner, SoftLearner)
    return learner


def wrapped(estimator: Any, num_classes: int = NUM_CLASSES) -> SklearnLearner:
    return SklearnLearner(estimator, num_classes=num_classes)


def probabilities(learner: Learner, x: Array) -> FloatArray:
    return np.asarray(softmax(learner.logits(x), axis=1))


# --- from targets to shares ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_shares_are_those_of_logits_that_give_the_targets(temperature: float) -> None:
    """Probabilities at any temperature are led back to the logits behind them."""
    logits = RNG.normal(size=(20, 5))
    recipe = Recipe(link="softmax", temperature=temperature)
    shares = class_shares("Test", link_scores(logits, recipe), recipe)

    assert np.allclose(shares, softmax(logits, axis=1))
    assert np.allclose(shares, class_shares("Test", logits, Recipe()))


def test_no_temperature_is_too_hot_for_many_classes() -> None:
    """Powers of small probabilities do not vanish all at once."""
    targets = np.full((2, 500), 1 / 500)
    targets[1, 7] *= 2
    shares = class_shares("Test", targets, Recipe(link="softmax", temperature=1000.0))

    assert np.allclose(shares[0], 1 / 500)
    assert shares[1, 7] == 1.0


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_independent_probabilities_are_normalised_over_classes(temperature: float) -> None:
    """One column a class against the rest: cooled one by one, then made to sum to one."""
    logits = np.array([[2.0, -1.0, 0.5], [40.0, -40.0, -40.0]])
    recipe = Recipe(link="sigmoid", temperature=temperature)
    shares = class_shares("Test", link_scores(logits, recipe), recipe)
    each = expit(logits)

    assert np.allclose(shares, each / each.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_labels_keep_their_own_probabilities(temperature: float) -> None:
    """Several labels are not normalised: a row may have all of them, or none."""
    logits = np.array([[2.0, -1.0], [-40.0, -9.0], [800.0, 800.0]])
    recipe = Recipe(link="sigmoid", temperature=temperature)
    shares = label_shares("Test", link_scores(logits, recipe), recipe)

    assert np.allclose(shares, expit(logits))
    assert np.allclose(shares, label_shares("Test", logits, Recipe()))
    with pytest.raises(InvalidParameter, match="Test: link must be identity or sigmoid"):
        label_shares("Test", shares, SOFT)


# --- from shares to weights ---------------------------------------------------------------


def test_weights_of_a_row_are_its_shares() -> None:
    """Above the cut nothing is lost, and labels stay in the order of rows."""
    shares = np.array([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0], [0.4, 0.0, 0.6]])
    labels = weigh(shares)

    assert labels.rows.tolist() == [0, 0, 0, 1, 2, 2]
    assert labels.classes.tolist() == [0, 1, 2, 2, 0, 2]
    assert np.allclose(labels.weights, [0.5, 0.3, 0.2, 1.0, 0.4, 0.6])
    assert labels.likeliest.tolist() == [0, 2, 2]
    assert not labels.are_plain


def test_one_class_a_row_costs_one_label() -> None:
    """Weights are 1 to the bit, also after what was dropped."""
    shares = np.array([[1 - 1e-9, 1e-9], [0.0, 1.0], [1e-5, 1 - 1e-5]])
    labels = weigh(shares)

    assert labels.are_plain
    assert labels.weights.tolist() == [1.0, 1.0, 1.0]
    assert labels.likeliest.tolist() == [0, 1, 1]


def test_unlikely_classes_are_dropped_and_the_rest_fills_their_place() -> None:
    """The cut of a common class is the largest one."""
    shares = np.tile(np.array([[0.5, 0.5], [0.99, 0.01], [0.01, 0.99], [0.98, 0.02]]), (5, 1))
    labels = weigh(shares)

    assert 0.01 < LARGEST_CUT < 0.02
    assert np.bincount(labels.rows)[:4].tolist() == [2, 1, 1, 2]
    assert np.allclose(np.bincount(labels.rows, labels.weights), 1.0)


def test_no_row_loses_all_its_classes() -> None:
    """With more classes than the cut has room for, the likeliest remain."""
    labels = weigh(np.full((3, 200), 1 / 200))

    assert np.bincount(labels.rows).tolist() == [200, 200, 200]


def test_a_rare_class_keeps_most_of_its_weight() -> None:
    """What is always below the cut of common classes is not lost, except mere rounding."""
    rare = RNG.uniform(0, 2 * LARGEST_CUT / 3, size=1000)
    dust = np.full(1000, SMALLEST_CUT / 2)
    labels = weigh(np.column_stack([1 - rare - dust, rare, dust]))
    kept = np.bincount(labels.classes, labels.weights, minlength=3)

    assert rare.max() < LARGEST_CUT
    assert kept[1] > 0.75 * rare.sum()
    assert kept[2] == 0


# --- learners -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOR_VECTORS)
@pytest.mark.parametrize("link", get_args(Link))
def test_every_model_learns_what_it_is_told(name: str, link: Link) -> None:
    """Scores and probabilities of whatever link give the classes they stand for."""
    targets = link_scores(6 * X[:, :3], Recipe(link=link))
    model = named(name).distill(X, targets, rng=generator(), recipe=Recipe(link=link))
    agreement = (model.predict(X) == targets.argmax(axis=1)).mean()

    assert agreement > 0.7
    assert model.logits(X).shape == (60, NUM_CLASSES)


@pytest.mark.parametrize("name", FOR_VECTORS)
def test_every_model_learns_several_labels(name: str) -> None:
    """Log-odds of labels are learned, by one model a label where need be."""
    odds = 6 * X[:, :2]
    model = named(name, 2, task="multi-label").distill(
        X, odds, rng=generator(), recipe=Recipe()
    )

    assert mean_auc(model.logits(X), (odds > 0).astype(np.int64)) > 0.8


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_targets_without_doubt_give_the_model_of_labels(name: str) -> None:
    """To the bit, also when a class is missing and when there is one only."""
    for y in (SHARES.argmax(axis=1), 2 * (X[:, 0] > 0), np.ones(60, dtype=np.int64)):
        fitted = named(name).fit(X, y.astype(np.int64), rng=generator(3))
        targets = np.eye(NUM_CLASSES)[y.astype(np.int64)]
        taught = named(name).distill(X, targets, rng=generator(3), recipe=SOFT)

        assert np.array_equal(fitted.logits(X), taught.logits(X))
        assert np.array_equal(fitted.predict(X), taught.predict(X))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_labels_without_doubt_give_the_model_of_labels(name: str) -> None:
    """The same for several labels, one of them constant."""
    y = np.column_stack([X[:, 0] > 0, X[:, 1] > 1, np.ones(60)]).astype(np.int64)
    fitted, taught = (named(name, 3, task="multi-label") for _ in range(2))
    fitted.fit(X, y, rng=generator(3))
    recipe = Recipe(link="sigmoid", temperature=2.0)
    taught.distill(X, y.astype(np.float32), rng=generator(3), recipe=recipe)

    assert np.array_equal(fitted.logits(X), taught.logits(X))


ONE_LEAF = [
    DecisionTreeClassifier(max_depth=1),
    RandomForestClassifier(5, max_depth=1),
    ExtraTreesClassifier(5, max_depth=1),
    GradientBoostingClassifier(n_estimators=30),
    HistGradientBoostingClassifier(max_iter=30, min_samples_leaf=2),
    LogisticRegression(),
    make_pipeline(StandardScaler(), LogisticRegression()),
]


@pytest.mark.parametrize(
    "learner",
    [
        *map(wrapped, ONE_LEAF),
        XGBoostLearner(num_classes=NUM_CLASSES),
        BoostedTreesLearner(num_classes=NUM_CLASSES),
    ],
    ids=lambda learner: type(getattr(learner, "_template", learner)).__name__,
)
def test_shares_of_rows_that_are_all_alike_are_learned(learner: Any) -> None:
    """Nothing tells the rows apart, so each gets the shares that all were given."""
    x, shares = np.ones((50, 2)), np.tile([0.7, 0.0, 0.3], (50, 1))
    model = learner.distill(x, shares, rng=generator(), recipe=SOFT)

    assert np.allclose(probabilities(model, x[:1]), shares[:1], atol=0.01)
    assert model.predict(x[:1]).tolist() == [0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "name", ["random-forest", "boosted-trees", "xgboost", "gradient-boosting"]
)
def test_logits_give_the_targets_at_their_temperature(name: str, temperature: float) -> None:
    """The contract of a recipe, on rows that a model can learn by heart."""
    x = np.repeat(np.arange(4.0)[:, None], 20, axis=0)
    shares = [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.4, 0.4, 0.2], [0.1, 0.7, 0.2]]
    targets = np.repeat(np.array(shares), 20, axis=0)
    recipe = Recipe(link="softmax", temperature=temperature)
    settings = Settings.of(num_trees=200, boosting_rounds=100)
    factory = learner_factory(name, row_shape=(1,), num_classes=3, settings=settings)
    model: Any = factory()
    model.distill(x, targets, rng=generator(), recipe=recipe)

    assert np.abs(link_scores(model.logits(x), recipe) - targets).max() < 0.05


def noisy_task(seed: int) -> tuple[Array, FloatArray, Array, FloatArray]:
    """Return few rows with a noisy teacher's shares, and many with the true ones."""
    rng = generator(seed)
    x = rng.normal(size=(2060, 6))
    scores = x @ rng.normal(size=(6, 3))
    noisy = scores[:60] + rng.normal(size=(60, 3))
    return x[:60], softmax(noisy, axis=1), x[60:], softmax(scores[60:], axis=1)


def students(name: str, x: Array, shares: FloatArray, seed: int) -> tuple[Learner, Learner]:
    """Return one that was taught by shares, and one by their likeliest classes."""
    settings = Settings.of(num_trees=50, boosting_rounds=10)
    factory = learner_factory(name, row_shape=(6,), num_classes=3, settings=settings)
    soft: Any = factory()
    soft.distill(x, shares, rng=generator(seed), recipe=SOFT)
    return soft, factory().fit(x, shares.argmax(axis=1), rng=generator(seed))


@pytest.mark.parametrize(
    "name", ["logistic-regression", "gradient-boosting", "boosted-trees", "xgboost"]
)
def test_shares_of_a_noisy_teacher_say_more_than_its_classes(name: str) -> None:
    """Where the teacher is in doubt, its likeliest class is often the wrong one.

    In cross-entropy the student of soft targets is nearer to the truth on every seed too.
    """
    gains = []
    for seed in range(8):
        x, shares, x_test, truth = noisy_task(seed)
        both = students(name, x, shares, seed)
        soft, hard = ((m.predict(x_test) == truth.argmax(axis=1)).mean() for m in both)
        gains.append(soft - hard)
        soft, hard = (
            -(truth * np.log(probabilities(m, x_test))).sum(axis=1).mean() for m in both
        )
        assert soft < hard - 0.03 or name == "logistic-regression" or seed >= 4

    assert min(gains) > 0
    assert np.mean(gains) > 0.03


def test_a_rare_label_is_still_ranked() -> None:
    """Probabilities far below one half order the rows as their teacher does."""
    odds = np.column_stack([-7 + X[:, 0], X[:, 1]])
    learner = MultiLabelLearner(lambda: wrapped(LogisticRegression(C=100.0), 2), num_classes=2)
    model = learner.distill(X, odds, rng=generator(), recipe=Recipe())

    assert expit(odds[:, 0]).max() < LARGEST_CUT
    assert np.corrcoef(model.logits(X)[:, 0], odds[:, 0])[0, 1] > 0.95


@pytest.mark.parametrize(
    ("share", "expected"), [(0.7, logit(0.7)), (1e-9, math.log(1e-7)), (1.0, -math.log(1e-7))]
)
def test_a_label_of_equal_shares_has_their_log_odds(share: float, expected: float) -> None:
    """Labels do not mix, and one that nobody doubts is constant."""
    targets = np.column_stack([np.full(60, share), X[:, 0] > 0]).astype(np.float64)
    recipe = Recipe(link="sigmoid")
    model = MultiLabelLearner(
        lambda: wrapped(DecisionTreeClassifier(max_depth=1), 2), num_classes=2
    ).distill(np.ones((60, 1)), targets, rng=generator(), recipe=recipe)

    assert np.allclose(model.logits(np.ones((2, 1)))[:, 0], expected, atol=1e-6)


def test_a_part_without_distill_learns_the_likelier_value() -> None:
    """A user's own binary learner of labels is enough."""

    class Sign:
        num_classes = 2

        def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> "Sign":
            del rng
            self.first = int(y[x[:, 0].argmax()])
            return self

        def predict(self, x: Array) -> IntArray:
            return np.where(x[:, 0] > 0, self.first, 1 - self.first)

        def logits(self, x: Array) -> FloatArray:
            return np.log(0.1 + 0.8 * np.eye(2)[self.predict(x)])

    model = MultiLabelLearner(Sign, num_classes=1)
    model.distill(X, -X[:, :1], rng=generator(), recipe=Recipe())

    assert np.array_equal(model.predict(X)[:, 0], (X[:, 0] <= 0).astype(np.int64))


# --- what weights do to an estimator ------------------------------------------------------


@pytest.mark.parametrize(
    "estimator",
    [
        KNeighborsClassifier(1),
        SVC(),
        LinearSVC(),
        make_pipeline(StandardScaler(), SVC()),
        BaggingClassifier(KNeighborsClassifier(1), 3),
    ],
)
def test_who_cannot_weigh_rows_learns_the_likeliest_class(estimator: Any) -> None:
    """Its model is that of labels, also when a class is likeliest nowhere."""
    shares = SHARES * [1.0, 1.0, 0.01]
    shares /= shares.sum(axis=1, keepdims=True)
    taught = wrapped(estimator).distill(X, shares, rng=generator(), recipe=SOFT)
    fitted = wrapped(estimator).fit(X, shares.argmax(axis=1), rng=generator())

    assert not takes_weights(estimator)
    assert np.array_equal(taught.logits(X), fitted.logits(X))


def test_steps_before_a_classifier_see_every_row_once() -> None:
    """A row in doubt, which is learned as several, does not move the scaler."""
    model: Any = wrapped(
        make_pipeline(StandardScaler(), SelectKBest(k=2), LogisticRegression())
    )
    shares = np.where(X[:, :1] > 0, [[1.0, 0.0, 0.0]], SHARES)
    model.distill(X, shares, rng=generator(), recipe=SOFT)

    assert np.array_equal(model._model[0].mean_, StandardScaler().fit(X).mean_)
    assert model.logits(X).shape == (60, 3)


def test_a_bootstrap_sample_takes_all_classes_of_a_row_or_none() -> None:
    """So every leaf of one row holds that row's shares."""
    forest: Any = wrapped(RandomForestClassifier(5))
    forest.distill(X, SHARES, rng=generator(), recipe=SOFT)
    rows = X.astype(np.float32)
    kept = weigh(SHARES)
    shares = np.zeros_like(SHARES)
    shares[kept.rows, kept.classes] = kept.weights

    for tree in forest._model.estimators_:
        in_leaves = tree.tree_.predict(rows)
        distances = np.abs(in_leaves[:, None] - shares[None]).sum(axis=2).min(axis=1)
        assert np.allclose(distances, 0.0, atol=1e-9)


def test_a_forest_of_several_threads_learns_shares_too() -> None:
    """Scikit-learn's own fit takes over where the shortcut does not apply."""
    forest = wrapped(RandomForestClassifier(20, n_jobs=2))
    model = forest.distill(X, SHARES, rng=generator(), recipe=SOFT)

    assert (model.predict(X) == SHARES.argmax(axis=1)).mean() > 0.9


@pytest.mark.parametrize("name", ["random-forest", "logistic-regression", "xgboost"])
def test_a_model_of_soft_targets_can_travel(name: str) -> None:
    """Its arrays give the same model elsewhere, to the bit."""
    model: Any = named(name).distill(X, SHARES, rng=generator(), recipe=SOFT)
    twin = named(name).from_arrays(model.to_arrays())  # type: ignore[attr-defined]

    assert np.array_equal(model.logits(X), twin.logits(X))


def has_arrays(learner: Any) -> bool:
    learner.fit(X, SHARES.argmax(axis=1), rng=generator())
    try:
        learner.to_arrays()
    except UnsupportedLearner:
        return False
    return True


@pytest.mark.parametrize("name", FOR_VECTORS)
def test_a_learner_knows_before_training_whether_its_models_travel(name: str) -> None:
    """Also one of several labels, which is made of others."""
    several = named(name, 2, task="multi-label")

    assert can_travel(named(name)) == can_travel(several) == has_arrays(named(name))


@pytest.mark.parametrize(
    "estimator",
    [
        make_pipeline(StandardScaler(), LogisticRegression()),
        make_pipeline(StandardScaler(), SVC()),
        make_pipeline(SelectKBest(k=2), LogisticRegression()),
        make_pipeline(StandardScaler(), make_pipeline(LogisticRegression())),
    ],
)
def test_a_pipeline_travels_if_all_its_steps_do(estimator: Any) -> None:
    """The answer before training is the one after it."""
    assert can_travel(wrapped(estimator)) == has_arrays(wrapped(estimator))


# --- bad targets --------------------------------------------------------------------------


def spoiled(value: float) -> FloatArray:
    targets = SHARES.copy()
    targets[3, 1] = value
    return targets


@pytest.mark.parametrize(
    ("targets", "rule"),
    [
        (spoiled(np.nan), "targets must be finite, got NaN or infinity"),
        (spoiled(np.inf), "targets must be finite, got NaN or infinity"),
        (spoiled(-0.1), "targets must be probabilities, as link softmax says"),
        (spoiled(1.1), "targets must be probabilities, as link softmax says"),
        (SHARES[:, :2], "targets must be of shape"),
        (SHARES[:9], "targets must be of shape"),
        (SHARES[:, 0], "targets must be of shape"),
        (SHARES.argmax(axis=1), "targets must be of shape"),
        (np.eye(3, dtype=np.int64)[[0] * 60], "targets must be floating-point numbers"),
        (np.zeros((60, 3)), "targets must be above 0 for some class of every row"),
    ],
)
@pytest.mark.parametrize("name", ["random-forest", "xgboost", "k-nearest-neighbours"])
def test_bad_targets_are_refused_with_a_sentence(name: str, targets: Array, rule: str) -> None:
    """Whatever a model could not learn from ends before it is touched."""
    learner = named(name).fit(X, SHARES.argmax(axis=1), rng=generator())
    before = learner.logits(X)
    with pytest.raises(InvalidData, match=rule):
        learner.distill(X, targets, rng=generator(), recipe=SOFT)  # type: ignore[attr-defined]

    assert np.array_equal(learner.logits(X), before)


def test_scores_beyond_float32_are_refused() -> None:
    """Their differences would overflow."""
    with pytest.raises(InvalidData, match="Test: targets must be within the range of float32"):
        check_soft_targets("Test", np.full((1, 3), 1e300), 1, 3, "identity")


@pytest.mark.parametrize(
    ("targets", "rule"),
    [
        (np.full((60, 2), np.nan), "targets must be finite"),
        (np.full((60, 2), -0.5), "targets must be probabilities, as link sigmoid says"),
        (np.zeros((60, 3)), "targets must be of shape"),
    ],
)
def test_bad_targets_of_labels_are_refused(targets: Array, rule: str) -> None:
    """Several labels are checked by the same rules."""
    learner = named("decision-tree", 2, task="multi-label")
    with pytest.raises(InvalidData, match=f"MultiLabelLearner: {rule}"):
        learner.distill(X, targets, rng=generator(), recipe=Recipe(link="sigmoid"))


def test_no_rows_are_refused() -> None:
    """There is nothing to learn, with or without doubt."""
    for learner in (named("decision-tree"), named("decision-tree", 3, task="multi-label")):
        with pytest.raises(InvalidData, match="x must be at least one row"):
            learner.distill(X[:0], SHARES[:0], rng=generator(), recipe=Recipe())
