"""Shared parts of learners that are not networks: rows, soft targets, and hostile arrays.

A wrapper around a tree, boosting or kernel library only says how its model is fitted, scored
and turned into arrays. Class lists, missing classes, one-class subsets, links, shapes and
hostile input are handled here.

**Soft targets.** For a model that is made to learn labels, a row that is 70 % one class and
30 % another becomes two rows with these weights. Whatever minimises a weighted sum over rows,
such as the impurity of trees or a log-loss, then minimises the cross-entropy of the soft
targets themselves.

**A budget for received models.** A model may take a multiple of the bytes that arrived, and
never more than the largest message that is read; a row may pass so many splits of its trees.
Learners whose arrays have the shapes of the receiver's own settings stay far below.
`tests/attacks/test_received_models.py` tries to make 1 MB take more than 64 MiB of memory, or
endless time. On a quiet machine each attack takes less than a second of processor time to be
rebuilt and to score 50 rows. Time also grows with what the receiver chose itself: the rows that
it scores and, in a `MultiLabelLearner`, its labels (350: 1.7 s).
"""

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

import numpy as np
from scipy.special import expit, logit, softmax

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import (
    KnowledgeMismatch,
    NotFitted,
    UnsupportedLearner,
    require,
    require_data,
    require_known,
)
from fl_strategies.learners import (
    UNKNOWN,
    Link,
    Recipe,
    Task,
    TrainingSet,
    check_labels,
    check_targets,
    check_task,
)
from fl_strategies.party.party import check_rows
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES

GROWTH: Final = 24
"""Bytes of memory for each byte that arrived; the smallest node of a tree grows 16 times."""
SPARE: Final = 2**16
"""Bytes that a model may take however few arrived."""
# No table is wider; a receiver may then allocate a row of any declared width.
MAX_WIDTH: Final = 2**20
MAX_TREES: Final = 10_000
# A tree on honest data has some tens of levels. Native code may walk one by recursion, and
# numpy takes a step of Python for each.
MAX_LEVELS: Final = 256
MAX_STEPS: Final = 2**15
LEVELS_PER_TREE: Final = 64


def require_memory(
    owner: str, arrays: Mapping[str, Array], num_bytes: int, most: int = MAX_REPLY_BYTES
) -> None:
    """Raise `KnowledgeMismatch` if a model of these arrays would take too many bytes."""
    arrived = sum(getattr(array, "nbytes", 0) for array in arrays.values())
    limit = min(most, SPARE + GROWTH * arrived)
    rule = f"those of a model up to {limit} bytes in memory"
    require_known(num_bytes <= limit, owner, "arrays", rule, num_bytes)


def require_steps(owner: str, levels: IntArray) -> None:
    """Raise `KnowledgeMismatch` if a row would pass too many of the levels of each tree."""
    deepest, steps = int(levels.max()), int(levels.sum())
    rule = f"of at most {MAX_LEVELS} levels"
    require_known(deepest <= MAX_LEVELS, owner, "trees", rule, "more")
    limit = max(MAX_STEPS, LEVELS_PER_TREE * len(levels))
    require_known(steps <= limit, owner, "trees", f"of at most {limit} levels in all", steps)


# Every class that is kept costs a row of training. One of less than 1/64 of a row hardly moves
# a model, but all of a rare class may lie below that, and its order of rows with it: so no
# class loses more than a quarter of its weight, unless it is below 1/4096 and mere rounding.
LARGEST_CUT: Final = 1 / 64
SMALLEST_CUT: Final = 1 / 4096
MOST_LOST: Final = 1 / 4
# Averages of probabilities may leave 0 to 1 by this much.
_ROUNDING: Final = 1e-6
_LARGEST: Final = float(np.finfo(np.float32).max)


