"""SklearnLearner, and through it everything that all tabular learners share."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.ensemble import (
    BaggingClassifier,
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    VotingClassifier,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier, ExtraTreeClassifier

from clients.tabular.base import MAX_WIDTH, MIN_PROBABILITY, TabularLearner
from clients.tabular.sklearn import SklearnLearner
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
    UnsupportedLearner,
)
from tests.clients.digits import NUM_CLASSES
from tests.clients.digits import digits as all_digits

digits = partial(all_digits, num_rows=120)

SEED = 7
# The random state that a learner draws first from a generator with this seed.
RANDOM_STATE = int(np.random.default_rng(SEED).integers(2**31 - 1))


def learner(estimator: Any) -> SklearnLearner:
    return SklearnLearner(estimator, num_classes=NUM_CLASSES)


def fitted(
    estimator: Any, classes: list[int] | None = None, *, seed: int = SEED
) -> SklearnLearner:
    x, y = digits(classes)
    return learner(estimator).fit(x, y, rng=np.random.default_rng(seed))


def tree() -> Any:
    return DecisionTreeClassifier(max_depth=4)


FAMILIES = [
    DecisionTreeClassifier(max_depth=5),
    DecisionTreeClassifier(max_leaf_nodes=12, max_features=0.5),
    ExtraTreeClassifier(),
    RandomForestClassifier(6, max_depth=4),
    ExtraTreesClassifier(6),
    GradientBoostingClassifier(n_estimators=2, max_depth=2),
    HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=5),
    LogisticRegression(max_iter=500),
    GaussianNB(),
    KNeighborsClassifier(3),
    MLPClassifier((12,), max_iter=400, tol=0.02, learning_rate_init=0.01),
    make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
]

FORESTS = [
    RandomForestClassifier(5, criterion="entropy", max_features="log2"),
    RandomForestClassifier(5, bootstrap=False, max_features=9, min_samples_leaf=0.02),
    RandomForestClassifier(5, max_leaf_nodes=7, min_samples_split=5),
    RandomForestClassifier(5, ccp_alpha=0.02, min_impurity_decrease=0.01),
    RandomForestClassifier(5, max_samples=0.5),
    RandomForestClassifier(5, class_weight="balanced"),
    RandomForestClassifier(5, class_weight="balanced_subsample"),
    RandomForestClassifier(20, oob_score=True),
    RandomForestClassifier(5, n_jobs=2),
    ExtraTreesClassifier(5, bootstrap=True, max_depth=3),
    ExtraTreesClassifier(1, criterion="log_loss", min_weight_fraction_leaf=0.05),
]


def name_of(estimator: Any) -> str:
    return type(estimator).__name__


# --- the same answers as scikit-learn -----------------------------------------------------


@pytest.mark.parametrize("estimator", FAMILIES, ids=name_of)
def test_answers_are_those_of_scikit_learn(estimator: Any) -> None:
    """A learner gives scikit-learn's labels and probabilities for the same random state."""
    x, y = digits()
    reference = clone(estimator)
    if "random_state" in reference.get_params():
        reference.set_params(random_state=RANDOM_STATE)
    elif "logisticregression__random_state" in reference.get_params():
        reference.set_params(logisticregression__random_state=RANDOM_STATE)
    reference.fit(x, y)

    actual = fitted(estimator)

    assert np.array_equal(reference.predict(x), actual.predict(x))
    expected = np.log(np.clip(reference.predict_proba(x), MIN_PROBABILITY, 1.0))
    assert np.array_equal(expected, actual.logits(x))


@pytest.mark.parametrize("estimator", FORESTS, ids=lambda forest: repr(forest)[:60])
def test_forests_are_those_of_scikit_learn(estimator: Any) -> None:
    """Every setting of a forest gives the very trees that scikit-learn's own fit does."""
    x, y = digits()
    reference = clone(estimator).set_params(random_state=RANDOM_STATE).fit(x, y)

    actual = fitted(estimator)

    rows = x.astype(np.float32)
    for ours, theirs in zip(actual._model.estimators_, reference.estimators_, strict=True):
        assert np.array_equal(ours.tree_.predict(rows), theirs.tree_.predict(rows))
        assert np.array_equal(ours.tree_.threshold, theirs.tree_.threshold)
    shares = sum(each.predict_proba(x) for each in reference.estimators_)
    expected = np.log(np.clip(shares / len(reference.estimators_), MIN_PROBABILITY, 1.0))
    assert np.array_equal(expected, actual.logits(x))
    assert np.array_equal(reference.predict(x), actual.predict(x))


