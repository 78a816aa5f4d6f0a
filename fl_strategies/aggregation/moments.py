"""Linear models from moments: sums of features, of features times targets, and of products.

A least-squares model depends on records through these sums alone, so that the model of summed
moments is the one of pooled records. With moments by fold, the error on every fold of a model
of the others follows from them as well: for weights w it is ``t't - 2 w'b + w'Gw``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray, IntArray, one_blas_thread
from fl_strategies.learners import Task

Head: TypeAlias = Literal["ridge", "lda", "logistic"]

PENALTIES: Final = tuple(10.0 ** (step / 2) for step in range(-16, 1))
"""To choose from, as multiples of the squared length of a row of features."""
_SINGULAR: Final = 1e-10
_DRAWS: Final = 2048
_SHARPNESS: Final = (math.log(0.05), math.log(64.0))
_LEAST_COUNT: Final = 0.5
_STEPS: Final = 300


def num_outputs(num_classes: int, task: Task) -> int:
    """Return the columns of coded targets; two classes are one."""
    return 1 if task == "single-label" and num_classes == 2 else num_classes


def coded(y: Array, num_classes: int, task: Task, levels: int = 1) -> IntArray:
    """Return what targets count in sums, (n, `num_outputs`).

    A class counts 1; of two classes, and of labels, one counts 1 and the other -1, and an
    unknown label nothing. Numbers between -1 and 1 are rounded to multiples of 1 / `levels`.

    Examples
    --------
    >>> coded(np.array([0, 2]), 3, "single-label")
    array([[1, 0, 0],
           [0, 0, 1]])
    """
    if task == "regression":
        return np.asarray(np.rint(np.clip(y, -1, 1) * levels), dtype=np.int64)
    if task == "multi-label":
        return np.where(y >= 0, 2 * y.astype(np.int64) - 1, 0)
    if num_classes == 2:
        return np.asarray(2 * y.astype(np.int64)[:, None] - 1)
    return np.asarray(y[:, None] == np.arange(num_classes), dtype=np.int64)


def packed_size(num_features: int) -> int:
    """Return how many numbers of a symmetric matrix are different."""
    return num_features * (num_features + 1) // 2


def pack(gram: Array) -> Array:
    """Return the upper triangle of a symmetric matrix."""
    return np.asarray(gram[np.triu_indices(len(gram))])


def unpack(values: Array, num_features: int) -> Array:
    """Return the symmetric matrix of an upper triangle."""
    gram = np.zeros((num_features, num_features), dtype=values.dtype)
    above = np.triu_indices(num_features)
    gram[above] = values
    gram.T[above] = values
    return gram


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over records, by fold.

    Parameters
    ----------
    targets : (num_folds, num_features, num_outputs)
        Of features times targets.
    gram : (num_folds, num_features, num_features)
        Of products of features; the last feature is constant.
    squares : (num_folds, num_outputs)
        Of squared targets.
    num_records : (num_folds,)
    """

    targets: FloatArray
    gram: FloatArray
    squares: FloatArray
    num_records: FloatArray

    @property
    def all(self) -> Self:
        """The same as one fold."""
        return self._summed(slice(None))

    def without(self, fold: int) -> Self:
        """All folds but one."""
        return self._summed(np.arange(len(self.gram)) != fold)

    def of(self, fold: int) -> Self:
        """One fold."""
        return self._summed(slice(fold, fold + 1))

    def _summed(self, which: Any) -> Self:
        return replace(
            self,
            targets=self.targets[which].sum(axis=0, keepdims=True),
            gram=self.gram[which].sum(axis=0, keepdims=True),
            squares=self.squares[which].sum(axis=0, keepdims=True),
            num_records=self.num_records[which].sum(keepdims=True),
        )

    @classmethod
    def of_records(cls, features: Array, targets: Array, num_folds: int = 1) -> Self:
        """Return the moments of records, the n-th of which is in fold n modulo their number."""
        rows, marks = features.astype(np.float64), targets.astype(np.float64)
        folds = [slice(fold, None, num_folds) for fold in range(num_folds)]
        return cls(
            np.stack([rows[fold].T @ marks[fold] for fold in folds]),
            np.stack([rows[fold].T @ rows[fold] for fold in folds]),
            np.stack([np.square(marks[fold]).sum(axis=0) for fold in folds]),
            np.array([float(len(rows[fold])) for fold in folds]),
        )


class Solution(NamedTuple):
    """Weights of features, (num_features, num_outputs), and how they were found."""

    weights: FloatArray
    penalty: float
    used: IntArray
    """Positions of the features that the model uses."""


