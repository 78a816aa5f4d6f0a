"""The contract of a learner, as a check that users run on their own wrapper.

Strategies rely on more than the method names of a protocol: on labels and scores of the
whole class list, on subsets that lack classes, on randomness that comes from nowhere
else. A wrapper that passes `check_learner` can be used in every strategy it has the
methods for.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from fl_strategies._util import Array, IntArray, to_array
from fl_strategies.errors import (
    KnowledgeMismatch,
    NotFitted,
    UnsupportedLearner,
    require,
    require_data,
)
from fl_strategies.learners import (
    EnsembleLearner,
    IncrementalLearner,
    Learner,
    LearnerFactory,
    PortableLearner,
    Recipe,
    SoftLearner,
    TrainingSet,
    check_labels,
)
from fl_strategies.party.party import check_rows

_OWNER = "check_learner"
_ROWS_PER_CLASS = 12


def check_learner(
    learner_fn: LearnerFactory,
    *,
    num_classes: int | None = None,
    num_features: int = 5,
    x: Array | None = None,
    y: IntArray | None = None,
) -> None:
    """Raise `UnsupportedLearner` naming the first rule that a learner breaks.

    The learner is fitted some ten times, without rows of yours to about a dozen per class.

    Parameters
    ----------
    learner_fn : factory
        Makes an unfitted learner for `num_classes` classes and rows of `num_features`.
    num_classes : int
        Length of the class list. By default 3, the least for made rows, so that a subset
        can lack a class; with rows of yours what the learner says.
    num_features : int
        Columns of the made rows, at least 1.
    x, y : optional
        Rows of yours (n, ...) and their class indices (n,), of two classes at least: for
        learners of two classes, of words or of images. A few dozen are enough.

    Examples
    --------
    >>> from sklearn.tree import DecisionTreeClassifier
    >>> from clients.tabular.sklearn import SklearnLearner
    >>> check_learner(lambda: SklearnLearner(DecisionTreeClassifier(), num_classes=3))
    >>> x, y = np.arange(12.0).reshape(6, 2), np.array([0, 0, 0, 1, 1, 1])
    >>> check_learner(lambda: SklearnLearner(DecisionTreeClassifier(), num_classes=2), x=x, y=y)
    """
    if x is None or y is None:
        require(x is None and y is None, _OWNER, "x and y", "given together", "one of them")
        num_classes = 3 if num_classes is None else num_classes
        require(num_classes >= 3, _OWNER, "num_classes", "at least 3", num_classes)
        require(num_features >= 1, _OWNER, "num_features", "at least 1", num_features)
        x, y = _made_rows(num_classes, num_features)
    elif num_classes is None:
        num_classes = getattr(learner_fn(), "num_classes", 2)
    x, y = _checked_rows(x, y, num_classes)
    check = _Check(learner_fn, num_classes, x, y)
    for rule in (
        check.has_the_methods,
        check.is_unfitted_at_first,
        check.data_are_not_modified,
        check.fit_returns_self,
        check.predict_names_a_highest_logit,
        check.randomness_comes_from_rng_alone,
        check.global_random_states_are_untouched,
        check.a_class_may_be_missing,
        check.no_rows_give_no_answers,
        check.bad_rows_are_refused,
        check.bad_labels_are_refused,
        check.fit_many_gives_one_twin_per_set,
        check.scores_can_be_learned,
        check.bad_scores_are_refused,
        check.learning_can_go_on,
        check.arrays_carry_the_model_to_the_bit,
    ):
        rule()


class _Check:
    """One factory, the data it is checked on, and a method for every rule."""

    def __init__(
        self, learner_fn: LearnerFactory, num_classes: int, x: Array, y: IntArray
    ) -> None:
        self.learner_fn = learner_fn
        self.num_classes = num_classes
        self.x, self.y = x, y
        self.classes = np.unique(y)
        self.global_states = _global_states()
        self.owner = type(learner_fn()).__name__

    def require(self, holds: bool, rule: str, got: object) -> None:
        if not holds:
            raise UnsupportedLearner(f"{self.owner}: {rule}, got {got}.")

    def fitted(self, seed: int = 0, data: TrainingSet | None = None) -> Learner:
        x, y = (self.x, self.y) if data is None else data
        return self.learner_fn().fit(x, y, rng=np.random.default_rng(seed))

    def refuses(
        self, error: type[Exception], rule: str, call: Callable[..., Any], *arguments: Any
    ) -> None:
        try:
            call(*arguments)
        except error:
            return
        except Exception as other:
            got = f"{rule} by {error.__name__}, got {other!r}"
            raise UnsupportedLearner(f"{self.owner}: {got}.") from other
        self.require(False, f"{rule} by {error.__name__}", "no error")

    def has_the_methods(self) -> None:
        learner = self.learner_fn()
        rule = "a learner must have num_classes, fit, predict and logits"
        self.require(isinstance(learner, Learner), rule, "fewer")
        count, rule = learner.num_classes, f"num_classes must be {self.num_classes}"
        self.require(count == self.num_classes, rule, count)

    def is_unfitted_at_first(self) -> None:
        for method in ("predict", "logits"):
            call = getattr(self.learner_fn(), method)
            self.refuses(NotFitted, f"{method} before fit must be refused", call, self.x)

    def fit_returns_self(self) -> None:
        learner = self.learner_fn()
        result = learner.fit(self.x, self.y, rng=np.random.default_rng(0))
        self.require(result is learner, "fit must return self", type(result).__name__)

    def check_answers(self, learner: Learner, x: Array, when: str) -> None:
        labels, scores = learner.predict(x), learner.logits(x)
        shape = (len(x), self.num_classes)
        form = f"{labels.shape} of {labels.dtype}"
        flat = labels.shape == (len(x),) and labels.dtype == np.int64
        self.require(flat, f"predict must return ({len(x)},) of int64{when}", form)
        inside = bool(((labels >= 0) & (labels < self.num_classes)).all())
        rule = f"predict must stay below {self.num_classes}{when}"
        self.require(inside, rule, "another label")
        form = f"{scores.shape} of {scores.dtype}"
        wide = scores.shape == shape and np.issubdtype(scores.dtype, np.floating)
        self.require(wide, f"logits must return {shape} of floats{when}", form)
        finite = bool(np.isfinite(scores).all())
        self.require(finite, f"logits must be finite{when}", "NaN or infinity")

    def predict_names_a_highest_logit(self) -> None:
        learner = self.fitted()
        self.check_answers(learner, self.x, "")
        labels, scores = learner.predict(self.x), learner.logits(self.x)
        named = scores[np.arange(len(labels)), labels]
        wrong = int((named < scores.max(axis=1) - 1e-6).sum())
        rule = "predict must name a class of highest logit"
        self.require(wrong == 0, rule, f"{wrong} others")

    def randomness_comes_from_rng_alone(self) -> None:
        same = self.agree(self.fitted(1), self.fitted(1))
        self.require(same, "equal generators must give equal models", "different scores")
        first, second = self.fitted(1), self.fitted(2)
        second_alone, first_after = self.fitted(2), self.fitted(1)
        same = self.agree(first, first_after) and self.agree(second, second_alone)
        self.require(same, "the order of fits must have no effect", "different scores")

    def agree(self, one: Learner, other: Learner) -> bool:
        labels = np.array_equal(one.predict(self.x), other.predict(self.x))
        return labels and np.array_equal(one.logits(self.x), other.logits(self.x))

    def global_random_states_are_untouched(self) -> None:
        # Since the start of the check: a learner that seeds would be found only once.
        same = self.global_states == _global_states()
        self.require(same, "global random states must stay untouched", "a changed one")

    def data_are_not_modified(self) -> None:
        x, y = self.x.copy(), self.y.copy()
        learner = self.learner_fn()
        learner.fit(x, y, rng=np.random.default_rng(0))
        learner.predict(x)
        learner.logits(x)
        same = np.array_equal(x, self.x) and np.array_equal(y, self.y)
        self.require(same, "x and y must not be modified", "changed data")

    def a_class_may_be_missing(self) -> None:
        for kept, when in (
            (self.y != self.classes[1], "lacks a class"),
            (self.y == self.classes[-1], "has one class"),
        ):
            learner = self.fitted(data=(self.x[kept], self.y[kept]))
            self.check_answers(learner, self.x, f" when training {when}")

    def no_rows_give_no_answers(self) -> None:
        self.check_answers(self.fitted(), self.x[:0], " for no rows")
        none = (self.x[:0], self.y[:0])
        self.refuses(ValueError, "an empty training set must be refused", self.fitted, 0, none)

    def bad_rows_are_refused(self) -> None:
        wide = np.concatenate([self.x, self.x], axis=1)
        learner = self.fitted()
        for method in (learner.predict, learner.logits):
            rule = f"another width in {method.__name__} must be refused"
            self.refuses(ValueError, rule, method, wide)
        if self.x.dtype.kind != "f":  # words and other whole numbers are never NaN
            return
        broken = self.x.copy()
        broken[0, 0] = np.nan
        training = (broken, self.y)
        self.refuses(ValueError, "NaN in training must be refused", self.fitted, 0, training)
        for method in (learner.predict, learner.logits):
            rule = f"NaN in {method.__name__} must be refused"
            self.refuses(ValueError, rule, method, broken)

    def bad_labels_are_refused(self) -> None:
        for label in (-1, self.num_classes):
            labels = np.where(self.y == self.classes[0], label, self.y)
            rule = f"the label {label} must be refused"
            self.refuses(ValueError, rule, self.fitted, 0, (self.x, labels))

    def fit_many_gives_one_twin_per_set(self) -> None:
        learner = self.learner_fn()
        if not isinstance(learner, EnsembleLearner):
            return
        sets = [(self.x, self.y), (self.x[::2], self.y[::2])]
        rngs = [np.random.default_rng(seed) for seed in range(len(sets))]
        twins = learner.fit_many(sets, rngs=rngs)
        self.require(len(twins) == len(sets), "fit_many must fit one twin a set", len(twins))
        for twin in twins:
            self.check_answers(twin, self.x, " after fit_many")

    def distilled(self, targets: Array) -> Learner | None:
        learner = self.learner_fn()
        if not isinstance(learner, SoftLearner):
            return None
        recipe = Recipe(loss="mse", link="softmax")
        rng = np.random.default_rng(0)
        result = learner.distill(self.x, targets, rng=rng, recipe=recipe)
        self.require(result is learner, "distill must return self", type(result).__name__)
        return result

    def scores_can_be_learned(self) -> None:
        """Check that distill listens to its targets and is repeatable."""
        turned = (self.y + 1) % self.num_classes
        plain, again, other = (
            self.distilled(np.eye(self.num_classes)[labels])
            for labels in (self.y, self.y, turned)
        )
        if plain is None or again is None or other is None:
            return
        self.check_answers(plain, self.x, " after distill")
        same = self.agree(plain, again)
        self.require(same, "equal generators must distil equal models", "different scores")
        differs = not self.agree(plain, other)
        self.require(differs, "distill must learn its targets", "the same for other targets")

    def bad_scores_are_refused(self) -> None:
        if not isinstance(self.learner_fn(), SoftLearner):
            return
        good = np.full((len(self.x), self.num_classes), 1 / self.num_classes)
        broken, below = good.copy(), good.copy()
        broken[0, 0], below[0, :2] = np.nan, (-0.5, 1.0)
        for rule, targets in (
            ("NaN in targets", broken),
            ("missing columns", good[:, :1]),
            ("negative probabilities", below),
        ):
            self.refuses(ValueError, f"{rule} must be refused", self.distilled, targets)

    def learning_can_go_on(self) -> None:
        learner = self.fitted()
        if not isinstance(learner, IncrementalLearner):
            return
        before = learner.logits(self.x)
        rng = np.random.default_rng(0)
        result = learner.partial_fit(self.x, self.y, rng=rng, epochs=1)
        self.require(result is learner, "partial_fit must return self", type(result).__name__)
        self.check_answers(learner, self.x, " after partial_fit")
        moved = not np.array_equal(before, learner.logits(self.x))
        self.require(moved, "partial_fit must keep learning", "the same scores as before")

    def arrays_carry_the_model_to_the_bit(self) -> None:
        """Check the round trip, unless the learner says that its models cannot travel."""
        if not isinstance(self.learner_fn(), PortableLearner):
            return
        first, second = self.classes[:2]
        for seed, kept in enumerate((self.y >= 0, self.y != second, self.y == first)):
            learner: Any = self.fitted(seed, (self.x[kept], self.y[kept]))
            try:
                arrays = learner.to_arrays()
            except UnsupportedLearner:
                return
            plain = all(array.dtype.kind in "biuf" for array in arrays.values())
            self.require(plain, "to_arrays must return arrays of numbers", "another type")
            receiver: Any = self.learner_fn()
            twin = receiver.from_arrays(arrays)
            self.require(
                twin is not receiver, "from_arrays must return a new learner", "itself"
            )
            same = self.agree(learner, twin)
            self.require(same, "arrays must carry a model to the bit", "different scores")
            fewer, rule = dict(list(arrays.items())[1:]), "incomplete arrays must be refused"
            self.refuses(KnowledgeMismatch, rule, receiver.from_arrays, fewer)


def _made_rows(num_classes: int, num_features: int) -> TrainingSet:
    """Return rows around a centre for each class."""
    rng = np.random.default_rng(0)
    y: IntArray = np.tile(np.arange(num_classes), _ROWS_PER_CLASS)
    centres = rng.normal(scale=3.0, size=(num_classes, num_features))
    noise = rng.normal(size=(len(y), num_features))
    return (centres[y] + noise).astype(np.float32), y


def _checked_rows(x: Array, y: IntArray, num_classes: int) -> TrainingSet:
    """Return rows and labels as arrays; refuse those that no learner could be checked on."""
    x, y = to_array(_OWNER, "x", x), to_array(_OWNER, "y", y)
    check_rows(_OWNER, "x", x)
    check_labels(_OWNER, "y", y, len(x), num_classes)
    found = len(np.unique(y))
    require_data(found > 1, _OWNER, "y", "labels of at least two classes", found)
    return x, y.astype(np.int64)


def _global_states() -> tuple[str, str]:
    """Return the states of the two generators that any code can reach, as text."""
    legacy: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    return repr([np.asarray(part).tolist() for part in legacy]), repr(random.getstate())