class WeightedLabels(NamedTuple):
    """Labels of rows, several a row with weights that sum to 1, in the order of rows."""

    rows: IntArray
    """Row of each label, (m,); every row has at least one."""
    classes: IntArray
    weights: FloatArray

    @property
    def likeliest(self) -> IntArray:
        """The class of largest weight of every row; ties go to the first."""
        order = np.lexsort((self.classes, -self.weights, self.rows))
        first = np.unique(self.rows[order], return_index=True)[1]
        return self.classes[order[first]]

    @property
    def are_plain(self) -> bool:
        """Whether every row has one label only."""
        return len(self.rows) == int(self.rows[-1]) + 1


def check_soft_targets(
    owner: str, targets: Array, num_rows: int, num_classes: int, link: Link
) -> None:
    """Raise `InvalidData` unless targets (num_rows, num_classes) are what the link gives."""
    check_targets(owner, "targets", targets, num_rows, num_classes, "regression")
    if not targets.size:
        return
    low, high = float(targets.min()), float(targets.max())
    fits = max(-low, high) <= _LARGEST
    require_data(fits, owner, "targets", "within the range of float32", "a larger value")
    inside = link == "identity" or (low >= -_ROUNDING and high <= 1 + _ROUNDING)
    rule = f"probabilities, as link {link} says"
    require_data(inside, owner, "targets", rule, "numbers outside 0 to 1")


def class_shares(owner: str, targets: FloatArray, recipe: Recipe) -> FloatArray:
    """Return checked targets as the probabilities of classes at temperature 1.

    Examples
    --------
    >>> recipe = Recipe(link="softmax", temperature=2.0)
    >>> class_shares("Doc", np.array([[0.75, 0.25]]), recipe)
    array([[0.9, 0.1]])
    """
    if recipe.link == "identity":
        return np.asarray(softmax(targets.astype(np.float64), axis=1))
    shares: FloatArray = np.clip(targets.astype(np.float64), 0.0, 1.0)
    if recipe.link == "sigmoid":
        shares = _cooled(shares, recipe.temperature)
    largest = shares.max(axis=1, keepdims=True)
    some = bool((largest > 0).all())
    require_data(some, owner, "targets", "above 0 for some class of every row", "a row of 0")
    shares = shares / largest
    if recipe.link == "softmax":
        shares = shares**recipe.temperature
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def label_shares(owner: str, targets: FloatArray, recipe: Recipe) -> FloatArray:
    """Return checked targets as the probabilities of independent labels at temperature 1."""
    able = recipe.link != "softmax"
    require(able, owner, "link", "identity or sigmoid for multi-label tasks", recipe.link)
    if recipe.link == "identity":
        return np.asarray(expit(targets.astype(np.float64)))
    return _cooled(np.clip(targets.astype(np.float64), 0.0, 1.0), recipe.temperature)


def weigh(shares: FloatArray) -> WeightedLabels:
    """Return the classes of every row that matter, with weights that sum to 1.

    Examples
    --------
    >>> weigh(np.array([[0.75, 0.25, 0.0], [0.0, 0.0, 1.0]])).weights
    array([0.75, 0.25, 1.  ])
    """
    cut = np.clip(MOST_LOST * shares.mean(axis=0), SMALLEST_CUT, LARGEST_CUT)
    kept = (shares > cut) | (shares == shares.max(axis=1, keepdims=True))
    rows, classes = np.nonzero(kept)
    weights = shares[rows, classes]
    totals = np.bincount(rows, weights=weights)
    return WeightedLabels(rows, classes, weights / totals[rows])


def _cooled(shares: FloatArray, temperature: float) -> FloatArray:
    """Return the sigmoid of what has these values as its sigmoid after division."""
    with np.errstate(over="ignore"):
        return np.asarray(expit(temperature * logit(shares)))


# Below every probability a model of this size can tell apart, and far enough from zero
# that one overconfident model cannot outweigh a federation: log(1e-7) is about -16.
MIN_PROBABILITY: Final = 1e-7
CLASSES: Final = "classes"
WIDTH: Final = "width"


def require_names(owner: str, arrays: Mapping[str, Array], names: set[str]) -> None:
    """Raise `KnowledgeMismatch` unless exactly these arrays arrived."""
    rule = f"named {sorted(names)}"
    require_known(set(arrays) == names, owner, "arrays", rule, sorted(map(str, arrays)))


