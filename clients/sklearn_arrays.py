"""Fitted scikit-learn models as plain arrays, without pickle.

Trees, forests and linear models have an exact array form of their own. It is small,
because it holds only what prediction reads, and safe by construction: a tree travels as
its nodes in depth-first order with one bit each, leaf or not, from which the children
are derived. No child index is on the wire that native code could follow astray.

Models and scalers whose prediction is plain numpy may travel as a skops archive, which is
opened only after it was found to be small, flat and of the expected type.
"""

import copy
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from clients.tabular import require_array, require_known, require_names
from fl_strategies.exceptions import KnowledgeMismatch, MissingExtra
from fl_strategies.protocols import Array

try:
    import skops.io
    from sklearn import clone, naive_bayes, preprocessing
    from sklearn.decomposition import PCA
    from sklearn.linear_model import RidgeClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.tree._tree import NODE_DTYPE, Tree
except ImportError as error:
    raise MissingExtra("SklearnLearner", str(error.name), "sklearn") from error

OWNER: Final = "SklearnLearner"
MAX_MODEL_BYTES: Final = 2**28
MAX_ARCHIVE_MEMBERS: Final = 256
# Text takes many times its size once it is parsed; that of a real model is a few kilobytes.
MAX_SCHEMA_BYTES: Final = 2**20
# Models and scalers that travel as archives, each with all that its prediction reads.
# Counts of training rows and the history of training stay where they are.
ARCHIVED_MODELS: Final[dict[type, tuple[str, ...]]] = {
    naive_bayes.GaussianNB: ("theta_", "var_", "class_prior_"),
    naive_bayes.BernoulliNB: ("feature_log_prob_", "class_log_prior_"),
    naive_bayes.MultinomialNB: ("feature_log_prob_", "class_log_prior_"),
    naive_bayes.ComplementNB: ("feature_log_prob_", "class_log_prior_"),
    MLPClassifier: ("coefs_", "intercepts_", "n_layers_", "n_outputs_", "out_activation_"),
}
ARCHIVED_SCALERS: Final[dict[type, tuple[str, ...]]] = {
    preprocessing.StandardScaler: ("mean_", "scale_"),
    preprocessing.MinMaxScaler: ("min_", "scale_"),
    preprocessing.MaxAbsScaler: ("scale_",),
    preprocessing.RobustScaler: ("center_", "scale_"),
    preprocessing.Normalizer: (),
    PCA: ("components_", "mean_", "explained_variance_", "n_components_"),
}
_LEARNED: Final = {**ARCHIVED_MODELS, **ARCHIVED_SCALERS}
_TREE_ARRAYS: Final = {
    "tree-sizes", "leaf-bits", "features", "thresholds", "values", "leaf-values",
}  # fmt: skip
# Settings of the machine rather than of the model: sender and receiver may differ.
_LOCAL_PARAMETERS: Final = {"random_state", "n_jobs", "verbose", "copy"}
_PLAIN_NODES: Final = {
    ("builtins.dict", "DictNode"),
    ("builtins.list", "ListNode"),
    ("builtins.tuple", "TupleNode"),
    ("builtins.str", "JsonNode"),
    ("builtins.str", "TypeNode"),
    *((f"numpy.{name}", "NdArrayNode") for name in ("ndarray", "float32", "float64", "int64")),
}


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
        "thresholds": _round_down(thresholds),
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


def _round_down(thresholds: Array) -> Array:
    """Return float32 thresholds that split float32 numbers exactly as the float64 ones do."""
    narrow = thresholds.astype(np.float32)
    lower = np.nextafter(narrow, np.float32(-np.inf))
    rounded: Array = np.where(narrow > thresholds, lower, narrow)
    return rounded


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
    return _as_classifier(model, shape)


def _float_type(array: object) -> type:
    """Return float32 for an array of it and float64 for anything else."""
    return np.float32 if getattr(array, "dtype", None) == np.float32 else np.float64


def _as_classifier(model: Any, shape: Shape) -> Any:
    """Give a rebuilt model the classes 0 .. k - 1 and its width."""
    model.n_features_in_ = shape.width
    if isinstance(model, (RidgeClassifier, MLPClassifier)):
        binarizer = preprocessing.LabelBinarizer()
        model._label_binarizer = binarizer.fit(np.arange(shape.num_classes))
    # Some versions of scikit-learn derive the classes of a ridge from its binarizer.
    if not isinstance(getattr(type(model), "classes_", None), property):
        model.classes_ = np.arange(shape.num_classes)
    return model


def archive(model: Any) -> Array:
    """Return settings and learned attributes of `model` as a skops archive in uint8."""
    thin = copy.copy(model)
    settings = model.get_params(deep=False).keys() - _LOCAL_PARAMETERS
    kept = settings.union(_LEARNED[type(model)])
    thin.__dict__ = {name: value for name, value in vars(model).items() if name in kept}
    return np.frombuffer(skops.io.dumps(thin, compression=ZIP_DEFLATED), dtype=np.uint8)