def test_a_fitted_forest_is_usable_as_a_forest_of_scikit_learn() -> None:
    """The forest that was fitted with less overhead answers through its own methods too."""
    x, _ = digits()
    actual = fitted(RandomForestClassifier(5, max_depth=3))

    model = actual._model

    assert (model.n_features_in_, model.n_classes_, len(model.estimators_)) == (64, 10, 5)
    assert np.array_equal(actual.predict(x), model.predict(x))
    assert model.score(x, actual.predict(x)) == 1.0


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float64])
def test_the_type_of_the_numbers_does_not_matter_to_trees(dtype: Any) -> None:
    """Whole numbers give one forest in every type that can hold them."""
    x, y = digits()
    expected = fitted(RandomForestClassifier(4)).logits(x)

    narrow = learner(RandomForestClassifier(4))
    narrow.fit(x.astype(dtype), y, rng=np.random.default_rng(SEED))

    assert np.array_equal(expected, narrow.logits(x.astype(dtype)))


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (RandomForestClassifier(3, max_depth=-1), "max_depth"),
        (RandomForestClassifier(0), "n_estimators"),
        (RandomForestClassifier(3, bootstrap="often"), "bootstrap"),
        (DecisionTreeClassifier(criterion="guess"), "criterion"),
    ],
    ids=["depth", "trees", "bootstrap", "criterion"],
)
def test_bad_settings_still_get_the_error_of_scikit_learn(estimator: Any, message: str) -> None:
    """Skipping checks for speed does not skip the one that finds a wrong setting."""
    with pytest.raises(ValueError, match=message):
        fitted(estimator)


def test_a_warning_of_scikit_learn_reaches_the_user() -> None:
    """A fit that stops too early is not silenced."""
    with pytest.warns(ConvergenceWarning):
        fitted(LogisticRegression(max_iter=1))


# --- randomness ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "estimator",
    [
        ExtraTreeClassifier(max_depth=3),
        RandomForestClassifier(3, max_depth=3),
        BaggingClassifier(ExtraTreeClassifier(max_depth=3), n_estimators=3),
        make_pipeline(StandardScaler(), ExtraTreesClassifier(3, max_depth=3)),
    ],
    ids=name_of,
)
def test_the_generator_decides_the_model(estimator: Any) -> None:
    """Equal generators give equal models and others do not, also for nested estimators."""
    x, _ = digits()

    assert np.array_equal(fitted(estimator).logits(x), fitted(estimator).logits(x))
    assert not np.array_equal(fitted(estimator).logits(x), fitted(estimator, seed=8).logits(x))


def test_every_nested_random_state_is_set() -> None:
    """Each random state of a nest is drawn from the generator, none is left to chance."""
    nest = BaggingClassifier(
        make_pipeline(StandardScaler(), ExtraTreeClassifier()), n_estimators=2
    )

    parameters = fitted(nest)._model.get_params()

    states = [value for key, value in parameters.items() if key.endswith("random_state")]
    assert len(states) == 2
    assert all(isinstance(state, int) for state in states)


@pytest.mark.parametrize("estimator", FAMILIES, ids=name_of)
def test_the_estimator_that_was_given_stays_as_it_was(estimator: Any) -> None:
    """Fitting changes neither the settings nor the state of the user's estimator."""
    before = repr(vars(estimator))

    fitted(estimator)

    assert repr(vars(estimator)) == before


# --- scores -------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [LinearSVC(), RidgeClassifier(), SVC()], ids=name_of)
@pytest.mark.parametrize("classes", [[2, 5], [2, 5, 8], None], ids=["two", "three", "all"])
def test_decision_values_become_log_probabilities(
    estimator: Any, classes: list[int] | None
) -> None:
    """Without probabilities the logits are the log of a softmax, in the class's column."""
    x, y = digits(classes)
    actual = fitted(estimator, classes)
    present = np.unique(y)

    scores = actual.logits(x)[:, present]

    assert np.allclose(np.exp(scores).sum(axis=1), 1.0, atol=1e-5)
    decisions = actual._model.decision_function(x)
    columns = decisions if decisions.ndim == 2 else np.stack([0 * decisions, decisions], axis=1)
    assert np.allclose(np.diff(scores), np.diff(columns), atol=1e-6) or scores.min() < -16
    assert (actual.predict(x) == y).mean() > 0.9
    assert np.array_equal(present[scores.argmax(axis=1)], actual.predict(x))


def test_a_model_that_only_predicts_gives_all_weight_to_its_class() -> None:
    """A vote without scores becomes one probable class and improbable others."""
    x, _ = digits()
    actual = fitted(VotingClassifier([("bayes", GaussianNB()), ("tree", tree())]))

    scores = actual.logits(x)

    assert np.array_equal(scores.argmax(axis=1), actual.predict(x))
    assert set(np.unique(scores)) == {math.log(MIN_PROBABILITY), 0.0}


