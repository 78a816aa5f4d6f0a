"""Ridge regression on random features: a kernel machine that scales to any number of rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from scipy.linalg import eigh

from clients.tabular.base import require_array, require_names
from clients.tabular.scores import ScoreLearner, plain_rows
from fl_strategies._util import Array, FloatArray, column_scales, one_blas_thread
from fl_strategies.errors import require
from fl_strategies.learners import Task

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
