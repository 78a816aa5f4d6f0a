"""Models of scikit-learn as learners of labels, and its trees as learners of scores.

Fitted models travel as plain arrays, without pickle and without archives. Linear models, naive
Bayes, perceptrons and scalers consist of a few arrays each, whose shapes follow from the
receiver's own settings: what has any other shape is refused before it is copied. Received trees
are walked in numpy, see `clients.tabular.trees`: no native code reads a node that somebody else
has written.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import numpy as np

from clients.tabular.base import (
    ScoreLearner,
    TabularLearner,
    WeightedLabels,
    all_but,
    require_array,
    require_names,
    to_float32,
)
from clients.tabular.trees import VALUES_AT_ONCE, Trees, num_received_trees, sklearn_tree
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import (
    KnowledgeMismatch,
    MissingExtra,
    UnsupportedLearner,
    require,
    require_known,
)
from fl_strategies.learners import Task
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES

try:
    from sklearn import clone, config_context
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.decomposition import PCA
    from sklearn.ensemble import (
        ExtraTreesClassifier,
        ExtraTreesRegressor,
        RandomForestClassifier,
        RandomForestRegressor,
    )
    from sklearn.linear_model import (
        LogisticRegression,
        Perceptron,
        RidgeClassifier,
        SGDClassifier,
    )
    from sklearn.naive_bayes import BernoulliNB, ComplementNB, GaussianNB, MultinomialNB
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import (
        LabelBinarizer,
        MaxAbsScaler,
        MinMaxScaler,
        Normalizer,
        RobustScaler,
        StandardScaler,
    )
    from sklearn.svm import SVC, LinearSVC, NuSVC
    from sklearn.tree import (
        DecisionTreeClassifier,
        DecisionTreeRegressor,
        ExtraTreeClassifier,
        ExtraTreeRegressor,
    )
    from sklearn.utils.validation import has_fit_parameter
except ImportError as error:
    raise MissingExtra("SklearnLearner", str(error.name), "sklearn") from error

OWNER: Final = "SklearnLearner"
TREES: Final = (DecisionTreeClassifier, ExtraTreeClassifier)
FORESTS: Final = (RandomForestClassifier, ExtraTreesClassifier)
REGRESSION_TREES: Final = (DecisionTreeRegressor, ExtraTreeRegressor)
REGRESSION_FORESTS: Final = (RandomForestRegressor, ExtraTreesRegressor)
LINEAR: Final = (LogisticRegression, RidgeClassifier, LinearSVC, SGDClassifier, Perceptron)
MODELS: Final = (GaussianNB, BernoulliNB, MultinomialNB, ComplementNB, MLPClassifier)
SCALERS: Final = (StandardScaler, MinMaxScaler, MaxAbsScaler, RobustScaler, Normalizer, PCA)
# The hinge loss asks which class is likelier and not by how much, so rows of several classes
# would teach them nothing, at a hundred times the cost.
HINGED: Final = (SVC, NuSVC, LinearSVC)

SETTINGS: Final = "settings"
VALUES: Final = "values"
LEAF_VALUES: Final = "leaf-values"
_BY_COLUMN: Final = "-by-column"
# Settings of the machine rather than of the model: sender and receiver may differ.
_LOCAL_PARAMETERS: Final = {"random_state", "n_jobs", "verbose", "copy"}
_LARGEST_SEED: Final = np.iinfo(np.int32).max

Sizes: TypeAlias = dict[str, tuple[int, ...]]


class Shape(NamedTuple):
    """Public facts about a model, known before its arrays are read."""

    num_classes: int
    width: int
    max_bytes: int = MAX_REPLY_BYTES


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
    return _as_classifier(model, shape)


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
        narrow = getattr(arrays[wire_name], "dtype", None) == np.float32
        kind = np.float32 if narrow else np.float64
        by_column = wire_name != name
        array = require_array(OWNER, arrays, wire_name, kind, size[::-1] if by_column else size)
        read[name] = array.T if by_column else array
    return read


def _sizes(model: Any, shape: Shape) -> Sizes:
    """Return the attributes that the prediction of a model or scaler reads, and their shapes.

    Counts of training rows and the history of training stay where they are.
    """
    k, d = shape.num_classes, shape.width
    used: dict[str, bool] = {}
    match model:
        case GaussianNB():
            return {"theta_": (k, d), "var_": (k, d), "class_prior_": (k,)}
        case BernoulliNB() | MultinomialNB() | ComplementNB():
            return {"feature_log_prob_": (k, d), "class_log_prior_": (k,)}
        case MLPClassifier():
            pairs = list(pairwise(_layers(model, shape)))
            return {
                **{f"coefs_/{i}": pair for i, pair in enumerate(pairs)},
                **{f"intercepts_/{i}": pair[1:] for i, pair in enumerate(pairs)},
            }
        case PCA(n_components_=count):
            return {"components_": (count, d), "mean_": (d,), "explained_variance_": (count,)}
        case StandardScaler():
            used = {"mean_": model.with_mean, "scale_": model.with_std}
        case RobustScaler():
            used = {"center_": model.with_centering, "scale_": model.with_scaling}
        case MinMaxScaler():
            used = {"min_": True, "scale_": True}
        case MaxAbsScaler():
            used = {"scale_": True}
    return {name: (d,) for name, is_used in used.items() if is_used}


def _layers(model: Any, shape: Shape) -> list[int]:
    hidden = np.atleast_1d(model.hidden_layer_sizes).tolist()
    return [shape.width, *hidden, 1 if shape.num_classes == 2 else shape.num_classes]


def model_to_arrays(model: Any) -> dict[str, Array]:
    """Return what a fitted model or scaler has learned, and a print of its settings."""
    num_classes = 0 if type(model) in SCALERS else len(model.classes_)
    arrays = {SETTINGS: _settings_print(model)}
    for name in _sizes(model, Shape(num_classes, model.n_features_in_)):
        attribute, _, number = name.partition("/")
        value = getattr(model, attribute)
        arrays |= _ordered(name, value[int(number)] if number else value)
    return arrays


def model_from_arrays(template: Any, arrays: Mapping[str, Array], shape: Shape) -> Any:
    """Return a fitted twin of `template` that has learned what the arrays say."""
    model, own = clone(template), all_but(OWNER, arrays, SETTINGS)
    received = require_array(OWNER, arrays, SETTINGS, np.uint8, (32,))
    same = np.array_equal(received, _settings_print(model))
    require_known(same, OWNER, SETTINGS, f"those of {model!r} as here", "others")
    if isinstance(model, PCA):
        model.n_components_ = _num_components(model, own, shape)
    for name, value in _read(own, _sizes(model, shape)).items():
        attribute, _, number = name.partition("/")
        earlier = getattr(model, attribute, [])
        setattr(model, attribute, [*earlier, value] if number else value)
    if isinstance(model, MLPClassifier):
        layers = _layers(model, shape)
        model.n_layers_, model.n_outputs_ = len(layers), layers[-1]
        model.out_activation_ = "logistic" if shape.num_classes == 2 else "softmax"
    return _as_classifier(model, shape)


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


def _as_classifier(model: Any, shape: Shape) -> Any:
    """Give a rebuilt model the classes 0 .. k - 1 and its width."""
    model.n_features_in_ = shape.width
    if isinstance(model, (RidgeClassifier, MLPClassifier)):
        model._label_binarizer = LabelBinarizer().fit(np.arange(shape.num_classes))
    # Some versions of scikit-learn derive the classes of a ridge from its binarizer.
    if not isinstance(getattr(type(model), "classes_", None), property):
        model.classes_ = np.arange(shape.num_classes)
    return model


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
    own = {**all_but(OWNER, arrays, VALUES, LEAF_VALUES), VALUES: arrays[LEAF_VALUES]}
    distinct = len(np.atleast_1d(arrays[VALUES]))
    require_known(distinct > 0, OWNER, VALUES, "at least one row", distinct)
    rows = (distinct, shape.num_classes)
    shares = require_array(OWNER, arrays, VALUES, np.float64, rows)
    sound = shares.min() >= 0 and shares.max() <= 1 and np.allclose(shares.sum(axis=1), 1)
    require_known(sound, OWNER, VALUES, "shares that sum to 1", "something else")
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
        What labels are; see `fl_strategies.learners`.

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
        allowed = (*REGRESSION_TREES, *REGRESSION_FORESTS)
        rule = f"one of {', '.join(each.__name__ for each in allowed)}"
        known = type(estimator) in allowed
        require(known, self._owner, "estimator", rule, estimator)
        self._template = estimator
        self._trees: Trees

    def _regress(self, x: Array, targets: FloatArray, rng: np.random.Generator) -> None:
        model = clone(self._template).set_params(random_state=int(rng.integers(_LARGEST_SEED)))
        # scikit-learn warns of a single column.
        labels = targets[:, 0] if targets.shape[1] == 1 else targets
        model.fit(to_float32(self._owner, x), labels)
        fitted = [model] if type(model) in REGRESSION_TREES else model.estimators_
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
        alone = type(self._template) in REGRESSION_TREES
        self._trees = Trees.from_arrays(
            self._owner,
            arrays,
            num_trees=1 if alone else num_received_trees(self._owner, arrays),
            width=self._width,
            num_values=self.num_classes,
        )


class SklearnLearner(TabularLearner):
    """A scikit-learn classifier, or a `Pipeline` that ends in one.

    Every `fit` trains a clone whose random states, also those of nested estimators, are
    drawn from `rng`; the estimator that was passed in is never changed. Results are
    those of scikit-learn itself for the same random states, to the bit; trees and
    forests only get there with fewer checks on the way.

    Scores come from `predict_proba`. An estimator without it gives the softmax of its
    decision function, which orders classes well but is not calibrated, and one without
    either gives all weight to the class it predicts.

    `distill` weighs rows by `sample_weight`. Estimators that do not take it, such as nearest
    neighbours, and support vector machines learn the likeliest class of each row.

    Trees, forests, the common linear models, naive Bayes, `MLPClassifier`, and pipelines
    of scalers before one of these can travel as arrays. Other models cannot, and
    `to_arrays` says so: nearest neighbours and kernel machines consist of their training
    rows, and the nodes of boosted trees are not checked here. Let them vote instead.

    Parameters
    ----------
    estimator : classifier
        An unfitted scikit-learn classifier.
    num_classes : int
        Length of the federation's class list.
    max_model_bytes : int
        Memory that a received model may take; see `clients.tabular.base` for the other limits.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.tree import DecisionTreeClassifier
    >>> learner = SklearnLearner(DecisionTreeClassifier(max_depth=2), num_classes=3)
    >>> x, y = np.array([[0.0], [1.0], [2.0]]), np.array([0, 2, 2])
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(x)
    array([0, 2, 2])
    """

    def __init__(
        self, estimator: Any, *, num_classes: int, max_model_bytes: int = MAX_REPLY_BYTES
    ) -> None:
        super().__init__(num_classes=num_classes)
        verbs = ("fit", "predict", "get_params")
        is_classifier = all(hasattr(estimator, verb) for verb in verbs)
        require(is_classifier, self._owner, "estimator", "a classifier", estimator)
        for name, value in estimator.get_params().items():
            # One column per pair of classes cannot be told from one per class.
            one_per_class = not (name.endswith("decision_function_shape") and value == "ovo")
            require(one_per_class, self._owner, name, "'ovr', one column a class", value)
        most = max_model_bytes
        require(most > 0, self._owner, "max_model_bytes", "positive", most)
        self._template = estimator
        self._max_model_bytes = max_model_bytes
        self._model: Any = None
        self._is_received = False

    def _fit(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        self._is_received = False
        is_tree, is_forest = type(self._template) in TREES, _is_plain_forest(self._template)
        if not is_tree and not is_forest:
            self._model = _seeded_clone(self._template, rng).fit(x, y)
            return
        # These have one random state and no nested estimator, so a copy is a clone.
        model = copy.copy(self._template)
        model.random_state = int(rng.integers(_LARGEST_SEED))
        rows = to_float32(self._owner, x)
        if is_tree:
            self._model = model.fit(rows, y, check_input=False)
        else:
            self._model = _fit_forest(model, rows, y)

    @property
    def _takes_weights(self) -> bool:
        return takes_weights(self._template)

    def _fit_weighted(self, x: Array, labels: WeightedLabels, rng: np.random.Generator) -> None:
        self._is_received = False
        model = _seeded_clone(self._template, rng)
        if type(model) in (*TREES, *FORESTS):
            x = to_float32(self._owner, x)
        if _is_plain_forest(model):
            self._model = _fit_forest(model, x, labels.classes, labels)
        else:
            self._model = fit_weighted(model, x, labels)

    def _probabilities(self, x: Array) -> FloatArray:
        if type(self._model) in TREES:
            return _mean_shares([self._model], to_float32(self._owner, x))
        if type(self._model) in FORESTS:
            return _mean_shares(self._model.estimators_, to_float32(self._owner, x))
        if type(self._model) is ReceivedTrees:
            return self._model.predict_proba(x)
        if hasattr(self._model, "predict_proba"):
            return self._ask("predict_proba", x)
        if hasattr(self._model, "decision_function"):
            return _softmax(self._ask("decision_function", x))
        return np.eye(self._num_present)[self._predict(x)]

    def _predict(self, x: Array) -> IntArray:
        if type(self._model) in (*TREES, *FORESTS, ReceivedTrees):
            return super()._predict(x)
        return self._ask("predict", x).astype(np.int64)

    def _ask(self, method: str, x: Array) -> Array:
        """Call the model; blame the sender if a received one cannot answer."""
        try:
            return np.asarray(getattr(self._model, method)(x))
        except Exception as error:
            if not self._is_received:
                raise
            raise KnowledgeMismatch(
                f"{self._owner}: a received model must score every row, got "
                f"{type(error).__name__}."
            ) from error

    @property
    def fitted_estimator(self) -> Any:
        """scikit-learn's own model of the classes present; None if it was not trained here."""
        is_constant = self._classes is None or len(self._classes) == 1
        return None if is_constant or self._is_received else self._model

    @property
    def travels(self) -> bool:
        """Whether models of this estimator have an array form."""
        return _travels(self._template)

    def _to_arrays(self) -> dict[str, Array]:
        return _form_of(self._model).encode(self._model)

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        shape = Shape(self._num_present, self._width, self._max_model_bytes)
        self._model = _form_of(self._template).decode(self._template, arrays, shape)
        self._is_received = True