class _Spectrum:
    """The eigenvectors of centred moments, of which every penalty's model follows."""

    def __init__(self, moments: Moments, used: IntArray) -> None:
        (gram,), (targets,), (number,) = moments.gram, moments.targets, moments.num_records
        self.used = used
        constant = gram[-1, -1]
        self._beside = gram[used, -1] / constant
        self._level = targets[-1] / constant
        self.number = max(float(number), 1.0)
        centred = gram[np.ix_(used, used)] - np.outer(self._beside, self._beside) * constant
        values, self._axes = np.linalg.eigh(centred / self.number)
        self.values = np.maximum(values, 0.0)
        along = targets[used] - np.outer(self._beside, targets[-1])
        self._along = self._axes.T @ along / self.number

    def weights(self, penalty: float, size: int) -> FloatArray:
        """Return the weights of all `size` features; the constant is not penalised."""
        largest = float(self.values.max(initial=0.0))
        shrunk = np.maximum(self.values + penalty, _SINGULAR * max(largest, 1e-300))
        own = self._axes @ (self._along / shrunk[:, None])
        found = np.zeros((size, own.shape[1]))
        found[self.used] = own
        found[-1] = self._level - self._beside @ own
        return found

    def covariance(self, penalty: float) -> FloatArray:
        """Return the variances of the used features' weights, for residuals of variance 1."""
        parts = self.values / np.maximum(self.values + penalty, 1e-300) ** 2
        return np.asarray(np.square(self._axes) @ parts / self.number)


def _squared_error(moments: Moments, weights: FloatArray) -> float:
    """Return the squared error of a model on records, less what no model changes."""
    (gram,), (targets,) = moments.gram, moments.targets
    return float(np.sum(weights * (gram @ weights)) - 2 * np.sum(weights * targets))


@one_blas_thread()
def solve(
    moments: Moments,
    subsets: Sequence[IntArray],
    penalties: Sequence[float] = PENALTIES,
) -> Solution:
    """Return the ridge regression of the features and the penalty that folds like best.

    Features of rows have length 1 at most, and a penalty is added to their mean products. With
    one fold, the first subset and penalty are taken.
    """
    whole, size = moments.all, moments.gram.shape[1]
    best = (math.inf, 0, penalties[0])
    if len(moments.gram) > 1:
        for number, used in enumerate(subsets):
            errors = np.zeros(len(penalties))
            for fold in range(len(moments.gram)):
                spectrum = _Spectrum(moments.without(fold), used)
                own = moments.of(fold)
                errors += [_squared_error(own, spectrum.weights(p, size)) for p in penalties]
            place = int(errors.argmin())
            best = min(best, (float(errors[place]), number, penalties[place]))
    _, number, penalty = best
    spectrum = _Spectrum(whole, subsets[number])
    return Solution(spectrum.weights(penalty, size), penalty, subsets[number])


@one_blas_thread()
def solve_noisy(moments: Moments, penalty: float) -> Solution:
    """Return the ridge regression of noisy moments, whose constant is penalised as well.

    To centre features would multiply the noise on their means by one over the constant.
    Directions that noise has made negative are as if empty.
    """
    (gram,), (targets,) = moments.gram, moments.targets
    number = max(float(moments.num_records[0]), 1.0)
    values, axes = np.linalg.eigh(gram / number)
    along = axes.T @ targets / number
    weights = axes @ (along / (np.maximum(values, 0.0) + penalty)[:, None])
    return Solution(weights, penalty, np.arange(len(gram) - 1))


@one_blas_thread()
def without_negative(gram: FloatArray) -> FloatArray:
    """Return the nearest matrix of products of features, where no direction is negative."""
    values, axes = np.linalg.eigh(gram)
    return np.asarray((axes * np.maximum(values, 0.0)) @ axes.T)


def overstatement(moments: Moments, penalty: float, deviation: float) -> float:
    """Return how far noise on means raises the product of weights and means that it is in."""
    values = np.linalg.eigvalsh(moments.gram[0] / max(float(moments.num_records[0]), 1.0))
    shrunk = np.maximum(values, 0.0) + penalty
    return float(deviation**2 * (1 / shrunk).sum() * moments.targets.shape[2])


def subsets(blocks: tuple[int, ...]) -> list[IntArray]:
    """Return the features to choose among: linear ones, with each bandwidth, and all."""
    linear, products, *bands = blocks
    starts = np.cumsum([linear + products, *bands])
    plain = np.arange(linear)
    whole = np.arange(starts[-1])
    several = [np.arange(starts[0])] if products else []
    with_one = [
        np.concatenate([plain, np.arange(start, start + size)])
        for start, size in zip(starts[:-1], bands, strict=True)
    ]
    return [plain, *several, *with_one, *([whole] if len(bands) > 1 else [])]


