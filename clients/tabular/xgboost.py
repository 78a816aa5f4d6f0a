"""XGBoost as a learner of labels, and of scores."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Unpack

import numpy as np

from clients.tabular.base import (
    ScoreLearner,
    SharedRows,
    WeightedLabels,
    all_but,
    require_array,
    to_float32,
)
from clients.tabular.boosting import OFFSETS, BoostedLearner, BoostingOptions, BoostingSettings
from clients.tabular.trees import NativeTree, Trees
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import MissingExtra
from fl_strategies.learners import Task

try:
    import xgboost
except ImportError as error:
    raise MissingExtra("XGBoostLearner", "xgboost", "xgboost") from error

OWNER: Final = "XGBoostLearner"


class XGBoostLearner(BoostedLearner):
    """Boosted trees, one sequence for two classes and one per class for more.

    Trained with histograms as by `xgboost.train`. Students on the same public rows share their
    bins, which are made once in a thread. Equal seeds give equal models. A model travels as
    plain arrays, which receivers with the same settings walk in numpy: no native code reads
    what somebody else wrote.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list.
    num_rounds : int (default: 100)
        Boosting rounds.
    max_depth : int (default: 6)
        Levels of splits in a tree, at least 1.
    learning_rate : float (default: 0.3)
        Shrinkage of every tree.
    gamma : float (default: 0.0)
        Smallest loss reduction that justifies a split.
    reg_lambda : float (default: 1.0)
        L2 penalty on leaf values.
    max_bin : int (default: 64)
        Histogram bins per feature; XGBoost's own default of 256 takes half as long again and
        is not more accurate on the tables measured here.
    num_threads : int (default: 1)
        Threads of one fit. Small data gains nothing from more than one.

    Examples
    --------
    >>> import numpy as np
    >>> learner = XGBoostLearner(num_classes=3, num_rounds=5, reg_lambda=0.0)
    >>> x, y = np.repeat([[0.0], [1.0]], 8, axis=0), np.repeat([0, 2], 8)
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(x[[0, -1]])
    array([0, 2])
    """

    def __init__(self, *, num_classes: int, **options: Unpack[BoostingOptions]) -> None:
        super().__init__(num_classes=num_classes)
        chosen = BoostingSettings(**options).checked(OWNER)
        self._num_rounds, self._settings = chosen.num_rounds, _native_settings(chosen)
        self._model: Any  # xgboost.Booster or _ReceivedBooster
        self._public: _Public | None = None

    @property
    def booster(self) -> "xgboost.Booster | None":
        """XGBoost's own model of the classes present; None if it was not trained here."""
        model = getattr(self, "_model", None)
        return model if isinstance(model, xgboost.Booster) else None

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        self._train(self._matrix(to_float32(self._owner, x), label=y), y, rng)

    def _fit_weighted(self, x: Array, labels: WeightedLabels, rng: np.random.Generator) -> None:
        rows = to_float32(self._owner, x)[labels.rows]
        data = self._matrix(rows, label=labels.classes, weight=labels.weights)
        self._train(data, labels.classes, rng)

    def _fit_shared(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        public = _SHARED.get(x, self._binned, self._settings["max_bin"])
        public.matrix.set_label(y)
        self._train(public.matrix, y, rng)
        self._public = public

    def _binned(self, x: Array) -> "_Public":
        threads, bins = self._settings["nthread"], self._settings["max_bin"]
        return _Public(x, xgboost.QuantileDMatrix(x, nthread=threads, max_bin=bins))

    def _matrix(self, x: Array, **labels: Array) -> Any:
        return xgboost.DMatrix(x, nthread=self._settings["nthread"], **labels)

    def _train(self, data: Any, y: IntArray, rng: np.random.Generator) -> None:
        seed = int(rng.integers(2**31))
        settings = {**self._settings, **_objective(int(y.max()) + 1), "seed": seed}
        # What `xgboost.train` does, without its callbacks and its copy of the model, which
        # would forget what the trees say of the training rows.
        booster = _Booster(settings, [data])
        for number in range(self._num_rounds):
            booster.update(data, number)
        self._model, self._public = booster, None

    def _probabilities(self, x: Array) -> FloatArray:
        rows, public = to_float32(self._owner, x), self._public
        if public is not None and np.array_equal(public.rows, rows):
            scores = self._model.predict(public.matrix)
        else:
            scores = self._model.inplace_predict(rows)
        probabilities = np.asarray(scores, dtype=np.float64)
        if self._num_present == 2:
            return np.stack([1.0 - probabilities, probabilities], axis=1)
        return probabilities

    def _sent(self) -> tuple[FloatArray, Trees]:
        model = self._model
        if not isinstance(model, xgboost.Booster):
            return model.offsets, model.trees
        one_row = np.zeros((1, model.num_features()), dtype=np.float32)
        offsets = _blank(model).inplace_predict(one_row, predict_type="margin")
        return np.asarray(offsets, dtype=np.float32).reshape(-1), trees_of(model)

    def _receive(self, offsets: FloatArray, trees: Trees) -> None:
        self._model, self._public = _ReceivedBooster(offsets, trees), None

    def _num_trees(self, owner: str, nodes: Mapping[str, Array], per_round: int) -> int:  # noqa: ARG002
        """Return how many trees a booster of these settings has: XGBoost grows all of them."""
        return self._num_rounds * per_round


class _Booster(xgboost.Booster):
    """A booster that does not copy the names of columns, which have none, in every round.

    That takes as long as a tree on the records of a small party.
    """

    def _assign_dmatrix_features(self, data: Any) -> None:
        """Do nothing; versions without this step never call it."""


class _Public(NamedTuple):
    """Rows that several models learn, and their bins."""

    rows: Array
    matrix: Any


_SHARED: Final[SharedRows[_Public]] = SharedRows()


@dataclass(frozen=True, eq=False)
class _ReceivedBooster:
    """A booster that has arrived: walked in numpy, its scores are the sender's to the bit.

    Parameters
    ----------
    offsets : (num_scores,) of float32
        What the trees' numbers are added to: one score for two classes, or one per class.
    trees : Trees
        Round by round, one tree per score.
    """

    offsets: FloatArray
    trees: Trees

    def inplace_predict(self, x: Array) -> FloatArray:
        """Return what the sender's booster says of rows of float32."""
        margins = self.trees.sums(x, self.offsets)
        # XGBoost itself turns scores into probabilities, so that not a bit differs.
        rows = np.zeros((len(x), 1), dtype=np.float32)
        blank = _trained_on_nothing(max(2, len(self.offsets)))
        return np.asarray(blank.inplace_predict(rows, base_margin=margins))


def _native_settings(chosen: BoostingSettings) -> dict[str, Any]:
    return {
        "tree_method": "hist",
        "max_depth": chosen.max_depth,
        "learning_rate": chosen.learning_rate,
        "gamma": chosen.gamma,
        "reg_lambda": chosen.reg_lambda,
        "max_bin": chosen.max_bin,
        "nthread": chosen.num_threads,
    }


def trees_of(booster: Any) -> Trees:
    """Return the trees of a booster in its own order: round by round, class by class."""
    model = json.loads(booster.save_raw("json"))
    return Trees.grow(map(_native_tree, model["learner"]["gradient_booster"]["model"]["trees"]))


def _native_tree(tree: dict[str, Any]) -> NativeTree:
    # XGBoost goes left below a threshold; for float32 that is up to the number before.
    # Leaves keep their value in the place of a threshold.
    conditions = np.array(tree["split_conditions"], dtype=np.float32)
    return NativeTree(
        left=np.array(tree["left_children"]),
        right=np.array(tree["right_children"]),
        features=np.array(tree["split_indices"]),
        thresholds=np.nextafter(conditions, np.float32(-np.inf)),
        values=conditions[:, np.newaxis],
    )


def _objective(num_present: int) -> dict[str, Any]:
    if num_present == 2:
        return {"objective": "binary:logistic"}
    return {"objective": "multi:softprob", "num_class": num_present}


def _blank(booster: Any) -> Any:
    """Return a booster that is the same but for its trees, which say 0 of every row."""
    model = json.loads(booster.save_raw("json"))
    for tree in model["learner"]["gradient_booster"]["model"]["trees"]:
        tree["split_conditions"] = [0.0] * len(tree["split_conditions"])
    blank = xgboost.Booster({"nthread": 1})
    blank.load_model(bytearray(json.dumps(model).encode()))
    return blank


@functools.cache
def _trained_on_nothing(num_present: int) -> Any:
    data = xgboost.DMatrix(np.zeros((num_present, 1)), label=np.arange(num_present), nthread=1)
    return _blank(xgboost.train({**_objective(num_present), "nthread": 1}, data, 1))


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
        What labels are; see `fl_strategies.learners`.
    num_rounds : int (default: 100)
        Boosting rounds, each with one tree per class.
    max_bin : int (default: 256)
        Histogram bins per feature.
    max_depth, learning_rate, gamma, reg_lambda, num_threads
        As in `XGBoostLearner`.

    Examples
    --------
    >>> import numpy as np
    >>> from fl_strategies.learners import Recipe
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
        options.setdefault("max_bin", MAX_BIN)
        chosen = BoostingSettings(**options).checked(self._owner)
        self._num_rounds = chosen.num_rounds
        self._settings = {
            **_native_settings(chosen),
            "objective": "reg:squarederror",
            "multi_strategy": "one_output_per_tree",
            # The mean is taken off the targets, whatever a version makes of its own.
            "base_score": 0.0,
        }
        self._trees: Trees
        self._offsets: FloatArray
        self._scales: FloatArray

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
        owner, shape = self._owner, (self.num_classes,)
        nodes = all_but(owner, arrays, OFFSETS, SCALES)
        self._offsets = require_array(owner, arrays, OFFSETS, np.float64, shape)
        self._scales = require_array(owner, arrays, SCALES, np.float64, shape)
        self._trees = Trees.from_arrays(
            owner,
            nodes,
            num_trees=self._num_rounds * self.num_classes,
            width=self._width,
            num_values=1,
        )
