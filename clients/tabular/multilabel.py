"""A multi-label learner made of binary ones."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Self

import numpy as np

from clients.tabular.base import (
    MAX_WIDTH,
    MIN_PROBABILITY,
    RowLearner,
    all_but,
    check_soft_targets,
    label_shares,
    require_array,
    weigh,
)
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import (
    InvalidData,
    KnowledgeMismatch,
    require,
    require_data,
    require_known,
)
from fl_strategies.learners import (
    UNKNOWN,
    Learner,
    LearnerFactory,
    Recipe,
    SoftLearner,
    can_travel,
    check_targets,
    check_task,
    require_portable,
)
from fl_strategies.party.party import check_rows
from fl_strategies.wire.knowledge import join_arrays, part_arrays

ROW_SHAPE: Final = "row-shape"
LOG_ODDS: Final = "log-odds"
IS_CONSTANT: Final = "is-constant"
_MAX_DIMENSIONS: Final = 8
_CERTAIN: Final = -math.log(MIN_PROBABILITY)


class MultiLabelLearner(RowLearner):
    """One binary learner per label, each fitted to the rows whose label is known.

    A label without known rows gives log-odds 0, and one with a single value the constant
    log-odds that a model of one class has elsewhere in this package. Models can travel if
    the binary learner's can.

    Parameters
    ----------
    learner_fn : factory
        Makes an unfitted learner of two classes: 0 is "no" and 1 is "yes".
    num_classes : int
        Number of labels, at least 1.

    Examples
    --------
    >>> from sklearn.tree import DecisionTreeClassifier
    >>> from clients.tabular.sklearn import SklearnLearner
    >>> tree = lambda: SklearnLearner(DecisionTreeClassifier(), num_classes=2)
    >>> x, y = np.array([[0.0], [1.0], [2.0]]), np.array([[0, 1], [1, 1], [-1, 1]])
    >>> learner = MultiLabelLearner(tree, num_classes=2)
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(x)
    array([[0, 1],
           [1, 1],
           [1, 1]])
    """

    def __init__(self, learner_fn: LearnerFactory, *, num_classes: int) -> None:
        check_task(self._owner, "multi-label", num_classes)
        found = learner_fn().num_classes
        require(found == 2, self._owner, "learner_fn", "a factory for two classes", found)
        super().__init__(num_classes=num_classes)
        self._learner_fn = learner_fn
        self._row_shape: tuple[int, ...] = ()
        self._constants: FloatArray = np.zeros(num_classes)
        # None where a label is constant; no list before the first fit.
        self._parts: list[Learner | None] | None = None

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        """Learn labels `y` (n, num_classes) of -1 (unknown), 0 and 1."""
        x, y = self._training_rows(x), np.asarray(y)
        check_targets(self._owner, "y", y, len(x), self._num_classes, "multi-label")
        return self._learn(x, y, rng, self._fit_part)

    def distill(
        self,
        x: Array,
        targets: FloatArray,
        *,
        rng: np.random.Generator,
        recipe: Recipe = Recipe(),  # noqa: B008 a frozen value
    ) -> Self:
        """Learn log-odds or probabilities (n, num_classes), each label by itself.

        A binary learner without `distill` learns the likelier value of every row.
        """
        x, targets = self._training_rows(x), np.asarray(targets)
        check_soft_targets(self._owner, targets, len(x), self._num_classes, recipe.link)
        shares = label_shares(self._owner, targets, recipe)
        plain = replace(recipe, loss="cross-entropy", link="softmax", temperature=1.0)
        return self._learn(x, shares, rng, partial(self._distill_part, recipe=plain))

    def predict(self, x: Array) -> IntArray:
        """Return 1 for every label that is more likely than not, else 0, (n, num_classes)."""
        return (self.logits(x) > 0).astype(np.int64)

    def logits(self, x: Array) -> FloatArray:
        """Return the log-odds of every label, (n, num_classes) of float64."""
        x, parts = np.asarray(x), self._fitted_parts()
        check_rows(self._owner, "x", x)
        fits = x.shape[1:] == self._row_shape
        rule = f"rows of shape {self._row_shape}, as in training"
        require_data(fits, self._owner, "x", rule, x.shape[1:])
        scores = np.tile(self._constants, (len(x), 1))
        for label, part in enumerate(parts):
            if part is not None:
                both = part.logits(x).astype(np.float64)
                scores[:, label] = both[:, 1] - both[:, 0]
        return scores

    @property
    def travels(self) -> bool:
        """Whether models of the binary learner have an array form."""
        return can_travel(self._learner_fn())

    def to_arrays(self) -> dict[str, Array]:
        """Return row shape, constants, and the arrays of every label's own learner."""
        parts = self._fitted_parts()
        models = [{} if part is None else require_portable(part).to_arrays() for part in parts]
        return {
            ROW_SHAPE: np.array(self._row_shape, dtype=np.int64),
            LOG_ODDS: self._constants.copy(),
            IS_CONSTANT: np.array([part is None for part in parts]),
            **join_arrays(models),
        }

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return a new fitted learner; raise `KnowledgeMismatch` for arrays that do not fit."""
        owner, twin = self._owner, copy.copy(self)
        own = all_but(owner, arrays, ROW_SHAPE, LOG_ODDS, IS_CONSTANT)
        twin._row_shape = self._received_row_shape(arrays)
        shape = (self._num_classes,)
        twin._constants = require_array(owner, arrays, LOG_ODDS, np.float64, shape)
        bounded = bool((np.abs(twin._constants) <= _CERTAIN).all())
        require_known(bounded, owner, LOG_ODDS, f"within {_CERTAIN:.1f}", "more")
        constant = require_array(owner, arrays, IS_CONSTANT, np.bool_, shape)
        models = part_arrays(own, self._num_classes)
        twin._parts = [
            twin._received_part(label, model, bool(is_constant))
            for label, (model, is_constant) in enumerate(zip(models, constant, strict=True))
        ]
        return twin

    def _training_rows(self, x: Array) -> Array:
        x = np.asarray(x)
        check_rows(self._owner, "x", x)
        require_data(x.size > 0, self._owner, "x", "at least one row and column", x.shape)
        return x

    def _learn(
        self,
        x: Array,
        targets: Array,
        rng: np.random.Generator,
        learn: Callable[[Array, Array, np.random.Generator], tuple[Learner | None, float]],
    ) -> Self:
        self._parts = None
        # A label's randomness must not depend on what is known of the labels before it.
        seeds = rng.integers(2**63, size=self._num_classes)
        learned = [
            learn(x, of_label, np.random.default_rng(seed))
            for of_label, seed in zip(targets.T, seeds, strict=True)
        ]
        self._constants = np.array([constant for _, constant in learned])
        self._parts, self._row_shape = [part for part, _ in learned], x.shape[1:]
        return self

    def _fit_part(
        self, x: Array, labels: IntArray, rng: np.random.Generator
    ) -> tuple[Learner | None, float]:
        """Return a model of one label, or none and the constant."""
        known = labels != UNKNOWN
        x, labels = x[known], labels[known].astype(np.int64)
        if len(np.unique(labels)) < 2:
            return None, _constant_log_odds(labels)
        return self._learner_fn().fit(x, labels, rng=rng), 0.0

    def _distill_part(
        self, x: Array, share: FloatArray, rng: np.random.Generator, recipe: Recipe
    ) -> tuple[Learner | None, float]:
        """Return a model of one label's probabilities (n,), or none and the constant."""
        both = np.stack([1 - share, share], axis=1)
        labels, part = weigh(both), self._learner_fn()
        if len(np.unique(labels.classes)) < 2:
            return None, _constant_log_odds(labels.classes)
        if isinstance(part, SoftLearner):
            return part.distill(x, both, rng=rng, recipe=recipe), 0.0
        return part.fit(x, labels.likeliest, rng=rng), 0.0

    def _received_row_shape(self, arrays: Mapping[str, Array]) -> tuple[int, ...]:
        size = np.size(arrays[ROW_SHAPE])
        rule = f"between 1 and {_MAX_DIMENSIONS} sides"
        require_known(1 <= size <= _MAX_DIMENSIONS, self._owner, ROW_SHAPE, rule, size)
        sides = require_array(self._owner, arrays, ROW_SHAPE, np.int64, (size,))
        fits = sides.min() >= 1 and math.prod(sides.tolist()) <= MAX_WIDTH
        rule = f"sides from 1 and rows up to {MAX_WIDTH} numbers"
        require_known(fits, self._owner, ROW_SHAPE, rule, sides)
        return tuple(sides.tolist())

    def _received_part(
        self, label: int, model: Mapping[str, Array], is_constant: bool
    ) -> Learner | None:
        name = f"label {label}"
        if is_constant:
            rule = "without arrays, as constant"
            require_known(not model, self._owner, name, rule, list(model))
            return None
        part = require_portable(self._learner_fn()).from_arrays(model)
        try:
            part.logits(np.zeros((0, *self._row_shape)))
        except InvalidData as error:
            rule = f"a model of rows of shape {self._row_shape}"
            raise KnowledgeMismatch(
                f"{self._owner}: {name} must be {rule}, got none."
            ) from error
        return part

    def _fitted_parts(self) -> list[Learner | None]:
        if self._parts is None:
            raise self._not_fitted()
        return self._parts


def _constant_log_odds(labels: IntArray) -> float:
    """Return the log-odds of a label with at most one known value."""
    if not len(labels):
        return 0.0
    return _CERTAIN if labels[0] == 1 else -_CERTAIN
