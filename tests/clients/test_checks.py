"""check_learner: every learner of the package passes, every broken one is named."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier

from clients.checks import check_learner
from clients.tabular.base import TabularLearner, require_array, require_names
from clients.tabular.boosted_trees import BoostedTreesLearner
from clients.tabular.forest import ForestLearner
from clients.tabular.lightgbm import LightGBMLearner
from clients.tabular.sklearn import SklearnLearner
from clients.tabular.xgboost import XGBoostLearner
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import InvalidParameter, UnsupportedLearner, require_data
from fl_strategies.learners import Recipe, TrainingSet


class CentroidLearner(TabularLearner):
    """A whole wrapper: what it takes to bring a model of another library."""

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        picked = [
            rng.permutation(np.flatnonzero(y == label))[:9] for label in range(y.max() + 1)
        ]
        self.centroids = np.stack([x[rows].mean(axis=0, dtype=np.float64) for rows in picked])

    def _probabilities(self, x: Array) -> FloatArray:
        distances = np.linalg.norm(x[:, None] - self.centroids, axis=2)
        closeness = np.exp(distances.min(axis=1, keepdims=True) - distances)
        shares: FloatArray = closeness / closeness.sum(axis=1, keepdims=True)
        return shares

    def _to_arrays(self) -> dict[str, Array]:
        return {"centroids": self.centroids}

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        require_names(self._owner, arrays, {"centroids"})
        shape = (self._num_present, self._width)
        self.centroids = require_array(self._owner, arrays, "centroids", np.float64, shape)


def centroids(**_: Any) -> CentroidLearner:
    return CentroidLearner(num_classes=3)


def test_a_small_wrapper_passes() -> None:
    """A wrapper of a few lines around any model is a full learner."""
    check_learner(centroids)
    check_learner(lambda: CentroidLearner(num_classes=5), num_classes=5, num_features=1)


@pytest.mark.parametrize(
    "estimator",
    [
        DecisionTreeClassifier(max_depth=3),
        RandomForestClassifier(3),
        ExtraTreesClassifier(3),
        LogisticRegression(),
        LinearSVC(),
        SVC(),
        KNeighborsClassifier(3),
        GradientBoostingClassifier(n_estimators=2),
        GaussianNB(),
        make_pipeline(StandardScaler(), RandomForestClassifier(3)),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_estimators_of_scikit_learn_pass(estimator: Any) -> None:
    """Every family of scikit-learn keeps the contract, whether it can travel or not."""
    check_learner(lambda: SklearnLearner(estimator, num_classes=3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: XGBoostLearner(num_classes=4, num_rounds=2),
        lambda: LightGBMLearner(num_classes=4, num_rounds=2),
        lambda: BoostedTreesLearner(num_classes=4, num_rounds=2),
        lambda: ForestLearner(num_classes=4, num_trees=8),
    ],
    ids=["xgboost", "lightgbm", "boosted-trees", "forest"],
)
def test_learners_of_trees_pass(make: Callable[[], Any]) -> None:
    """Boosted trees and forests keep the contract."""
    check_learner(make, num_classes=4)


class FourMethods:
    """The least a learner can be; it hides that its model could travel."""

    def __init__(self) -> None:
        self.inner = centroids()
        self.num_classes = 3

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        self.inner.fit(x, y, rng=rng)
        return self

    def predict(self, x: Array) -> IntArray:
        return self.inner.predict(x)

    def logits(self, x: Array) -> FloatArray:
        return self.inner.logits(x)


def test_a_learner_need_not_travel() -> None:
    """The four methods of a learner are enough; the rules of others do not apply."""
    check_learner(FourMethods)


def test_seeding_the_shared_generator_is_found() -> None:
    """A learner that sets the same global seed in every fit is found all the same."""

    class Seeds(CentroidLearner):
        def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
            np.random.seed(123)  # noqa: NPY002
            super()._fit(x, y, rng)

    with pytest.raises(UnsupportedLearner, match="global random states must stay untouched"):
        check_learner(lambda: Seeds(num_classes=3))


def test_torch_passes() -> None:
    """A network keeps the contract, also where it fits many at once."""
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("clients.networks.learner")
    factory: Callable[[], Any] = lambda: module.TorchLearner(  # noqa: E731
        lambda: torch.nn.Linear(5, 3), num_classes=3, epochs=1
    )

    check_learner(factory)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_classes": 2}, "check_learner: num_classes must be at least 3, got 2"),
        ({"num_features": 0}, "check_learner: num_features must be at least 1, got 0"),
    ],
)
def test_bad_settings_of_the_check_are_refused(settings: dict[str, int], message: str) -> None:
    """The check needs three classes, so that one can be missing."""
    with pytest.raises(InvalidParameter, match=message):
        check_learner(centroids, **settings)


def network(module_fn: Callable[[], Any], num_classes: int) -> Callable[[], Any]:
    from clients.networks.learner import TorchLearner

    return lambda: TorchLearner(module_fn, num_classes=num_classes, epochs=1)


def words_network() -> Any:
    from torch import nn

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vectors, self.scores = nn.EmbeddingBag(20, 4), nn.Linear(4, 2)

        def forward(self, rows: Any) -> Any:
            return self.scores(self.vectors(rows.long()))

    return Words()


def image_network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 16, 4))


@pytest.mark.parametrize("kind", ["two classes", "words", "images", "frames"])
def test_learners_are_checked_on_rows_of_the_user(kind: str) -> None:
    """For what made rows are not: two classes, word numbers, images."""
    rng = np.random.default_rng(1)
    y = np.arange(24) % (4 if kind == "images" else 2)
    binary: Callable[[], Any] = lambda: SklearnLearner(  # noqa: E731
        DecisionTreeClassifier(), num_classes=2
    )
    rows: Array = rng.normal(size=(24, 3)) + y[:, None]
    factory, x = {
        "two classes": (binary, rows),
        "frames": (binary, pd.DataFrame(rows)),
        "words": (network(words_network, 2), rng.integers(20, size=(24, 7))),
        "images": (network(image_network, 4), rng.random((24, 1, 6, 6))),
    }[kind]

    check_learner(factory, x=x, y=pd.Series(y) if kind == "frames" else y)  # type: ignore[arg-type]


def test_a_rule_that_is_broken_on_rows_of_the_user_is_named() -> None:
    """Also where the class list is longer than what the rows show."""
    x, y = np.random.default_rng(0).normal(size=(20, 2, 2)), np.arange(20) % 2 + 1

    check_learner(centroids, x=x, y=y)
    with pytest.raises(UnsupportedLearner, match="NaN in training must be refused"):
        check_learner(lambda: TakesNaN(num_classes=3), x=x, y=y)
    with pytest.raises(UnsupportedLearner, match="num_classes must be 2, got 3"):
        check_learner(centroids, num_classes=2, x=x, y=y - 1)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((2, 1)), None, "x and y must be given together, got 'one of them'"),
        (np.zeros((2, 1)), np.zeros(2, int), "y must be labels of at least two classes, got 1"),
        (np.zeros((2, 1)), np.array([0, 5]), "y must be between 0 and 2"),
        (np.zeros(2), np.array([0, 1]), "x must be an array of rows"),
    ],
)
def test_rows_that_nothing_can_be_checked_on_are_refused(
    x: Array, y: IntArray | None, message: str
) -> None:
    """The fault is the caller's, not the learner's."""
    with pytest.raises(ValueError, match=f"check_learner: {message}"):
        check_learner(centroids, x=x, y=y)


# --- one broken rule each -----------------------------------------------------------------


class NoLogits:
    """It cannot score."""

    num_classes = 3

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        raise NotImplementedError

    def predict(self, x: Array) -> IntArray:
        raise NotImplementedError


class OtherClasses(CentroidLearner):
    """It has a class list of its own."""

    @property
    def num_classes(self) -> int:
        return 7


class AnswersUnfitted(CentroidLearner):
    """It guesses before it has learned."""

    def predict(self, x: Array) -> IntArray:
        return super().predict(x) if self._classes is not None else np.zeros(len(x), np.int64)


class WrongUnfittedError(CentroidLearner):
    """It fails before fit, but not by the agreed error."""

    def logits(self, x: Array) -> FloatArray:
        if self._classes is None:
            raise KeyError("weights")
        return super().logits(x)


class ReturnsNone(CentroidLearner):
    """It cannot be chained."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Any:
        super().fit(x, y, rng=rng)


