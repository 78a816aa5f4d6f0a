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
from clients.tabular.moments import MomentsLearner
from clients.tabular.sklearn import SklearnLearner
from clients.tabular.xgboost import XGBoostLearner
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import InvalidParameter, UnsupportedLearner, require_data
from fl_strategies.learners import (
    EnsembleLearner,
    IncrementalLearner,
    PortableLearner,
    Recipe,
    SoftLearner,
)


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
    """A few lines around any model are enough, also of scores, or where none can travel."""
    check_learner(centroids)
    check_learner(lambda: CentroidLearner(num_classes=5), num_classes=5, num_features=1)
    check_learner(lambda: Soft(num_classes=3))
    check_learner(FourMethods)


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
        lambda: MomentsLearner(num_classes=4, num_cosines=9),
        lambda: MomentsLearner(num_classes=4, num_cosines=0),
    ],
    ids=["xgboost", "lightgbm", "boosted-trees", "forest", "moments", "linear-moments"],
)
def test_learners_of_trees_and_moments_pass(make: Callable[[], Any]) -> None:
    """Boosted trees, forests and moments keep the contract."""
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
    for kind in (EnsembleLearner, SoftLearner, IncrementalLearner, PortableLearner):
        assert isinstance(factory(), kind)


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


def with_method(method: str, body: Callable[..., Any], base: Any = CentroidLearner) -> Any:
    """Return a kind of learner with another method, which gets the usual one and `self`."""

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        usual = getattr(super(Broken, self), method)
        return body(usual, self, *args, **kwargs)

    changed.__name__ = method
    Broken: Any = type("Broken", (base,), {method: changed})  # noqa: N806
    return Broken


def after(method: str, change: Callable[[Any], Any], base: Any = CentroidLearner) -> Any:
    """Return a kind of learner that changes what a method returns."""
    return with_method(method, lambda usual, _, *args, **own: change(usual(*args, **own)), base)


def before(method: str, change: Callable[..., Any], base: Any = CentroidLearner) -> Any:
    """Return a kind of learner that changes what a method is given."""
    return with_method(
        method, lambda usual, _self, *args, **own: usual(*change(*args), **own), base
    )


class NoLogits:
    """It cannot score."""

    num_classes = 3

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        raise NotImplementedError

    def predict(self, x: Array) -> IntArray:
        raise NotImplementedError


class CountsItsFits(CentroidLearner):
    """Equal fits in a row agree, but a fit with another generator leaves a trace."""

    seen: set[str] = set()  # noqa: RUF012

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        self.seen.add(str(rng.bit_generator.state["state"]))
        super()._fit(x, y, rng)
        self.centroids += len(self.seen)


class BecomesTheModel(CentroidLearner):
    """It overwrites the receiver."""

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        vars(self).update(vars(super().from_arrays(arrays)))
        return self


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


def guessing(usual: Any, self: Any, x: Array) -> IntArray:
    return usual(x) if self._classes is not None else np.zeros(len(x), np.int64)


def failing(usual: Any, self: Any, x: Array) -> FloatArray:
    if self._classes is None:
        raise KeyError("weights")
    return usual(x)


def impossible(scores: FloatArray) -> FloatArray:
    return np.where(scores < -16, -np.inf, scores)


def drawing(usual: Any, _: Any, x: Array, y: IntArray, rng: np.random.Generator) -> None:
    np.random.random()  # noqa: NPY002
    usual(x, y, rng)


def centring(usual: Any, _: Any, x: Array, y: IntArray, **own: Any) -> Any:
    x -= x.mean(axis=0)
    return usual(x, y, **own)


def deaf(usual: Any, self: Any, x: Array, targets: FloatArray, **own: Any) -> Any:
    usual(x, targets, **own)
    return self.fit(x, np.arange(len(x)) % 3, rng=own["rng"])


