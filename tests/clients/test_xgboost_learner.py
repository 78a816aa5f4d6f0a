"""XGBoostLearner: the boosting of XGBoost, and a closed door before its native code."""

import importlib
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from clients.tabular import MIN_PROBABILITY
from clients.ubjson import decode
from clients.xgboost_learner import XGBoostLearner
from fl_strategies.arrays import Array, IntArray
from fl_strategies.core.protocols import PortableLearner
from fl_strategies.exceptions import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    MissingExtra,
    NotFitted,
)
from tests.clients.ubjson_writer import encode

DIGITS = load_digits(return_X_y=True)
NUM_CLASSES = 10


def digits(classes: list[int] | None = None, num_rows: int = 150) -> tuple[Array, IntArray]:
    x, y = DIGITS
    kept = np.isin(y, range(NUM_CLASSES) if classes is None else classes)
    return x[kept][:num_rows], y[kept][:num_rows]


def learner(**settings: Any) -> XGBoostLearner:
    chosen = {"num_classes": NUM_CLASSES, "num_rounds": 4, "max_depth": 3, **settings}
    return XGBoostLearner(**chosen)


def fitted(
    classes: list[int] | None = None, *, seed: int = 0, **settings: Any
) -> XGBoostLearner:
    x, y = digits(classes)
    return learner(**settings).fit(x, y, rng=np.random.default_rng(seed))


# --- learning -----------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [[3, 8], [3, 8, 9], None], ids=["two", "three", "all"])
def test_scores_are_those_of_xgboost(classes: list[int] | None) -> None:
    """Probabilities equal those of a booster that is trained by hand."""
    x, y = digits(classes)
    present, encoded = np.unique(y, return_inverse=True)
    objective: dict[str, Any] = {"objective": "binary:logistic"}
    if len(present) > 2:
        objective = {"objective": "multi:softprob", "num_class": len(present)}
    parameters = {**objective, "max_depth": 3, "tree_method": "hist", "nthread": 1}
    data = xgboost.DMatrix(x, label=encoded)
    expected = xgboost.train(parameters, data, 4).predict(xgboost.DMatrix(x))
    if len(present) == 2:
        expected = np.stack([1.0 - expected.astype(np.float64), expected], axis=1)

    actual = fitted(classes).logits(x)[:, present]

    assert np.array_equal(np.log(np.clip(expected.astype(np.float64), 1e-7, 1.0)), actual)


@pytest.mark.parametrize("classes", [[3, 8], [3, 8, 9], None], ids=["two", "three", "all"])
def test_classes_keep_their_columns(classes: list[int] | None) -> None:
    """Labels are classes of the federation, and absent classes get the smallest score."""
    x, y = digits(classes)
    actual = fitted(classes, num_rounds=8)

    labels, scores = actual.predict(x), actual.logits(x)

    absent = np.setdiff1d(np.arange(NUM_CLASSES), y)
    assert (labels == y).mean() > 0.95
    assert np.array_equal(scores.argmax(axis=1), labels)
    assert (scores[:, absent] == math.log(MIN_PROBABILITY)).all()


def test_a_single_class_needs_no_booster() -> None:
    """The subset on which XGBoost itself fails gives a constant model that travels."""
    x, _ = digits()
    constant = fitted([5])

    twin = learner().from_arrays(constant.to_arrays())

    for each in (constant, twin):
        assert (each.predict(x) == 5).all()
        assert (each.logits(x)[:, 5] == 0.0).all()


def test_equal_generators_give_equal_models() -> None:
    """A model is a function of the data and the generator."""
    first, second = fitted(seed=4).to_arrays(), fitted(seed=4).to_arrays()

    assert np.array_equal(first["booster"], second["booster"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_rounds", 2),
        ("max_depth", 1),
        ("learning_rate", 0.1),
        ("gamma", 3.0),
        ("reg_lambda", 20.0),
        ("max_bin", 2),
    ],
)
def test_every_setting_reaches_xgboost(setting: str, value: float) -> None:
    """Changing a setting changes the model."""
    x, y = digits()
    other = learner(**{setting: value}).fit(x, y, rng=np.random.default_rng(0))

    assert not np.array_equal(fitted().logits(x), other.logits(x))


def test_threads_do_not_change_the_answer() -> None:
    """The number of threads is a matter of speed only."""
    x, _ = digits([3, 8])

    one, two = fitted([3, 8]), fitted([3, 8], num_threads=2)

    assert np.allclose(one.logits(x), two.logits(x), atol=1e-5)