class FloatLabels(CentroidLearner):
    """Its labels are no indices."""

    def predict(self, x: Array) -> Any:
        return super().predict(x).astype(float)


class ColumnLabels(CentroidLearner):
    """Its labels are a column."""

    def predict(self, x: Array) -> IntArray:
        return super().predict(x)[:, None]


class LabelsFromOne(CentroidLearner):
    """It counts classes from one."""

    def predict(self, x: Array) -> IntArray:
        labels: IntArray = super().predict(x) + 1
        return labels


class NarrowScores(CentroidLearner):
    """It forgets a column."""

    def logits(self, x: Array) -> FloatArray:
        return super().logits(x)[:, :2]


class IntegerScores(CentroidLearner):
    """It rounds its scores."""

    def logits(self, x: Array) -> Any:
        return super().logits(x).astype(int)


class InfiniteScores(CentroidLearner):
    """It calls a class impossible."""

    def logits(self, x: Array) -> FloatArray:
        scores = super().logits(x)
        scores[scores < -16] = -np.inf
        return scores


class OppositeScores(CentroidLearner):
    """Its labels and scores disagree."""

    def logits(self, x: Array) -> FloatArray:
        return -super().logits(x)


class OwnRandomness(CentroidLearner):
    """It draws from a generator of its own."""

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:  # noqa: ARG002
        super()._fit(x, y, np.random.default_rng())


