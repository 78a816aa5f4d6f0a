"""Several models combined into one: means, committees and stacked ensembles.

For model m and class c let z[m, c] be the log-probability minus the mean over classes. Then

    score[c] = sum over m of weights[m, c] z[m, c] + bias[c]  (+ output . relu(hidden . z))

where the last term exists only with hidden units. Training starts from weights 1/M and zeros
elsewhere, which is the mean of log-probabilities.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn, Self

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import (
    KnowledgeMismatch,
    StrategyError,
    UnsupportedLearner,
    require,
    require_known,
)
from fl_strategies.learners import Learner, LearnerFactory, Task, require_portable
from fl_strategies.wire.knowledge import join_arrays, part_arrays

SIGNS: Final = "signs"
NAMES: Final = "names"
MAX_MEMBERS: Final = 100_000
MAX_NAME_BYTES: Final = 2**20
# Within float32, so that no learner has to refuse a target that another agent made.
LARGEST: Final = 1e30
_LEAST_PROBABILITY: Final = 1e-12


def raw_outputs(model: Learner, x: Array, task: Task) -> FloatArray:
    """Return a model's predictions, (n, num_classes), which may not be finite.

    Raises `KnowledgeMismatch` for another shape: the model may be an untrusted party's.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scores = np.asarray(model.logits(x), dtype=np.float64)
    expected = (len(x), model.num_classes)
    same, owner = scores.shape == expected, type(model).__name__
    require_known(same, owner, "logits", f"of shape {expected}", scores.shape)
    with np.errstate(invalid="ignore"):
        if task == "regression":
            return scores
        return np.asarray(scipy.special.softmax(scores, axis=1))


def outputs(model: Learner, x: Array, task: Task) -> FloatArray:
    """Return a model's predictions, (n, num_classes): probabilities or, in regression, numbers.

    A prediction that is not finite becomes uniform or, in regression, 0. No row depends on
    another.
    """
    found = raw_outputs(model, x, task)
    usable = np.isfinite(found).all(axis=1, keepdims=True)
    nothing = 0.0 if task == "regression" else 1 / model.num_classes
    return np.where(usable, np.clip(found, -LARGEST, LARGEST), nothing)


def add_outputs(
    total: FloatArray, members: Sequence[Learner], signs: Sequence[int], x: Array, task: Task
) -> list[Exception]:
    """Add each member's predictions to a total, and return the errors of those that fail.

    One that raises is skipped in the sum: it may be an untrusted party's.
    """
    errors: list[Exception] = []
    for sign, member in zip(signs, members, strict=True):
        try:
            total += sign * outputs(member, x, task)
        except Exception as error:  # a hostile model may make a learner raise anything
            errors.append(error)
    return errors


def require_members(owner: str, num_members: int, errors: Sequence[Exception]) -> None:
    """Raise `KnowledgeMismatch` unless at least one member works."""
    if len(errors) == num_members > 0:
        raise KnowledgeMismatch(
            f"{owner}: a member must be able to predict the rows, got none of {num_members}: "
            f"{describe(errors[-1])}."
        ) from errors[-1]


def describe(error: Exception) -> str:
    """Describe the failure of an untrusted model, without quoting rows."""
    known = isinstance(error, StrategyError)
    return str(error).rstrip(".") if known else f"{type(error).__name__} while it was read"


def rebuild(
    owner: str,
    name: str,
    arrays: Mapping[str, Array],
    model_fns: Mapping[str, LearnerFactory],
    num_classes: int,
) -> Learner:
    """Rebuild a model from received arrays, by the receiver's own code."""
    if name not in model_fns:
        known = ", ".join(sorted(model_fns)) or "none"
        raise KnowledgeMismatch(
            f"{owner}: the model's learner must be one that model_fns names ({known}), "
            f"got {name[:200]!r}."
        )
    model = require_portable(model_fns[name]()).from_arrays(arrays)
    if model.num_classes != num_classes:
        raise KnowledgeMismatch(
            f"{owner}: a model must have {num_classes} classes or outputs, "
            f"got {model.num_classes}."
        )
    return model


