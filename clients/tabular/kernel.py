"""Ridge regression in closed form, by kernels and by linear maps."""

import math
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from scipy.linalg import cho_factor, cho_solve, eigh, lstsq
from scipy.spatial.distance import cdist

from clients.tabular.base import require_array, require_names
from clients.tabular.scores import ScoreLearner, plain_rows
from fl_strategies._util import Array, FloatArray
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
        _check_ridge(owner, ridge)
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
        _check_ridge(self._owner, ridge)
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


def _check_ridge(owner: str, ridge: float) -> None:
    require(0 <= ridge < math.inf, owner, "ridge", "finite and at least 0", ridge)


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