def all_but(owner: str, arrays: Mapping[str, Array], *names: str) -> dict[str, Array]:
    """Return the other arrays; raise `KnowledgeMismatch` unless these arrived as well."""
    for name in names:
        found = sorted(map(str, arrays))
        require_known(name in arrays, owner, "arrays", f"with {name!r}", found)
    return {name: array for name, array in arrays.items() if name not in names}


def require_array(
    owner: str, arrays: Mapping[str, Array], name: str, dtype: Any, shape: tuple[int, ...]
) -> Array:
    """Return a copy of one received array; refuse any other type, shape or infinity.

    A copy, because the sender's buffer could change after it was checked.
    """
    array = arrays[name]
    is_array = isinstance(array, np.ndarray)
    require_known(is_array, owner, name, "an array", type(array).__name__)
    require_known(array.dtype == dtype, owner, name, f"of {np.dtype(dtype)}", array.dtype)
    require_known(array.shape == shape, owner, name, f"of shape {shape}", array.shape)
    # A view that repeats a few bytes would only take its size once it is copied.
    whole = all(stride or side <= 1 for stride, side in zip(array.strides, shape, strict=True))
    require_known(whole, owner, name, "of numbers of its own", "a repeated view")
    if array.dtype.kind == "f":
        require_known(bool(np.isfinite(array).all()), owner, name, "finite", "NaN or infinity")
    return np.array(array, order="C")


def to_float32(owner: str, x: Array) -> Array:
    """Return rows in C order as float32, what tree libraries compare; refuse overflow."""
    with np.errstate(over="ignore"):
        narrow: Array = np.ascontiguousarray(x, dtype=np.float32)
    if narrow.dtype != x.dtype and x.dtype.kind == "f":
        fits = bool(np.isfinite(narrow).all())
        require_data(fits, owner, "x", "within the range of float32", "a larger value")
    return narrow


class RowLearner:
    """Base of learners that see rows as flat vectors, all of one width.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list, number of labels, or number of outputs.
    """

    def __init__(self, *, num_classes: int) -> None:
        self._num_classes = num_classes
        self._width = 0

    @property
    def _owner(self) -> str:
        return type(self).__name__

    @property
    def num_classes(self) -> int:
        """Length of the class list, number of labels, or number of outputs."""
        return self._num_classes

    def _flat_rows(self, x: Array) -> Array:
        x = np.asarray(x)
        check_rows(self._owner, "x", x)
        return x.reshape(len(x), math.prod(x.shape[1:]))

    def _training_rows(self, x: Array) -> Array:
        rows = self._flat_rows(x)
        require_data(
            len(rows) > 0, self._owner, "x", "at least one row", "an empty training set"
        )
        require_data(rows.shape[1] > 0, self._owner, "x", "at least one column", "none")
        return rows

    def _checked_rows(self, x: Array) -> Array:
        rows = self._flat_rows(x)
        rule = f"rows of {self._width} columns, as in training"
        require_data(rows.shape[1] == self._width, self._owner, "x", rule, rows.shape[1])
        return rows

    def _not_fitted(self) -> NotFitted:
        return NotFitted(f"{self._owner}: the learner must be fitted first, got none.")

    def _received_width(self, arrays: Mapping[str, Array]) -> int:
        width = int(self._received_number(arrays, WIDTH, np.int64))
        fits, rule = 1 <= width <= MAX_WIDTH, f"between 1 and {MAX_WIDTH}"
        require_known(fits, self._owner, WIDTH, rule, width)
        return width

    def _received_number(self, arrays: Mapping[str, Array], name: str, dtype: type) -> float:
        return float(require_array(self._owner, arrays, name, dtype, (1,)).item())


Twin = TypeVar("Twin", bound="TabularLearner")


class Unfitted(NamedTuple, Generic[Twin]):
    """A twin of many, with the rows of float32 and the labels 0 .. k - 1 that it must learn."""

    twin: Twin
    rows: Array
    labels: IntArray
    rng: np.random.Generator
    is_shared: bool
    """Whether other sets have the very same array of rows."""