FitsOneOfMany = type(
    "FitsOneOfMany",
    (CentroidLearner,),
    {"fit_many": lambda self, sets, *, rngs: [self.fit(*sets[0], rng=rngs[0])]},
)
StandsStill = type("StandsStill", (Soft,), {"partial_fit": lambda self, *_, **__: self})
OtherClasses = type("OtherClasses", (CentroidLearner,), {"num_classes": 7})
TakesNaN = before("fit", lambda x, y: (np.nan_to_num(x), y))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (with_method("distill", deaf, Soft), "distill must learn its targets"),
        (before("distill", lambda x, t: (x, np.nan_to_num(t)), Soft), "NaN in targets must"),
        (
            before("distill", lambda x, t: (x, np.abs(t)), Soft),
            "negative probabilities must be",
        ),
        (
            with_method(
                "distill", lambda usual, _, *a, **own: copy.copy(usual(*a, **own)), Soft
            ),
            "distill must return self, got Broken",
        ),
        (StandsStill, "partial_fit must keep learning"),
        (NoLogits, "must have num_classes, fit, predict and logits"),
        (OtherClasses, "num_classes must be 3, got 7"),
        (
            with_method("predict", guessing),
            "predict before fit must be refused by NotFitted, got no error",
        ),
        (
            with_method("logits", failing),
            "logits before fit must be refused by NotFitted, got KeyError",
        ),
        (after("fit", lambda _: None), "fit must return self, got NoneType"),
        (after("predict", lambda y: y.astype(float)), "predict must return .* of int64"),
        (after("predict", lambda y: y[:, None]), "predict must return"),
        (after("predict", lambda y: y + 1), "predict must stay below 3"),
        (after("logits", lambda z: z[:, :2]), "logits must return"),
        (after("logits", lambda z: z.astype(int)), "logits must return .* of floats"),
        (after("logits", impossible), "logits must be finite when training lacks a class"),
        (after("logits", lambda z: -z), "predict must name a class of highest logit"),
        (
            before("_fit", lambda x, y, _: (x, y, np.random.default_rng())),
            "equal generators must give equal models",
        ),
        (CountsItsFits, "the order of fits must have no effect"),
        (with_method("_fit", drawing), "global random states must stay untouched"),
        (with_method("fit", centring), "x and y must not be modified"),
        (
            with_method("logits", lambda usual, self, x: usual(x)[:, self._fitted_classes()]),
            "logits must return .* when training lacks a class",
        ),
        (
            with_method(
                "logits",
                lambda usual, self, x: usual(x) * (1 if self._num_present > 1 else np.nan),
            ),
            "logits must be finite when training has one class",
        ),
        (
            after("predict", lambda y: y if len(y) else np.zeros((0, 1), np.int64)),
            "predict must return .* for no rows",
        ),
        (
            with_method(
                "fit", lambda usual, self, x, y, **o: usual(x, y, **o) if len(x) else self
            ),
            "an empty training set must be refused",
        ),
        (TakesNaN, "NaN in training must be refused"),
        (before("predict", lambda x: (np.nan_to_num(x),)), "NaN in predict must be refused"),
        (before("logits", lambda x: (x[:, :5],)), "another width in logits must be refused"),
        (before("fit", lambda x, y: (x, np.clip(y, 0, 2))), "the label -1 must be refused"),
        (FitsOneOfMany, "fit_many must fit one twin a set, got 1"),
        (
            after("_to_arrays", lambda a: {n: v.astype(str) for n, v in a.items()}),
            "to_arrays must return arrays of numbers",
        ),
        (
            after("_to_arrays", lambda a: {n: v.round(2) for n, v in a.items()}),
            "arrays must carry a model to the bit",
        ),
        (BecomesTheModel, "from_arrays must return a new learner"),
        (
            before("from_arrays", lambda arrays: ({"classes": np.arange(3), **arrays},)),
            "incomplete arrays must be refused by KnowledgeMismatch",
        ),
    ],
)
def test_a_broken_rule_is_named(broken: Any, message: str) -> None:
    """Each rule fails alone for a learner that breaks it, and the error says which."""
    factory: Any = broken if broken is NoLogits else lambda: broken(num_classes=3)

    with pytest.raises(UnsupportedLearner, match=f"{broken.__name__}: .*{message}"):
        check_learner(factory)