class CountsItsFits(CentroidLearner):
    """Equal fits in a row agree, but a fit with another generator leaves a trace."""

    seen: set[str] = set()  # noqa: RUF012

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        self.seen.add(str(rng.bit_generator.state["state"]))
        super()._fit(x, y, rng)
        self.centroids += len(self.seen)


class GlobalRandomness(CentroidLearner):
    """It draws from the generator that all code shares."""

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        np.random.random()  # noqa: NPY002
        super()._fit(x, y, rng)


class ChangesRows(CentroidLearner):
    """It centres the rows of its caller."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        x -= x.mean(axis=0)
        return super().fit(x, y, rng=rng)


class DropsMissingClasses(CentroidLearner):
    """It has columns only for what it saw."""

    def logits(self, x: Array) -> FloatArray:
        return super().logits(x)[:, self._fitted_classes()]


class NeedsTwoClasses(CentroidLearner):
    """It has no answer after a single class."""

    def logits(self, x: Array) -> FloatArray:
        scores = super().logits(x)
        return scores if self._num_present > 1 else scores * np.nan


class NeedsRows(CentroidLearner):
    """It answers no rows in another shape."""

    def predict(self, x: Array) -> IntArray:
        return super().predict(x) if len(x) else np.zeros((0, 1), np.int64)


class LearnsFromNothing(CentroidLearner):
    """It accepts an empty training set."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        return super().fit(x, y, rng=rng) if len(x) else self


class TakesNaN(CentroidLearner):
    """It fills gaps in training silently."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        return super().fit(np.nan_to_num(x), y, rng=rng)


class PredictsNaN(CentroidLearner):
    """It fills gaps in prediction silently."""

    def predict(self, x: Array) -> IntArray:
        return super().predict(np.nan_to_num(x))


class TakesAnyWidth(CentroidLearner):
    """It ignores columns it does not know."""

    def logits(self, x: Array) -> FloatArray:
        return super().logits(x[:, :5])


class TakesAnyLabel(CentroidLearner):
    """It bends labels into its range."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        return super().fit(x, np.clip(y, 0, 2), rng=rng)


class FitsOneOfMany(CentroidLearner):
    """It fits only the first of many sets."""

    def fit_many(self, sets: list[TrainingSet], *, rngs: list[Any]) -> list[Self]:
        return [self.fit(*sets[0], rng=rngs[0])]


class TextArrays(CentroidLearner):
    """It sends text."""

    def _to_arrays(self) -> dict[str, Array]:
        return {"centroids": self.centroids.astype(str)}


class RoundsArrays(CentroidLearner):
    """It loses digits on the way."""

    def _to_arrays(self) -> dict[str, Array]:
        return {"centroids": self.centroids.round(2)}


class BecomesTheModel(CentroidLearner):
    """It overwrites the receiver."""

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        vars(self).update(vars(super().from_arrays(arrays)))
        return self


class TakesFewerArrays(CentroidLearner):
    """It fills in what did not arrive."""

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        return super().from_arrays({"classes": np.arange(3), **arrays})


class Soft(CentroidLearner):
    """It learns soft targets by their likeliest class, and checks them."""

    def distill(
        self, x: Array, targets: FloatArray, *, rng: np.random.Generator, recipe: Recipe
    ) -> Self:
        assert recipe.link == "softmax"
        shape = (len(x), self.num_classes)
        require_data(targets.shape == shape, "Soft", "targets", "one per class", targets.shape)
        require_data(bool(np.isfinite(targets).all()), "Soft", "targets", "finite", "NaN")
        require_data(targets.min() >= 0, "Soft", "targets", "probabilities", "less than 0")
        return self.fit(x, targets.argmax(axis=1), rng=rng)