class Committee(ABC):
    """Base of predictors that combine several models, which are fitted elsewhere.

    Parameters
    ----------
    num_classes : int
        Length of the class list; in regression the number of outputs.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    @abstractmethod
    def logits(self, x: Array) -> FloatArray:
        """Return scores, (n, num_classes); the largest of a row is the predicted class."""

    def predict(self, x: Array) -> IntArray:
        """Return the class with the largest score of every row, (n,)."""
        labels: IntArray = self.logits(x).argmax(axis=1)
        return labels

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> NoReturn:  # noqa: ARG002
        """Refuse: a committee is made of models that are fitted already."""
        name = type(self).__name__
        raise UnsupportedLearner(f"{name}: members must be fitted one by one, got labels.")


class RememberedScores(Committee):
    """Precomputed scores (n, num_classes), returned whatever rows are given."""

    def __init__(self, scores: FloatArray) -> None:
        super().__init__(scores.shape[1])
        self.scores = scores

    def logits(self, x: Array) -> FloatArray:
        """Return the scores, for as many rows as they were computed for."""
        require(len(x) == len(self.scores), "RememberedScores", "x", "the same rows", len(x))
        return self.scores


class MeanEnsemble(Committee):
    """The mean of the members' probabilities or, in regression, of their outputs."""

    def __init__(self, members: Sequence[Learner], *, num_classes: int, task: Task) -> None:
        super().__init__(num_classes)
        require(len(members) > 0, "MeanEnsemble", "members", "at least one model", 0)
        self.members, self.task = tuple(members), task

    def logits(self, x: Array) -> FloatArray:
        """Return the logarithm of the mean probabilities, or the mean outputs."""
        mean, signs = np.zeros((len(x), self.num_classes)), [1] * len(self.members)
        errors = add_outputs(mean, self.members, signs, x, self.task)
        require_members("MeanEnsemble", len(self.members), errors)
        mean /= len(self.members) - len(errors)
        if self.task == "regression":
            return mean
        return np.asarray(np.log(np.maximum(mean, _LEAST_PROBABILITY)))