def _seeded_clone(estimator: Any, rng: np.random.Generator) -> Any:
    """Return an unfitted twin with all its random states, also nested ones, from `rng`."""
    model = clone(estimator)
    names = [name for name in model.get_params() if name.split("__")[-1] == "random_state"]
    return model.set_params(
        **{name: int(rng.integers(_LARGEST_SEED)) for name in sorted(names)}
    )


def _is_plain_forest(model: Any) -> bool:
    """Tell whether `_fit_forest` knows every setting of a forest that shapes its trees."""
    return (
        type(model) in FORESTS
        and isinstance(model.n_estimators, int)
        and model.n_estimators >= 1
        and isinstance(model.bootstrap, bool)
        and model.n_jobs in (None, 1)
        and model.max_samples is None
        and model.class_weight is None
        and not (model.oob_score or model.warm_start or model.verbose)
    )


def _fit_forest(
    forest: Any, x: Array, y: IntArray, weighted: WeightedLabels | None = None
) -> Any:
    """Fit the very trees that `forest.fit` would, without its overhead per tree.

    With weighted labels a tree's bootstrap sample draws rows, each with all its labels.
    """
    settings = {name: getattr(forest, name) for name in forest.estimator_params}
    prototype = clone(forest.estimator).set_params(**settings)
    seeds, labels = np.random.RandomState(forest.random_state), y.astype(np.float64)[:, None]
    trees = [copy.copy(prototype) for _ in range(forest.n_estimators)]
    for tree in trees:
        tree.random_state = seeds.randint(_LARGEST_SEED)
    rows = x if weighted is None else x[weighted.rows]

    def grow(tree: Any) -> None:
        weights: Array | None = None if weighted is None else weighted.weights
        if forest.bootstrap:  # each row as often as scikit-learn's forest draws it
            drawn = np.random.RandomState(tree.random_state).randint(0, len(x), len(x))
            counts = np.bincount(drawn, minlength=len(x))
            weights = counts if weighted is None else weighted.weights * counts[weighted.rows]
        tree.fit(rows, labels, sample_weight=weights, check_input=False)

    grow(trees[0])  # checks the settings that all trees share
    with config_context(skip_parameter_validation=True, assume_finite=True):
        for tree in trees[1:]:
            grow(tree)
    num_classes = int(y.max()) + 1
    forest.estimators_, forest.n_outputs_, forest.n_features_in_ = trees, 1, x.shape[1]
    forest.classes_, forest.n_classes_ = np.arange(num_classes), num_classes
    return forest