class Deaf(Soft):
    """It learns something, but not the targets."""

    def distill(
        self, x: Array, targets: FloatArray, *, rng: np.random.Generator, recipe: Recipe
    ) -> Self:
        super().distill(x, targets, rng=rng, recipe=recipe)
        return self.fit(x, np.arange(len(x)) % 3, rng=rng)


class TakesNaNScores(Soft):
    """It fills gaps in targets silently."""

    def distill(
        self, x: Array, targets: FloatArray, *, rng: np.random.Generator, recipe: Recipe
    ) -> Self:
        return super().distill(x, np.nan_to_num(targets), rng=rng, recipe=recipe)


class TakesNegativeScores(Soft):
    """It takes anything for a probability."""

    def distill(
        self, x: Array, targets: FloatArray, *, rng: np.random.Generator, recipe: Recipe
    ) -> Self:
        return super().distill(x, np.abs(targets), rng=rng, recipe=recipe)


class ReturnsATwin(Soft):
    """It leaves itself untaught."""

    def distill(
        self, x: Array, targets: FloatArray, *, rng: np.random.Generator, recipe: Recipe
    ) -> Self:
        return copy.copy(super().distill(x, targets, rng=rng, recipe=recipe))


class StandsStill(Soft):
    """It says that it continues learning, and does not."""

    def partial_fit(
        self, x: Array, y: IntArray, *, rng: np.random.Generator, epochs: int
    ) -> Self:
        del x, y, rng, epochs
        return self


def test_a_learner_of_scores_passes() -> None:
    """The rules of soft learners hold for one that keeps them."""
    check_learner(lambda: Soft(num_classes=3))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Deaf, "distill must learn its targets"),
        (TakesNaNScores, "NaN in targets must be refused"),
        (TakesNegativeScores, "negative probabilities must be refused"),
        (ReturnsATwin, "distill must return self, got ReturnsATwin"),
        (StandsStill, "partial_fit must keep learning"),
        (NoLogits, "must have num_classes, fit, predict and logits"),
        (OtherClasses, "num_classes must be 3, got 7"),
        (AnswersUnfitted, "predict before fit must be refused by NotFitted, got no error"),
        (WrongUnfittedError, "logits before fit must be refused by NotFitted, got KeyError"),
        (ReturnsNone, "fit must return self, got NoneType"),
        (FloatLabels, "predict must return .* of int64"),
        (ColumnLabels, "predict must return"),
        (LabelsFromOne, "predict must stay below 3"),
        (NarrowScores, "logits must return"),
        (IntegerScores, "logits must return .* of floats"),
        (InfiniteScores, "logits must be finite when training lacks a class"),
        (OppositeScores, "predict must name a class of highest logit"),
        (OwnRandomness, "equal generators must give equal models"),
        (CountsItsFits, "the order of fits must have no effect"),
        (GlobalRandomness, "global random states must stay untouched"),
        (ChangesRows, "x and y must not be modified"),
        (DropsMissingClasses, "logits must return .* when training lacks a class"),
        (NeedsTwoClasses, "logits must be finite when training has one class"),
        (NeedsRows, "predict must return .* for no rows"),
        (LearnsFromNothing, "an empty training set must be refused"),
        (TakesNaN, "NaN in training must be refused"),
        (PredictsNaN, "NaN in predict must be refused"),
        (TakesAnyWidth, "another width in logits must be refused"),
        (TakesAnyLabel, "the label -1 must be refused"),
        (FitsOneOfMany, "fit_many must fit one twin a set, got 1"),
        (TextArrays, "to_arrays must return arrays of numbers"),
        (RoundsArrays, "arrays must carry a model to the bit"),
        (BecomesTheModel, "from_arrays must return a new learner"),
        (TakesFewerArrays, "incomplete arrays must be refused by KnowledgeMismatch"),
    ],
)
def test_a_broken_rule_is_named(broken: Any, message: str) -> None:
    """Each rule fails alone for a learner that breaks it, and the error says which."""
    factory: Any = broken if broken is NoLogits else lambda: broken(num_classes=3)

    with pytest.raises(UnsupportedLearner, match=f"{broken.__name__}: .*{message}"):
        check_learner(factory)