@pytest.mark.parametrize("estimator", FAMILIES, ids=name_of)
def test_missing_classes_have_columns_of_their_own(estimator: Any) -> None:
    """A subset that lacks classes still gives every class of the federation a column."""
    x, y = digits([3, 9])
    actual = fitted(estimator, [3, 9])

    scores, labels = actual.logits(x), actual.predict(x)

    assert scores.shape == (len(x), NUM_CLASSES)
    assert scores.dtype == np.float64
    others = np.delete(scores, [3, 9], axis=1)
    assert (others == math.log(MIN_PROBABILITY)).all()
    assert set(labels) <= {3, 9}
    assert (labels == y).mean() > 0.9


@pytest.mark.parametrize("estimator", [*FAMILIES, SVC(), LinearSVC()], ids=name_of)
def test_a_single_class_needs_no_library(estimator: Any) -> None:
    """A subset of one class, which many estimators refuse, becomes a constant model."""
    x, _ = digits()

    actual = fitted(estimator, [6])

    assert (actual.predict(x) == 6).all()
    assert (actual.logits(x)[:, 6] == 0.0).all()
    assert (np.delete(actual.logits(x), 6, axis=1) == math.log(MIN_PROBABILITY)).all()
    assert sorted(actual.to_arrays()) == ["classes", "width"]


def test_fitting_again_forgets() -> None:
    """The second fit of a learner leaves nothing of the first."""
    x, y = digits([1, 2])
    again = fitted(tree()).fit(x[:, :32], y, rng=np.random.default_rng(SEED))

    fresh = learner(tree()).fit(x[:, :32], y, rng=np.random.default_rng(SEED))

    assert np.array_equal(fresh.logits(x[:, :32]), again.logits(x[:, :32]))


# --- refusals -----------------------------------------------------------------------------


def test_a_fit_that_fails_leaves_no_model() -> None:
    """After an error nobody can mistake the old model for the new one."""
    x, y = digits()
    actual = fitted(KNeighborsClassifier(3))
    actual._template = KNeighborsClassifier(-1)

    with pytest.raises(ValueError, match="n_neighbors"):
        actual.fit(x, y, rng=np.random.default_rng(0))

    with pytest.raises(NotFitted):
        actual.predict(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:0], y[:0]), "at least one row"),
        (lambda x, y: (x[:, :0], y), "at least one column"),
        (lambda x, y: (np.where(x > 15, np.nan, x), y), "finite"),
        (lambda x, y: (x.astype(str), y), "an array of numbers"),
        (lambda x, y: (x[:, 0], y), "an array of rows"),
        (lambda x, y: (x, y[:-1]), "one per row"),
        (lambda x, y: (x, y + 1), "between 0 and 9"),
        (lambda x, y: (x, y - 1), "between 0 and 9"),
        (lambda x, y: (x, y.astype(float)), "class indices"),
    ],
    ids=["empty", "no-columns", "nan", "text", "flat", "short", "above", "below", "floats"],
)
def test_bad_training_data_are_refused(change: Any, message: str) -> None:
    """Training data that break the contract are named before any library sees them."""
    x, y = change(*digits())

    with pytest.raises(InvalidData, match=f"SklearnLearner: .*{message}"):
        learner(tree()).fit(x, y, rng=np.random.default_rng(0))


@pytest.mark.parametrize("classes", [None, [4]], ids=["all", "one"])
@pytest.mark.parametrize("method", ["predict", "logits"])
def test_bad_rows_are_refused(method: str, classes: list[int] | None) -> None:
    """Rows of another width or with NaN are refused, by constant models too."""
    x, _ = digits()
    ask = getattr(fitted(tree(), classes), method)

    with pytest.raises(InvalidData, match="rows of 64 columns, as in training, got 63"):
        ask(x[:, 1:])
    with pytest.raises(InvalidData, match="finite"):
        ask(np.full((2, 64), np.inf))


def test_an_error_of_the_own_model_is_that_of_scikit_learn() -> None:
    """Only received models are called a mismatch when they cannot answer."""
    x, y = digits([1, 2], num_rows=4)
    few = learner(KNeighborsClassifier(9)).fit(x, y, rng=np.random.default_rng(0))

    with pytest.raises(ValueError, match="n_neighbors") as caught:
        few.predict(x)

    assert not isinstance(caught.value, KnowledgeMismatch)


@pytest.mark.parametrize("estimator", [tree(), RandomForestClassifier(2)], ids=name_of)
def test_numbers_beyond_float32_are_refused_by_trees(estimator: Any) -> None:
    """Trees compare float32, where a large float64 would become infinity unnoticed."""
    x, y = digits()
    large = x.copy()
    large[3, 5] = 1e300

    with pytest.raises(InvalidData, match="within the range of float32"):
        learner(estimator).fit(large, y, rng=np.random.default_rng(0))
    with pytest.raises(InvalidData, match="within the range of float32"):
        fitted(estimator).predict(large)


