"""A linear model of random cosines, columns or components, as moments of records give it."""

import copy
from collections.abc import Mapping
from typing import Final, NamedTuple, Self

import numpy as np

from clients.tabular.base import ScoreLearner, require_array, require_names
from fl_strategies._util import Array, FloatArray, one_blas_thread
from fl_strategies.aggregation.moments import Moments, solve, subsets
from fl_strategies.errors import require, require_data, require_known
from fl_strategies.features import FeatureMap
from fl_strategies.learners import Task

USUAL_COSINES: Final = 390
_FOLDS: Final = 5
_WEIGHTS: Final = "weights"
_ERRORS: Final = "errors"


class Coefficient(NamedTuple):
    """How much one column adds to a logit, or an output, per unit; with its standard error."""

    column: str
    weight: float
    error: float
    """NaN if it is not known: after noise, and of heads that are no regressions."""


class MomentsLearner(ScoreLearner):
    """Ridge regression on columns and random cosines, as `FedMoments` makes it of sums.

    Trained by itself, it takes features from its own rows, and bandwidth and penalty by five
    folds. As a federation's final model it is given both with the weights.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list, number of labels, or number of outputs.
    task : "single-label", "multi-label" or "regression"
        What labels are; see `fl_strategies.learners`.
    num_cosines : int
        Random cosines, 0 for a linear model.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.linspace(0.0, 6.0, 200)[:, np.newaxis]
    >>> learner = MomentsLearner(num_classes=1, task="regression")
    >>> learner = learner.fit(x, np.sin(x), rng=np.random.default_rng(0))
    >>> learner.predict(np.array([[1.5], [4.5]])).round(1)
    array([[ 1.],
           [-1.]])
    """

    def __init__(
        self, *, num_classes: int, task: Task = "single-label", num_cosines: int = USUAL_COSINES
    ) -> None:
        super().__init__(num_classes=num_classes, task=task)
        require(num_cosines >= 0, self._owner, "num_cosines", "at least 0", num_cosines)
        self._num_cosines = num_cosines
        self._features: FeatureMap
        self._weights: FloatArray
        self._errors: FloatArray | None = None

    def with_weights(
        self, features: FeatureMap, weights: FloatArray, errors: FloatArray | None = None
    ) -> Self:
        """Return a fitted twin whose logits, or outputs, are features times weights."""
        twin = copy.copy(self)
        twin._width, twin._link, twin._temperature = features.num_values, "identity", 1.0
        twin._features, twin._weights = features, np.array(weights)
        twin._errors = None if errors is None else np.array(errors)
        return twin

    def coefficients(
        self, names: list[str] | None = None, output: int = -1
    ) -> list[Coefficient]:
        """Return what each column adds to an output per unit of its own, largest first.

        Only linear models have such numbers: those of columns or components. They hold for
        rows that are neither cut nor shortened.
        """
        features, width = self._features, self._features.num_values
        linear = features.num_features - 1 == features.blocks[0]
        rule = "columns or components, so that the model is linear"
        require_data(linear, self._owner, "features", rule, "cosines or products")
        known = [f"column {n}" for n in range(width)] if names is None else list(names)
        require(len(known) == width, self._owner, "names", f"{width} names", len(known))
        parts = [(self._weights, 1.0), (self._errors, np.nan)]
        found = []
        for values, missing in parts:
            if values is None:
                found.append(np.full(width, missing))
                continue
            own = values[:-1, output] * features.reach
            if len(features.columns):
                found.append(own * features.columns * features.scale)
            elif missing == 1.0:
                found.append((features.turn @ own) * features.scale)
            else:
                found.append(np.full(width, np.nan))
        order = np.argsort(-np.abs(found[0]))
        return [Coefficient(known[n], float(found[0][n]), float(found[1][n])) for n in order]

    @one_blas_thread()
    def _regress(self, x: Array, targets: FloatArray, rng: np.random.Generator) -> None:
        rows = np.asarray(x, dtype=np.float64)
        features = FeatureMap.of_rows(rows)
        if self._num_cosines:
            features = features.with_cosines(rows, self._num_cosines, rng)
        self._features, self._errors = features.settled(), None
        folds = min(_FOLDS, len(rows))
        known = Moments.of_records(self._computed(rows), targets, folds)
        self._weights = solve(known, subsets(self._features.blocks)).weights

    def _computed(self, rows: Array) -> FloatArray:
        return self._features(rows) / self._features.levels

    @one_blas_thread()
    def _outputs(self, x: Array) -> FloatArray:
        return self._features.times(x, self._weights)

    def _to_arrays(self) -> dict[str, Array]:
        errors = {} if self._errors is None else {_ERRORS: self._errors.copy()}
        return {**self._features.to_arrays(), _WEIGHTS: self._weights.copy(), **errors}

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        owner, own = self._owner, {_WEIGHTS, _ERRORS}
        given = {name: array for name, array in arrays.items() if name not in own}
        is_arrays = all(isinstance(array, np.ndarray) for array in arrays.values())
        require_known(is_arrays, owner, "arrays", "numbers", "others")
        self._features = FeatureMap.from_arrays(owner, given, self._width)
        shape = (self._features.num_features, self.num_classes)
        require_names(owner, arrays, {*given, _WEIGHTS, *(own & {_ERRORS} & set(arrays))})
        self._weights = require_array(owner, arrays, _WEIGHTS, np.float64, shape)
        has_errors = _ERRORS in arrays
        self._errors = (
            require_array(owner, arrays, _ERRORS, np.float64, shape) if has_errors else None
        )
        if self._errors is not None:
            least = float(self._errors.min())
            require_known(least >= 0, owner, _ERRORS, "at least 0", least)
