"""What a strategy asks of a model: four small protocols, no base class to inherit.

A learner is created unfitted by a zero-argument factory, so a strategy can make as many
twins as it needs. Labels are positions 0 .. num_classes - 1 in the federation's class
list; scores always have `num_classes` columns, also when a training set lacks classes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fl_strategies.exceptions import UnsupportedLearner

Array: TypeAlias = NDArray[Any]
FloatArray: TypeAlias = NDArray[np.floating[Any]]
IntArray: TypeAlias = NDArray[np.int64]
TrainingSet: TypeAlias = tuple[Array, IntArray]


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
    """A learner that can learn from scores instead of labels."""

    def distill(self, x: Array, scores: FloatArray, *, rng: np.random.Generator) -> Self:
        """Learn to give `scores` (n, num_classes) on rows `x`."""


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


LearnerFactory: TypeAlias = Callable[[], Learner]


def require_portable(learner: Learner) -> PortableLearner:
    """Return the learner if it can travel; say what to do if it cannot."""
    if not isinstance(learner, PortableLearner):
        raise UnsupportedLearner(
            f"Learner: a model that travels must have to_arrays and from_arrays, got "
            f"{type(learner).__name__}. Let it vote instead: exchange='votes'."
        )
    return learner
