"""Gradient boosted trees of XGBoost as a learner."""

import copy
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from clients.soft_labels import WeightedLabels
from clients.tabular import TabularLearner, require_array, require_names, to_float32
from clients.tree_arrays import levels_of
from clients.ubjson import decode
from clients.xgboost_settings import boosting_settings
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.exceptions import KnowledgeMismatch, MissingExtra, require_known

try:
    import xgboost
except ImportError as error:
    raise MissingExtra("XGBoostLearner", "xgboost", "xgboost") from error

OWNER: Final = "XGBoostLearner"
BOOSTER: Final = "booster"
_NO_PARENT: Final = 2**31 - 1
_VALUES_PER_TREE: Final = 64
# Names included, a model has one value in 26 bytes or more.
_BYTES_PER_VALUE: Final = 20
_PER_NODE_FLOATS: Final = ("base_weights", "loss_changes", "split_conditions", "sum_hessian")
_PER_NODE_INTEGERS: Final = (
    "default_left",
    "left_children",
    "parents",
    "right_children",
    "split_indices",
    "split_type",
)


class XGBoostLearner(TabularLearner):
    """Boosted trees, one sequence for two classes and one per class for more.

    Trained by `xgboost.train` with histograms, which takes half the time of XGBoost's
    scikit-learn interface on the small subsets of a federation. Equal seeds give equal
    models. A model travels in XGBoost's own binary form, and can be read by receivers
    with the same version of XGBoost and the same settings.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list.
    num_rounds : int
        Boosting rounds.
    max_depth : int
        Levels of splits in a tree, at least 1.
    learning_rate : float
        Shrinkage of every tree.
    gamma : float
        Smallest loss reduction that justifies a split.
    reg_lambda : float
        L2 penalty on leaf values.
    max_bin : int
        Histogram bins per feature; 64 takes about half the time of 256.
    num_threads : int
        Threads of one fit. Small data gains nothing from more than one.

    Examples
    --------
    >>> import numpy as np
    >>> learner = XGBoostLearner(num_classes=3, num_rounds=5, reg_lambda=0.0)
    >>> x, y = np.repeat([[0.0], [1.0]], 8, axis=0), np.repeat([0, 2], 8)
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(x[[0, -1]])
    array([0, 2])
    """

    def __init__(
        self,
        *,
        num_classes: int,
        num_rounds: int = 100,
        max_depth: int = 6,
        learning_rate: float = 0.3,
        gamma: float = 0.0,
        reg_lambda: float = 1.0,
        max_bin: int = 256,
        num_threads: int = 1,
    ) -> None:
        super().__init__(num_classes=num_classes)
        self._settings = boosting_settings(
            OWNER,
            num_rounds=num_rounds,
            max_depth=max_depth,
            learning_rate=learning_rate,
            gamma=gamma,
            reg_lambda=reg_lambda,
            max_bin=max_bin,
            num_threads=num_threads,
        )
        self._num_rounds = num_rounds
        self._booster: Any = None

    @property
    def _takes_weights(self) -> bool:
        return True

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        self._boost(to_float32(self._owner, x), y, None, rng)

    def _fit_weighted(self, x: Array, labels: WeightedLabels, rng: np.random.Generator) -> None:
        rows = to_float32(self._owner, x)[labels.rows]
        self._boost(rows, labels.classes, labels.weights, rng)

    def _boost(
        self, x: Array, y: IntArray, weights: FloatArray | None, rng: np.random.Generator
    ) -> None:
        seed = int(rng.integers(2**31))
        settings = {**self._settings, **_objective(int(y.max()) + 1), "seed": seed}
        threads = self._settings["nthread"]
        data = xgboost.DMatrix(x, label=y, weight=weights, nthread=threads)
        self._booster = xgboost.train(settings, data, self._num_rounds)

    def _probabilities(self, x: Array) -> FloatArray:
        # A kept DMatrix would save a quarter of this, but only as long as nobody writes
        # into the array it was made of.
        scores = self._booster.inplace_predict(to_float32(self._owner, x))
        probabilities = np.asarray(scores, dtype=np.float64)
        if self._num_present == 2:
            return np.stack([1.0 - probabilities, probabilities], axis=1)
        return probabilities

    def _to_arrays(self) -> dict[str, Array]:
        return {BOOSTER: np.frombuffer(self._booster.save_raw("ubj"), dtype=np.uint8)}

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        require_names(OWNER, arrays, {BOOSTER})
        size = np.size(arrays[BOOSTER])
        raw = require_array(OWNER, arrays, BOOSTER, np.uint8, (size,)).tobytes()
        per_round = 1 if self._num_present == 2 else self._num_present
        num_trees = self._num_rounds * per_round
        most = min(_VALUES_PER_TREE * (num_trees + 4), len(raw) // _BYTES_PER_VALUE)
        received = decode(raw, max_items=most)
        _check_model(received, self._num_present, self._width, num_trees)
        self._booster = _load(raw, self._width, self._settings["nthread"])


def _objective(num_present: int) -> dict[str, Any]:
    if num_present == 2:
        return {"objective": "binary:logistic"}
    return {"objective": "multi:softprob", "num_class": num_present}


def _load(raw: bytes, width: int, num_threads: int) -> xgboost.Booster:
    """Return the checked model; score a row, because some fields are read only then."""
    booster = xgboost.Booster()
    try:
        booster.load_model(bytearray(raw))
        booster.set_param({"nthread": num_threads})
        booster.inplace_predict(np.zeros((1, width), dtype=np.float32))
    except xgboost.core.XGBoostError as error:
        raise KnowledgeMismatch(
            f"{OWNER}: booster must be readable by XGBoost, got {error!r:.200}."
        ) from error
    return booster


@functools.cache
def _reference(num_present: int) -> Any:
    """Return what this version of XGBoost writes for one round on one column.

    Everything in a received model but its trees is compared with it, so that native code
    reads no field of the header that it would not have written itself.
    """
    data = xgboost.DMatrix(np.zeros((num_present, 1)), label=np.arange(num_present), nthread=1)
    booster = xgboost.train({**_objective(num_present), "nthread": 1}, data, 1)
    return decode(bytes(booster.save_raw("ubj")))


def _check_model(received: Any, num_present: int, width: int, num_trees: int) -> None:
    """Raise `KnowledgeMismatch` unless XGBoost itself could have written `received`."""
    expected = copy.deepcopy(_reference(num_present))
    learner = expected["learner"]
    model = learner["gradient_booster"]["model"]
    tree = model["trees"][0]
    per_round = len(model["trees"])
    learner["learner_model_param"]["num_feature"] = str(width)
    tree["tree_param"]["num_feature"] = str(width)
    model["gbtree_model_param"]["num_trees"] = str(num_trees)
    model["iteration_indptr"] = list(range(0, num_trees + 1, per_round))
    model["tree_info"] = [index % per_round for index in range(num_trees)]
    _require_equal("booster", received, expected)
    trees = received["learner"]["gradient_booster"]["model"]["trees"]
    require_known(len(trees) == num_trees, OWNER, "trees", f"{num_trees} trees", len(trees))
    for index, own in enumerate(trees):
        _check_tree_form(own, tree, index)
    _check_structure(trees, width)


def _require_equal(name: str, received: Any, expected: Any) -> None:
    """Raise unless both are the same apart from the trees and the base score."""
    require_known(type(received) is type(expected), OWNER, name, "of its type", type(received))
    if name.endswith(".base_score"):
        _check_base_score(received, expected)
    elif isinstance(expected, dict):
        keys = sorted(expected)
        require_known(sorted(received) == keys, OWNER, name, f"of {keys}", sorted(received))
        for key in keys:
            _require_equal(f"{name}.{key}", received[key], expected[key])
    elif isinstance(expected, np.ndarray):
        same = received.dtype == expected.dtype and np.array_equal(received, expected)
        require_known(same, OWNER, name, "as this XGBoost writes it", "something else")
    elif not name.endswith(".trees"):
        same = _plain_list(received) == _plain_list(expected)
        require_known(same, OWNER, name, f"{expected!r:.80}", f"{received!r:.80}")


def _plain_list(value: Any) -> Any:
    """Return a value that `==` compares by type as well; lists hold only plain values."""
    return [(type(item), repr(item)) for item in value] if isinstance(value, list) else value


def _check_base_score(received: str, expected: str) -> None:
    """Raise unless the text is as many finite numbers as expected, in the same brackets."""
    number = r"[-+]?\d{1,40}(\.\d{1,40})?([eE][-+]?\d{1,4})?"
    count = expected.count(",")
    listed = rf"{number}(,{number}){{{count}}}"
    pattern = rf"\[{listed}\]" if expected.startswith("[") else listed
    fits = re.fullmatch(pattern, received, re.ASCII) is not None
    finite = fits and all(
        math.isfinite(float(item)) for item in received.strip("[]").split(",")
    )
    require_known(finite, OWNER, "base_score", f"like {expected!r}", f"{received!r:.80}")


def _check_tree_form(tree: Any, reference: dict[str, Any], index: int) -> None:
    """Raise unless a tree has the fields of `reference`, of one length where per node."""
    name = f"tree {index}"
    require_known(isinstance(tree, dict), OWNER, name, "an object", type(tree).__name__)
    require_known(tree.keys() == reference.keys(), OWNER, name, "of known fields", sorted(tree))
    num_nodes = np.size(tree["left_children"])
    require_known(num_nodes >= 1, OWNER, name, "at least one node", num_nodes)
    header = {**reference["tree_param"], "num_nodes": str(num_nodes)}
    _require_equal(f"{name}.tree_param", tree["tree_param"], header)
    _require_equal(f"{name}.id", tree["id"], index)
    for field in (*_PER_NODE_FLOATS, *_PER_NODE_INTEGERS):
        require_array(OWNER, tree, field, reference[field].dtype, (num_nodes,))
    for field in reference.keys() - {
        "tree_param",
        "id",
        *_PER_NODE_FLOATS,
        *_PER_NODE_INTEGERS,
    }:
        _require_equal(f"{name}.{field}", tree[field], reference[field])


def _check_structure(trees: Sequence[Mapping[str, Array]], width: int) -> None:
    """Raise unless children, parents and splits of all trees are those of real trees.

    A child comes after its parent and every node but a root is a child exactly once, so
    a walk from the root can neither leave its tree nor return to a node. Nor can it go too
    deep: XGBoost walks by recursion.
    """
    sizes = np.array([len(tree["left_children"]) for tree in trees])
    roots = np.cumsum(sizes) - sizes
    nodes = {
        field: np.concatenate([tree[field] for tree in trees]).astype(np.int64)
        for field in _PER_NODE_INTEGERS
    }
    left, right = nodes["left_children"], nodes["right_children"]
    split = (left != -1) | (right != -1)
    ids, first = np.arange(len(left)), np.repeat(roots, sizes)
    parent, last = (ids - first)[split], (np.repeat(sizes, sizes) - 1)[split]
    for child in (left[split], right[split]):
        inside = bool(((child > parent) & (child <= last)).all())
        require_known(inside, OWNER, "children", "after their parent", "another index")
    children = np.concatenate([(first + left)[split], (first + right)[split]])
    others = np.delete(ids, roots)
    once = np.array_equal(np.sort(children), others)
    require_known(once, OWNER, "children", "of one parent each", "shared or lost nodes")
    below = (np.where(split, first + child, -1) for child in (left, right))
    levels_of(OWNER, roots, *below)
    parents = np.full(len(ids), _NO_PARENT)
    parents[children] = np.tile(parent, 2)
    same = np.array_equal(parents, nodes["parents"])
    require_known(same, OWNER, "parents", "those of the children", "something else")
    features = nodes["split_indices"]
    inside = bool(((features >= 0) & (features < width)).all())
    require_known(inside, OWNER, "split_indices", f"below {width}", "another index")
    require_known(not nodes["split_type"].any(), OWNER, "split_type", "numerical", "categories")
    flags = bool((nodes["default_left"] <= 1).all())
    require_known(flags, OWNER, "default_left", "0 or 1", "something else")
