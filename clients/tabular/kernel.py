"""Ridge regression in closed form: by kernels, by linear maps, and on random features."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from scipy.linalg import cho_factor, cho_solve, eigh, lstsq
from scipy.spatial.distance import cdist

from clients.tabular.base import ScoreLearner, plain_rows, require_array, require_names
from fl_strategies._util import Array, FloatArray, column_scales, one_blas_thread
from fl_strategies.errors import UnsupportedLearner, require, require_data, require_known
from fl_strategies.learners import Task

Kernel: TypeAlias = Literal["linear", "rbf", "polynomial", "laplace"]

KERNELS: Final[tuple[str, ...]] = get_args(Kernel)
_PAIRS_AT_ONCE: Final = 2**20
# Products were rounded before a matrix of them is decomposed, so that its eigenvalues of
# zero are off by more than the rounding of the decomposition alone.
_SINGULAR: Final = 32 * float(np.finfo(np.float64).eps)


class KernelRidgeLearner(ScoreLearner):
    """Kernel ridge regression, with the ridge counted per row.

    As in Afonin and Karimireddy, "Towards Model-Agnostic Federated Learning Using Knowledge
    Distillation" (ICLR 2022), equations 1 to 4 and proposition I, the predictor is
    f(x) = k_x (c I + K)^-1 y with K[i, j] = k(x_i, x_j) / N and k_x[i] = k(x, x_i) / N for
    N training rows. That is k(x, X) (c N I + k(X, X))^-1 y, the minimiser of the mean
    squared error plus c times the squared norm of f: the same c means the same trade-off
    for any number of rows, and it is N times smaller than the `alpha` of scikit-learn. With
    c = 0 the inverse is the pseudo-inverse, so f is the least-norm function among those
    that fit best.

    A model consists of its training rows, to the bit, so it only travels if `reveal_rows`
    allows it. Send what it predicts, or take `RidgeLearner`, whose models are coefficients.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list, number of labels, or number of outputs.
    task : "single-label", "multi-label" or "regression"
        What labels are; see `fl_strategies.learners`.
    kernel : "linear", "rbf", "polynomial" or "laplace"
        x . x', exp(-gamma |x - x'|_2^2), (gamma x . x' + offset)^degree, or
        exp(-gamma |x - x'|_1).
    ridge : float
        The c above, at least 0.
    gamma : float, optional
        Inverse scale of a kernel, above 0; one over the number of columns if omitted.
    degree : int
        Power of the polynomial kernel, at least 1.
    offset : float
        Constant of the polynomial kernel, at least 0.
    reveal_rows : bool
        Whether models may travel, and with them every training row.

    Examples
    --------
    >>> import numpy as np
    >>> learner = KernelRidgeLearner(num_classes=1, task="regression", ridge=0.0)
    >>> x, y = np.array([[0.0], [1.0], [3.0]]), np.array([[1.0], [5.0], [2.0]])
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(x).round(6)
    array([[1.],
           [5.],
           [2.]])
    """

    def __init__(
        self,
        *,
        num_classes: int,
        task: Task = "single-label",
        kernel: Kernel = "rbf",
        ridge: float = 1e-3,
        gamma: float | None = None,
        degree: int = 3,
        offset: float = 1.0,
        reveal_rows: bool = False,
    ) -> None:
        super().__init__(num_classes=num_classes, task=task)
        owner = self._owner
        require(kernel in KERNELS, owner, "kernel", f"one of {', '.join(KERNELS)}", kernel)
        require(0 <= ridge < math.inf, owner, "ridge", "finite and at least 0", ridge)
        positive = gamma is None or 0 < gamma < math.inf
        require(positive, owner, "gamma", "finite and above 0", gamma)
        require(degree >= 1, owner, "degree", "at least 1", degree)
        require(0 <= offset < math.inf, owner, "offset", "finite and at least 0", offset)
        self._kernel, self._ridge = kernel, ridge
        self._gamma, self._degree, self._offset = gamma, degree, offset
        self._reveal_rows = reveal_rows
        self._rows: FloatArray
        self._dual: FloatArray

    def _regress(self, x: Array, targets: FloatArray, _rng: np.random.Generator) -> None:
        rows = plain_rows(x)
        with np.errstate(over="ignore"):
            gram = self._similarities(rows, rows)
        finite = bool(np.isfinite(gram).all())
        require_data(finite, self._owner, "x", "small enough for the kernel", "infinity")
        self._rows, self._dual = rows, solve_shifted(gram, self._ridge * len(rows), targets)

    def _outputs(self, x: Array) -> FloatArray:
        rows, step = plain_rows(x), max(1, _PAIRS_AT_ONCE // len(self._rows))
        parts = [
            self._similarities(rows[start : start + step], self._rows) @ self._dual
            for start in range(0, len(rows), step)
        ]
        return np.concatenate(parts)

    def _similarities(self, one: FloatArray, other: FloatArray) -> FloatArray:
        """Return the kernel of all pairs, (len(one), len(other))."""
        gamma = self._scale(one.shape[1])
        values: FloatArray
        if self._kernel == "linear":
            values = one @ other.T
        elif self._kernel == "polynomial":
            values = (gamma * (one @ other.T) + self._offset) ** self._degree
        else:
            distance = "sqeuclidean" if self._kernel == "rbf" else "cityblock"
            values = np.exp(-gamma * cdist(one, other, distance))
        return values

    def _scale(self, width: int) -> float:
        return 1.0 / width if self._gamma is None else self._gamma

    def _settings(self) -> FloatArray:
        """Return what a receiver must have set alike, in numbers."""
        kernel, gamma = KERNELS.index(self._kernel), self._scale(self._width)
        return np.array([kernel, gamma, self._degree, self._offset], dtype=np.float64)

    @property
    def travels(self) -> bool:
        """Whether models may take their training rows along."""
        return self._reveal_rows

    def _to_arrays(self) -> dict[str, Array]:
        if not self._reveal_rows:
            raise UnsupportedLearner(
                f"{self._owner}: reveal_rows must be True for a model to travel, because it "
                f"carries all {len(self._rows)} training rows along, got False."
            )
        return {
            "kernel": self._settings(),
            "support-rows": self._rows.copy(),
            "dual-coefficients": self._dual.copy(),
        }

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        owner, name = self._owner, "support-rows"
        require_names(owner, arrays, {"kernel", name, "dual-coefficients"})
        settings = self._settings()
        kernel = require_array(owner, arrays, "kernel", np.float64, settings.shape)
        same = np.array_equal(kernel, settings)
        require_known(same, owner, "kernel", f"{settings} as here", kernel)
        num_rows = len(np.atleast_1d(arrays[name]))
        require_known(num_rows > 0, owner, name, "at least one row", "none")
        dual_shape = (num_rows, self.num_classes)
        self._rows = require_array(owner, arrays, name, np.float64, (num_rows, self._width))
        self._dual = require_array(owner, arrays, "dual-coefficients", np.float64, dual_shape)


class RidgeLearner(ScoreLearner):
    """Linear ridge regression: the mean squared error plus `ridge` times |w|^2 is smallest.

    The intercept is not penalised. Without it the model equals a `KernelRidgeLearner` with
    the linear kernel and the same ridge, but it travels as coefficients, not as rows.
    Columns of very different size are best standardised before.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list, number of labels, or number of outputs.
    task : "single-label", "multi-label" or "regression"
        What labels are; see `fl_strategies.learners`.
    ridge : float
        Weight of the squared norm, at least 0; with 0 the least-norm solution is taken.
    intercept : bool
        Whether a constant is learned as well.

    Examples
    --------
    >>> import numpy as np
    >>> learner = RidgeLearner(num_classes=1, task="regression", ridge=0.0)
    >>> x = np.array([[0.0], [1.0], [2.0]])
    >>> learner = learner.fit(x, 2 * x + 1, rng=np.random.default_rng(0))
    >>> learner.predict(np.array([[10.0]])).round(6)
    array([[21.]])
    """

    def __init__(
        self,
        *,
        num_classes: int,
        task: Task = "single-label",
        ridge: float = 1e-3,
        intercept: bool = True,
    ) -> None:
        super().__init__(num_classes=num_classes, task=task)
        require(0 <= ridge < math.inf, self._owner, "ridge", "finite and at least 0", ridge)
        self._ridge, self._has_intercept = ridge, intercept
        self._coefficients: FloatArray
        self._intercepts: FloatArray

    def _regress(self, x: Array, targets: FloatArray, _rng: np.random.Generator) -> None:
        rows = plain_rows(x)
        centre, level = np.zeros(rows.shape[1]), np.zeros(targets.shape[1])
        if self._has_intercept:
            centre, level = rows.mean(axis=0), targets.mean(axis=0)
        self._coefficients = _solve_linear(rows - centre, self._ridge, targets - level)
        self._intercepts = level - centre @ self._coefficients

    def _outputs(self, x: Array) -> FloatArray:
        scores: FloatArray = plain_rows(x) @ self._coefficients + self._intercepts
        return scores

    def _to_arrays(self) -> dict[str, Array]:
        return {
            "coefficients": self._coefficients.copy(),
            "intercepts": self._intercepts.copy(),
        }

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        owner, shape = self._owner, (self._width, self.num_classes)
        require_names(owner, arrays, {"coefficients", "intercepts"})
        self._coefficients = require_array(owner, arrays, "coefficients", np.float64, shape)
        self._intercepts = require_array(owner, arrays, "intercepts", np.float64, shape[1:])


def solve_shifted(gram: FloatArray, shift: float, targets: FloatArray) -> FloatArray:
    """Return (gram + shift I)^-1 targets for a symmetric positive semi-definite matrix.

    Directions in which the matrix cannot be told from singular get no weight: for a
    shift of 0 that is the pseudo-inverse.

    Examples
    --------
    >>> solve_shifted(np.array([[2.0, 2.0], [2.0, 2.0]]), 0.0, np.array([[4.0], [4.0]]))
    array([[1.],
           [1.]])
    """
    if shift > len(gram) * _SINGULAR * np.trace(gram):
        shifted = gram.copy()
        np.fill_diagonal(shifted, gram.diagonal() + shift)
        return plain_rows(cho_solve(cho_factor(shifted, lower=True), targets))
    values, vectors = eigh(gram)
    kept = values > len(gram) * _SINGULAR * max(values[-1], 0.0)
    inverse = np.where(kept, 1.0 / np.where(kept, values + shift, 1.0), 0.0)
    return plain_rows(vectors @ (inverse[:, np.newaxis] * (vectors.T @ targets)))


def _solve_linear(x: FloatArray, ridge: float, targets: FloatArray) -> FloatArray:
    """Return the coefficients (d, k) of a regression without intercept.

    The smaller of both problems is solved, so that neither many rows nor many columns make
    a matrix that does not fit into memory.
    """
    num_rows, width = x.shape
    shift = ridge * num_rows
    if width > num_rows:
        return plain_rows(x.T @ solve_shifted(x @ x.T, shift, targets))
    if shift > 0:
        x = np.concatenate([x, math.sqrt(shift) * np.eye(width)])
        targets = np.concatenate([targets, np.zeros((width, targets.shape[1]))])
    cutoff = num_rows * _SINGULAR
    return plain_rows(lstsq(x, targets, cond=cutoff, lapack_driver="gelsy")[0])


USUAL_FEATURES: Final = 2000
RIDGES: Final = tuple(10.0 ** (step / 2) for step in range(-10, 1))
"""Penalties to choose from; smaller ones are within the rounding of float32."""
_PAIRS: Final = 1000
_VALUES_AT_ONCE: Final = 2**23
_NAMES: Final = frozenset(
    {"centre", "scales", "frequencies", "phases", "coefficients", "intercepts"}
)


class RandomFeaturesLearner(ScoreLearner):
    """Ridge regression on cosines of random directions, which approximates an rbf kernel.

    Rahimi and Recht, "Random Features for Large-Scale Kernel Machines" (NIPS 2007): with
    normal w and uniform b, the products of features sqrt(2 / D) cos(w . x + b) of two rows
    have the mean exp(-|x - x'|^2 / 2). Rows are centred, their columns scaled unless they
    share a unit, and divided by the median distance of training rows.

    The mean squared error plus `ridge` times |w|^2 is smallest; the intercept is free. Time
    grows linearly with the rows, and a model holds as many numbers however many they were.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list, number of labels, or number of outputs.
    task : "single-label", "multi-label" or "regression"
        What labels are; see `fl_strategies.learners`.
    num_features : int
        Cosines, at least 1.
    ridge : float, optional
        Weight of the squared norm, above 0; the best of `RIDGES` by generalised
        cross-validation on the training rows if omitted.

    Notes
    -----
    Features are computed in float32, so a ridge below 1e-6 has little meaning. The means of
    training rows and their columns' spread leave with the model.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.linspace(0.0, 6.0, 50)[:, np.newaxis]
    >>> learner = RandomFeaturesLearner(num_classes=1, task="regression", num_features=300)
    >>> learner = learner.fit(x, np.sin(x), rng=np.random.default_rng(0))
    >>> learner.predict(np.array([[1.5], [4.5]])).round(1)
    array([[ 1.],
           [-1.]])
    """

    def __init__(
        self,
        *,
        num_classes: int,
        task: Task = "single-label",
        num_features: int = USUAL_FEATURES,
        ridge: float | None = None,
    ) -> None:
        super().__init__(num_classes=num_classes, task=task)
        owner = self._owner
        require(num_features >= 1, owner, "num_features", "at least 1", num_features)
        positive = ridge is None or 0 < ridge < math.inf
        require(positive, owner, "ridge", "finite and above 0", ridge)
        self._num_features = num_features
        self._ridges = RIDGES if ridge is None else (ridge,)
        self._centre: FloatArray
        self._scales: FloatArray
        self._frequencies: Array
        self._phases: Array
        self._coefficients: FloatArray
        self._intercepts: FloatArray

    @one_blas_thread()
    def _regress(self, x: Array, targets: FloatArray, rng: np.random.Generator) -> None:
        rows = plain_rows(x)
        self._centre, self._scales = rows.mean(axis=0), column_scales(rows)
        self._scales = self._scales / _usual_distance(rows * self._scales, rng)
        shape = (rows.shape[1], self._num_features)
        self._frequencies = rng.standard_normal(shape, dtype=np.float32)
        self._phases = (2 * np.pi * rng.random(self._num_features)).astype(np.float32)
        features = self._features(rows)
        middle = features.mean(axis=0, dtype=np.float64)
        features -= middle.astype(np.float32)
        level = targets.mean(axis=0)
        self._coefficients = solve_ridge(features, targets - level, self._ridges)
        self._intercepts = level - middle @ self._coefficients

    def _features(self, rows: Array) -> Array:
        """Return the cosines of rows (n, num_features), float32."""
        placed = ((rows - self._centre) * self._scales).astype(np.float32)
        waves = placed @ self._frequencies
        waves += self._phases
        np.cos(waves, out=waves)
        waves *= np.float32(math.sqrt(2 / self._num_features))
        return waves

    @one_blas_thread()
    def _outputs(self, x: Array) -> FloatArray:
        step = max(1, _VALUES_AT_ONCE // self._num_features)
        weights = self._coefficients
        parts = [
            self._features(x[start : start + step]) @ weights
            for start in range(0, len(x), step)
        ]
        scores: FloatArray = np.concatenate(parts) + self._intercepts
        return scores

    def _to_arrays(self) -> dict[str, Array]:
        return {
            "centre": self._centre.copy(),
            "scales": self._scales.copy(),
            "frequencies": self._frequencies.copy(),
            "phases": self._phases.copy(),
            "coefficients": self._coefficients.copy(),
            "intercepts": self._intercepts.copy(),
        }

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        owner, width, number = self._owner, (self._width,), self._num_features
        require_names(owner, arrays, set(_NAMES))

        def received(name: str, dtype: type, shape: tuple[int, ...]) -> Array:
            return require_array(owner, arrays, name, dtype, shape)

        self._centre = received("centre", np.float64, width)
        self._scales = received("scales", np.float64, width)
        self._frequencies = received("frequencies", np.float32, (*width, number))
        self._phases = received("phases", np.float32, (number,))
        shape = (number, self.num_classes)
        self._coefficients = received("coefficients", np.float64, shape)
        self._intercepts = received("intercepts", np.float64, shape[1:])


def _usual_distance(rows: FloatArray, rng: np.random.Generator) -> float:
    """Return the median distance of some pairs of rows; 1 where rows are the same."""
    one, other = rng.integers(len(rows), size=(2, _PAIRS))
    distances = np.linalg.norm(rows[one] - rows[other], axis=1)
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 1.0


def solve_ridge(x: Array, targets: FloatArray, ridges: Sequence[float]) -> FloatArray:
    """Return coefficients (d, k) with the best ridge by generalised cross-validation.

    Both columns and targets have mean zero. Whatever the number of ridges, the smaller of
    both matrices of products is decomposed once.

    Examples
    --------
    >>> x = np.array([[1.0], [-1.0], [2.0], [-2.0]])
    >>> solve_ridge(x, 3 * x, ridges=(1e-9, 1.0)).round(6)
    array([[3.]])
    """
    num_rows, width = x.shape
    wide = width > num_rows
    values, vectors = eigh(x @ x.T if wide else x.T @ x, driver="evd")
    values = np.maximum(values.astype(np.float64), 0.0)
    along = vectors.T @ (targets if wide else x.T @ targets)
    squares = np.square(along).sum(axis=1)
    if not wide:
        seen = values > np.finfo(x.dtype).eps * values[-1]
        squares = np.where(seen, squares / np.where(seen, values, 1.0), 0.0)
    unexplained = max(float(np.square(targets).sum() - squares.sum()), 0.0)

    def error(ridge: float) -> float:
        kept = ridge * num_rows / (values + ridge * num_rows)
        # The mean of the targets was fitted as well.
        free = num_rows - 1 - float((1 - kept).sum())
        residual = unexplained + float(kept**2 @ squares)
        return residual / float(max(free, 1e-9) ** 2)

    best = min(ridges, key=error) * num_rows
    solved = vectors @ (along / (values + best)[:, np.newaxis])
    return np.asarray(x.T @ solved if wide else solved, dtype=np.float64)
