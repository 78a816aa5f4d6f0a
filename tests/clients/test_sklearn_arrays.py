"""The array forms of scikit-learn models: exact for friends, closed to the untrusted."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Perceptron, RidgeClassifier, SGDClassifier
from sklearn.naive_bayes import BernoulliNB, ComplementNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier, ExtraTreeClassifier

from clients.tabular.sklearn import Shape, SklearnLearner, trees_from_arrays, trees_to_arrays
from fl_strategies._util import Array
from fl_strategies.errors import KnowledgeMismatch, UnsupportedLearner
from tests.clients.digits import DIGITS, NUM_CLASSES, digits

Arrays = dict[str, Array]
FOREST = ("tree-sizes", "leaf-bits", "features", "thresholds", "values", "leaf-values")

TREES = [
    DecisionTreeClassifier(max_depth=5),
    DecisionTreeClassifier(max_leaf_nodes=20),
    DecisionTreeClassifier(ccp_alpha=0.01, class_weight="balanced"),
    ExtraTreeClassifier(),
    RandomForestClassifier(6, max_depth=5),
    RandomForestClassifier(4, max_leaf_nodes=9, class_weight="balanced_subsample"),
    ExtraTreesClassifier(6),
]
LINEAR = [
    LogisticRegression(),
    LogisticRegression(fit_intercept=False),
    RidgeClassifier(),
    RidgeClassifier(fit_intercept=False),
    LinearSVC(),
    LinearSVC(fit_intercept=False),
    SGDClassifier(),
    SGDClassifier(loss="log_loss", average=True),
    Perceptron(),
]
PLAIN = [
    GaussianNB(),
    BernoulliNB(binarize=7.0),
    MultinomialNB(),
    ComplementNB(norm=True),
    MLPClassifier((6, 5), max_iter=5),
]
PIPELINES = [
    make_pipeline(StandardScaler(), RandomForestClassifier(4, max_depth=4)),
    make_pipeline(StandardScaler(with_mean=False), LogisticRegression()),
    make_pipeline(MinMaxScaler(clip=True), PCA(5, whiten=True), GaussianNB()),
    make_pipeline(MaxAbsScaler(), RobustScaler(), Normalizer(), LinearSVC()),
    make_pipeline("passthrough", PCA(7), DecisionTreeClassifier(max_depth=4)),
]
UNSUPPORTED = [
    SVC(),
    KNeighborsClassifier(3),
    KNeighborsClassifier(3, algorithm="brute"),
    GradientBoostingClassifier(n_estimators=2),
    HistGradientBoostingClassifier(max_iter=2),
    make_pipeline(StandardScaler(), SVC()),
    make_pipeline(PolynomialFeatures(1), LogisticRegression()),
    make_pipeline(StandardScaler(), make_pipeline(StandardScaler(), GaussianNB())),
]


def name_of(estimator: Any) -> str:
    return repr(estimator).replace("\n", "")[:50]


def learner(estimator: Any, **settings: int) -> SklearnLearner:
    return SklearnLearner(clone(estimator), num_classes=NUM_CLASSES, **settings)


def fitted(estimator: Any, classes: list[int], dtype: Any = np.float64) -> SklearnLearner:
    x, y = digits(classes, num_rows=120)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return learner(estimator).fit(x.astype(dtype), y, rng=np.random.default_rng(3))


def small_forest() -> tuple[Any, Arrays]:
    estimator = RandomForestClassifier(3, max_depth=3)
    return estimator, fitted(estimator, [0, 4, 7]).to_arrays()


def check_refused(estimator: Any, arrays: Arrays, message: str) -> None:
    with pytest.raises(KnowledgeMismatch, match=message):
        learner(estimator).from_arrays(arrays)


# --- exact for friends --------------------------------------------------------------------


@pytest.mark.parametrize("classes", [[0, 4], [0, 4, 7], list(range(10))], ids=len)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("estimator", [*TREES, *LINEAR, *PLAIN, *PIPELINES], ids=name_of)
def test_a_model_predicts_the_same_to_the_bit_after_travel(
    estimator: Any, dtype: Any, classes: list[int]
) -> None:
    """Labels and scores of a received model equal the sender's on rows it never saw."""
    x = DIGITS[:300].astype(dtype)
    sender = fitted(estimator, classes, dtype)

    twin = learner(estimator).from_arrays(sender.to_arrays())

    assert np.array_equal(sender.predict(x), twin.predict(x))
    assert np.array_equal(sender.logits(x), twin.logits(x))