def standard_errors(moments: Moments, solution: Solution) -> FloatArray | None:
    """Return the standard errors of weights, (num_features, num_outputs).

    The constant's is not known, 0, and nothing is with as many weights as records.
    """
    whole = moments.all
    spectrum = _Spectrum(whole, solution.used)
    kept = spectrum.values / np.maximum(spectrum.values + solution.penalty, 1e-300)
    free = spectrum.number - 1 - float(kept.sum())
    if free < 1:
        return None
    (gram,), (targets,), (squares,) = whole.gram, whole.targets, whole.squares
    weights = solution.weights
    residual = squares - 2 * (weights * targets).sum(axis=0)
    residual = np.maximum(residual + (weights * (gram @ weights)).sum(axis=0), 0.0) / free
    found = np.zeros(weights.shape)
    variances = spectrum.covariance(solution.penalty)
    found[solution.used] = np.sqrt(variances[:, None] * residual)
    return found


class ClassScores(NamedTuple):
    """Scores of the records of each class: means (C, k), covariance (k, k), shares (C,)."""

    means: FloatArray
    covariance: FloatArray
    shares: FloatArray


def class_sums(moments: Moments, num_classes: int) -> FloatArray:
    """Return the sums of features of each class, (num_features, num_classes), of all folds."""
    whole = moments.all
    (targets,) = whole.targets
    if targets.shape[1] == num_classes:
        return np.asarray(targets)
    everybody = whole.gram[0][:, -1:] / math.sqrt(whole.gram[0][-1, -1] / whole.num_records[0])
    return np.hstack([everybody - targets, everybody + targets]) / 2


def scores_of_classes(
    moments: Moments, weights: Sequence[FloatArray], num_classes: int
) -> ClassScores:
    """Return how scores are spread that models give to the folds they have not seen.

    `weights` are those of a model per fold, or of one for all.
    """
    whole = moments.all
    constant = math.sqrt(max(whole.gram[0][-1, -1] / max(whole.num_records[0], 1.0), 1e-300))
    counts = np.maximum(class_sums(moments, num_classes)[-1] / constant, _LEAST_COUNT)
    sums, squares = np.zeros((num_classes, weights[0].shape[1])), 0.0
    parts = [moments.of(fold) for fold in range(len(moments.gram))]
    folds = parts if len(weights) > 1 else [whole]
    for own, each in zip(folds, weights, strict=True):
        sums += class_sums(own, num_classes).T @ each
        squares = squares + each.T @ own.gram[0] @ each
    means, total = sums / counts[:, None], float(counts.sum())
    spread = squares / total - (means * (counts / total)[:, None]).T @ means
    values, axes = np.linalg.eigh((spread + spread.T) / 2)
    least = _SINGULAR * max(float(values.max(initial=0.0)), 1e-300)
    return ClassScores(means, (axes * np.maximum(values, least)) @ axes.T, counts / total)


def indicator_weights(weights: FloatArray, constant: float, num_classes: int) -> FloatArray:
    """Return the weights of scores that are shares of classes, (num_features, num_classes).

    Of two classes one score from -1 to 1 is known.
    """
    if weights.shape[1] == num_classes:
        return weights
    half = np.zeros((len(weights), 1))
    half[-1] = 0.5 / constant
    return np.hstack([half - weights / 2, half + weights / 2])


def discriminant(spread: ClassScores, weights: FloatArray, constant: float) -> FloatArray:
    """Return the weights of log-probabilities where scores of classes are normal.

    Linear discriminant analysis of fitted scores is the penalised one of the features
    (Hastie, Buja and Tibshirani, Annals of Statistics 1995).
    """
    # Shares of classes add up to one, so one direction has no spread.
    inverse = np.linalg.pinv(spread.covariance, rcond=1e-6, hermitian=True)
    directions = inverse @ spread.means.T
    levels = np.log(spread.shares) - 0.5 * np.sum(spread.means.T * directions, axis=0)
    found = weights @ directions
    found[-1] += levels / constant
    return np.asarray(found)


def sharpness(scores: FloatArray, mean_own: float) -> float:
    """Return the multiple of shares of classes that makes the best log-probabilities.

    It is the logistic regression with one weight: log-loss depends on labels through the mean
    score that records have of their own class alone, which is a moment. `scores` (n, C) are
    those of rows that stand for all records.
    """

    def loss(log_sharp: float) -> float:
        sharp = math.exp(log_sharp)
        normal = scipy.special.logsumexp(sharp * scores, axis=1).mean()
        return float(normal - sharp * mean_own)

    found = scipy.optimize.minimize_scalar(loss, bounds=_SHARPNESS, method="bounded")
    return math.exp(found.x)


