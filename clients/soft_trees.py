"""Gradient boosted trees of XGBoost that learn scores instead of labels."""

from collections.abc import Mapping
from typing import Final, Unpack

import numpy as np

from clients.scores import ScoreLearner
from clients.tabular import require_array, to_float32
from clients.tree_arrays import Trees
from clients.xgboost_common import BoostingOptions, boosting_settings, trees_of
from fl_strategies.arrays import Array, FloatArray
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import MissingExtra, require_known

try:
    import xgboost
except ImportError as error:
    raise MissingExtra("XGBoostScores", "xgboost", "xgboost") from error

OFFSETS: Final = "offsets"
SCALES: Final = "scales"
MAX_BIN: Final = 256


class XGBoostScores(ScoreLearner):
    """Boosted regression trees, one sequence per class, by squared error.

    Targets are standardised column by column before boosting, so that scores of any size
    are learned alike; `gamma` and `reg_lambda` act on standardised targets. Only the trees
    are kept, as plain arrays that are walked in numpy: a model travels between different
    versions of XGBoost and predicts the same to the bit everywhere. Thresholds are values of
    single training rows, which leave with the model.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list, number of labels, or number of outputs.
    task : "single-label", "multi-label" or "regression"
        What labels are; see `fl_strategies.core.tasks`.
    num_rounds : int (default: 100)
        Boosting rounds, each with one tree per class.
    max_depth : int (default: 6)
        Levels of splits in a tree, at least 1.
    learning_rate : float (default: 0.3)
        Shrinkage of every tree.
    gamma : float (default: 0.0)
        Smallest loss reduction that justifies a split.
    reg_lambda : float (default: 1.0)
        L2 penalty on leaf values.
    max_bin : int (default: 256)
        Histogram bins per feature.
    num_threads : int (default: 1)
        Threads of one fit.

    Examples
    --------
    >>> import numpy as np
    >>> from fl_strategies.core.protocols import Recipe
    >>> learner = XGBoostScores(num_classes=2, num_rounds=30, reg_lambda=0.0)
    >>> x = np.repeat([[0.0], [1.0]], 8, axis=0)
    >>> shares = np.repeat([[0.9, 0.1], [0.2, 0.8]], 8, axis=0)
    >>> recipe = Recipe(link="softmax")
    >>> learner = learner.distill(x, shares, rng=np.random.default_rng(0), recipe=recipe)
    >>> np.exp(learner.logits(x[[0, -1]])).round(2)
    array([[0.9, 0.1],
           [0.2, 0.8]])
    """

    def __init__(
        self,
        *,
        num_classes: int,
        task: Task = "single-label",
        **options: Unpack[BoostingOptions],
    ) -> None:
        super().__init__(num_classes=num_classes, task=task)
        self._num_rounds, boosting = boosting_settings(self._owner, **options)
        self._settings = {
            **boosting,
            "max_bin": options.get("max_bin", MAX_BIN),
            "objective": "reg:squarederror",
            "multi_strategy": "one_output_per_tree",
            # The mean is taken off the targets, whatever a version makes of its own.
            "base_score": 0.0,
        }
        self._trees: Trees
        self._offsets: FloatArray
        self._scales: FloatArray

    @property
    def _num_trees(self) -> int:
        return self._num_rounds * self.num_classes

    def _regress(self, x: Array, targets: FloatArray, rng: np.random.Generator) -> None:
        deviations = targets.std(axis=0)
        self._offsets = targets.mean(axis=0)
        self._scales = np.where(deviations > 0, deviations, 1.0)
        standard = ((targets - self._offsets) / self._scales).astype(np.float32)
        data = xgboost.DMatrix(
            to_float32(self._owner, x), label=standard, nthread=self._settings["nthread"]
        )
        settings = {**self._settings, "seed": int(rng.integers(2**31))}
        booster = xgboost.train(settings, data, self._num_rounds)
        self._trees = trees_of(booster)

    def _outputs(self, x: Array) -> FloatArray:
        shape = (self._num_rounds, self.num_classes, -1)
        sums = [
            leaves.reshape(shape).sum(axis=0, dtype=np.float64).T
            for leaves in self._trees.leaf_values(to_float32(self._owner, x))
        ]
        scores: FloatArray = self._offsets + self._scales * np.concatenate(sums)
        return scores

    def _to_arrays(self) -> dict[str, Array]:
        own = {OFFSETS: self._offsets.copy(), SCALES: self._scales.copy()}
        return {**own, **self._trees.to_arrays(self._width)}

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        own, owner, shape = dict(arrays), self._owner, (self.num_classes,)
        for name in (OFFSETS, SCALES):
            require_known(name in own, owner, "arrays", f"with {name!r}", sorted(own))
        self._offsets = require_array(owner, own, OFFSETS, np.float64, shape)
        self._scales = require_array(owner, own, SCALES, np.float64, shape)
        nodes = {name: each for name, each in own.items() if name not in (OFFSETS, SCALES)}
        self._trees = Trees.from_arrays(
            owner, nodes, num_trees=self._num_trees, width=self._width, num_values=1
        )