def _is_plain(value: object) -> bool:
    """Tell whether a value is finite numbers, text, or a short nest of such."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf" and bool(np.isfinite(value).all())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, np.number))


def unarchive(template: Any, array: object, shape: Shape) -> Any:
    """Return a twin of `template` with what the archive says it learned.

    The archive is read only after its members, their sizes and the types it names were
    checked; skops then applies its own list of trusted types, which is not extended.
    """
    is_bytes = isinstance(array, np.ndarray) and array.dtype == np.uint8
    require_known(is_bytes, OWNER, "archive", "an array of uint8", type(array).__name__)
    data = np.asarray(array).tobytes()
    try:
        _check_archive(data, type(template), shape.max_bytes)
        loaded = skops.io.loads(data)
        return _adopt(clone(template), loaded, shape)
    except KnowledgeMismatch:
        raise
    except Exception as error:
        raise KnowledgeMismatch(
            f"{OWNER}: archive must be readable by skops, got {type(error).__name__}."
        ) from error


def _adopt(model: Any, loaded: Any, shape: Shape) -> Any:
    """Give `model` what `loaded` learned; both must be of one type and one setting."""
    name = type(loaded).__name__
    require_known(type(loaded) is type(model), OWNER, "archive", f"a {model!r}", name)
    received = vars(loaded)
    for name, setting in model.get_params(deep=False).items():
        agrees = name in _LOCAL_PARAMETERS or repr(received.get(name)) == repr(setting)
        require_known(agrees, OWNER, name, f"{setting!r} as here", "another setting")
    for name in _LEARNED[type(model)]:
        plain = name in received and _is_plain(received[name])
        require_known(plain, OWNER, name, "finite numbers or text", "something else")
        setattr(model, name, received[name])
    return _as_classifier(model, shape)


def _check_archive(data: bytes, expected: type, max_bytes: int) -> None:
    """Raise unless the archive is small, flat and names no type but the expected one."""
    with ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        rule = f"at most {MAX_ARCHIVE_MEMBERS} members"
        require_known(len(members) <= MAX_ARCHIVE_MEMBERS, OWNER, "archive", rule, len(members))
        size = sum(member.file_size for member in members)
        rule = f"at most {max_bytes} bytes unpacked"
        require_known(size <= max_bytes, OWNER, "archive", rule, size)
        for member in members:
            _check_member(archive, member)
        schema = json.loads(archive.read("schema.json"))
    allowed = _PLAIN_NODES | {(f"{expected.__module__}.{expected.__name__}", "ObjectNode")}
    for node in _typed_nodes(schema):
        known = (f"{node.get('__module__')}.{node.get('__class__')}", node.get("__loader__"))
        require_known(known in allowed, OWNER, "archive", "of expected types", known)


def _check_member(archive: ZipFile, member: ZipInfo) -> None:
    """Raise unless a member is the schema or one array of exactly its declared size."""
    packing = member.compress_type in (ZIP_STORED, ZIP_DEFLATED)
    require_known(packing, OWNER, "archive", "stored or deflated", member.compress_type)
    if member.filename == "schema.json":
        small = member.file_size <= MAX_SCHEMA_BYTES
        rule = f"with a schema of at most {MAX_SCHEMA_BYTES} bytes"
        require_known(small, OWNER, "archive", rule, member.file_size)
        return
    named = re.fullmatch(r"\d+\.npy", member.filename) is not None
    require_known(named, OWNER, "archive", "a schema and arrays", repr(member.filename))
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        require_known(version == (1, 0), OWNER, "archive", "of array version 1", version)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        expected = file.tell() + math.prod(shape) * dtype.itemsize
    require_known(dtype.kind in "fiu", OWNER, "archive", "of numbers", dtype)
    require_known(member.file_size == expected, OWNER, "archive", "whole arrays", expected)


def _typed_nodes(schema: object) -> Iterator[dict[str, Any]]:
    """Yield every part of a schema that names a type or a loader."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.keys() & {"__class__", "__module__", "__loader__"}:
                yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def archive_from_arrays(template: Any, arrays: Mapping[str, Array], shape: Shape) -> Any:
    """Return a fitted twin of `template` from the archive named "skops"."""
    require_names(OWNER, arrays, {"skops"})
    model = unarchive(template, arrays["skops"], shape)
    scores = probe(model.predict_proba, shape.width)
    fits = scores.shape == (1, shape.num_classes)
    require_known(fits, OWNER, "skops", f"a model of {shape.num_classes} classes", scores.shape)
    return model


def probe(function: Callable[[Array], Any], width: int) -> Array:
    """Return what a received model makes of one row; refuse it if it cannot."""
    try:
        with np.errstate(all="ignore"):
            return np.asarray(function(np.zeros((1, width))))
    except Exception as error:
        raise KnowledgeMismatch(
            f"{OWNER}: a received model must score a row of {width}, got {error!r}."
        ) from error
