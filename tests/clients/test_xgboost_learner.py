"""XGBoostLearner: the boosting of XGBoost, and a closed door before its native code."""

import importlib
import math
import sys
from typing import Any

import numpy as np
import pytest
import xgboost
from sklearn.datasets import load_digits

from clients.tabular.base import MIN_PROBABILITY
from clients.tabular.xgboost import XGBoostLearner
from fl_strategies._util.arrays import Array, IntArray
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    MissingExtra,
    NotFitted,
)
from fl_strategies.learners import PortableLearner

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


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    """Tell whether two models are the same arrays."""
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


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
    assert same(fitted(seed=4).to_arrays(), fitted(seed=4).to_arrays())


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
    monkeypatch.delitem(sys.modules, "clients.tabular.xgboost")
    monkeypatch.setitem(sys.modules, "xgboost", None)

    with pytest.raises(MissingExtra, match=r"fl-strategies\[xgboost\]"):
        importlib.import_module("clients.tabular.xgboost")


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
    assert same(sender.to_arrays(), twin.to_arrays())


SENT = fitted([3, 8, 9]).to_arrays()


def test_a_model_is_small() -> None:
    """XGBoost's own form of this model has 40 kB."""
    assert sum(array.nbytes for array in fitted().to_arrays().values()) < 4_000


def test_a_received_model_can_learn_again() -> None:
    """It forgets what it was, as any other does."""
    x, y = digits()

    again = learner().from_arrays(SENT).fit(x, y, rng=np.random.default_rng(0))

    assert np.array_equal(again.logits(x), fitted().logits(x))


def test_scores_of_a_broken_model_are_numbers() -> None:
    """Finite numbers whose sum overflows carry no NaN into anybody's average."""
    for sign in (1, -1):
        most = np.full_like(SENT["values"], sign * np.finfo(np.float32).max)
        most[::3] *= -1
        twin = learner().from_arrays({**SENT, "values": most, "offsets": most[:3, 0]})

        assert np.isfinite(twin.logits(DIGITS[0][:50])).all()
        assert set(twin.predict(DIGITS[0][:50])) <= {3, 8, 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": np.zeros(2, dtype=np.float32)}, r"offsets must be of shape \(3,\)"),
        ({"offsets": np.zeros(3)}, "offsets must be of float32"),
        ({"offsets": np.full(3, np.inf, dtype=np.float32)}, "offsets must be finite"),
        ({"offsets": np.full(3, np.nan, dtype=np.float32)}, "offsets must be finite"),
        ({"tree-sizes": SENT["tree-sizes"][:-1]}, r"tree-sizes must be of shape \(12,\)"),
        ({"tree-sizes": SENT["tree-sizes"] + 2}, "must be"),
        ({"leaf-bits": ~SENT["leaf-bits"]}, "must be"),
        ({"features": np.full_like(SENT["features"], 64)}, "features must be below 64"),
        ({"thresholds": SENT["thresholds"] * np.nan}, "thresholds must be finite"),
        ({"values": SENT["values"] * np.inf}, "values must be finite"),
        ({"width": np.array([8])}, "features must be below 8"),
        ({"width": np.array([300])}, "features must be of uint16"),
        ({"classes": np.array([3, 8])}, "must be"),
        ({"more": np.zeros(1)}, "named"),
        ({"booster": np.zeros(9, dtype=np.uint8)}, "named"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_broken_model_is_refused(changes: dict[str, Array], message: str) -> None:
    """Each array must be what the receiver's own settings and the trees' sizes say."""
    with pytest.raises(KnowledgeMismatch, match=message):
        learner().from_arrays({**SENT, **changes})


@pytest.mark.parametrize("name", sorted(SENT))
def test_a_missing_array_is_refused(name: str) -> None:
    """By its name, or by the names that are known."""
    with pytest.raises(KnowledgeMismatch, match=name):
        learner().from_arrays({key: array for key, array in SENT.items() if key != name})


def test_models_of_other_rounds_are_refused() -> None:
    """The receiver's settings decide how many trees fit."""
    with pytest.raises(KnowledgeMismatch, match=r"tree-sizes must be of shape \(15,\)"):
        learner(num_rounds=5).from_arrays(SENT)


# --- many at once -------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [[3, 8], None], ids=["two", "all"])
def test_many_are_each_as_if_alone(classes: list[int] | None) -> None:
    """Students on shared bins, and sets of their own rows, equal models fitted alone."""
    public, labels = digits(classes)
    sets = [(public, labels), digits([3, 8, 9]), (public, labels[::-1]), digits([5])]
    rngs = [np.random.default_rng(number) for number in range(len(sets))]

    many = learner().fit_many(sets, rngs=rngs)

    for number, (twin, (x, y)) in enumerate(zip(many, sets, strict=True)):
        alone = learner().fit(x, y, rng=np.random.default_rng(number))
        assert same(twin.to_arrays(), alone.to_arrays())
        for rows in (public, public.copy(), DIGITS[0][:50]):
            assert np.array_equal(twin.logits(rows), alone.logits(rows))


def test_shared_rows_are_known_by_their_content() -> None:
    """Neither bins nor answers belong to an address: rows may be written to."""
    x, y = digits([3, 8])
    rows = x.copy()
    for _ in range(2):
        rngs = [np.random.default_rng(seed) for seed in (0, 1)]
        first, _ = learner().fit_many([(rows, y), (rows, y)], rngs=rngs)
        alone = learner().fit(rows, y, rng=np.random.default_rng(0))
        assert np.array_equal(first.logits(rows), alone.logits(rows))
        rows += np.arange(64) * rows[:, :1] - rows[:, 5:6]
        assert np.array_equal(first.logits(rows), alone.logits(rows))


def test_other_bins_are_other_matrices() -> None:
    """Learners of different settings on the same rows do not share what they may not."""
    x, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 2
    for bins in (64, 4, 64):
        rngs = [np.random.default_rng(seed) for seed in (0, 1)]
        one, _ = learner(max_bin=bins).fit_many([(x, y), (x, y)], rngs=rngs)
        alone = learner(max_bin=bins).fit(x, y, rng=np.random.default_rng(0))
        assert same(one.to_arrays(), alone.to_arrays())