@pytest.mark.parametrize(
    ("estimator", "settings", "message"),
    [
        (tree(), {"num_classes": 1}, "num_classes must be at least 2"),
        (tree(), {"num_classes": 3, "max_model_bytes": 0}, "max_model_bytes must be positive"),
        (StandardScaler(), {"num_classes": 3}, "estimator must be a classifier"),
        (SVC(decision_function_shape="ovo"), {"num_classes": 3}, "must be 'ovr'"),
        (
            make_pipeline(StandardScaler(), SVC(decision_function_shape="ovo")),
            {"num_classes": 3},
            "svc__decision_function_shape must be 'ovr'",
        ),
    ],
    ids=["one-class", "no-memory", "scaler", "pairs", "nested-pairs"],
)
def test_bad_parameters_are_refused(
    estimator: Any, settings: dict[str, int], message: str
) -> None:
    """A setting that cannot work is refused when the learner is made."""
    with pytest.raises(InvalidParameter, match=message):
        SklearnLearner(estimator, **settings)


# --- the frame of every array form --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("classes", None, "with 'classes'"),
        ("width", None, "with 'width'"),
        ("classes", np.array([], dtype=np.int64), "between 1 and 10 classes"),
        ("classes", np.arange(11), "between 1 and 10 classes"),
        ("classes", np.array([0, 2, 2]), "rising"),
        ("classes", np.array([2, 1, 0]), "rising"),
        ("classes", np.array([-1, 0, 1]), "rising and below 10"),
        ("classes", np.array([0, 1, 10]), "rising and below 10"),
        ("classes", np.array([0.0, 1.0, 2.0]), "of int64"),
        ("classes", np.array([[0, 1, 2]]), "of shape"),
        ("width", np.array([0]), "between 1 and"),
        ("width", np.array([-5]), "between 1 and"),
        ("width", np.array([MAX_WIDTH + 1]), "between 1 and"),
        ("width", np.array(64), "of shape"),
        ("width", np.array([64], dtype=np.int32), "of int64"),
        ("more", np.array([1]), "named"),
        (7, np.array([1]), "arrays"),
    ],
)
def test_a_wrong_frame_is_refused(name: Any, value: Array | None, message: str) -> None:
    """Classes and width that do not fit the federation are a mismatch, not a crash."""
    arrays: dict[Any, Array] = dict(fitted(tree(), [0, 1, 2]).to_arrays())
    arrays.pop(name, None)
    if value is not None:
        arrays[name] = value

    with pytest.raises(KnowledgeMismatch, match=message):
        learner(tree()).from_arrays(arrays)


def test_a_constant_model_travels_alone() -> None:
    """A one-class model is its class and width; anything beside it is refused."""
    x, _ = digits()
    arrays = fitted(SVC(), [6]).to_arrays()

    twin = learner(SVC()).from_arrays(arrays)

    assert (twin.predict(x) == 6).all()
    with pytest.raises(KnowledgeMismatch, match="named"):
        learner(SVC()).from_arrays({**arrays, "more": np.zeros(3, dtype=np.uint8)})


def test_a_received_model_is_a_new_learner() -> None:
    """Receiving leaves the receiver as it was, and later writes do not reach the twin."""
    x, _ = digits()
    receiver = fitted(RidgeClassifier(), [0, 1])
    before = receiver.logits(x)
    arrays = {key: array.copy() for key, array in fitted(RidgeClassifier()).to_arrays().items()}

    twin = receiver.from_arrays(arrays)
    expected = twin.logits(x)
    for array in arrays.values():
        array[...] = 0

    assert np.array_equal(receiver.logits(x), before)
    assert np.array_equal(twin.logits(x), expected)


class _Majority(TabularLearner):
    """The smallest subclass: it has no array form."""

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:  # noqa: ARG002
        self.shares = np.bincount(y) / len(y)

    def _probabilities(self, x: Array) -> FloatArray:
        return (
            np.full((len(x), len(self.shares)), np.nan)
            if x.max() > 1
            else (np.tile(self.shares, (len(x), 1)))
        )


def test_the_smallest_subclass_says_what_it_lacks_and_spreads_no_nan() -> None:
    """A wrapper needs no array form, and then points to votes instead.

    A NaN probability becomes the smallest one, so that no average is lost to it.
    """
    x, y = digits([1, 4])
    majority = _Majority(num_classes=NUM_CLASSES).fit(x, y, rng=np.random.default_rng(0))
    frame: Mapping[str, Array] = {"classes": np.array([1, 4]), "width": np.array([64])}

    with pytest.raises(UnsupportedLearner, match=r'_Majority: .*exchange="votes"'):
        majority.to_arrays()
    with pytest.raises(KnowledgeMismatch, match="_Majority: arrays must be those of"):
        majority.from_arrays(frame)
    assert (majority.logits(x) == math.log(MIN_PROBABILITY)).all()
