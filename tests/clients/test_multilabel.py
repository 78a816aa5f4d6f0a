"""MultiLabelLearner: binary learners side by side, each on the rows it knows."""

import math
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.tree import DecisionTreeClassifier

from clients.tabular.base import MIN_PROBABILITY
from clients.tabular.kernel import RidgeLearner
from clients.tabular.multilabel import MultiLabelLearner
from clients.tabular.sklearn import SklearnLearner
from fl_strategies._util import Array
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
    UnsupportedLearner,
)
from fl_strategies.learners import Learner, PortableLearner, quality

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 5))
LABELS = (X[:, :4] + 0.3 * RNG.normal(size=(80, 4)) > 0).astype(np.int64)
# Known at random, always "yes", never known, known in full.
Y = np.column_stack(
    [
        np.where(RNG.random(80) < 0.3, -1, LABELS[:, 0]),
        np.where(LABELS[:, 1] == 1, 1, -1),
        np.full(80, -1),
        LABELS[:, 3],
    ]
)
CERTAIN = -math.log(MIN_PROBABILITY)


def logistic() -> Learner:
    return SklearnLearner(LogisticRegression(), num_classes=2)


def tree() -> Learner:
    return SklearnLearner(DecisionTreeClassifier(max_features=1), num_classes=2)


def learner(part: Any = logistic, num_classes: int = 4) -> MultiLabelLearner:
    return MultiLabelLearner(part, num_classes=num_classes)


def fitted(part: Any = logistic, y: Array = Y, seed: int = 0) -> MultiLabelLearner:
    return learner(part, y.shape[1]).fit(X, y, rng=np.random.default_rng(seed))


# --- learning -----------------------------------------------------------------------------


def test_log_odds_are_those_of_binary_models() -> None:
    """Every label is learned by itself, from the rows where it is known."""
    scores = fitted().logits(X)

    for label in (0, 3):
        known = Y[:, label] >= 0
        alone = LogisticRegression().fit(X[known], Y[known, label])
        assert np.allclose(scores[:, label], alone.decision_function(X), atol=1e-8)


def test_labels_without_two_values_are_constant() -> None:
    """One known value is certain within the package's bounds, and none is undecided."""
    y = np.where(Y == 1, 0, Y)
    scores, negative = fitted().logits(X), fitted(y=y).logits(X)

    assert (scores[:, 1] == CERTAIN).all()
    assert (scores[:, 2] == 0.0).all()
    assert (negative[:, :2] == -CERTAIN).all()
    assert fitted().predict(X)[:, 1:3].tolist() == [[1, 0]] * 80


def test_answers_have_the_form_of_the_task() -> None:
    """Labels are 0 and 1 by the sign of the log-odds, and good ones."""
    model = fitted()

    labels, scores = model.predict(X), model.logits(X)

    assert model.num_classes == 4
    assert labels.dtype == np.int64
    assert scores.dtype == np.float64
    assert np.array_equal(labels, (scores > 0).astype(np.int64))
    assert quality(model, X, LABELS, "multi-label") > 0.7
    assert quality(model, X, Y, "multi-label") > 0.9
    assert model.logits(X[:0]).shape == (0, 4)


def test_randomness_of_a_label_is_its_own() -> None:
    """Equal generators give equal models, and a label does not depend on others."""
    one, same, other = (fitted(tree, seed=seed).logits(X) for seed in (1, 1, 2))
    less = fitted(tree, np.column_stack([np.full(80, -1), Y[:, 1:]]), seed=1).logits(X)
    fresh = RNG.normal(size=(200, 5))

    assert np.array_equal(one, same)
    assert np.array_equal(one[:, 3], less[:, 3])
    first, second = (fitted(tree, seed=seed).logits(fresh) for seed in (1, 2))
    assert not np.array_equal(first, second)
    assert one.shape == other.shape


def test_images_reach_the_parts_as_images() -> None:
    """Rows of any shape are handed on, and other shapes are refused."""
    images = RNG.normal(size=(80, 2, 3))

    model = learner().fit(images, Y, rng=np.random.default_rng(0))

    assert model.logits(images).shape == (80, 4)
    with pytest.raises(InvalidData, match=r"rows of shape \(2, 3\)"):
        model.logits(images.reshape(80, 6))


