"""Regression trees and forests of scikit-learn that learn scores instead of labels."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from clients.scores import ScoreLearner
from clients.tabular import to_float32
from clients.tree_arrays import Trees, num_received_trees, sklearn_tree
from fl_strategies.arrays import Array, FloatArray
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import MissingExtra, require

try:
    from sklearn import clone
    from sklearn.ensemble import ExtraTreesRegressor, RandomForestRegressor
    from sklearn.tree import DecisionTreeRegressor, ExtraTreeRegressor
except ImportError as error:
    raise MissingExtra("ForestScores", str(error.name), "sklearn") from error

TREES: Final = (DecisionTreeRegressor, ExtraTreeRegressor)
FORESTS: Final = (RandomForestRegressor, ExtraTreesRegressor)
_LARGEST_SEED: Final = np.iinfo(np.int32).max


class ForestScores(ScoreLearner):
    """A tree or forest of scikit-learn whose leaves hold one number per class.

    Every fit trains a clone whose random state is drawn from `rng`. Only the trees are
    kept, as plain arrays that are walked in numpy: the leaves' numbers in float32, and
    nothing else of the training rows. A leaf of a single row holds that row's targets.

    Parameters
    ----------
    estimator : RandomForestRegressor, ExtraTreesRegressor, DecisionTreeRegressor, \
or ExtraTreeRegressor
        An unfitted regressor.
    num_classes : int
        Length of the federation's class list, number of labels, or number of outputs.
    task : "single-label", "multi-label" or "regression"
        What labels are; see `fl_strategies.core.tasks`.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.tree import DecisionTreeRegressor
    >>> learner = ForestScores(DecisionTreeRegressor(), num_classes=2)
    >>> x, scores = np.array([[0.0], [1.0]]), np.array([[3.0, -1.0], [0.5, 2.0]])
    >>> learner.distill(x, scores, rng=np.random.default_rng(0)).logits(x)
    array([[ 3. , -1. ],
           [ 0.5,  2. ]])
    """

    def __init__(
        self, estimator: Any, *, num_classes: int, task: Task = "single-label"
    ) -> None:
        super().__init__(num_classes=num_classes, task=task)
        rule = f"one of {', '.join(each.__name__ for each in (*TREES, *FORESTS))}"
        known = type(estimator) in (*TREES, *FORESTS)
        require(known, self._owner, "estimator", rule, estimator)
        self._template = estimator
        self._trees: Trees

    def _regress(self, x: Array, targets: FloatArray, rng: np.random.Generator) -> None:
        model = clone(self._template).set_params(random_state=int(rng.integers(_LARGEST_SEED)))
        # scikit-learn warns of a single column.
        labels = targets[:, 0] if targets.shape[1] == 1 else targets
        model.fit(to_float32(self._owner, x), labels)
        fitted = [model] if type(model) in TREES else model.estimators_
        self._trees = Trees.grow(
            sklearn_tree(each.tree_, each.tree_.value[:, :, 0].astype(np.float32))
            for each in fitted
        )

    def _outputs(self, x: Array) -> FloatArray:
        rows = to_float32(self._owner, x)
        means = [
            leaves.mean(axis=0, dtype=np.float64) for leaves in self._trees.leaf_values(rows)
        ]
        return np.concatenate(means)

    def _to_arrays(self) -> dict[str, Array]:
        return self._trees.to_arrays(self._width)

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        alone = type(self._template) in TREES
        self._trees = Trees.from_arrays(
            self._owner,
            arrays,
            num_trees=1 if alone else num_received_trees(self._owner, arrays),
            width=self._width,
            num_values=self.num_classes,
        )
