"""Fitted scikit-learn models as plain arrays, without pickle and without archives.

Linear models, naive Bayes, perceptrons and scalers consist of a few arrays each, whose
shapes follow from the receiver's own settings: what has any other shape is refused before
it is copied. Received trees are walked in numpy, see `clients.tabular.trees`: no native code
reads a node that somebody else has written.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import numpy as np

from clients.tabular.base import require_array, require_names, to_float32
from clients.tabular.trees import VALUES_AT_ONCE, Trees, sklearn_tree
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import MissingExtra, UnsupportedLearner, require_known
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES

try:
    from sklearn import clone, naive_bayes, preprocessing
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.decomposition import PCA
    from sklearn.linear_model import RidgeClassifier
    from sklearn.neural_network import MLPClassifier
except ImportError as error:
    raise MissingExtra("SklearnLearner", str(error.name), "sklearn") from error


OWNER: Final = "SklearnLearner"
SETTINGS: Final = "settings"
_BY_COLUMN: Final = "-by-column"
# Settings of the machine rather than of the model: sender and receiver may differ.
_LOCAL_PARAMETERS: Final = {"random_state", "n_jobs", "verbose", "copy"}


class Shape(NamedTuple):
    """What the receiver knows of a model before it looks at the arrays."""

    num_classes: int
    width: int
    max_bytes: int = MAX_REPLY_BYTES


Sizes: TypeAlias = dict[str, tuple[int, ...]]


def linear_to_arrays(model: Any) -> dict[str, Array]:
    """Return coefficients and intercept of a fitted linear classifier."""
    coefficients = np.atleast_2d(model.coef_)
    intercept = model.intercept_
    if np.ndim(intercept) == 0:  # a plain 0.0, which takes the type of what it is added to
        intercept = np.full(len(coefficients), intercept, dtype=coefficients.dtype)
    return {**_ordered("coef", coefficients), "intercept": np.array(intercept)}


def linear_from_arrays(template: Any, arrays: Mapping[str, Array], shape: Shape) -> Any:
    """Return a fitted twin of `template` with the received coefficients."""
    num_rows = 1 if shape.num_classes == 2 else shape.num_classes
    received = _read(arrays, {"coef": (num_rows, shape.width), "intercept": (num_rows,)})
    model = clone(template)
    model.coef_, model.intercept_ = received["coef"], received["intercept"]
    return as_classifier(model, shape)


def _ordered(name: str, array: Array) -> dict[str, Array]:
    """Return an array under a name that tells its memory order.

    The order decides in which order products are summed, hence the last bit.
    """
    by_column = array.flags.f_contiguous and not array.flags.c_contiguous
    return {name + _BY_COLUMN * by_column: np.array(array.T if by_column else array, order="C")}


def _read(arrays: Mapping[str, Array], sizes: Sizes) -> dict[str, Array]:
    """Return received floating-point arrays of exactly these names and shapes."""
    found = {
        name if name in arrays else name + _BY_COLUMN: size for name, size in sizes.items()
    }
    require_names(OWNER, arrays, set(found))
    read = {}
    for (wire_name, size), name in zip(found.items(), sizes, strict=True):
        kind = np.float32 if _is_float32(arrays[wire_name]) else np.float64
        by_column = wire_name != name
        array = require_array(OWNER, arrays, wire_name, kind, size[::-1] if by_column else size)
        read[name] = array.T if by_column else array
    return read


def _is_float32(array: object) -> bool:
    return getattr(array, "dtype", None) == np.float32


# Models and scalers by the attributes that their prediction reads. Counts of training rows
# and the history of training stay where they are.


def _gaussian_sizes(_: Any, shape: Shape) -> Sizes:
    table = shape.num_classes, shape.width
    return {"theta_": table, "var_": table, "class_prior_": table[:1]}


def _discrete_sizes(_: Any, shape: Shape) -> Sizes:
    table = shape.num_classes, shape.width
    return {"feature_log_prob_": table, "class_log_prior_": table[:1]}


def _layers(model: Any, shape: Shape) -> list[int]:
    hidden = np.atleast_1d(model.hidden_layer_sizes).tolist()
    return [shape.width, *hidden, 1 if shape.num_classes == 2 else shape.num_classes]


def _perceptron_sizes(model: Any, shape: Shape) -> Sizes:
    layers = _layers(model, shape)
    pairs = list(pairwise(layers))
    return {
        **{f"coefs_/{i}": pair for i, pair in enumerate(pairs)},
        **{f"intercepts_/{i}": pair[1:] for i, pair in enumerate(pairs)},
    }


def _standard_sizes(scaler: Any, shape: Shape) -> Sizes:
    used = {"mean_": scaler.with_mean, "scale_": scaler.with_std}
    return {name: (shape.width,) for name, is_used in used.items() if is_used}


def _robust_sizes(scaler: Any, shape: Shape) -> Sizes:
    used = {"center_": scaler.with_centering, "scale_": scaler.with_scaling}
    return {name: (shape.width,) for name, is_used in used.items() if is_used}


def _component_sizes(scaler: Any, shape: Shape) -> Sizes:
    count = scaler.n_components_
    return {
        "components_": (count, shape.width),
        "mean_": (shape.width,),
        "explained_variance_": (count,),
    }


_SIZES: Final[Mapping[type, Callable[[Any, Shape], Sizes]]] = {
    naive_bayes.GaussianNB: _gaussian_sizes,
    naive_bayes.BernoulliNB: _discrete_sizes,
    naive_bayes.MultinomialNB: _discrete_sizes,
    naive_bayes.ComplementNB: _discrete_sizes,
    MLPClassifier: _perceptron_sizes,
    preprocessing.StandardScaler: _standard_sizes,
    preprocessing.MinMaxScaler: lambda _, shape: dict.fromkeys(
        ("min_", "scale_"), (shape.width,)
    ),
    preprocessing.MaxAbsScaler: lambda _, shape: {"scale_": (shape.width,)},
    preprocessing.RobustScaler: _robust_sizes,
    preprocessing.Normalizer: lambda *_: {},
    PCA: _component_sizes,
}
SCALERS: Final = (
    preprocessing.StandardScaler,
    preprocessing.MinMaxScaler,
    preprocessing.MaxAbsScaler,
    preprocessing.RobustScaler,
    preprocessing.Normalizer,
    PCA,
)
MODELS: Final = tuple(_SIZES.keys() - set(SCALERS))


def model_to_arrays(model: Any) -> dict[str, Array]:
    """Return what a fitted model or scaler has learned, and a print of its settings."""
    num_classes = 0 if type(model) in SCALERS else len(model.classes_)
    sizes = _SIZES[type(model)](model, Shape(num_classes, model.n_features_in_))
    arrays = {SETTINGS: _settings_print(model)}
    for name in sizes:
        attribute, _, number = name.partition("/")
        value = getattr(model, attribute)
        arrays |= _ordered(name, value[int(number)] if number else value)
    return arrays


def model_from_arrays(template: Any, arrays: Mapping[str, Array], shape: Shape) -> Any:
    """Return a fitted twin of `template` that has learned what the arrays say."""
    model, own = clone(template), dict(arrays)
    require_known(SETTINGS in own, OWNER, "arrays", f"with {SETTINGS!r}", sorted(own))
    received = require_array(OWNER, own, SETTINGS, np.uint8, (32,))
    same = np.array_equal(received, _settings_print(model))
    require_known(same, OWNER, SETTINGS, f"those of {model!r} as here", "others")
    del own[SETTINGS]
    if isinstance(model, PCA):
        model.n_components_ = _num_components(model, own, shape)
    for name, value in _read(own, _SIZES[type(model)](model, shape)).items():
        attribute, _, number = name.partition("/")
        if number:
            setattr(model, attribute, [*getattr(model, attribute, []), value])
        else:
            setattr(model, attribute, value)
    if isinstance(model, MLPClassifier):
        layers = _layers(model, shape)
        model.n_layers_, model.n_outputs_ = len(layers), layers[-1]
        model.out_activation_ = "logistic" if shape.num_classes == 2 else "softmax"
    return as_classifier(model, shape)


def _settings_print(model: Any) -> Array:
    """Return a fingerprint of the settings that both sides must share."""
    settings = model.get_params(deep=False).items()
    text = repr(
        sorted((name, repr(v)) for name, v in settings if name not in _LOCAL_PARAMETERS)
    )
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype=np.uint8)


def _num_components(model: PCA, arrays: Mapping[str, Array], shape: Shape) -> int:
    """Return how many components were kept, which the settings may leave to the data."""
    count, set_to = int(np.size(arrays.get("explained_variance_", ()))), model.n_components
    fits = count == set_to if isinstance(set_to, int) else 1 <= count <= shape.width
    rule = f"as many numbers as {model!r} has components"
    require_known(fits, OWNER, "explained_variance_", rule, count)
    return count


def width_after(scaler: Any, width: int) -> int:
    """Return how many columns a fitted scaler makes of `width`."""
    return int(getattr(scaler, "n_components_", width))


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


VALUES: Final = "values"
LEAF_VALUES: Final = "leaf-values"


def trees_to_arrays(trees: Sequence[Any]) -> dict[str, Array]:
    """Return fitted trees as arrays over all their nodes, splits and leaves.

    Leaves share few distinct rows of class shares, so these are listed once.
    """
    grown = Trees.grow(sklearn_tree(tree.tree_, tree.tree_.value[:, 0]) for tree in trees)
    shares, index = np.unique(grown.values, axis=0, return_inverse=True)
    narrow = index.reshape(-1, 1).astype(np.min_scalar_type(len(shares) - 1))
    received = ReceivedTrees(replace(grown, values=narrow), shares, trees[0].tree_.n_features)
    return received.to_arrays()


class ReceivedTrees(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Trees that have arrived, with scores that are the sender's to the bit.

    Parameters
    ----------
    trees : Trees
        A leaf holds one number, that of its row in `shares`: a model of a thousand classes
        takes hardly more memory than one of two.
    shares : (num_distinct, num_classes)
    width : int
    """

    def __init__(self, trees: Trees, shares: FloatArray, width: int) -> None:
        self.trees = trees
        self.shares = shares
        self.width = width

    def to_arrays(self) -> dict[str, Array]:
        """Return the trees as arrays for the wire."""
        arrays = self.trees.to_arrays(self.width)
        return {**arrays, LEAF_VALUES: arrays[VALUES], VALUES: self.shares.copy()}

    def predict_proba(self, x: Array) -> FloatArray:
        """Return the mean class shares of the leaves that rows fall into, (n, k)."""
        rows = to_float32(OWNER, np.asarray(x))
        return np.concatenate([self._mean(leaf) for leaf in self.trees.leaf_values(rows)])

    def _mean(self, leaf_values: Array) -> FloatArray:
        """Return the mean of shares (b, k); trees are added one after the other.

        That is scikit-learn's order, on which the last bit of a sum depends.
        """
        index = leaf_values[:, :, 0]
        total = np.zeros((index.shape[1], self.shares.shape[1]))
        step = max(1, VALUES_AT_ONCE // total.size)
        for start in range(0, len(index), step):
            shares = self.shares[index[start : start + step]]
            shares[0] += total
            total = shares.sum(axis=0)
        return np.asarray(total / len(index))

    def predict(self, x: Array) -> IntArray:
        """Return the likeliest class of every row; ties go to the first."""
        labels: IntArray = self.predict_proba(x).argmax(axis=1)
        return labels

    def fit(self, x: Array, y: Array) -> NoReturn:  # noqa: ARG002 - scikit-learn asks for it
        """Refuse: these trees are fitted already."""
        raise UnsupportedLearner(f"{OWNER}: received trees must stay as they are, got rows.")

    def __sklearn_is_fitted__(self) -> bool:
        """Return that they are fitted, which a `Pipeline` wants to know."""
        return True


def trees_from_arrays(
    num_trees: int, arrays: Mapping[str, Array], shape: Shape
) -> ReceivedTrees:
    """Return received trees; raise `KnowledgeMismatch` for all that are not whole."""
    own = dict(arrays)
    for name in (VALUES, LEAF_VALUES):
        require_known(name in own, OWNER, "arrays", f"with {name!r}", sorted(map(str, own)))
    distinct = len(np.atleast_1d(own[VALUES]))
    require_known(distinct > 0, OWNER, VALUES, "at least one row", distinct)
    rows = (distinct, shape.num_classes)
    shares = require_array(OWNER, own, VALUES, np.float64, rows)
    sound = shares.min() >= 0 and shares.max() <= 1 and np.allclose(shares.sum(axis=1), 1)
    require_known(sound, OWNER, VALUES, "shares that sum to 1", "something else")
    own[VALUES] = own.pop(LEAF_VALUES)
    trees = Trees.from_arrays(
        OWNER,
        own,
        num_trees=num_trees,
        width=shape.width,
        num_values=1,
        dtype=np.min_scalar_type(distinct - 1),
        max_bytes=shape.max_bytes,
    )
    inside = bool((trees.values < distinct).all())
    require_known(inside, OWNER, LEAF_VALUES, f"below {distinct}", "a larger index")
    return ReceivedTrees(trees, shares, shape.width)
