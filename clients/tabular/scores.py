"""Shared parts of learners that regress on scores: tasks, links and serialisation.

A wrapper around trees, kernels or a linear map then only says how rows (n, d) are mapped
to numbers (n, k) by squared error; what these numbers mean is decided here.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Self

import numpy as np

from clients.budget import MAX_WIDTH
from clients.tabular.base import MIN_PROBABILITY, WIDTH, check_soft_targets, require_array
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import NotFitted, require, require_data, require_known
from fl_strategies.learners import UNKNOWN, Link, Recipe, Task, check_targets, check_task
from fl_strategies.party.party import check_rows

LINK: Final = "link"
TEMPERATURE: Final = "temperature"
# The place of a link in this list is its number on the wire.
_LINKS: Final[tuple[Link, ...]] = ("identity", "softmax", "sigmoid")
# What the targets of each task may be; the last is what labels are turned into.
_LINKS_OF_TASK: Final[Mapping[Task, tuple[Link, ...]]] = {
    "single-label": ("identity", "sigmoid", "softmax"),
    "multi-label": ("identity", "sigmoid"),
    "regression": ("identity",),
}
_LARGEST: Final = float(np.finfo(np.float32).max)


class ScoreLearner(ABC):
    """Base of learners that map rows to one number per class, by squared error.

    Labels are learned as targets: one-hot rows for single-label tasks, and for multi-label
    tasks 0 and 1, where an unknown label counts as the mean of the known ones of its column
    (0.5 if there are none). Every `fit` and `distill` starts anew, and every norm of a
    recipe is taken as squared error.

    What was regressed on targets of link "identity" are the logits. Probabilities become
    logits by the logarithm ("softmax") or the log-odds ("sigmoid") of what was regressed,
    clipped at `MIN_PROBABILITY`, times the recipe's temperature.

    A subclass implements `_regress`, `_outputs`, `_to_arrays` and `_from_arrays`.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list, number of labels, or number of outputs.
    task : "single-label", "multi-label" or "regression"
        What labels are; see `fl_strategies.learners`.
    """

    def __init__(self, *, num_classes: int, task: Task = "single-label") -> None:
        check_task(self._owner, task, num_classes)
        self._num_classes = num_classes
        self._task: Task = task
        self._link: Link | None = None
        self._temperature = 1.0
        self._width = 0

    @property
    def _owner(self) -> str:
        return type(self).__name__

    @property
    def num_classes(self) -> int:
        """Length of the class list, number of labels, or number of outputs."""
        return self._num_classes

    def fit(self, x: Array, y: Array, *, rng: np.random.Generator) -> Self:
        """Learn what the task calls labels, forgetting what was known before."""
        x, y = np.asarray(x), np.asarray(y)
        rows = self._training_rows(x)
        check_targets(self._owner, "y", y, len(x), self._num_classes, self._task)
        self._check_range("y", y)
        targets = targets_of(y, self._num_classes, self._task)
        return self._learn(rows, targets, Recipe(link=_LINKS_OF_TASK[self._task][-1]), rng)

    def distill(
        self,
        x: Array,
        targets: FloatArray,
        *,
        rng: np.random.Generator,
        recipe: Recipe = Recipe(),  # noqa: B008 a frozen value
    ) -> Self:
        """Learn targets (n, num_classes) of rows `x`, forgetting what was known before."""
        x, targets = np.asarray(x), np.asarray(targets)
        links = _LINKS_OF_TASK[self._task]
        rule = f"one of {', '.join(links)} for {self._task} tasks"
        require(recipe.link in links, self._owner, "link", rule, recipe.link)
        rows = self._training_rows(x)
        check_soft_targets(self._owner, targets, len(x), self._num_classes, recipe.link)
        return self._learn(rows, targets.astype(np.float64), recipe, rng)

    def predict(self, x: Array) -> Array:
        """Return classes (n,), labels 0 and 1 (n, num_classes), or outputs of a regression.

        Where several logits were clipped to the same bound, the class is still the one of
        the highest score.
        """
        if self._task == "regression":
            return self.logits(x)
        if self._task == "multi-label":
            return (self.logits(x) > 0).astype(np.int64)
        labels: IntArray = self._scores(x).argmax(axis=1).astype(np.int64)
        return labels

    def logits(self, x: Array) -> FloatArray:
        """Return unnormalised log-probabilities, log-odds or outputs, (n, num_classes)."""
        scores, scale = self._scores(x), self._temperature
        # A received temperature may be any finite number; what overflows is clipped.
        with np.errstate(over="ignore"):
            if self._link == "softmax":
                scores = scale * np.log(np.maximum(scores, MIN_PROBABILITY))
            elif self._link == "sigmoid":
                shares = np.clip(scores, MIN_PROBABILITY, 1 - MIN_PROBABILITY)
                scores = scale * (np.log(shares) - np.log1p(-shares))
        return np.clip(scores, -_LARGEST, _LARGEST)

    def to_arrays(self) -> dict[str, Array]:
        """Return width, link and temperature, (1,) each, and the model's own arrays."""
        return {
            WIDTH: np.array([self._width]),
            LINK: np.array([_LINKS.index(self._fitted_link())]),
            TEMPERATURE: np.array([self._temperature], dtype=np.float64),
            **self._to_arrays(),
        }

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return a new fitted learner; raise `KnowledgeMismatch` for arrays that do not fit."""
        own, twin = dict(arrays), copy.copy(self)
        width = self._received(own, WIDTH, np.int64)
        fits = 1 <= width <= MAX_WIDTH
        require_known(fits, self._owner, WIDTH, f"between 1 and {MAX_WIDTH}", width)
        links = [_LINKS.index(link) for link in _LINKS_OF_TASK[self._task]]
        number = self._received(own, LINK, np.int64)
        require_known(number in links, self._owner, LINK, f"one of {sorted(links)}", number)
        temperature = self._received(own, TEMPERATURE, np.float64)
        require_known(temperature > 0, self._owner, TEMPERATURE, "above 0", temperature)
        twin._width, twin._link = int(width), _LINKS[int(number)]
        twin._temperature = temperature
        twin._from_arrays(own)
        return twin

    @abstractmethod
    def _regress(self, x: Array, targets: FloatArray, rng: np.random.Generator) -> None:
        """Fit a new model to finite rows (n, d), n and d >= 1, and targets (n, k)."""

    @abstractmethod
    def _outputs(self, x: Array) -> FloatArray:
        """Return what the model makes of rows (n, d), n >= 1: numbers (n, k)."""

    @abstractmethod
    def _to_arrays(self) -> dict[str, Array]:
        """Return the model as arrays of numbers."""

    @abstractmethod
    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Become the model in `arrays`, of `_width` columns and `num_classes` outputs."""

    def _learn(
        self, rows: Array, targets: FloatArray, recipe: Recipe, rng: np.random.Generator
    ) -> Self:
        self._link = None
        self._regress(rows, targets, rng)
        self._width, self._temperature = rows.shape[1], recipe.temperature
        self._link = recipe.link
        return self

    def _scores(self, x: Array) -> FloatArray:
        """Return what was regressed, (n, k) of finite float64."""
        self._fitted_link()
        rows = self._checked_rows(x)
        same = rows.shape[1] == self._width
        rule = f"rows of {self._width} columns, as in training"
        require_data(same, self._owner, "x", rule, rows.shape[1])
        if not len(rows):
            return np.zeros((0, self._num_classes))
        # Finite numbers that were received can still overflow; that must not carry NaN
        # into the average of a whole federation.
        with np.errstate(over="ignore", invalid="ignore"):
            scores = np.asarray(self._outputs(rows), dtype=np.float64)
        return np.clip(np.nan_to_num(scores, nan=0.0), -_LARGEST, _LARGEST)

    def _training_rows(self, x: Array) -> Array:
        rows = self._checked_rows(x)
        require_data(len(x) > 0, self._owner, "x", "at least one row", "an empty training set")
        require_data(rows.shape[1] > 0, self._owner, "x", "at least one column", "none")
        return rows

    def _checked_rows(self, x: Array) -> Array:
        x = np.asarray(x)
        check_rows(self._owner, "x", x)
        self._check_range("x", x)
        return x.reshape(len(x), math.prod(x.shape[1:]))

    def _check_range(self, name: str, values: Array) -> None:
        fits = not values.size or max(-float(values.min()), float(values.max())) <= _LARGEST
        require_data(fits, self._owner, name, "within the range of float32", "a larger value")

    def _fitted_link(self) -> Link:
        if self._link is None:
            raise NotFitted(f"{self._owner}: the learner must be fitted first, got none.")
        return self._link

    def _received(self, arrays: dict[str, Array], name: str, dtype: type) -> float:
        """Take the one number of this name out of the received arrays."""
        found = sorted(str(each) for each in arrays)
        require_known(name in arrays, self._owner, "arrays", f"with {name!r}", found)
        number = require_array(self._owner, arrays, name, dtype, (1,)).item()
        del arrays[name]
        return float(number)


def targets_of(y: Array, num_classes: int, task: Task) -> FloatArray:
    """Return checked labels as numbers to regress on, (n, num_classes) of float64.

    Examples
    --------
    >>> targets_of(np.array([[1, -1], [-1, -1], [0, -1]]), 2, "multi-label")
    array([[1. , 0.5],
           [0.5, 0.5],
           [0. , 0.5]])
    """
    if task == "regression":
        return y.astype(np.float64)
    if task == "single-label":
        one_hot: FloatArray = np.eye(num_classes)[y]
        return one_hot
    known = y != UNKNOWN
    counts = known.sum(axis=0)
    positives = np.where(known, y, 0).sum(axis=0)
    means = np.where(counts > 0, positives / np.maximum(counts, 1), 0.5)
    return np.where(known, y, means)


def plain_rows(matrix: Array) -> FloatArray:
    """Return a copy in float64 and C order.

    The memory order decides in which order products are summed, hence the last bit.
    """
    return np.array(matrix, dtype=np.float64, order="C")