def _mean_shares(trees: Sequence[Any], x: Array) -> FloatArray:
    """Return the mean class shares of the leaves that rows fall into, (n, k).

    Trees are summed one after the other, so that the last bit of a score does not
    depend on which of several threads came first.
    """
    total: FloatArray = trees[0].tree_.predict(x)
    for tree in trees[1:]:
        total += tree.tree_.predict(x)
    total /= len(trees)
    return total


def _softmax(decisions: Array) -> FloatArray:
    """Return the softmax of decision values (n, k), or (n,) for two classes."""
    if decisions.ndim == 1:
        decisions = np.stack([np.zeros_like(decisions), decisions], axis=1)
    # Finite coefficients that were received can still overflow; `logits` replaces NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.exp(decisions - decisions.max(axis=1, keepdims=True))
        shares: FloatArray = powers / powers.sum(axis=1, keepdims=True)
    return shares


class _Form(NamedTuple):
    """Conversion between models of some types and arrays."""

    types: tuple[type, ...]
    encode: Callable[[Any], dict[str, Array]]
    decode: Callable[[Any, Mapping[str, Array], Shape], Any]


def _form_of(model: Any) -> _Form:
    for form in _FORMS:
        if type(model) in form.types:
            return form
    raise _unsupported(model)


def _travels(model: Any) -> bool:
    try:
        if type(model) is Pipeline:
            return all(_scalers(model)) and _travels(model.steps[-1][1])
        _form_of(model)
    except UnsupportedLearner:
        return False
    return True


