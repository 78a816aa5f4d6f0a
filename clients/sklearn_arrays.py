"""Fitted scikit-learn models as plain arrays, without pickle.

Trees, forests and linear models have an exact array form of their own. It is small,
because it holds only what prediction reads, and safe by construction: a tree travels as
its nodes in depth-first order with one bit each, leaf or not, from which the children
are derived. No child index is on the wire that native code could follow astray.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from clients.tabular import require_array, require_names
from clients.tree_arrays import round_down
from fl_strategies.exceptions import MissingExtra, require_known
from fl_strategies.protocols import Array

try:
    from sklearn import clone, preprocessing
    from sklearn.linear_model import RidgeClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.tree._tree import NODE_DTYPE, Tree
except ImportError as error:
    raise MissingExtra("SklearnLearner", str(error.name), "sklearn") from error

OWNER: Final = "SklearnLearner"
MAX_MODEL_BYTES: Final = 2**28
_TREE_ARRAYS: Final = {
    "tree-sizes", "leaf-bits", "features", "thresholds", "values", "leaf-values",
}  # fmt: skip


class Shape(NamedTuple):
    """What the receiver knows of a model before it looks at the arrays."""

    num_classes: int
    width: int
    max_bytes: int = MAX_MODEL_BYTES


def tree_prototype(forest: Any) -> Any:
    """Return an unfitted tree with the settings that `forest` gives to its trees."""
    settings = {name: getattr(forest, name) for name in forest.estimator_params}
    return clone(forest.estimator).set_params(**settings)


def assemble_forest(forest: Any, trees: Sequence[Any], shape: Shape) -> Any:
    """Turn an unfitted `forest` into one that consists of fitted `trees`."""
    forest.estimators_ = list(trees)
    forest.n_features_in_, forest.n_outputs_ = shape.width, 1
    forest.classes_, forest.n_classes_ = np.arange(shape.num_classes), shape.num_classes
    return forest


def trees_to_arrays(trees: Sequence[Any]) -> dict[str, Array]:
    """Return fitted trees as arrays over all their nodes, splits and leaves.

    Leaves share few distinct rows of class shares, so these are listed once.
    """
    parts = [_nodes_of(tree.tree_) for tree in trees]
    leaves, features, thresholds, rows = map(np.concatenate, zip(*parts, strict=True))
    values, index = np.unique(rows, axis=0, return_inverse=True)
    width = trees[0].tree_.n_features
    return {
        "tree-sizes": np.array([len(part[0]) for part in parts]),
        "leaf-bits": np.packbits(leaves),
        "features": features.astype(np.min_scalar_type(width - 1)),
        "thresholds": round_down(thresholds),
        "values": values,
        "leaf-values": index.reshape(-1).astype(np.min_scalar_type(len(values) - 1)),
    }


def _nodes_of(tree: Any) -> tuple[Array, Array, Array, Array]:
    """Return leaf flags of all nodes, features and thresholds of splits, rows of leaves."""
    left, right = tree.children_left.tolist(), tree.children_right.tolist()
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if left[node] >= 0:
            waiting += (right[node], left[node])
    nodes = np.array(order)
    leaf = tree.children_left[nodes] < 0
    split = nodes[~leaf]
    return leaf, tree.feature[split], tree.threshold[split], tree.value[nodes[leaf], 0]


def trees_from_arrays(
    prototype: Any, num_trees: int, arrays: Mapping[str, Array], shape: Shape
) -> list[Any]:
    """Return fitted copies of `prototype`, one for every received tree.

    They predict to the bit what the sender's trees do, but hold no training statistics.
    """
    require_names(OWNER, arrays, _TREE_ARRAYS)
    sizes = require_array(OWNER, arrays, "tree-sizes", np.int64, (num_trees,)).tolist()
    total = sum(sizes)
    require_known(min(sizes) > 0, OWNER, "tree-sizes", "at least 1", min(sizes))
    num_bytes = total * (NODE_DTYPE.itemsize + 8 * shape.num_classes)
    rule = f"of models up to {shape.max_bytes} bytes"
    require_known(num_bytes <= shape.max_bytes, OWNER, "tree-sizes", rule, num_bytes)
    bits = require_array(OWNER, arrays, "leaf-bits", np.uint8, (math.ceil(total / 8),))
    leaf = np.unpackbits(bits, count=total).astype(bool)
    nodes, values = _received_nodes(leaf, arrays, shape)
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(nodes, ends), np.split(values, ends), strict=True)
    return [_build_tree(copy.copy(prototype), *part, shape) for part in parts]


def _received_nodes(
    leaf: Array, arrays: Mapping[str, Array], shape: Shape
) -> tuple[Array, Array]:
    """Return the nodes of all trees, still without children, and their class shares."""
    num_leaves = int(leaf.sum())
    splits, narrow = (len(leaf) - num_leaves,), np.min_scalar_type(shape.width - 1)
    features = require_array(OWNER, arrays, "features", narrow, splits)
    inside = bool((features < shape.width).all())
    require_known(inside, OWNER, "features", f"below {shape.width}", "a larger index")
    nodes = np.zeros(len(leaf), dtype=NODE_DTYPE)
    nodes["left_child"] = nodes["right_child"] = -1
    nodes["feature"] = nodes["threshold"] = -2
    nodes["feature"][~leaf] = features
    nodes["threshold"][~leaf] = require_array(OWNER, arrays, "thresholds", np.float32, splits)
    values = np.zeros((len(leaf), 1, shape.num_classes))
    values[leaf, 0] = _received_values(arrays, num_leaves, shape.num_classes)
    return nodes, values


def _received_values(arrays: Mapping[str, Array], num_leaves: int, num_classes: int) -> Array:
    """Return the class shares of every leaf, (num_leaves, num_classes)."""
    distinct = len(np.atleast_1d(arrays["values"]))
    rule = f"between 1 and {num_leaves} rows"
    require_known(1 <= distinct <= num_leaves, OWNER, "values", rule, distinct)
    values = require_array(OWNER, arrays, "values", np.float64, (distinct, num_classes))
    shares = values.min() >= 0 and values.max() <= 1 and np.allclose(values.sum(axis=1), 1)
    require_known(shares, OWNER, "values", "shares that sum to 1", "something else")
    narrow = np.min_scalar_type(distinct - 1)
    index = require_array(OWNER, arrays, "leaf-values", narrow, (num_leaves,))
    inside = bool((index < distinct).all())
    require_known(inside, OWNER, "leaf-values", f"below {distinct}", "a larger index")
    return np.asarray(values[index])


def _build_tree(tree: Any, nodes: Array, values: Array, shape: Shape) -> Any:
    """Turn an unfitted tree into a fitted one; `nodes` are depth first."""
    split = nodes["feature"] >= 0
    nodes["left_child"][split] = np.flatnonzero(split) + 1
    right, depth = _right_children(split.tolist())
    nodes["right_child"][split] = right
    native = Tree(shape.width, np.array([shape.num_classes], dtype=np.intp), 1)
    # The depth is exact because scikit-learn sizes the buffers of paths by it.
    state = {"max_depth": depth, "node_count": len(nodes), "nodes": nodes, "values": values}
    native.__setstate__(state)
    tree.tree_, tree.n_features_in_, tree.n_outputs_ = native, shape.width, 1
    tree.classes_, tree.n_classes_ = np.arange(shape.num_classes), shape.num_classes
    return tree


def _right_children(split: Sequence[bool]) -> tuple[list[int], int]:
    """Return the right child of every split, in node order, and the depth of the tree.

    Nodes are depth first, so a left child follows its parent, and the node after a
    finished subtree is the right child of the last split that still lacks one. A list
    of flags that is not exactly one binary tree is refused.
    """
    right: dict[int, int] = {}
    waiting: list[tuple[int, int]] = []
    depth = deepest = 0
    for node, is_split in enumerate(split, start=1):
        if is_split:
            waiting.append((node, depth))
            right[node] = 0
            depth += 1
            continue
        deepest = max(deepest, depth)
        complete = node == len(split)
        require_known(complete != bool(waiting), OWNER, "leaf-bits", "whole trees", "a part")
        if waiting:
            parent, depth = waiting.pop()
            right[parent] = node
            depth += 1
    require_known(not waiting, OWNER, "leaf-bits", "whole trees", "a part")
    return list(right.values()), deepest


def linear_to_arrays(model: Any) -> dict[str, Array]:
    """Return coefficients and intercept of a fitted linear classifier."""
    coefficients = np.atleast_2d(model.coef_)
    # The memory order decides in which order products are summed, hence the last bit.
    by_column = coefficients.flags.f_contiguous and not coefficients.flags.c_contiguous
    name, array = ("coef-by-column", coefficients.T) if by_column else ("coef", coefficients)
    intercept = model.intercept_
    if np.ndim(intercept) == 0:  # a plain 0.0, which takes the type of what it is added to
        intercept = np.full(len(coefficients), intercept, dtype=coefficients.dtype)
    return {name: np.array(array, order="C"), "intercept": np.array(intercept)}


def linear_from_arrays(template: Any, arrays: Mapping[str, Array], shape: Shape) -> Any:
    """Return a fitted twin of `template` with the received coefficients."""
    name = "coef" if "coef" in arrays else "coef-by-column"
    require_names(OWNER, arrays, {name, "intercept"})
    num_rows = 1 if shape.num_classes == 2 else shape.num_classes
    order = (num_rows, shape.width) if name == "coef" else (shape.width, num_rows)
    coefficients = require_array(OWNER, arrays, name, _float_type(arrays[name]), order)
    model = clone(template)
    model.coef_ = coefficients if name == "coef" else coefficients.T
    intercept_type = _float_type(arrays["intercept"])
    model.intercept_ = require_array(OWNER, arrays, "intercept", intercept_type, (num_rows,))
    return as_classifier(model, shape)


def _float_type(array: object) -> type:
    """Return float32 for an array of it and float64 for anything else."""
    return np.float32 if getattr(array, "dtype", None) == np.float32 else np.float64


def as_classifier(model: Any, shape: Shape) -> Any:
    """Give a rebuilt model the classes 0 .. k - 1 and its width."""
    model.n_features_in_ = shape.width
    if isinstance(model, (RidgeClassifier, MLPClassifier)):
        binarizer = preprocessing.LabelBinarizer()
        model._label_binarizer = binarizer.fit(np.arange(shape.num_classes))
    # Some versions of scikit-learn derive the classes of a ridge from its binarizer.
    if not isinstance(getattr(type(model), "classes_", None), property):
        model.classes_ = np.arange(shape.num_classes)
    return model