# --- travel -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [logistic, tree, lambda: RidgeLearner(num_classes=2)],
    ids=["logistic", "tree", "ridge"],
)
def test_a_model_travels_when_its_parts_do(part: Any) -> None:
    """Constants and models of all labels arrive to the bit."""
    sender = fitted(part)

    twin = learner(part).from_arrays(sender.to_arrays())

    assert isinstance(sender, PortableLearner)
    assert np.array_equal(sender.logits(X), twin.logits(X))
    assert all(array.dtype.kind in "biuf" for array in sender.to_arrays().values())


def test_parts_that_cannot_travel_say_so() -> None:
    """A nearest-neighbour model consists of its rows and stays where it is."""
    model = fitted(lambda: SklearnLearner(KNeighborsClassifier(), num_classes=2))

    with pytest.raises(UnsupportedLearner, match="KNeighborsClassifier"):
        model.to_arrays()


SENT = fitted().to_arrays()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("row-shape", np.array([0]), "row-shape must be sides from 1"),
        ("row-shape", np.array([2**40, 2**40]), "row-shape must be sides from 1"),
        ("row-shape", np.array([], dtype=np.int64), "row-shape must be between 1 and 8"),
        ("row-shape", np.ones(9, dtype=np.int64), "row-shape must be between 1 and 8"),
        ("row-shape", np.array([6]), "label 0 must be a model of rows of shape"),
        ("log-odds", np.zeros(3), "log-odds must be of shape"),
        ("log-odds", np.full(4, 17.0), "log-odds must be within 16.1"),
        ("log-odds", np.full(4, np.nan), "log-odds must be finite"),
        ("is-constant", np.ones(4), "is-constant must be of bool"),
        ("is-constant", np.ones(4, dtype=bool), "label 0 must be without arrays"),
        ("is-constant", np.zeros(4, dtype=bool), "arrays must be"),
        ("4/coef", np.zeros(2), "must belong to models 0 to 3"),
        ("more", np.zeros(2), "must belong to models 0 to 3"),
        ("0/coef", np.full((1, 5), np.nan), "coef must be finite"),
        ("0/more", np.zeros(2), "arrays must be named"),
    ],
)
def test_forged_arrays_are_refused(name: str, value: Array, message: str) -> None:
    """Everything besides the parts is checked here, and the parts by themselves."""
    with pytest.raises(KnowledgeMismatch, match=message):
        learner().from_arrays({**SENT, name: value})


def test_incomplete_arrays_are_refused() -> None:
    """No array can be omitted, and the number of labels must agree."""
    for left in SENT:
        with pytest.raises(KnowledgeMismatch):
            learner().from_arrays({name: SENT[name] for name in SENT if name != left})
    with pytest.raises(KnowledgeMismatch):
        learner(num_classes=5).from_arrays(SENT)


# --- refusals -----------------------------------------------------------------------------


def test_bad_settings_are_refused() -> None:
    """Labels are at least one, and parts are binary."""
    with pytest.raises(InvalidParameter, match="num_classes must be at least 1, got 0"):
        learner(num_classes=0)
    with pytest.raises(InvalidParameter, match="learner_fn must be a factory for two classes"):
        learner(lambda: RidgeLearner(num_classes=3))


def test_bad_data_are_refused() -> None:
    """Unfitted use, labels of another form, empty sets and NaN are named."""
    rng = np.random.default_rng(0)

    for call in (learner().predict, learner().logits):
        with pytest.raises(NotFitted, match="MultiLabelLearner"):
            call(X)
    with pytest.raises(NotFitted):
        learner().to_arrays()
    with pytest.raises(InvalidData, match=r"y must be of shape \(80, 4\)"):
        learner().fit(X, Y[:, 0], rng=rng)
    with pytest.raises(InvalidData, match="-1, 0 and 1"):
        learner().fit(X, Y + 1, rng=rng)
    with pytest.raises(InvalidData, match="at least one row"):
        learner().fit(X[:0], Y[:0], rng=rng)
    with pytest.raises(InvalidData, match="finite"):
        fitted().logits(np.where(X > 2, np.nan, X))
