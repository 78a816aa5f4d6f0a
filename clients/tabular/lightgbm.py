"""LightGBM as a learner of labels."""

from typing import Any, Final, Unpack

import numpy as np
from scipy.special import expit, softmax

from clients.tabular.base import SharedRows, WeightedLabels, to_float32
from clients.tabular.boosting import BoostedLearner, BoostingOptions, BoostingSettings
from clients.tabular.trees import NativeTree, Trees
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import MissingExtra

try:
    import lightgbm
except ImportError as error:
    raise MissingExtra("LightGBMLearner", "lightgbm", "lightgbm") from error

OWNER: Final = "LightGBMLearner"
MOST_LEAVES: Final = 2**17
"""LightGBM's own limit."""


class LightGBMLearner(BoostedLearner):
    """Boosted trees, one sequence for two classes and one per class for more.

    Trees are complete down to `max_depth`, and a leaf needs a curvature of 1, as in
    `XGBoostLearner`, whose settings these are. Students on the same public rows share their
    bins, which are made once in a thread. No step is random. A model travels as plain arrays,
    which receivers walk in numpy: no native code reads what somebody else wrote.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list.
    num_rounds : int (default: 100)
        Boosting rounds; fewer if no split is left that helps.
    max_depth, learning_rate, gamma, reg_lambda, max_bin, num_threads
        As in `XGBoostLearner`.

    Examples
    --------
    >>> import numpy as np
    >>> learner = LightGBMLearner(num_classes=3, num_rounds=5, reg_lambda=0.0)
    >>> x, y = np.repeat([[0.0], [1.0]], 8, axis=0), np.repeat([0, 2], 8)
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(x[[0, -1]])
    array([0, 2])
    """

    number = np.float64

    def __init__(self, *, num_classes: int, **options: Unpack[BoostingOptions]) -> None:
        super().__init__(num_classes=num_classes)
        chosen = BoostingSettings(**options).checked(OWNER)
        self._num_rounds = chosen.num_rounds
        self._settings = {
            "max_depth": chosen.max_depth,
            "num_leaves": min(2 ** min(chosen.max_depth, 17), MOST_LEAVES),
            "learning_rate": chosen.learning_rate,
            "min_gain_to_split": chosen.gamma,
            "lambda_l2": chosen.reg_lambda,
            "max_bin": chosen.max_bin,
            "num_threads": chosen.num_threads,
            "min_data_in_leaf": 1,
            "min_sum_hessian_in_leaf": 1.0,
            "metric": "none",
            "verbosity": -1,
            # Of two equally fast ways to the same histograms the one that never tries both.
            "force_row_wise": True,
            "deterministic": True,
            # Whether a column can be split depends on labels, and bins are shared.
            "feature_pre_filter": False,
            # Rows are finite, and a received tree has no branch for a missing number.
            "use_missing": False,
        }
        self._model: Any  # lightgbm.Booster or Trees
        self._offsets: FloatArray

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:  # noqa: ARG002
        self._train(self._binned(to_float32(OWNER, x)), y)

    def _fit_weighted(
        self,
        x: Array,
        labels: WeightedLabels,
        rng: np.random.Generator,  # noqa: ARG002
    ) -> None:
        data = self._binned(to_float32(OWNER, x)[labels.rows])
        data.set_weight(labels.weights)
        self._train(data, labels.classes)

    def _fit_shared(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:  # noqa: ARG002
        self._train(_SHARED.get(x, self._binned, self._settings["max_bin"]), y)

    def _binned(self, x: Array) -> Any:
        return lightgbm.Dataset(x, params=self._settings).construct()

    def _train(self, data: Any, y: IntArray) -> None:
        num_present = int(y.max()) + 1
        objective: dict[str, Any] = {"objective": "binary"}
        if num_present > 2:
            objective = {"objective": "multiclass", "num_class": num_present}
        data.set_label(y)
        booster = lightgbm.Booster({**self._settings, **objective}, data)
        for _ in range(self._num_rounds):
            if booster.update():  # nothing is left to split
                break
        self._model = booster.free_dataset()
        # The leaves of LightGBM's first trees hold what other libraries add to all of them.
        self._offsets = np.zeros(booster.num_model_per_iteration())

    def _probabilities(self, x: Array) -> FloatArray:
        rows = to_float32(OWNER, x)
        if isinstance(self._model, Trees):
            scores = self._model.sums(rows, self._offsets)
        else:
            threads = self._settings["num_threads"]
            scores = self._model.predict(rows, raw_score=True, num_threads=threads)
        if self._num_present > 2:
            # In one layout, because the order of a sum decides its last bit. Scores that were
            # received may be too far apart for a number.
            with np.errstate(over="ignore"):
                return np.asarray(softmax(np.ascontiguousarray(scores), axis=1))
        scores = scores.reshape(-1)
        return np.stack([expit(-scores), expit(scores)], axis=1)

    def _sent(self) -> tuple[FloatArray, Trees]:
        trees = self._model if isinstance(self._model, Trees) else trees_of(self._model)
        return self._offsets, trees

    def _receive(self, offsets: FloatArray, trees: Trees) -> None:
        self._model, self._offsets = trees, offsets


_SHARED: Final[SharedRows[Any]] = SharedRows()


def trees_of(booster: Any) -> Trees:
    """Return the trees of a booster in its own order: round by round, class by class."""
    trees = booster.model_to_string().partition("end of trees")[0].split("\nTree=")[1:]
    return Trees.grow(map(_native_tree, trees))


def _native_tree(text: str) -> NativeTree:
    """Return a tree of which splits come first, and then leaves, whose numbers are below 0."""
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def numbers(name: str, kind: type[float]) -> Array:
        return np.array(fields.get(name, "").split(), dtype=kind)

    leaves = numbers("leaf_value", float)
    num_splits = len(leaves) - 1
    ends = np.full(len(leaves), -1)
    left, right = (numbers(f"{side}_child", int)[:num_splits] for side in ("left", "right"))
    blank = np.zeros(len(leaves))
    return NativeTree(
        left=np.append(np.where(left < 0, num_splits + ~left, left), ends),
        right=np.append(np.where(right < 0, num_splits + ~right, right), ends),
        features=np.append(numbers("split_feature", int)[:num_splits], blank.astype(int)),
        thresholds=np.append(numbers("threshold", float)[:num_splits], blank),
        values=np.append(np.zeros(num_splits), leaves)[:, np.newaxis],
    )
