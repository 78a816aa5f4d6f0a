"""The aggregator: what makes one prediction of those of several models, and how it learns.

Of model m and class c let z[m, c] be the log-probability, less the mean over classes. Then

    score[c] = sum over m of weights[m, c] z[m, c] + bias[c]  (+ output . relu(hidden . z))

where the last term is the network's. It begins with weights 1/M and everything that is
added 0, which is the mean of log-probabilities.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import scipy

from fl_strategies.aggregation.ensembles import Committee, outputs, require_members
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.protocols import Learner
from fl_strategies.exceptions import KnowledgeMismatch

LEAST_PROBABILITY: Final = 1e-4
"""What a model says less than this about a class counts as this."""
LARGEST_WEIGHT: Final = 1e6
BATCH_SIZE: Final = 32
MOMENTUM: Final = 0.9

WEIGHTS, BIAS = "weights", "bias"
HIDDEN, HIDDEN_BIAS, OUTPUT = "hidden", "hidden-bias", "output"

Weights = Mapping[str, Array]


def shapes_of(num_models: int, num_classes: int, num_hidden: int) -> dict[str, tuple[int, ...]]:
    """Return what arrays an aggregator has; without hidden units it is a linear one."""
    shapes: dict[str, tuple[int, ...]] = {
        WEIGHTS: (num_models, num_classes),
        BIAS: (num_classes,),
    }
    if num_hidden:
        shapes[HIDDEN] = num_models * num_classes, num_hidden
        shapes[HIDDEN_BIAS] = (num_hidden,)
        shapes[OUTPUT] = num_hidden, num_classes
    return shapes


def first_weights(
    num_models: int, num_classes: int, num_hidden: int, rng: np.random.Generator
) -> dict[str, Array]:
    """Return the aggregator that begins as the mean."""
    shapes = shapes_of(num_models, num_classes, num_hidden)
    made: dict[str, Array] = {name: np.zeros(shape) for name, shape in shapes.items()}
    made[WEIGHTS] += 1 / num_models
    if num_hidden:
        spread = np.sqrt(2 / (num_models * num_classes))
        made[HIDDEN] = rng.normal(scale=spread, size=shapes[HIDDEN])
    return made


def read_weights(
    arrays: Weights, num_models: int, num_classes: int, num_hidden: int
) -> dict[str, Array]:
    """Return untrusted arrays if they are an aggregator of this shape."""
    shapes = shapes_of(num_models, num_classes, num_hidden)
    typed = all(array.dtype == np.float64 for array in arrays.values())
    if not typed or shapes != {name: array.shape for name, array in arrays.items()}:
        raise KnowledgeMismatch(
            f"FENS: the aggregator must have weights (float64) of {num_models} models and "
            f"{num_classes} classes, got others."
        )
    # NaN compares as false, so it is refused as well.
    if not all((np.abs(array) <= LARGEST_WEIGHT).all() for array in arrays.values()):
        raise KnowledgeMismatch(
            f"FENS: weights must be finite and at most {LARGEST_WEIGHT:g}, got others."
        )
    return {name: arrays[name] for name in shapes}


class Unreadable(Committee):
    """Stands for a member that cannot be rebuilt: it holds all classes for equally likely."""

    def logits(self, x: Array) -> FloatArray:
        """Return zeros."""
        return np.zeros((len(x), self.num_classes))


class StackedEnsemble(Committee):
    """Several models, and the aggregator that makes one prediction of theirs.

    Parameters
    ----------
    members : sequence of fitted learners
    weights : mapping of name to array
        See `first_weights`.
    num_classes : int
    """

    def __init__(
        self, members: Sequence[Learner], weights: Weights, *, num_classes: int
    ) -> None:
        super().__init__(num_classes)
        self.members = tuple(members)
        num_hidden = weights[HIDDEN_BIAS].size if HIDDEN_BIAS in weights else 0
        self.weights = read_weights(weights, len(self.members), num_classes, num_hidden)

    def logits(self, x: Array) -> FloatArray:
        """Return the aggregator's scores."""
        return combine(self.weights, self.evidence(x))

    def evidence(self, x: Array) -> FloatArray:
        """Return what members say of rows, (n, num_models, num_classes), around zero.

        A member that fails says nothing: it may be an untrusted party's.
        """
        said, errors = [], []
        for member in self.members:
            try:
                said.append(outputs(member, x, "single-label"))
            except Exception as error:  # a hostile model may make a learner raise anything
                errors.append(error)
                said.append(np.full((len(x), self.num_classes), 1 / self.num_classes))
        require_members("StackedEnsemble", len(self.members), errors)
        logs = np.log(np.maximum(np.stack(said, axis=1), LEAST_PROBABILITY))
        return np.asarray(logs - logs.mean(axis=2, keepdims=True))


def combine(weights: Weights, z: FloatArray) -> FloatArray:
    """Return the scores (n, num_classes)."""
    scores = (weights[WEIGHTS] * z).sum(axis=1) + weights[BIAS]
    if HIDDEN in weights:
        scores = scores + np.maximum(_hidden(weights, z), 0.0) @ weights[OUTPUT]
    return np.asarray(scores)


def learned(
    weights: Weights,
    z: FloatArray,
    y: IntArray,
    *,
    rng: np.random.Generator,
    epochs: int,
    rate: float,
) -> dict[str, Array]:
    """Return the weights after some passes of gradient descent on the cross-entropy."""
    new = {name: np.array(array, dtype=np.float64) for name, array in weights.items()}
    speed = {name: np.zeros_like(array) for name, array in new.items()}
    for _ in range(epochs):
        order = rng.permutation(len(y))
        for start in range(0, len(y), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            slopes = gradients(new, z[rows], y[rows])
            for name, slope in slopes.items():
                speed[name] = MOMENTUM * speed[name] - rate * slope
                new[name] = np.clip(new[name] + speed[name], -LARGEST_WEIGHT, LARGEST_WEIGHT)
    return new


def gradients(weights: Weights, z: FloatArray, y: IntArray) -> dict[str, FloatArray]:
    """Return the slopes of the mean cross-entropy in all weights."""
    scores = combine(weights, z)
    errors = (scipy.special.softmax(scores, axis=1) - np.eye(scores.shape[1])[y]) / len(y)
    slopes = {WEIGHTS: np.einsum("nc,nmc->mc", errors, z), BIAS: errors.sum(axis=0)}
    if HIDDEN in weights:
        inner = _hidden(weights, z)
        slopes[OUTPUT] = np.maximum(inner, 0.0).T @ errors
        back = (errors @ weights[OUTPUT].T) * (inner > 0)
        slopes[HIDDEN] = z.reshape(len(z), -1).T @ back
        slopes[HIDDEN_BIAS] = back.sum(axis=0)
    return slopes


def _hidden(weights: Weights, z: FloatArray) -> FloatArray:
    return np.asarray(z.reshape(len(z), -1) @ weights[HIDDEN] + weights[HIDDEN_BIAS])