def test_images_and_no_rows_are_rows() -> None:
    """Rows of any shape are flattened, and no rows give no answers."""
    x, y = digits()
    images = x.reshape(-1, 8, 8)

    actual = learner().fit(images, y, rng=np.random.default_rng(0))

    assert np.array_equal(actual.predict(images), fitted().predict(x))
    assert actual.predict(images[:0]).shape == (0,)
    assert actual.logits(images[:0]).shape == (0, NUM_CLASSES)


def test_changed_rows_give_changed_answers() -> None:
    """Nothing is remembered of an array by its identity: it may be written to."""
    x, _ = digits()
    actual, rows = fitted(), x.copy()
    before = actual.logits(rows)

    rows[:] = 0

    assert np.array_equal(actual.logits(rows), actual.logits(np.zeros_like(x)))
    assert not np.array_equal(actual.logits(rows), before)


# --- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_classes", 1),
        ("num_rounds", 0),
        ("max_depth", 0),
        ("learning_rate", 0.0),
        ("learning_rate", 1.5),
        ("gamma", -0.1),
        ("reg_lambda", -1.0),
        ("max_bin", 1),
        ("num_threads", 0),
    ],
)
def test_bad_settings_are_refused(setting: str, value: float) -> None:
    """A setting outside its range is named with its value."""
    with pytest.raises(InvalidParameter, match=f"XGBoostLearner: {setting} must be .*{value}"):
        learner(**{setting: value})


def test_bad_data_are_refused() -> None:
    """Unfitted use, other widths, NaN, large numbers and foreign labels are named."""
    x, y = digits()
    rng = np.random.default_rng(0)

    with pytest.raises(NotFitted, match="XGBoostLearner"):
        learner().predict(x)
    with pytest.raises(NotFitted):
        learner().to_arrays()
    with pytest.raises(InvalidData, match="rows of 64 columns"):
        fitted().predict(x[:, :5])
    with pytest.raises(InvalidData, match="finite"):
        learner().fit(np.where(x > 15, np.nan, x), y, rng=rng)
    with pytest.raises(InvalidData, match="range of float32"):
        learner().fit(x * 1e300, y, rng=rng)
    with pytest.raises(InvalidData, match="between 0 and 9"):
        learner().fit(x, y + 1, rng=rng)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without XGBoost the import says what to install."""
    monkeypatch.delitem(sys.modules, "clients.xgboost_learner")
    monkeypatch.setitem(sys.modules, "xgboost", None)

    with pytest.raises(MissingExtra, match=r"fl-strategies\[xgboost\]"):
        importlib.import_module("clients.xgboost_learner")


# --- travel -------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [[3, 8], [3, 8, 9], None], ids=["two", "three", "all"])
@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_a_model_predicts_the_same_to_the_bit_after_travel(
    classes: list[int] | None, gamma: float
) -> None:
    """Labels and scores of a received model equal the sender's, pruned or not."""
    x = DIGITS[0][:300]
    sender = fitted(classes, gamma=gamma)

    twin = learner(gamma=gamma).from_arrays(sender.to_arrays())

    assert isinstance(sender, PortableLearner)
    assert np.array_equal(sender.predict(x), twin.predict(x))
    assert np.array_equal(sender.logits(x), twin.logits(x))
    assert np.array_equal(sender.to_arrays()["booster"], twin.to_arrays()["booster"])


SENT = fitted([3, 8, 9]).to_arrays()
Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> dict[str, Array]:
    model = decode(SENT["booster"].tobytes())
    change(model)
    return {**SENT, "booster": np.frombuffer(encode(model), dtype=np.uint8)}