class SignedEnsemble(Committee):
    """The sum of the members' outputs, each with its sign: the predictor of EKD.

    Parameters
    ----------
    members : sequence of fitted learners
        Without any, the object can only be rebuilt: see `from_arrays`.
    signs : sequence of 1 and -1
    names : sequence of str
        Names of the members' learners, for the side that rebuilds them.
    num_classes : int
    task : "single-label" or "regression"
    model_fns : mapping of learner name to factory
        Used by `from_arrays` to rebuild members.

    Notes
    -----
    Signed sums of probabilities are not probabilities, so `logits` are only scores, the
    largest of which is the predicted class. Their sum changes with every round, because
    softmax outputs always sum to one; nothing here depends on it.
    """

    def __init__(
        self,
        members: Sequence[Learner] = (),
        signs: Sequence[int] = (),
        names: Sequence[str] = (),
        *,
        num_classes: int,
        task: Task,
        model_fns: Mapping[str, LearnerFactory],
    ) -> None:
        super().__init__(num_classes)
        counts = (len(members), len(signs), len(names))
        require(len(set(counts)) == 1, "SignedEnsemble", "members", "as many as signs", counts)
        units = {1, -1}.issuperset(signs)
        require(units, "SignedEnsemble", "signs", "1 and -1", list(signs)[:10])
        self.members, self.signs, self.names = tuple(members), tuple(signs), tuple(names)
        self.task = task
        self.model_fns = model_fns

    def logits(self, x: Array) -> FloatArray:
        """Return the signed sum of what the members predict; one that cannot is skipped."""
        total = np.zeros((len(x), self.num_classes))
        errors = self.add_from(0, x, total)
        require_members("SignedEnsemble", len(self.members), errors)
        return total

    def add_from(self, first: int, x: Array, total: FloatArray) -> list[Exception]:
        """Add the members from number `first` on to a total; see `add_outputs`."""
        members, signs = self.members[first:], self.signs[first:]
        return add_outputs(total, members, signs, x, self.task)

    def to_arrays(self) -> dict[str, Array]:
        """Return signs, names and all members' arrays."""
        names = np.frombuffer(json.dumps(self.names).encode(), dtype=np.uint8)
        members = join_arrays([require_portable(m).to_arrays() for m in self.members])
        return {SIGNS: np.array(self.signs, dtype=np.int8), NAMES: names, **members}

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return the ensemble that was saved; raise `KnowledgeMismatch` if it is none."""
        signs, names = _read_signs(arrays), _read_names(arrays)
        own = {name: array for name, array in arrays.items() if name not in (SIGNS, NAMES)}
        rule = f"{len(signs)}, one per sign"
        require_known(len(names) == len(signs), "SignedEnsemble", "names", rule, len(names))
        members = [
            rebuild("SignedEnsemble", name, part, self.model_fns, self.num_classes)
            for name, part in zip(names, part_arrays(own, len(signs)), strict=True)
        ]
        return type(self)(
            members,
            signs,
            names,
            num_classes=self.num_classes,
            task=self.task,
            model_fns=self.model_fns,
        )


def _read_signs(arrays: Mapping[str, Array]) -> list[int]:
    signs = arrays.get(SIGNS, np.empty(0))
    plain = signs.dtype == np.int8 and signs.ndim == 1 and 1 <= len(signs) <= MAX_MEMBERS
    plain = plain and bool(np.isin(signs, (1, -1)).all())
    require_known(plain, "SignedEnsemble", "signs", "1 and -1 of int8", "others")
    return [int(sign) for sign in signs]


def _read_names(arrays: Mapping[str, Array]) -> list[str]:
    raw = arrays.get(NAMES)
    problem = KnowledgeMismatch("SignedEnsemble: names must be a list of text, got none.")
    if raw is None or raw.dtype != np.uint8 or raw.size > MAX_NAME_BYTES:
        raise problem
    try:
        names = json.loads(raw.tobytes().decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise problem from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise problem
    return names


LEAST_PROBABILITY: Final = 1e-4
"""Floor of a model's probability of a class."""
LARGEST_WEIGHT: Final = 1e6
BATCH_SIZE: Final = 32
MOMENTUM: Final = 0.9

WEIGHTS, BIAS = "weights", "bias"
HIDDEN, HIDDEN_BIAS, OUTPUT = "hidden", "hidden-bias", "output"

Weights = Mapping[str, Array]


def shapes_of(num_models: int, num_classes: int, num_hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an aggregator's arrays; without hidden units it is linear."""
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
    """Return the initial aggregator, which is the mean."""
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
            f"Aggregator: it must have weights (float64) of {num_models} models and "
            f"{num_classes} classes, got others."
        )
    # NaN compares as false, so it is refused as well.
    small = all((np.abs(array) <= LARGEST_WEIGHT).all() for array in arrays.values())
    rule = f"finite and at most {LARGEST_WEIGHT:g}"
    require_known(small, "Aggregator", "weights", rule, "others")
    return {name: arrays[name] for name in shapes}


class Unreadable(Committee):
    """Stands in for a member that cannot be rebuilt: all classes are equally likely."""

    def logits(self, x: Array) -> FloatArray:
        """Return zeros."""
        return np.zeros((len(x), self.num_classes))


class StackedEnsemble(Committee):
    """Several models, and the aggregator that combines their predictions.

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
        """Return the members' log-probabilities, (n, num_models, num_classes), around zero.

        A member that fails has no opinion: it may be an untrusted party's.
        """
        shares, errors = [], []
        for member in self.members:
            try:
                shares.append(outputs(member, x, "single-label"))
            except Exception as error:  # a hostile model may make a learner raise anything
                errors.append(error)
                shares.append(np.full((len(x), self.num_classes), 1 / self.num_classes))
        require_members("StackedEnsemble", len(self.members), errors)
        logs = np.log(np.maximum(np.stack(shares, axis=1), LEAST_PROBABILITY))
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
    """Return the weights after some epochs of gradient descent on the cross-entropy."""
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
    """Return the gradients of the mean cross-entropy with respect to all weights."""
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