class TabularLearner(RowLearner, ABC):
    """Base of learners that are made to learn labels.

    A subclass implements `_fit` and `_probabilities`; where its model can weigh its rows,
    `_takes_weights` and `_fit_weighted`; and where its models may travel, `_to_arrays` and
    `_from_arrays`. It sees only the classes that are present in a training set, renumbered
    0 .. k - 1 with k >= 2; a training set with a single class becomes a constant model
    without any call to the subclass.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list.
    """

    def __init__(self, *, num_classes: int) -> None:
        require(num_classes >= 2, self._owner, "num_classes", "at least 2", num_classes)
        super().__init__(num_classes=num_classes)
        self._classes: IntArray | None = None

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        """Learn labels `y` (n,) of rows `x` (n, ...), forgetting what was known before."""
        rows = self._training_rows(x)
        classes, encoded = self._numbered(y, len(rows))
        self._classes = None
        if len(classes) > 1:
            self._fit(rows, encoded, rng)
        self._classes, self._width = classes, rows.shape[1]
        return self

    def distill(
        self,
        x: Array,
        targets: FloatArray,
        *,
        rng: np.random.Generator,
        recipe: Recipe = Recipe(),  # noqa: B008 a frozen value
    ) -> Self:
        """Learn targets (n, num_classes) of rows `x`, forgetting what was known before.

        Targets become probabilities of classes at temperature 1, and these the weights of
        labels; every loss of a recipe is taken as the model's own. Targets that leave no
        row in doubt give the very model that `fit` makes of their classes. A model that
        cannot weigh rows learns the likeliest class of each.

        Unlikely classes are dropped (see `clients.tabular.base`) and then score as low as
        any class that is missing: a large temperature does not bring them back.
        """
        rows, targets = self._training_rows(x), np.asarray(targets)
        shape = (len(rows), self._num_classes)
        check_soft_targets(self._owner, targets, *shape, recipe.link)
        labels = weigh(class_shares(self._owner, targets, recipe))
        if labels.are_plain or not self._takes_weights:
            return self.fit(rows, labels.likeliest, rng=rng)
        self._classes = None
        classes, encoded = np.unique(labels.classes, return_inverse=True)
        self._fit_weighted(rows, labels._replace(classes=encoded), rng)
        self._classes, self._width = classes, rows.shape[1]
        return self

    def predict(self, x: Array) -> IntArray:
        """Return the most likely class of every row, (n,)."""
        classes, rows = self._fitted_classes(), self._checked_rows(x)
        if len(classes) == 1 or not len(rows):
            return np.full(len(rows), classes[0], dtype=np.int64)
        labels: IntArray = classes[self._predict(rows)]
        return labels

    def logits(self, x: Array) -> FloatArray:
        """Return the logarithm of class probabilities, (n, num_classes) of float64.

        Probabilities are clipped at `MIN_PROBABILITY`, which is also what a class gets
        that the training set lacked. float64 keeps the order of close scores, so that
        the largest one is always the class that `predict` names.
        """
        classes, rows = self._fitted_classes(), self._checked_rows(x)
        scores = np.full((len(rows), self._num_classes), math.log(MIN_PROBABILITY))
        if len(classes) == 1:
            scores[:, classes[0]] = 0.0
        elif len(rows):
            probabilities = np.asarray(self._probabilities(rows), dtype=np.float64)
            # fmax takes the other side of a NaN: a broken model that was received
            # must not carry NaN into the average of a whole federation.
            clipped = np.fmin(np.fmax(probabilities, MIN_PROBABILITY), 1.0)
            scores[:, classes] = np.log(clipped)
        return scores

    @property
    def travels(self) -> bool:
        """Whether models of this learner have an array form."""
        return type(self)._to_arrays is not TabularLearner._to_arrays

    def to_arrays(self) -> dict[str, Array]:
        """Return what was learned: classes (k,), width (1,) and the model's own arrays."""
        classes = self._fitted_classes()
        own = self._to_arrays() if len(classes) > 1 else {}
        return {CLASSES: classes.copy(), WIDTH: np.array([self._width]), **own}

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return a new fitted learner; raise `KnowledgeMismatch` for arrays that do not fit."""
        own, twin = all_but(self._owner, arrays, CLASSES, WIDTH), copy.copy(self)
        twin._classes = self._received_classes(arrays)
        twin._width = self._received_width(arrays)
        if len(twin._classes) > 1:
            twin._from_arrays(own)
        else:
            require_names(self._owner, own, set())
        return twin

    @abstractmethod
    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        """Fit a new model to finite rows (n, d) and labels (n,) in 0 .. k - 1, k >= 2."""

    @abstractmethod
    def _probabilities(self, x: Array) -> FloatArray:
        """Return the probabilities (n, k) of rows (n, d), n >= 1."""

    @property
    def _takes_weights(self) -> bool:
        """Whether `_fit_weighted` is there to be called."""
        return False

    def _fit_weighted(self, x: Array, labels: WeightedLabels, rng: np.random.Generator) -> None:
        """Fit a new model to finite rows (n, d) and weighted labels in 0 .. k - 1, k >= 2."""
        raise NotImplementedError

    def _predict(self, x: Array) -> IntArray:
        """Return the likeliest of the k classes of every row; ties go to the first."""
        labels: IntArray = self._probabilities(x).argmax(axis=1)
        return labels

    def _to_arrays(self) -> dict[str, Array]:
        """Return the model as arrays of numbers."""
        raise UnsupportedLearner(
            f"{self._owner}: the model must have an array form to travel, got none. "
            'Use exchange="votes", which needs no model on the wire.'
        )

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Become the model in `arrays`, of `_num_present` classes and `_width` columns."""
        raise KnowledgeMismatch(
            f"{self._owner}: arrays must be those of a one-class model, got "
            f"{sorted(map(str, arrays))}."
        )

    def _twins(
        self, sets: Sequence[TrainingSet], rngs: Sequence[np.random.Generator]
    ) -> tuple[list[Self], list["Unfitted[Self]"]]:
        """Return a twin per training set, and what those with several classes must learn.

        Every array of rows is checked once. Rows that several sets share are those of students
        on public rows, which may be kept in a `SharedRows`; the records of a party never are.
        """
        sets = list(sets)
        counts = Counter(id(x) for x, _ in sets)
        checked: dict[int, Array] = {}
        twins, waiting = [copy.copy(self) for _ in sets], []
        for twin, (x, y), rng in zip(twins, sets, rngs, strict=True):
            if id(x) not in checked:
                checked[id(x)] = to_float32(self._owner, self._training_rows(x))
            rows = checked[id(x)]
            twin._classes, labels = self._numbered(y, len(rows))
            twin._width = rows.shape[1]
            if len(twin._classes) > 1:
                waiting.append(Unfitted(twin, rows, labels, rng, counts[id(x)] > 1))
        return twins, waiting

    @property
    def _num_present(self) -> int:
        """Number k of classes that the model can tell apart."""
        return len(self._fitted_classes())

    def _fitted_classes(self) -> IntArray:
        if self._classes is None:
            raise self._not_fitted()
        return self._classes

    def _numbered(self, y: IntArray, num_rows: int) -> tuple[IntArray, IntArray]:
        """Return the classes among checked labels, and the labels as their places there."""
        y = np.asarray(y)
        check_labels(self._owner, "y", y, num_rows, self._num_classes)
        classes, encoded = np.unique(y, return_inverse=True)
        return classes.astype(np.int64), encoded.astype(np.int64)

    def _received_classes(self, arrays: Mapping[str, Array]) -> IntArray:
        size = np.size(arrays[CLASSES])
        rule = f"between 1 and {self._num_classes} classes"
        require_known(1 <= size <= self._num_classes, self._owner, CLASSES, rule, size)
        classes: IntArray = require_array(self._owner, arrays, CLASSES, np.int64, (size,))
        rising = bool((classes[1:] > classes[:-1]).all())
        inside = bool(classes[0] >= 0 and classes[-1] < self._num_classes)
        rule = f"rising and below {self._num_classes}"
        require_known(rising and inside, self._owner, CLASSES, rule, classes)
        return classes


