"""Learners, the tasks they learn, and the metrics that evaluate them.

A learner is anything with the methods of a protocol below. It is created unfitted by a
zero-argument factory, so a strategy can make as many twins as it needs. Labels are positions
0 .. num_classes - 1 in the federation's class list; scores always have `num_classes` columns,
also when a training set lacks classes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    Final,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    get_args,
    runtime_checkable,
)

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray, IntArray, counted
from fl_strategies.errors import InvalidParameter, UnsupportedLearner, require, require_data
from fl_strategies.features import FeatureMap
from fl_strategies.privacy.events import PrivacyEvent
from fl_strategies.wire import keys

TrainingSet: TypeAlias = tuple[Array, IntArray]
Loss: TypeAlias = Literal["l1", "l2", "mse", "cross-entropy"]
Link: TypeAlias = Literal["identity", "softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a learner is to learn: ``link(logits(x) / temperature) = targets``, nearly.

    Parameters
    ----------
    loss : "l1", "l2", "mse" or "cross-entropy"
        Per row: mean absolute difference, Euclidean distance, mean squared difference, or
        the cross-entropy of targets that are probabilities. Learners that solve their
        problem in closed form, or only know squares, may take every norm as "mse".
    link : "identity", "softmax" or "sigmoid"
        What turns logits into what the targets are: scores, probabilities of classes, or
        probabilities of independent labels.
    temperature : float
        Logits are divided by it before a softmax or sigmoid; 1 for the identity.
    epochs : int, optional
        Passes over the rows; the learner's own number if omitted. Learners that do not
        learn in passes ignore it.
    """

    loss: Loss = "mse"
    link: Link = "identity"
    temperature: float = 1.0
    epochs: int | None = None

    def __post_init__(self) -> None:
        """Check that loss and link go together."""
        losses, links = get_args(Loss), get_args(Link)
        require(self.loss in losses, "Recipe", "loss", f"one of {', '.join(losses)}", self.loss)
        require(self.link in links, "Recipe", "link", f"one of {', '.join(links)}", self.link)
        fits = self.loss != "cross-entropy" or self.link != "identity"
        require(fits, "Recipe", "link", "softmax or sigmoid for cross-entropy", self.link)
        warm = 0 < self.temperature < math.inf
        require(warm, "Recipe", "temperature", "finite and above 0", self.temperature)
        plain = self.link != "identity" or self.temperature == 1
        require(plain, "Recipe", "temperature", "1 for the identity", self.temperature)
        enough = self.epochs is None or self.epochs >= 1
        require(enough, "Recipe", "epochs", "at least 1", self.epochs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Proximal:
    """FedProx's term: ``mu/2 |w - anchor|^2``, for the weights w that learn.

    Parameters
    ----------
    mu : float
        Strength.
    anchor : mapping of name to array, optional
        Centre, named as in `to_arrays`; the weights at the start of the call if omitted.
    """

    mu: float
    anchor: Mapping[str, Array] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the strength; only the learner knows its weights."""
        _check_strength("Proximal", "mu", self.mu)


@dataclass(frozen=True, eq=False)
class Correction:
    """SCAFFOLD's term: ``<arrays, w>``, which adds the arrays to the gradient of every step.

    Parameters
    ----------
    arrays : mapping of name to array
        Named as in `to_arrays`: the server's control variate less the party's own.
    """

    arrays: Mapping[str, Array] = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Generated:
    """FedGen's term: the mean cross-entropy of the last layer's answers to given features.

    Parameters
    ----------
    features, labels : (n, num_features), (n,)
        Inputs of the last layer, and the classes it is to recognise in them.
    strength : float (default: 1)
        Weight of the term.
    """

    features: FloatArray = field(repr=False)
    labels: IntArray = field(repr=False)
    strength: float = 1.0

    def __post_init__(self) -> None:
        """Check the strength, and that every row has a label."""
        _check_strength("Generated", "strength", self.strength)
        rule = f"of shape ({len(self.features)},), one per row of features"
        fits = np.shape(self.labels) == (len(self.features),)
        require(fits, "Generated", "labels", rule, np.shape(self.labels))


@dataclass(frozen=True, kw_only=True, eq=False)
class Prototypes:
    """FedProto's term: the mean squared distance of features to the prototype of their class.

    The only term that sees the batch. Under DP-SGD it is part of the loss of a record, and is
    clipped and noised with it.

    Parameters
    ----------
    prototypes : (num_classes, num_features)
        What `FeatureLearner.features` should be for a record of each class.
    known : (num_classes,) of bool, optional
        Which classes have a prototype; all if omitted. Records of others lose nothing.
    strength : float (default: 1)
        Weight of the term.
    """

    prototypes: FloatArray = field(repr=False)
    known: Array | None = field(default=None, repr=False)
    strength: float = 1.0

    def __post_init__(self) -> None:
        """Check the strength and the shapes; only the learner knows its features."""
        _check_strength("Prototypes", "strength", self.strength)
        shape = np.shape(self.prototypes)
        rule = "of shape (num_classes, num_features)"
        require(len(shape) == 2, "Prototypes", "prototypes", rule, shape)
        known = shape[:1] if self.known is None else self.known.shape
        require(known == shape[:1], "Prototypes", "known", f"of shape {shape[:1]}", known)


def _check_strength(owner: str, name: str, value: float) -> None:
    require(0 <= value < math.inf, owner, name, "finite and at least 0", value)


Term: TypeAlias = Proximal | Correction | Generated | Prototypes


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """The terms that a learner minimises besides its loss.

    None may hold anything private that has not been paid for: a learner that trains privately
    takes them as they are.

    Parameters
    ----------
    terms : sequence of Term
        Their sum is added to the loss.
    step_size : float, optional
        Take steps of plain gradient descent, of this size, in place of those of the
        learner's own optimizer; its batches and penalties stay.

    Examples
    --------
    >>> Objective(terms=(Proximal(mu=0.1),))
    Objective(terms=(Proximal(mu=0.1),), step_size=None)
    """

    terms: Sequence[Term] = ()
    step_size: float | None = None

    def __post_init__(self) -> None:
        """Check the step size; every term checks itself."""
        moves = self.step_size is None or 0 < self.step_size < math.inf
        require(moves, "Objective", "step_size", "finite and above 0", self.step_size)


def link_scores(scores: FloatArray, recipe: Recipe) -> FloatArray:
    """Return scores as the recipe's targets: as they are, or as probabilities."""
    if recipe.link == "identity":
        return scores
    warm = scores / recipe.temperature
    if recipe.link == "sigmoid":
        return np.asarray(scipy.special.expit(warm))
    return np.asarray(scipy.special.softmax(warm, axis=1))


@runtime_checkable
class Learner(Protocol):
    """A classifier with the verbs of scikit-learn and an explicit source of randomness."""

    @property
    def num_classes(self) -> int:
        """Length of the federation's class list."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        """Learn labels `y` (n,) of rows `x` (n, ...); draw randomness from `rng` only."""

    def predict(self, x: Array) -> IntArray:
        """Return the most likely class of every row, (n,)."""

    def logits(self, x: Array) -> FloatArray:
        """Return unnormalised log-probabilities, (n, num_classes)."""


@runtime_checkable
class EnsembleLearner(Learner, Protocol):
    """A learner that fits many independent twins faster than one after the other."""

    def fit_many(
        self, sets: Sequence[TrainingSet], *, rngs: Sequence[np.random.Generator]
    ) -> "list[Self]":
        """Return one new fitted twin per training set; twin i uses `rngs[i]` only."""


@runtime_checkable
class SoftLearner(Learner, Protocol):
    """A learner that can learn from scores or probabilities instead of labels."""

    def distill(
        self, x: Array, targets: FloatArray, *, rng: np.random.Generator, recipe: Recipe
    ) -> Self:
        """Learn targets (n, num_classes) of rows `x`, as the recipe says.

        Learners that can continue from what they know do so; others start anew.
        """


@runtime_checkable
class IncrementalLearner(SoftLearner, Protocol):
    """A learner that can resume learning where it stopped."""

    def partial_fit(
        self, x: Array, y: IntArray, *, rng: np.random.Generator, epochs: int
    ) -> Self:
        """Learn labels `y` (n,) in so many more passes, without forgetting the rest."""


@runtime_checkable
class PortableLearner(Learner, Protocol):
    """A fitted learner that can travel as plain arrays, never as a pickle."""

    def to_arrays(self) -> dict[str, Array]:
        """Return everything that was learned as named arrays of numbers."""

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return a fitted twin; raise `KnowledgeMismatch` for arrays that do not fit.

        The arrays are untrusted: nothing in them may be executed, and whatever
        native code will later read must be checked here.
        """


@runtime_checkable
class LinearLearner(PortableLearner, Protocol):
    """A learner that is linear in features, and can be given their weights."""

    def with_weights(
        self, features: FeatureMap, weights: FloatArray, errors: FloatArray | None = None
    ) -> Self:
        """Return a fitted twin whose logits, or outputs, are features times weights.

        Features are divided by `features.levels`; weights, and their standard errors if they
        are known, are (num_features, num_classes).
        """


@runtime_checkable
class PrivateLearner(Protocol):
    """A learner that trains with differential privacy and accounts for it."""

    @property
    def privacy_events(self) -> "Sequence[tuple[PrivacyEvent, int]]":
        """What training has spent so far, each event with its count; at first nothing."""

    def planned_events(
        self, num_records: int, *, epochs: int | None = None, distill: bool = False
    ) -> "Sequence[tuple[PrivacyEvent, int]]":
        """Return what learning from so many records will spend, before they are looked at.

        `distill` asks about that method instead of `fit` and `partial_fit`. Nothing means
        that it promises no privacy.
        """


@runtime_checkable
class ContinuingLearner(IncrementalLearner, PortableLearner, Protocol):
    """A learner that can continue where it stopped, also in another process."""


@runtime_checkable
class StartingLearner(ContinuingLearner, Protocol):
    """A learner whose first weights can be drawn before there are records."""

    def initialised(self, *, rng: np.random.Generator) -> Self:
        """Return a twin with random weights, which the generator alone decides."""


@runtime_checkable
class GuidedLearner(ContinuingLearner, Protocol):
    """A learner with weights that takes an `Objective`, for FedProx, SCAFFOLD and the like."""

    @property
    def steps_taken(self) -> int:
        """Optimizer steps of the last call that learned; 0 before the first."""

    def partial_fit(
        self,
        x: Array,
        y: IntArray,
        *,
        rng: np.random.Generator,
        epochs: int,
        objective: Objective | None = None,
    ) -> Self:
        """Learn as every `partial_fit`, and minimise the objective beside the loss."""


DenseLayer: TypeAlias = tuple[FloatArray, FloatArray]
"""Weights (outputs, inputs) and biases (outputs,)."""


@runtime_checkable
class DenseLearner(PortableLearner, Protocol):
    """A perceptron, whose hidden layers can get another number of units."""

    def to_layers(self) -> list[DenseLayer]:
        """Return the layers from inputs to logits; raise `UnsupportedLearner` for others."""

    def from_layers(self, layers: Sequence[DenseLayer]) -> Self:
        """Return a fitted twin of these layers, with as many hidden units as they have."""

    def sized_for(self, arrays: Mapping[str, Array]) -> Self:
        """Return an unfitted twin with as many hidden units as arrays of its kind have.

        Nothing else is checked; what is of another kind gives a twin of the usual size.
        """


@runtime_checkable
class HeadedLearner(GuidedLearner, Protocol):
    """A learner whose logits are a dense layer of features that it learns."""

    def head(self) -> DenseLayer:
        """Return that layer; raise `UnsupportedLearner` if there is none with biases."""


@runtime_checkable
class FeatureLearner(Learner, Protocol):
    """A learner that represents rows as features, of which its last layer makes logits."""

    def features(self, x: Array) -> FloatArray:
        """Return the inputs of the last layer for rows `x` (n, ...), (n, num_features).

        What is computed from private rows is as private as they are.
        """


LearnerFactory: TypeAlias = Callable[[], Learner]


def check_factory(owner: str, name: str, factory: object, num_classes: int) -> None:
    """Raise `InvalidParameter`, saying what to write, for a model in place of a factory."""
    given = factory if isinstance(factory, type) else type(factory)
    wanted = _in_a_learner(given, num_classes)
    if wanted is None and callable(factory):
        return
    if wanted is None and hasattr(given, "fit"):
        wanted = f"{given.__name__}(...)"
    kind = "the class" if given is factory else "an object of the class"
    raise _not_a_factory(owner, name, f"{kind} {given.__name__}", wanted)


def check_made(owner: str, name: str, factory: LearnerFactory, num_classes: int) -> None:
    """Raise `InvalidParameter` also for what makes no learner, or one of other classes.

    It makes one, so this is not for where parties are made over and over.
    """
    check_factory(owner, name, factory, num_classes)
    made: object = factory()
    if not all(hasattr(made, verb) for verb in ("fit", "predict", "logits")):
        kind = type(made)
        got = f"one that makes objects of the class {kind.__name__}"
        raise _not_a_factory(owner, name, got, _in_a_learner(kind, num_classes))
    found = getattr(made, "num_classes", None)
    if found != num_classes:
        raise InvalidParameter(
            f"{owner}: {name} must make learners of {num_classes} classes, labels or targets, "
            f"as all of the federation have, got {found}. Write: num_classes={num_classes}"
        )


def _not_a_factory(owner: str, name: str, got: str, wanted: str | None) -> InvalidParameter:
    hint = "" if wanted is None else f" Write: lambda: {wanted}"
    return InvalidParameter(
        f"{owner}: {name} must be a function without arguments that makes a new learner, got "
        f"{got}.{hint}"
    )


def _in_a_learner(given: type, num_classes: int) -> str | None:
    """Return how a class of torch, XGBoost or scikit-learn becomes a learner, or None."""
    classes = f"num_classes={num_classes}"
    if any(base.__module__ == "torch.nn.modules.module" for base in given.__mro__):
        return f"TorchLearner(lambda: {given.__name__}(...), {classes})"
    if hasattr(given, "logits") or not hasattr(given, "get_params"):
        return None
    if given.__module__.partition(".")[0] == "xgboost":
        return f"XGBoostLearner({classes})"
    return f"SklearnLearner({given.__name__}(...), {classes})"


def events_of(learner: object) -> "tuple[tuple[PrivacyEvent, int], ...]":
    """Return what training a learner has spent; nothing if it does not train privately."""
    return tuple(learner.privacy_events) if isinstance(learner, PrivateLearner) else ()


def plan_of(
    learner: object, num_records: int, *, epochs: int | None = None, distill: bool = False
) -> "tuple[tuple[PrivacyEvent, int], ...]":
    """Return what training a learner will spend; nothing if it does not train privately."""
    if not isinstance(learner, PrivateLearner):
        return ()
    return tuple(learner.planned_events(num_records, epochs=epochs, distill=distill))


def require_soft(owner: str, learner: Learner) -> SoftLearner:
    """Return the learner if it can learn from scores; say what to do if it cannot."""
    if isinstance(learner, SoftLearner):
        return learner
    advice = "TabularLearner and ScoreLearner give it to any model."
    raise _unsupported(owner, learner, "must have distill to learn from scores", advice)


def require_guided(owner: str, learner: Learner) -> GuidedLearner:
    """Return the learner if it takes an `Objective`; say what to do if it does not."""
    if isinstance(learner, GuidedLearner):
        return learner
    rule = "must take an objective (partial_fit, steps_taken, to_arrays and from_arrays)"
    raise _unsupported(owner, learner, rule)


def require_headed(owner: str, learner: Learner) -> HeadedLearner:
    """Return the learner if it has a last layer; say what to do if it has none."""
    if isinstance(learner, HeadedLearner):
        return learner
    raise _unsupported(owner, learner, "must tell its last layer (head) and take an objective")


def require_features(owner: str, learner: Learner) -> FeatureLearner:
    """Return the learner if it has features; say what to do if it does not."""
    if isinstance(learner, FeatureLearner):
        return learner
    raise _unsupported(owner, learner, "must represent rows as features (features)")


def _unsupported(
    owner: str, learner: Learner, rule: str, advice: str = "TorchLearner does."
) -> UnsupportedLearner:
    return UnsupportedLearner(
        f"{owner}: the learner {rule}, got {type(learner).__name__}. {advice}"
    )


def can_travel(learner: object) -> bool:
    """Return whether a learner's models can become arrays, before any is trained.

    A learner that has the methods for some models only says so by an attribute `travels`.
    """
    return isinstance(learner, PortableLearner) and bool(getattr(learner, "travels", True))


def require_portable(learner: Learner, hint: str = "") -> PortableLearner:
    """Return the learner if it can travel; if not, say so, and the hint what to do."""
    if isinstance(learner, PortableLearner):
        return learner
    raise UnsupportedLearner(
        f"Learner: a model that travels must have to_arrays and from_arrays, got "
        f"{type(learner).__name__}. {hint}".rstrip()
    )


def fit_ensemble(
    learner_fn: LearnerFactory,
    sets: Sequence[TrainingSet],
    *,
    rngs: Sequence[np.random.Generator],
    kind: str = "models",
) -> list[Learner]:
    """Fit one learner per training set, all at once where the learner knows how.

    `kind` says what they are to whoever watches the progress.
    """
    first = learner_fn()
    if isinstance(first, EnsembleLearner):
        return list(first.fit_many(sets, rngs=rngs))
    members = counted(list(zip(sets, rngs, strict=True)), kind)
    return [learner_fn().fit(x, y, rng=rng) for (x, y), rng in members]


Task: TypeAlias = Literal["single-label", "multi-label", "regression"]

TASKS: Final[tuple[str, ...]] = get_args(Task)
METRICS: Final[Mapping[str, str]] = {
    "single-label": keys.ACCURACY,
    "multi-label": keys.MEAN_AUC,
    "regression": keys.MEAN_SQUARED_ERROR,
}
"""Main metric of each task; only the last is better when smaller."""
UNKNOWN: Final = -1
"""A label of a multi-label record that is not known."""


def check_task(owner: str, task: str, num_classes: int) -> None:
    """Raise `InvalidParameter` unless the task is known and has enough classes."""
    require(task in TASKS, owner, "task", f"one of {', '.join(TASKS)}", task)
    least = 2 if task == "single-label" else 1
    require(num_classes >= least, owner, "num_classes", f"at least {least}", num_classes)


def check_targets(
    owner: str, name: str, y: Array, num_rows: int, num_classes: int, task: Task
) -> None:
    """Raise `InvalidData` unless `y` holds targets of the task, one row per record.

    Single-label: class indices (n,). Multi-label: (n, num_classes) of -1 (unknown),
    0 (no) and 1 (yes). Regression: finite numbers (n, num_classes).
    """
    if task == "single-label":
        check_labels(owner, name, y, num_rows, num_classes)
        return
    shape = (num_rows, num_classes)
    require_data(y.shape == shape, owner, name, f"of shape {shape}", f"shape {y.shape}")
    if task == "regression":
        require_data(y.dtype.kind == "f", owner, name, "floating-point numbers", y.dtype)
        finite = bool(np.isfinite(y).all())
        require_data(finite, owner, name, "finite", "NaN or infinity")
        return
    require_data(y.dtype.kind in "iu", owner, name, "an array of -1, 0 and 1", y.dtype)
    outside = y[(y < UNKNOWN) | (y > 1)]
    require_data(not len(outside), owner, name, "an array of -1, 0 and 1", outside[:1])


def check_labels(owner: str, name: str, y: Array, num_rows: int, num_classes: int) -> None:
    """Raise `InvalidData` unless `y` holds one class index per row."""
    flat = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
    rule = "a flat array of class indices"
    require_data(flat, owner, name, rule, f"shape {y.shape} of {y.dtype}")
    require_data(len(y) == num_rows, owner, name, f"{num_rows} labels, one per row", len(y))
    if len(y):
        outside = y[(y < 0) | (y >= num_classes)]
        rule = f"between 0 and {num_classes - 1}, the federation's class list"
        require_data(not len(outside), owner, name, rule, outside[:1])


class Evaluation(NamedTuple):
    """Metrics of a model on some rows."""

    metrics: dict[str, float]
    """All metrics of the task by name; NaN where the rows define none."""
    shares: FloatArray
    """Contribution of each row: the mean is the main metric, the spread its sampling error."""


def paired_error(one: FloatArray, other: FloatArray) -> float:
    """Return the standard error of the difference of two models, from their shares per row."""
    return float((one - other).std() / np.sqrt(max(len(one), 1)))


def metric_names(task: Task, num_classes: int) -> tuple[str, ...]:
    """Return the metrics of a task, the one of `METRICS` first."""
    if task == "regression":
        return METRICS[task], keys.R2, keys.RMSE, keys.MAE
    if task == "multi-label":
        return (METRICS[task],)
    curve = (keys.AUC,) if num_classes == 2 else ()
    return keys.ACCURACY, keys.BALANCED_ACCURACY, keys.MACRO_F1, *curve


def quality(model: Learner, x: Array, y: Array, task: Task) -> float:
    """Return accuracy, mean area under the ROC curve, or mean squared error."""
    if task == "single-label":
        return float((model.predict(x) == y).mean())
    scores = model.logits(x)
    if task == "regression":
        return float(np.square(scores - y).mean())
    return mean_auc(scores, y)


def evaluate_model(model: Learner, x: Array, y: Array, task: Task) -> Evaluation:
    """Return all metrics of a model, and each row's contribution to the main one."""
    if task == "single-label":
        scores = model.logits(x) if model.num_classes == 2 else None
        margins = None if scores is None else scores[:, 1] - scores[:, 0]
        return _evaluate_labels(model.predict(x), margins, y)
    scores = model.logits(x)
    if task == "regression":
        return _evaluate_outputs(scores, y)
    return Evaluation({keys.MEAN_AUC: mean_auc(scores, y)}, _auc_shares(scores, y))


def evaluate_constant(trained: Array, y: Array, num_classes: int, task: Task) -> Evaluation:
    """Evaluate the constant model, the baseline that all others have to beat.

    The answer is the most frequent class of the targets in `trained`, or their mean in
    regression. In multi-label learning a constant ranks no row, so the area is one half.
    """
    if task == "multi-label":
        return Evaluation({keys.MEAN_AUC: 0.5}, np.full(len(y), 0.5))
    if task == "regression":
        return _evaluate_outputs(trained.mean(axis=0), y)
    most = np.bincount(trained, minlength=num_classes).argmax()
    margins = np.zeros(len(y)) if num_classes == 2 else None
    return _evaluate_labels(np.full(len(y), most), margins, y)


def _evaluate_labels(predicted: IntArray, margins: FloatArray | None, y: Array) -> Evaluation:
    hits = (predicted == y).astype(np.float64)
    curve = {} if margins is None else {keys.AUC: auc(margins, y == 1)}
    metrics = {keys.ACCURACY: float(hits.mean()), **class_metrics(predicted, y), **curve}
    return Evaluation(metrics, hits)


def _evaluate_outputs(outputs: FloatArray, y: Array) -> Evaluation:
    errors = np.square(outputs - y)
    squared, spread = float(errors.mean()), target_variance(y)
    metrics = {
        keys.MEAN_SQUARED_ERROR: squared,
        keys.R2: 1 - squared / spread if spread > 0 else math.nan,
        keys.RMSE: math.sqrt(squared),
        keys.MAE: float(np.abs(outputs - y).mean()),
    }
    return Evaluation(metrics, errors.mean(axis=1))


def target_variance(y: Array) -> float:
    """Return the mean variance of numeric targets, of which R2 is a share; 0 without any."""
    return float(y.var(axis=0).mean()) if len(y) else 0.0


def variance_explained(found: Evaluation, y: Array) -> Evaluation:
    """Return an evaluation of numeric targets whose shares per row have R2 as their mean."""
    spread = target_variance(y)
    shares = np.full(len(y), math.nan) if spread <= 0 else 1 - found.shares / spread
    return found._replace(shares=shares)


def class_metrics(predicted: IntArray, y: IntArray) -> dict[str, float]:
    """Return metrics that weight all classes equally, however few rows they have.

    Balanced accuracy is the mean recall of the classes that occur in `y`, macro F1 the mean
    of F1 over those that occur in `y` or are predicted; both as in scikit-learn.

    Examples
    --------
    >>> class_metrics(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1]))["balanced-accuracy"]
    0.5
    """
    size = 1 + max(predicted.max(initial=0), y.max(initial=0))
    hits, named, actual = (
        np.bincount(rows, minlength=size) for rows in (y[predicted == y], predicted, y)
    )
    occurs, counts = actual > 0, (actual + named) > 0
    return {
        keys.BALANCED_ACCURACY: float((hits[occurs] / actual[occurs]).mean()),
        keys.MACRO_F1: float((2 * hits[counts] / (actual + named)[counts]).mean()),
    }


def auc(scores: FloatArray, positive: Array) -> float:
    """Return the area under the ROC curve, ties counted half; NaN if there is no curve."""
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    above = _ranks(scores)[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def mean_auc(scores: FloatArray, y: Array) -> float:
    """Return the mean over labels of the area under the ROC curve.

    Unknown labels are excluded; so are labels with positives or negatives only, for which
    no curve exists. NaN if nothing is left.

    Examples
    --------
    >>> y = np.array([[0, 1], [1, 0], [1, -1]])
    >>> mean_auc(np.array([[0.1, 2.0], [0.7, 1.0], [0.1, 3.0]]), y)
    0.875
    """
    columns = zip(scores.T, y.T, strict=True)
    areas = np.array([auc(c[labels != UNKNOWN], _positive(labels)) for c, labels in columns])
    known = areas[~np.isnan(areas)]
    return float(known.mean()) if len(known) else float("nan")


def _positive(labels: Array) -> Array:
    positive: Array = labels[labels != UNKNOWN] == 1
    return positive


def _auc_shares(scores: FloatArray, y: Array) -> FloatArray:
    """Return each row's contribution to the mean area, by DeLong's decomposition.

    A positive row ranks above a share of the negative ones, and vice versa. That share, minus
    the area and scaled by the rarity of its side, is the row's influence; an unknown label
    has none. The variance of the mean over rows is then that of the area.
    """
    shares = []
    for column, labels in zip(scores.T, y.T, strict=True):
        known, positive = labels != UNKNOWN, _positive(labels)
        area = auc(column[known], positive)
        if np.isnan(area):
            continue
        share = np.full(len(labels), area)
        share[known] += _influence(column[known], positive, area) * len(labels)
        shares.append(share)
    return np.mean(shares, axis=0) if shares else np.full(len(y), np.nan)


def _influence(scores: FloatArray, positive: Array, area: float) -> FloatArray:
    ranks, influence = _ranks(scores), np.empty(len(scores))
    for side, sign in ((positive, 1), (~positive, -1)):
        beaten = (ranks[side] - _ranks(scores[side])) / (~side).sum()
        wins = beaten if sign > 0 else 1 - beaten
        influence[side] = (wins - area) / side.sum()
    return influence


def _ranks(values: Array) -> FloatArray:
    """Return the place of each value, from 1; equal values share the mean of theirs.

    The same as `scipy.stats.rankdata`, whose import would cost a party a second per message.
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: FloatArray = counts.cumsum() - (counts - 1) / 2
    return means[places]