def gradient_booster(model: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = model["learner"]["gradient_booster"]
    return inner


def forest(model: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = gradient_booster(model)["model"]
    return inner


def tree(model: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = forest(model)["trees"][0]
    return first


def header(**fields: Any) -> Change:
    return lambda model: model["learner"]["learner_model_param"].update(fields)


def at(field: str, index: int, value: float) -> Change:
    def change(model: dict[str, Any]) -> None:
        tree(model)[field][index] = value

    return change


def test_rewriting_alone_changes_nothing() -> None:
    """The writer of these tests is faithful: an unchanged model is accepted."""
    x = DIGITS[0][:50]

    twin = learner().from_arrays(changed(dict.copy))

    assert np.array_equal(twin.logits(x), fitted([3, 8, 9]).logits(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (header(num_feature="65"), "num_feature must be '64'"),
        (header(num_feature="4294967360"), "num_feature must be '64'"),
        (header(num_feature=64), "num_feature must be of its type"),
        (header(num_class="4"), "num_class must be '3'"),
        (header(num_target="2"), "num_target must be '1'"),
        (header(base_score="[nan,0,0]"), "base_score"),
        (header(base_score="[1E999,0E0,0E0]"), "base_score"),
        (header(base_score="[0E0]"), "base_score"),
        (header(base_score="[0E0,0E0,0E0"), "base_score"),
        (header(base_score="[0E0,0E0,[0E0]]"), "base_score"),
        (header(base_score=""), "base_score"),
        (header(more="1"), "learner_model_param must be of"),
        (lambda m: m["learner"].update(attributes={"a": "b"}), "attributes must be of"),
        (lambda m: m["learner"].update(feature_names=["a"] * 64), "feature_names must be"),
        (lambda m: m["learner"].update(feature_types=["c"] * 64), "feature_types must be"),
        (lambda m: m["learner"].pop("objective"), "learner must be of"),
        (lambda m: m["learner"]["objective"].update(name="rank:map"), "name must be 'multi"),
        (lambda m: m.update(version=[99, 0, 0]), "version must be"),
        (lambda m: m.update(version=[True, 2, 0]), "version must be"),
        (lambda m: gradient_booster(m).update(name="dart"), "name must be 'gbtree'"),
        (lambda m: gradient_booster(m).update(name="gblinear"), "name must be 'gbtree'"),
        (
            lambda m: gradient_booster(m).update(weight_drop=[1.0]),
            "gradient_booster must be of",
        ),
        (
            lambda m: forest(m)["gbtree_model_param"].update(num_trees="13"),
            "num_trees must be '12'",
        ),
        (
            lambda m: forest(m)["gbtree_model_param"].update(num_parallel_tree="2"),
            "num_parallel_tree must be '1'",
        ),
        (lambda m: forest(m)["tree_info"].__setitem__(0, 7), "tree_info must be"),
        (lambda m: forest(m)["tree_info"].__setitem__(0, -1), "tree_info must be"),
        (lambda m: forest(m)["iteration_indptr"].__setitem__(1, 9), "iteration_indptr must"),
        (lambda m: forest(m)["iteration_indptr"].append(99), "iteration_indptr must be"),
        (lambda m: forest(m)["trees"].pop(), "trees must be 12 trees"),
        (lambda m: forest(m)["trees"].__setitem__(0, 1), "tree 0 must be an object"),
        (lambda m: forest(m).update(trees={}), "trees must be of its type"),
    ],
)
def test_a_foreign_header_is_refused(change: Change, message: str) -> None:
    """Every field outside the trees must be what this XGBoost itself would write."""
    with pytest.raises(KnowledgeMismatch, match=message):
        learner().from_arrays(changed(change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("left_children", 0, 10**6), "children must be after their parent"),
        (at("left_children", 0, -7), "children must be after their parent"),
        (at("left_children", 0, 0), "children must be after their parent"),
        (at("right_children", 0, -1), "children must be after their parent"),
        (at("right_children", 0, 1), "children must be of one parent each"),
        (at("left_children", -1, 1), "children must be after their parent"),
        (at("parents", 0, 0), "parents must be those of the children"),
        (at("parents", 1, 2), "parents must be those of the children"),
        (at("split_indices", 0, 64), "split_indices must be below 64"),
        (at("split_indices", -1, -1), "split_indices must be below 64"),
        (at("split_indices", 0, 2**31 - 1), "split_indices must be below 64"),
        (at("split_type", 0, 1), "split_type must be numerical"),
        (at("default_left", 0, 2), "default_left must be 0 or 1"),
        (at("split_conditions", 0, np.nan), "split_conditions must be finite"),
        (at("split_conditions", -1, np.inf), "split_conditions must be finite"),
        (at("base_weights", 0, np.nan), "base_weights must be finite"),
        (at("sum_hessian", 0, -np.inf), "sum_hessian must be finite"),
        (lambda m: tree(m).update(left_children=tree(m)["left_children"][:-1]), "must be"),
        (lambda m: tree(m).update(parents=tree(m)["parents"][:-1]), "parents must be of shape"),
        (
            lambda m: tree(m).update(split_indices=tree(m)["split_indices"].tolist()),
            "split_indices must be an array",
        ),
        (
            lambda m: tree(m).update(parents=tree(m)["parents"].astype(np.int64)),
            "parents must be of int32",
        ),
        (
            lambda m: tree(m).update(
                {
                    name: array[:0]
                    for name, array in tree(m).items()
                    if isinstance(array, np.ndarray)
                }
            ),
            "tree 0 must be at least one node",
        ),
        (lambda m: tree(m)["tree_param"].update(num_nodes="10"), "num_nodes must be"),
        (lambda m: tree(m)["tree_param"].update(num_deleted="1"), "num_deleted must be"),
        (lambda m: tree(m)["tree_param"].update(size_leaf_vector="9"), "size_leaf_vector"),
        (lambda m: tree(m)["tree_param"].update(num_feature="99"), "num_feature must be"),
        (lambda m: tree(m).update(id=5), "id must be 0"),
        (lambda m: tree(m).update(id=False), "id must be of its type"),
        (lambda m: tree(m).update(extra=1), "tree 0 must be of known fields"),
        (lambda m: tree(m).pop("parents"), "tree 0 must be of known fields"),
        (
            lambda m: tree(m).update(categories=np.array([5], dtype=np.int32)),
            "categories must be as this XGBoost writes it",
        ),
    ],
)
def test_a_broken_tree_is_refused(change: Change, message: str) -> None:
    """No index, length or number of a tree reaches native code unchecked."""
    with pytest.raises(KnowledgeMismatch, match=message):
        learner().from_arrays(changed(change))


def test_a_lost_subtree_is_refused() -> None:
    """A node that nobody points to is as wrong as one that two point to."""

    def forget(model: dict[str, Any]) -> None:
        first = tree(model)
        first["left_children"][0] = first["right_children"][0] = -1

    with pytest.raises(KnowledgeMismatch, match="children must be of one parent each"):
        learner().from_arrays(changed(forget))


@pytest.mark.parametrize("base_score", ["[-3E0]", "[2E0]"])
def test_a_base_score_that_is_no_probability_is_refused(base_score: str) -> None:
    """What XGBoost would notice only when it predicts is noticed on arrival."""
    sent = fitted([3, 8]).to_arrays()
    model = decode(sent["booster"].tobytes())
    model["learner"]["learner_model_param"]["base_score"] = base_score
    raw = np.frombuffer(encode(model), dtype=np.uint8)

    with pytest.raises(KnowledgeMismatch, match="booster must be readable by XGBoost"):
        learner().from_arrays({**sent, "booster": raw})


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(0, dtype=np.uint8),
        np.frombuffer(b"{}", dtype=np.uint8),
        np.frombuffer(b"[]", dtype=np.uint8),
        np.zeros((2, 2), dtype=np.uint8),
        np.zeros(9),
        np.frombuffer(json.dumps({"learner": {}}).encode(), dtype=np.uint8),
    ],
    ids=["nothing", "object", "array", "matrix", "floats", "json"],
)
def test_what_is_no_booster_is_refused(array: Array) -> None:
    """Anything but the binary form of a booster is a mismatch."""
    with pytest.raises(KnowledgeMismatch):
        learner().from_arrays({**SENT, "booster": array})