MOST_BYTES: Final = 2**26
"""Larger rows are not kept: a model on them takes far longer than its bins."""

Made = TypeVar("Made")


class SharedRows(threading.local, Generic[Made]):
    """The last rows of this thread, by their content, and what was made of them.

    What a library makes of the public rows of a federation before it learns, such as bins, is
    made once, though many models learn from them in turn. It belongs to one thread, because
    libraries write the labels of a model into its bins. A copy of the rows is compared, never
    their address: whoever writes into an array gets what belongs to its new content.

    Examples
    --------
    >>> shared, rows = SharedRows(), np.ones((2, 2))
    >>> shared.get(rows, np.sum), shared.get(rows.copy(), np.size), shared.get(rows * 2, np.sum)
    (np.float64(4.0), np.float64(4.0), np.float64(8.0))
    """

    def __init__(self) -> None:
        self._kept: tuple[Hashable, Array, Made] | None = None

    def get(self, rows: Array, make: Callable[[Array], Made], key: Hashable = None) -> Made:
        """Return what `make` makes of rows, or made of equal rows with this key last time."""
        if self._kept is not None:
            kept_key, kept, made = self._kept
            if kept_key == key and kept.dtype == rows.dtype and np.array_equal(kept, rows):
                return made
        self._kept, own = None, rows.copy()
        made = make(own)
        if own.nbytes <= MOST_BYTES:
            self._kept = key, own, made
        return made


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