@pytest.mark.parametrize("estimator", TREES, ids=name_of)
def test_a_received_tree_may_travel_on(estimator: Any) -> None:
    """A second journey changes nothing: the form holds all there is to know."""
    arrays = fitted(estimator, [0, 4, 7]).to_arrays()

    again = learner(estimator).from_arrays(arrays).to_arrays()

    assert arrays.keys() == again.keys()
    for name, array in arrays.items():
        assert np.array_equal(array, again[name])


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_narrow_thresholds_split_all_float32_rows_alike(seed: int) -> None:
    """Rows on, just above and just below every threshold fall into the same leaves."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(40, 2)) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
    y = rng.integers(3, size=40)
    tree = DecisionTreeClassifier(random_state=0).fit(x, y)
    shape = Shape(num_classes=tree.n_classes_, width=2)
    edges = tree.tree_.threshold.astype(np.float32)
    near = [np.nextafter(edges, np.float32(end)) for end in (-np.inf, np.inf)]
    probes = np.concatenate([edges, *near, x.ravel()])
    rows = np.stack([probes, rng.permutation(probes)], axis=1)

    twin = trees_from_arrays(1, trees_to_arrays([tree]), shape)

    assert np.array_equal(tree.predict_proba(rows), twin.predict_proba(rows))


def test_a_forest_is_small() -> None:
    """A node takes less than eight bytes, a fifteenth of what pickle takes."""
    sender = fitted(RandomForestClassifier(50), list(range(10)))
    num_nodes = sum(tree.tree_.node_count for tree in sender._model.estimators_)

    num_bytes = sum(array.nbytes for array in sender.to_arrays().values())

    assert num_bytes < 8 * num_nodes


def test_training_statistics_stay_at_home() -> None:
    """Numbers of training rows, impurities and the history of training do not travel."""
    tree = fitted(DecisionTreeClassifier(), [0, 4]).to_arrays()
    bayes = fitted(GaussianNB(), [0, 4]).to_arrays()
    network = fitted(MLPClassifier((6,), max_iter=5), [0, 4]).to_arrays()

    assert tree.keys() == {"classes", "width", *FOREST}
    assert bayes.keys() == {"classes", "width", "settings", "theta_", "var_", "class_prior_"}
    layers = {"coefs_/0", "coefs_/1", "intercepts_/0", "intercepts_/1"}
    assert network.keys() == {"classes", "width", "settings", *layers}


@pytest.mark.parametrize("estimator", UNSUPPORTED, ids=name_of)
def test_models_without_a_safe_form_say_so(estimator: Any) -> None:
    """Training rows and unchecked nodes never travel; the error offers votes."""
    sender = fitted(estimator, [0, 4, 7])

    with pytest.raises(UnsupportedLearner, match='exchange="votes"'):
        sender.to_arrays()


def test_the_setting_of_the_receiver_counts() -> None:
    """Seeds and threads may differ between the sides, settings of the model may not."""
    arrays = fitted(MLPClassifier((6,), max_iter=5), [0, 4, 7]).to_arrays()

    twin = learner(MLPClassifier((6,), max_iter=5, random_state=1, verbose=0))

    assert twin.from_arrays(arrays)._model.random_state == 1
    other = MLPClassifier((6,), max_iter=5, activation="tanh")
    check_refused(other, arrays, "settings must be those of MLPClassifier.activation='tanh'")


# --- trees closed to the untrusted ------------------------------------------------------------


def replaced(name: str, change: Callable[[Array], Array]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, name: change(arrays[name])}


def first_as(value: float) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        changed = array.copy()
        changed.flat[0] = value
        return changed

    return change


def shifted_sizes(sizes: Array) -> Array:
    return np.asarray(sizes + np.array([2, -2, 0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("tree-sizes", first_as(0)), "tree-sizes must be at least 1"),
        (replaced("tree-sizes", first_as(-3)), "tree-sizes must be at least 1"),
        (replaced("tree-sizes", first_as(2**40)), "a model up to \\d+ bytes in memory"),
        (replaced("tree-sizes", first_as(2**62)), "a model up to \\d+ bytes in memory"),
        (replaced("tree-sizes", first_as(101)), "leaf-bits must be of shape"),
        (replaced("tree-sizes", shifted_sizes), "leaf-bits must be whole trees"),
        (replaced("tree-sizes", lambda a: a[:2]), "leaf-bits must be of shape"),
        (replaced("tree-sizes", lambda a: a[:0]), "those of 1 to 10000 trees, got 0"),
        (replaced("tree-sizes", lambda a: np.repeat(a, 9_999)), "those of 1 to 10000 trees"),
        (replaced("tree-sizes", lambda a: a[:, None]), "tree-sizes must be of shape"),
        (replaced("tree-sizes", lambda a: a.astype(float)), "tree-sizes must be of int64"),
        (replaced("leaf-bits", np.zeros_like), "must be of shape"),
        (replaced("leaf-bits", lambda a: a ^ 255), "must be"),
        (replaced("leaf-bits", lambda a: a[:-1]), "leaf-bits must be of shape"),
        (replaced("features", first_as(64)), "features must be below 64"),
        (replaced("features", lambda a: a.astype(np.int64) - 100), "features must be of uint8"),
        (replaced("features", lambda a: a[1:]), "features must be of shape"),
        (replaced("thresholds", first_as(np.nan)), "thresholds must be finite"),
        (replaced("thresholds", first_as(np.inf)), "thresholds must be finite"),
        (replaced("thresholds", lambda a: a.astype(np.float64)), "must be of float32"),
        (replaced("values", first_as(np.nan)), "values must be finite"),
        (replaced("values", first_as(-0.5)), "values must be shares"),
        (replaced("values", first_as(1e300)), "values must be shares"),
        (replaced("values", lambda a: a / 2), "values must be shares"),
        (replaced("values", lambda a: a[:0]), "values must be at least one row"),
        (replaced("values", lambda a: np.repeat(a, 99, axis=0)), "values must be of uint16"),
        (replaced("values", lambda a: a[:, :2]), "values must be of shape"),
        (replaced("values", lambda a: a[0]), "values must be of shape"),
        (replaced("leaf-values", first_as(200)), "leaf-values must be below"),
        (replaced("leaf-values", lambda a: a[:-1]), "values must be of shape"),
        (lambda arrays: {**arrays, "impurity": np.zeros(3)}, "arrays must be named"),
        (replaced("thresholds", lambda a: a.tolist()), "thresholds must be an array"),
    ],
)
def test_broken_forests_are_refused(change: Callable[[Arrays], Arrays], message: str) -> None:
    """Each rule of the form is checked before native code reads a single node."""
    estimator, arrays = small_forest()

    check_refused(estimator, change(arrays), message)


@pytest.mark.parametrize("name", FOREST)
def test_every_array_of_a_forest_is_needed(name: str) -> None:
    """A form with a part missing is refused by name."""
    estimator, arrays = small_forest()
    del arrays[name]

    check_refused(estimator, arrays, "arrays must be (named|with)")


def test_a_forest_may_have_another_size() -> None:
    """Its sender chose how many trees it has; a single tree has one."""
    estimator, arrays = small_forest()
    same, other = (
        learner(forest).from_arrays(arrays)
        for forest in (estimator, RandomForestClassifier(4, max_depth=3))
    )

    assert same.logits(DIGITS).tobytes() == other.logits(DIGITS).tobytes()
    check_refused(DecisionTreeClassifier(), arrays, "tree-sizes must be of shape")


def test_a_large_model_needs_permission() -> None:
    """What a model takes in memory is known, and bounded, before it is allocated."""
    estimator, arrays = small_forest()
    num_nodes = int(arrays["tree-sizes"].sum())
    needed = num_nodes * 48 + 3 * 64

    assert learner(estimator, max_model_bytes=needed).from_arrays(arrays).num_classes == 10
    with pytest.raises(KnowledgeMismatch, match=f"up to {needed - 1} bytes"):
        learner(estimator, max_model_bytes=needed - 1).from_arrays(arrays)


# --- linear models closed to the untrusted ----------------------------------------------------


REGRESSION, BAYES = LogisticRegression(max_iter=200), GaussianNB()


@pytest.mark.parametrize(
    ("estimator", "change", "message"),
    [
        (REGRESSION, replaced("coef-by-column", first_as(np.nan)), "must be finite"),
        (REGRESSION, replaced("intercept", first_as(np.inf)), "must be finite"),
        (REGRESSION, replaced("coef-by-column", lambda a: a[:-1]), "of shape"),
        (REGRESSION, replaced("coef-by-column", lambda a: a.T), "of shape"),
        (REGRESSION, replaced("coef-by-column", lambda a: a.astype(np.int64)), "of float64"),
        (REGRESSION, replaced("coef-by-column", lambda a: a.astype(object)), "of float64"),
        (REGRESSION, replaced("intercept", lambda a: a[:1]), "of shape"),
        (REGRESSION, lambda a: {**a, "coef": a["coef-by-column"].T}, "named"),
        (BAYES, replaced("theta_", first_as(np.nan)), "theta_ must be finite"),
        (BAYES, replaced("theta_", lambda a: a[:, :-1]), "theta_ must be of shape"),
        (BAYES, replaced("theta_", lambda a: a[0]), "theta_ must be of shape"),
        (BAYES, replaced("var_", lambda a: a.astype(object)), "var_ must be of float64"),
        (BAYES, replaced("class_prior_", lambda a: a.tolist()), "class_prior_ must be an arr"),
        (BAYES, replaced("settings", first_as(7)), "settings must be those of GaussianNB"),
        (BAYES, replaced("settings", lambda a: a[1:]), "settings must be of shape"),
        (BAYES, lambda a: {**a, "class_count_": np.zeros(3)}, "arrays must be named"),
        (BAYES, lambda a: {**a, "theta_-by-column": a["theta_"].T}, "must be named"),
        (BAYES, lambda a: {n: v for n, v in a.items() if n != "var_"}, "arrays must be named"),
        (BAYES, lambda a: {n: v for n, v in a.items() if n != "settings"}, "with 'settings'"),
    ],
)
def test_broken_models_are_refused(
    estimator: Any, change: Callable[[Arrays], Arrays], message: str
) -> None:
    """Whatever is not exactly what prediction reads, in its own shape, is named."""
    check_refused(estimator, change(fitted(estimator, [0, 4, 7]).to_arrays()), message)


def test_layers_have_the_sizes_of_the_receiver() -> None:
    """Neither more units nor more layers than the receiver has set are read."""
    estimator = MLPClassifier((6,), max_iter=5)
    arrays = fitted(estimator, [0, 4, 7]).to_arrays()
    wide = {"coefs_/0": np.zeros((64, 9)), "intercepts_/0": np.zeros(9)}

    check_refused(estimator, {**arrays, **wide}, r"coefs_/0 must be of shape \(64, 6\)")
    check_refused(estimator, {**arrays, "coefs_/2": np.zeros((3, 3))}, "arrays must be named")


def test_components_are_as_many_as_the_receiver_has_set() -> None:
    """A projection cannot make rows wider than they are, nor than was set."""
    estimator = make_pipeline(PCA(4), GaussianNB())
    arrays = fitted(estimator, [0, 4, 7]).to_arrays()
    more = {"step-0/explained_variance_": np.ones(5), "step-0/components_": np.ones((5, 64))}

    check_refused(estimator, {**arrays, **more}, "as many numbers as PCA")


def test_a_pipeline_needs_all_its_steps() -> None:
    """A missing or foreign step of a pipeline is refused by name."""
    estimator = make_pipeline(StandardScaler(), PCA(4), GaussianNB())
    arrays = fitted(estimator, [0, 4, 7]).to_arrays()
    without = {name: array for name, array in arrays.items() if "step-1" not in name}
    first = {name: array for name, array in arrays.items() if "step-0" in name}
    foreign = {name.replace("0", "1"): array for name, array in first.items()}
    more = {name.replace("0", "2"): array for name, array in first.items()}

    check_refused(estimator, without, "with 'settings'")
    check_refused(estimator, {**without, **foreign}, "settings must be those of PCA")
    check_refused(estimator, {**arrays, **more}, "named")


def test_a_received_model_that_fails_later_blames_its_sender() -> None:
    """A scaler that divides by almost zero is a scaler, and fails as a mismatch."""
    estimator = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    arrays = fitted(estimator, [0, 4, 7]).to_arrays()
    tiny = np.full(64, 1e-308)

    sender_fault = learner(estimator).from_arrays({**arrays, "step-0/scale_": tiny})

    with (
        np.errstate(all="ignore"),
        pytest.raises(KnowledgeMismatch, match="must score every row"),
    ):
        sender_fault.predict(DIGITS * 1e3)


# --- mutations ----------------------------------------------------------------------------


def mutated(array: Array, data: st.DataObject) -> Array:
    """Return an array with some bytes changed, a part cut off or a part repeated."""
    raw = bytearray(array.tobytes())
    start = data.draw(st.integers(0, len(raw) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "splice"])):
        case "flip":
            for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
                raw[at] = data.draw(st.sampled_from([0, 1, 2, 127, 128, 255]))
        case "cut":
            del raw[start:]
        case "splice":
            raw[start:start] = raw[: data.draw(st.integers(0, len(raw)))]
    whole = len(raw) // array.itemsize * array.itemsize
    changed = np.frombuffer(bytes(raw[:whole]), dtype=array.dtype)
    return changed.reshape(array.shape) if changed.size == array.size else changed


MUTATED = {
    "forest": RandomForestClassifier(2, max_depth=3),
    "linear": RidgeClassifier(),
    "bayes": GaussianNB(),
    "pipeline": make_pipeline(StandardScaler(), DecisionTreeClassifier(max_depth=3)),
}
VALID = {name: fitted(each, [0, 4, 7]).to_arrays() for name, each in MUTATED.items()}


@pytest.mark.parametrize("family", MUTATED)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_mutations_are_refused_or_predict(family: str, data: st.DataObject) -> None:
    """A damaged model is a mismatch or a working model, and never ends the process."""
    arrays = dict(VALID[family])
    for name in data.draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, max_size=2)):
        if arrays[name].size:
            arrays[name] = mutated(arrays[name], data)

    with np.errstate(all="ignore"):
        try:
            twin = learner(MUTATED[family]).from_arrays(arrays)
            labels = twin.predict(np.zeros((3, int(arrays["width"][0]))))
        except KnowledgeMismatch:
            return

    assert labels.shape == (3,)
    assert ((labels >= 0) & (labels < NUM_CLASSES)).all()