def test_models_of_other_settings_are_refused() -> None:
    """Rounds, classes and width of the receiver decide what fits."""
    with pytest.raises(KnowledgeMismatch, match="num_trees must be '15'"):
        learner(num_rounds=5).from_arrays(SENT)
    with pytest.raises(KnowledgeMismatch, match="num_feature must be '63'"):
        learner().from_arrays({**SENT, "width": np.array([63])})
    with pytest.raises(KnowledgeMismatch):
        learner().from_arrays({**SENT, "classes": np.array([3, 8])})
    with pytest.raises(KnowledgeMismatch, match="named"):
        learner().from_arrays({**SENT, "more": np.zeros(1)})


@pytest.mark.parametrize("booster", ["dart", "gblinear"])
def test_other_boosters_are_refused(booster: str) -> None:
    """A real model of another kind is refused before XGBoost loads it."""
    x, y = digits([3, 8, 9])
    labels = np.unique(y, return_inverse=True)[1]
    settings = {"objective": "multi:softprob", "num_class": 3, "booster": booster}
    model = xgboost.train({**settings, "nthread": 1}, xgboost.DMatrix(x, label=labels), 4)
    raw = np.frombuffer(model.save_raw("ubj"), dtype=np.uint8)

    with pytest.raises(KnowledgeMismatch):
        learner().from_arrays({**SENT, "booster": raw})


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_mutations_are_refused_or_predict(data: st.DataObject) -> None:
    """A damaged booster is a mismatch or a working model, and never ends the process."""
    raw = bytearray(SENT["booster"].tobytes())
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[place] = data.draw(st.integers(0, 255))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(raw))] * 2)))
    match data.draw(st.sampled_from(["keep", "keep", "cut", "repeat"])):
        case "cut":
            del raw[start:end]
        case "repeat":
            raw[start:start] = raw[start:end]

    try:
        twin = learner().from_arrays({**SENT, "booster": np.frombuffer(raw, dtype=np.uint8)})
    except KnowledgeMismatch:
        return

    assert set(twin.predict(DIGITS[0][:20])) <= {3, 8, 9}