def _unsupported(model: Any) -> UnsupportedLearner:
    return UnsupportedLearner(
        f"{OWNER}: a model that travels must have an array form, got "
        f'{type(model).__name__}. Use exchange="votes", which needs no model on the wire.'
    )


def _forest_from_arrays(_: Any, arrays: Mapping[str, Array], shape: Shape) -> Any:
    return trees_from_arrays(num_received_trees(OWNER, arrays), arrays, shape)


def _pipeline_to_arrays(pipeline: Any) -> dict[str, Array]:
    scalers = {
        f"{prefix}{name}": array
        for prefix, _, scaler in _scalers(pipeline)
        for name, array in model_to_arrays(scaler).items()
    }
    final = pipeline.steps[-1][1]
    return {**scalers, **_form_of(final).encode(final)}


def _pipeline_from_arrays(template: Any, arrays: Mapping[str, Array], shape: Shape) -> Any:
    pipeline, left = clone(template), dict(arrays)
    for prefix, position, scaler in _scalers(pipeline):
        names = [name for name in left if str(name).startswith(prefix)]
        own = {name.removeprefix(prefix): left.pop(name) for name in names}
        fitted = model_from_arrays(scaler, own, shape)
        pipeline.steps[position] = (pipeline.steps[position][0], fitted)
        shape = shape._replace(width=getattr(fitted, "n_components_", shape.width))
    name, final = pipeline.steps[-1]
    pipeline.steps[-1] = (name, _form_of(final).decode(final, left, shape))
    return pipeline


