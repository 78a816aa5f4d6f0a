"""What a strategy asks of a model: small protocols, no base class to inherit.

A learner is created unfitted by a zero-argument factory, so a strategy can make as many
twins as it needs. Labels are positions 0 .. num_classes - 1 in the federation's class
list; scores always have `num_classes` columns, also when a training set lacks classes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Literal,
    Protocol,
    Self,
    TypeAlias,
    get_args,
    runtime_checkable,
)

import numpy as np
from scipy.special import expit, softmax

from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.exceptions import UnsupportedLearner, require
from fl_strategies.privacy.events import PrivacyEvent

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
        Passes over the rows; the learner's own number if left out. Learners that do not
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


def link_scores(scores: FloatArray, recipe: Recipe) -> FloatArray:
    """Return scores as the recipe's targets: as they are, or as probabilities."""
    if recipe.link == "identity":
        return scores
    warm = scores / recipe.temperature
    if recipe.link == "sigmoid":
        return np.asarray(expit(warm))
    return np.asarray(softmax(warm, axis=1))


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

        Learners that can go on from what they know do so; others start anew.
        """


@runtime_checkable
class IncrementalLearner(SoftLearner, Protocol):
    """A learner that can go on learning where it stopped."""

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

        The arrays come from strangers: nothing in them may be executed, and whatever
        native code will later read must be checked here.
        """


@runtime_checkable
class PrivateLearner(Protocol):
    """A learner that trains with differential privacy and says what that costs."""

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
    """A learner that can go on where it stopped, also in another process."""


LearnerFactory: TypeAlias = Callable[[], Learner]


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
    if not isinstance(learner, SoftLearner):
        raise UnsupportedLearner(
            f"{owner}: the learner must have distill to learn from scores, got "
            f"{type(learner).__name__}. TabularLearner and ScoreLearner give it to any model."
        )
    return learner


def can_travel(learner: object) -> bool:
    """Tell whether a learner's models can become arrays, before any is trained.

    A learner that has the methods for some models only says so by an attribute `travels`.
    """
    return isinstance(learner, PortableLearner) and bool(getattr(learner, "travels", True))


def require_portable(learner: Learner, hint: str = "") -> PortableLearner:
    """Return the learner if it can travel; if not, say so, and the hint what to do."""
    if not isinstance(learner, PortableLearner):
        sentence = (
            f"Learner: a model that travels must have to_arrays and from_arrays, got "
            f"{type(learner).__name__}."
        )
        raise UnsupportedLearner(f"{sentence} {hint}".rstrip())
    return learner