class ScoreLearner(RowLearner, ABC):
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
        super().__init__(num_classes=num_classes)
        self._task: Task = task
        self._link: Link | None = None
        self._temperature = 1.0

    def fit(self, x: Array, y: Array, *, rng: np.random.Generator) -> Self:
        """Learn what the task calls labels, forgetting what was known before."""
        rows, y = self._training_rows(x), np.asarray(y)
        check_targets(self._owner, "y", y, len(rows), self._num_classes, self._task)
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
        links, targets = _LINKS_OF_TASK[self._task], np.asarray(targets)
        rule = f"one of {', '.join(links)} for {self._task} tasks"
        require(recipe.link in links, self._owner, "link", rule, recipe.link)
        rows = self._training_rows(x)
        check_soft_targets(self._owner, targets, len(rows), self._num_classes, recipe.link)
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
        own, twin = all_but(self._owner, arrays, WIDTH, LINK, TEMPERATURE), copy.copy(self)
        twin._width = self._received_width(arrays)
        links = [_LINKS.index(link) for link in _LINKS_OF_TASK[self._task]]
        number = int(self._received_number(arrays, LINK, np.int64))
        require_known(number in links, self._owner, LINK, f"one of {sorted(links)}", number)
        twin._link = _LINKS[number]
        temperature = self._received_number(arrays, TEMPERATURE, np.float64)
        require_known(temperature > 0, self._owner, TEMPERATURE, "above 0", temperature)
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
        if not len(rows):
            return np.zeros((0, self._num_classes))
        # Finite numbers that were received can still overflow; that must not carry NaN
        # into the average of a whole federation.
        with np.errstate(over="ignore", invalid="ignore"):
            scores = np.asarray(self._outputs(rows), dtype=np.float64)
        return np.clip(np.nan_to_num(scores, nan=0.0), -_LARGEST, _LARGEST)

    def _flat_rows(self, x: Array) -> Array:
        rows = super()._flat_rows(x)
        self._check_range("x", rows)
        return rows

    def _check_range(self, name: str, values: Array) -> None:
        fits = not values.size or max(-float(values.min()), float(values.max())) <= _LARGEST
        require_data(fits, self._owner, name, "within the range of float32", "a larger value")

    def _fitted_link(self) -> Link:
        if self._link is None:
            raise self._not_fitted()
        return self._link


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