def _scalers(pipeline: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield prefix on the wire, position and estimator of all steps before the classifier."""
    if type(pipeline.steps[-1][1]) is Pipeline:
        raise _unsupported(pipeline.steps[-1][1])
    for position, (_, scaler) in enumerate(pipeline.steps[:-1]):
        if scaler is None or scaler == "passthrough":
            continue
        if type(scaler) not in SCALERS:
            raise _unsupported(scaler)
        yield f"step-{position}/", position, scaler


_FORMS: Final = (
    _Form(
        TREES,
        lambda model: trees_to_arrays([model]),
        lambda _, arrays, shape: trees_from_arrays(1, arrays, shape),
    ),
    _Form(FORESTS, lambda model: trees_to_arrays(model.estimators_), _forest_from_arrays),
    _Form((ReceivedTrees,), ReceivedTrees.to_arrays, _forest_from_arrays),
    _Form(LINEAR, linear_to_arrays, linear_from_arrays),
    _Form(MODELS, model_to_arrays, model_from_arrays),
    _Form((Pipeline,), _pipeline_to_arrays, _pipeline_from_arrays),
)


def takes_weights(estimator: Any) -> bool:
    """Tell whether an estimator, and all that it is made of, gains from weighted rows."""
    if isinstance(estimator, Pipeline):
        return takes_weights(estimator.steps[-1][1])
    nested = [part for part in estimator.get_params().values() if hasattr(part, "fit")]
    return all(
        has_fit_parameter(each, "sample_weight") and not isinstance(each, HINGED)
        for each in (estimator, *nested)
    )


def fit_weighted(model: Any, x: Array, labels: WeightedLabels) -> Any:
    """Fit an estimator that takes weights to rows (n, d), and return it.

    The steps of a pipeline before the last see every row once, as they do without weights.
    """
    if not isinstance(model, Pipeline):
        return model.fit(x[labels.rows], labels.classes, sample_weight=labels.weights)
    if len(model.steps) > 1:
        before = model[:-1]
        x = before.fit_transform(x, labels.likeliest)
        model.steps[:-1] = before.steps
    fit_weighted(model.steps[-1][1], x, labels)
    return model