def drawn_scores(spread: ClassScores) -> FloatArray:
    """Return scores of records if those of each class are normal, (n, num_scores)."""
    values, axes = np.linalg.eigh(spread.covariance)
    root = axes * np.sqrt(np.maximum(values, 0.0))
    draws = np.random.default_rng(0).standard_normal((_DRAWS, len(root))) @ root.T
    numbers = np.rint(spread.shares * _DRAWS).astype(int)
    parts = zip(spread.means, numbers.tolist(), strict=True)
    return np.concatenate([mean + draws[: max(1, number)] for mean, number in parts])


@one_blas_thread()
def log_linear(
    moments: Moments,
    solution: Solution,
    *,
    head: Head,
    constant: float,
    num_classes: int,
    task: Task,
    overstated: float = 0.0,
) -> tuple[FloatArray, float]:
    """Return the weights of logits, (num_features, num_classes), and how much sharper they are.

    Probabilities are calibrated on folds that the models have not seen, if there are some.
    `overstated` is by how much noise raises the product of weights and means that it is in.
    """
    if task == "regression":
        return solution.weights, 1.0
    size, many = len(solution.weights), len(moments.gram) > 1
    folds = [moments.without(fold) for fold in range(len(moments.gram))] if many else []
    fitted = [
        _Spectrum(fold, solution.used).weights(solution.penalty, size) for fold in folds
    ] or [solution.weights]
    if task == "multi-label":
        sharp = np.empty(num_classes)
        for label in range(num_classes):
            one = replace(moments, targets=moments.targets[:, :, label, None])
            own = [each[:, label, None] for each in fitted]
            sharp[label] = _calibrated(
                one, own, solution.weights[:, label, None], 2, overstated
            )[1]
        # Log-odds of a label are the difference of both shares, which is the score itself.
        return np.asarray(solution.weights * sharp), float(sharp.mean())
    if head == "lda":
        shares = [indicator_weights(each, constant, num_classes) for each in fitted]
        spread = scores_of_classes(moments, shares, num_classes)
        own_shares = indicator_weights(solution.weights, constant, num_classes)
        return discriminant(spread, own_shares, constant), 1.0
    return _calibrated(moments, fitted, solution.weights, num_classes, overstated)


def _calibrated(
    moments: Moments,
    fitted: Sequence[FloatArray],
    weights: FloatArray,
    num_classes: int,
    overstated: float,
) -> tuple[FloatArray, float]:
    """Return weights of logits by those of targets, and their multiple of shares of classes."""
    whole = moments.all
    number = max(float(whole.num_records[0]), 1.0)
    constant = math.sqrt(max(whole.gram[0][-1, -1] / number, 1e-300))
    parts = [moments.of(fold) for fold in range(len(fitted))] if len(fitted) > 1 else [whole]
    shares = [indicator_weights(each, constant, num_classes) for each in fitted]
    mean_own = -overstated
    for part, each in zip(parts, shares, strict=True):
        mean_own += float(np.sum(each * class_sums(part, num_classes))) / number
    own = indicator_weights(weights, constant, num_classes)
    scores = drawn_scores(scores_of_classes(moments, shares, num_classes))
    sharp = sharpness(scores, mean_own)
    return np.asarray(own * sharp), sharp


@one_blas_thread()
def logistic_weights(
    rows: FloatArray, means: FloatArray, penalty: float, *, softmax_link: bool
) -> FloatArray:
    """Return the weights of the regression that expects these means, (num_features, columns).

    `rows` (n, num_features) are public, and stand for the records in what the model expects.
    The loss is convex, and its gradient what the model expects less the means, plus a penalty.
    """

    def loss(flat: FloatArray) -> tuple[float, FloatArray]:
        weights = flat.reshape(means.shape)
        scores = rows @ weights
        if softmax_link:
            normal = scipy.special.logsumexp(scores, axis=1)
            expected = scipy.special.softmax(scores, axis=1)
        else:
            normal, expected = np.logaddexp(scores, -scores).sum(axis=1), np.tanh(scores)
        value = normal.mean() - np.sum(weights * means) + penalty / 2 * np.sum(weights**2)
        gradient = rows.T @ expected / len(rows) - means + penalty * weights
        return float(value), gradient.ravel()

    start, steps = np.zeros(means.size), {"maxiter": _STEPS}
    found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=steps)
    return np.asarray(found.x.reshape(means.shape))
