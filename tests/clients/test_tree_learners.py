"""Learners of trees: one contract for XGBoost, LightGBM, our own boosting and our own forest.

What ours learn is compared with a definition elsewhere.
"""

import math
from typing import Any, Final

import lightgbm
import numpy as np
import pytest
import xgboost
from scipy.special import expit, softmax

from clients.tabular.base import MIN_PROBABILITY
from clients.tabular.boosted_trees import BoostedTreesLearner
from clients.tabular.forest import ForestLearner
from clients.tabular.lightgbm import LightGBMLearner
from clients.tabular.xgboost import XGBoostLearner, XGBoostScores
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
)
from fl_strategies.learners import EnsembleLearner, PortableLearner, SoftLearner
from tests.clients.digits import DIGITS, NUM_CLASSES, digits, generator, same

BOOSTED: Final[dict[str, type[Any]]] = {
    "xgboost": XGBoostLearner,
    "lightgbm": LightGBMLearner,
    "boosted-trees": BoostedTreesLearner,
}
KINDS: Final = {**BOOSTED, "forest": ForestLearner}
WITH_SCORES: Final = {**BOOSTED, "xgboost-scores": XGBoostScores}
every_kind = pytest.mark.parametrize("kind", KINDS)
some_classes = pytest.mark.parametrize(
    "classes", [[3, 8], [3, 8, 9], None], ids=["two", "three", "all"]
)


def learner(kind: str = "xgboost", **settings: Any) -> Any:
    if kind == "forest":
        return ForestLearner(**{"num_classes": NUM_CLASSES, "num_trees": 12, **settings})
    chosen = {"num_classes": NUM_CLASSES, "num_rounds": 4, "max_depth": 3, **settings}
    return WITH_SCORES[kind](**chosen)


def fitted(
    kind: str = "xgboost", classes: list[int] | None = None, *, seed: int = 0, **settings: Any
) -> Any:
    x, y = digits(classes)
    return learner(kind, **settings).fit(x, y, rng=generator(seed))


# --- learning -----------------------------------------------------------------------------


@some_classes
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

    actual = fitted("xgboost", classes).logits(x)[:, present]

    assert np.array_equal(np.log(np.clip(expected.astype(np.float64), 1e-7, 1.0)), actual)


@some_classes
def test_scores_are_those_of_lightgbm(classes: list[int] | None) -> None:
    """Probabilities equal those of a booster that is trained by hand, without shared bins."""
    x, y = digits(classes)
    present, encoded = np.unique(y, return_inverse=True)
    objective: dict[str, Any] = {"objective": "binary"}
    if len(present) > 2:
        objective = {"objective": "multiclass", "num_class": len(present)}
    parameters = {
        **objective,
        "max_depth": 3,
        "num_leaves": 8,
        "learning_rate": 0.3,
        "lambda_l2": 1.0,
        "max_bin": 64,
        "min_data_in_leaf": 1,
        "min_sum_hessian_in_leaf": 1.0,
        "num_threads": 1,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(x.astype(np.float32), label=encoded, params=parameters)
    scores = lightgbm.train(parameters, data, 4).predict(x, raw_score=True)
    assert isinstance(scores, np.ndarray)
    if len(present) == 2:
        expected = np.stack([expit(-scores), expit(scores)], axis=1)
    else:
        expected = softmax(scores, axis=1)

    actual = fitted("lightgbm", classes).logits(x)[:, present]

    np.testing.assert_allclose(actual, np.log(np.clip(expected, 1e-7, 1.0)), rtol=1e-9)


@every_kind
@some_classes
def test_classes_keep_their_columns(kind: str, classes: list[int] | None) -> None:
    """Labels are classes of the federation, and absent classes get the smallest score."""
    x, y = digits(classes)
    actual = fitted(kind, classes, **({} if kind == "forest" else {"num_rounds": 12}))

    labels, scores = actual.predict(x), actual.logits(x)

    absent = np.setdiff1d(np.arange(NUM_CLASSES), y)
    assert (labels == y).mean() > 0.95
    assert np.array_equal(scores.argmax(axis=1), labels)
    assert (scores[:, absent] == math.log(MIN_PROBABILITY)).all()


@every_kind
def test_the_generator_decides_the_model(kind: str) -> None:
    """Equal ones give equal models; two kinds take no random step."""
    one = fitted(kind, seed=4).to_arrays()

    assert same(one, fitted(kind, seed=4).to_arrays())
    if kind != "xgboost":
        assert same(one, fitted(kind, seed=5).to_arrays()) == (kind != "forest")


CHANGES: Final = {
    "num_rounds": 2,
    "max_depth": 1,
    "learning_rate": 0.1,
    "gamma": 3.0,
    "reg_lambda": 20.0,
    "max_bin": 2,
}
FOR_FORESTS: Final = {"num_trees": 5, "max_depth": 2, "num_candidates": 1}


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        *((kind, *change) for kind in WITH_SCORES for change in CHANGES.items()),
        *(("forest", *change) for change in FOR_FORESTS.items()),
    ],
)
def test_every_setting_changes_the_model(kind: str, setting: str, value: float) -> None:
    """Changing a setting changes the model."""
    x, _ = digits()

    other = fitted(kind, **{setting: value})

    assert not np.array_equal(fitted(kind).logits(x), other.logits(x))


@pytest.mark.parametrize("kind", ["xgboost", "lightgbm", "xgboost-scores"])
def test_threads_do_not_change_the_answer(kind: str) -> None:
    """The number of threads is a matter of speed only."""
    x, _ = digits([3, 8])

    one, two = fitted(kind, [3, 8]), fitted(kind, [3, 8], num_threads=2)

    assert np.allclose(one.logits(x), two.logits(x), atol=1e-5)


@every_kind
def test_images_are_rows(kind: str) -> None:
    """Rows of any shape are flattened."""
    x, y = digits()
    images = x.reshape(-1, 8, 8)

    actual = learner(kind).fit(images, y, rng=generator())

    assert np.array_equal(actual.predict(images), fitted(kind).predict(x))


@every_kind
def test_changed_rows_give_changed_answers(kind: str) -> None:
    """Nothing is remembered of an array by its identity: it may be written to."""
    x, _ = digits()
    actual = fitted(kind)
    rows = x.copy()
    before = actual.logits(rows)

    rows[:] = 0

    assert np.array_equal(actual.logits(rows), actual.logits(np.zeros_like(x)))
    assert not np.array_equal(actual.logits(rows), before)


# --- refusals -----------------------------------------------------------------------------


OUT_OF_RANGE: Final = (
    ("num_classes", 1),
    ("num_rounds", 0),
    ("max_depth", 0),
    ("learning_rate", 0.0),
    ("learning_rate", 1.5),
    ("gamma", -0.1),
    ("reg_lambda", -1.0),
    ("max_bin", 1),
)
NO_FOREST: Final = (
    ("num_classes", 1),
    ("num_trees", 0),
    ("max_depth", 0),
    ("max_depth", 61),
    ("num_candidates", 0),
)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        *((kind, *wrong) for kind in WITH_SCORES for wrong in OUT_OF_RANGE),
        *((kind, "num_threads", 0) for kind in ("xgboost", "lightgbm", "xgboost-scores")),
        *(("forest", *wrong) for wrong in NO_FOREST),
    ],
)
def test_bad_settings_are_refused(kind: str, setting: str, value: float) -> None:
    """A setting outside its range is named with its value."""
    owner = {**KINDS, **WITH_SCORES}[kind].__name__
    with pytest.raises(InvalidParameter, match=f"{owner}: {setting} must be .*{value}"):
        learner(kind, **{setting: value})


@every_kind
def test_bad_data_are_refused(kind: str) -> None:
    """NaN, large numbers and foreign labels are named, in one set and in many."""
    x, y = digits()
    with pytest.raises(NotFitted, match=KINDS[kind].__name__):
        learner(kind).to_arrays()
    with pytest.raises(InvalidData, match="rows of 64 columns"):
        fitted(kind).predict(x[:, :5])
    for rows, labels, message in (
        (np.where(x > 15, np.nan, x), y, "finite"),
        (x * 1e300, y, "range of float32"),
        (x, y + 1, "between 0 and 9"),
    ):
        with pytest.raises(InvalidData, match=message):
            learner(kind).fit(rows, labels, rng=generator())
        with pytest.raises(InvalidData, match=message):
            learner(kind).fit_many([(rows, labels)], rngs=[generator()])


# --- travel -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pruned", *KINDS])
@pytest.mark.parametrize("classes", [[3, 8], [3, 8, 9], None, [5]])
def test_a_model_predicts_the_same_to_the_bit_after_travel(
    kind: str, classes: list[int] | None
) -> None:
    """Labels and scores of a received model equal the sender's, pruned or not."""
    x, settings = DIGITS[:300], {"gamma": 2.0} if kind == "pruned" else {}
    kind = "xgboost" if kind == "pruned" else kind
    sender = fitted(kind, classes, **settings)

    twin = learner(kind, **settings).from_arrays(sender.to_arrays())

    for ability in (PortableLearner, SoftLearner, EnsembleLearner):
        assert isinstance(sender, ability)
    assert np.array_equal(sender.predict(x), twin.predict(x))
    assert np.array_equal(sender.logits(x), twin.logits(x))
    assert same(sender.to_arrays(), twin.to_arrays())


SENT = {kind: fitted(kind, [3, 8, 9]).to_arrays() for kind in KINDS}


@pytest.mark.parametrize("kind", BOOSTED)
def test_a_model_is_small(kind: str) -> None:
    """XGBoost's own form of this model has 40 kB."""
    assert sum(array.nbytes for array in fitted(kind).to_arrays().values()) < 4_000


@every_kind
def test_a_received_model_can_learn_again(kind: str) -> None:
    """It forgets what it was, as any other does."""
    x, y = digits()

    again = learner(kind).from_arrays(SENT[kind]).fit(x, y, rng=generator(0))

    assert np.array_equal(again.logits(x), fitted(kind).logits(x))


@pytest.mark.parametrize("kind", BOOSTED)
def test_scores_of_a_broken_model_are_numbers(kind: str) -> None:
    """Finite numbers whose sum overflows carry no NaN into anybody's average."""
    sent = SENT[kind]
    for sign in (1, -1):
        most = np.full_like(sent["values"], sign * np.finfo(sent["values"].dtype).max)
        most[::3] *= -1
        twin = learner(kind).from_arrays({**sent, "values": most, "offsets": most[:3, 0]})

        assert np.isfinite(twin.logits(DIGITS[:50])).all()
        assert set(twin.predict(DIGITS[:50])) <= {3, 8, 9}


BROKEN: Final[list[tuple[str, Any, str]]] = [
    ("tree-sizes", lambda old: old[:0], "must be"),
    ("tree-sizes", lambda old: old + 2, "must be"),
    ("leaf-bits", lambda old: ~old, "must be"),
    ("features", lambda old: np.full_like(old, 64), "features must be below 64"),
    ("thresholds", lambda old: old * np.nan, "thresholds must be finite"),
    ("values", lambda old: old * np.inf, "values must be finite"),
    ("width", lambda _: np.array([8]), "features must be below 8"),
    ("width", lambda _: np.array([300]), "features must be of uint16"),
    ("classes", lambda _: np.array([3, 8]), "must be"),
    ("more", lambda _: np.zeros(1), "named"),
]
BROKEN_BOOSTED: Final[list[tuple[str, Any, str]]] = [
    ("offsets", lambda old: old[:2], r"offsets must be of shape \(3,\)"),
    ("offsets", lambda old: old.astype(np.float16), "offsets must be of float(32|64)"),
    ("offsets", lambda old: np.full_like(old, np.inf), "offsets must be finite"),
    ("offsets", lambda old: np.full_like(old, np.nan), "offsets must be finite"),
    ("tree-sizes", lambda old: old[:-1], "tree-sizes must be"),
    ("booster", lambda _: np.zeros(9, dtype=np.uint8), "named"),
]
BROKEN_FORESTS: Final[list[tuple[str, Any, str]]] = [
    ("tree-sizes", lambda old: old[:0], "1 to"),
    ("values", lambda old: old * 2, "shares that sum to 1"),
    ("values", lambda old: 1 - 2 * old, "shares that sum to 1"),
    ("values", lambda old: old[:, :2], "values must be of shape"),
    ("values", lambda old: old.astype(np.float64), "values must be of float32"),
]


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        *((kind, *broken) for kind in KINDS for broken in BROKEN),
        *((kind, *broken) for kind in BOOSTED for broken in BROKEN_BOOSTED),
        *(("forest", *broken) for broken in BROKEN_FORESTS),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_broken_model_is_refused(kind: str, name: str, change: Any, message: str) -> None:
    """Each array must be what the trees' sizes say, and the receiver's settings."""
    sent = SENT[kind]
    with pytest.raises(KnowledgeMismatch, match=message):
        learner(kind).from_arrays({**sent, name: change(sent.get(name))})


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k in KINDS for name in SENT[k]])
def test_a_missing_array_is_refused(kind: str, name: str) -> None:
    """By its name, or by the names that are known."""
    with pytest.raises(KnowledgeMismatch, match=name):
        learner(kind).from_arrays({n: each for n, each in SENT[kind].items() if n != name})


def test_boosters_of_other_rounds_are_refused() -> None:
    """The receiver's settings decide how many trees of XGBoost fit."""
    with pytest.raises(KnowledgeMismatch, match=r"tree-sizes must be of shape \(15,\)"):
        learner(num_rounds=5).from_arrays(SENT["xgboost"])


@pytest.mark.parametrize("kind", ["lightgbm", "boosted-trees"])
def test_any_number_of_rounds_is_received(kind: str) -> None:
    """LightGBM stops where no split helps, and of our own the settings need not be known."""
    x, _ = digits([3, 8, 9])
    twin = learner(kind, num_rounds=5).from_arrays(SENT[kind])

    assert np.array_equal(twin.logits(x), fitted(kind, [3, 8, 9]).logits(x))
    sizes = SENT[kind]["tree-sizes"][:-1]
    with pytest.raises(KnowledgeMismatch, match="those of rounds of 3 trees, got 11"):
        learner(kind).from_arrays({**SENT[kind], "tree-sizes": sizes})
    with pytest.raises(KnowledgeMismatch, match="those of 1 to 10000 trees"):
        learner(kind).from_arrays({**SENT[kind], "tree-sizes": sizes[:0]})


def test_lightgbm_ends_where_no_split_helps() -> None:
    """A model of leaves alone says the shares of classes, and travels."""
    x, y = digits([3, 8])
    stump = fitted("lightgbm", [3, 8], gamma=1e9)
    twin = learner("lightgbm").from_arrays(stump.to_arrays())

    share = (y == 8).mean()
    np.testing.assert_allclose(np.exp(stump.logits(x)[:, 8]), share, rtol=1e-6)
    assert np.array_equal(twin.logits(x), stump.logits(x))
    assert stump.to_arrays()["tree-sizes"].tolist() == [1]


# --- many at once -------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("classes", [[3, 8], None], ids=["two", "all"])
def test_many_are_each_as_if_alone(kind: str, classes: list[int] | None) -> None:
    """Students on shared bins, and sets of their own rows, equal models fitted alone."""
    public, labels = digits(classes)
    sets = [
        (public, labels),
        digits([3, 8, 9]),
        (public, labels[::-1]),
        digits([5]),
        digits(num_rows=77),
        digits([3, 9], num_rows=20),
    ]
    rngs = [generator(number) for number in range(len(sets))]

    many = learner(kind).fit_many(sets, rngs=rngs)

    for number, (twin, (x, y)) in enumerate(zip(many, sets, strict=True)):
        alone = learner(kind).fit(x, y, rng=generator(number))
        assert same(twin.to_arrays(), alone.to_arrays())
        for rows in (public, public.copy(), DIGITS[:50]):
            assert np.array_equal(twin.logits(rows), alone.logits(rows))


@every_kind
def test_shared_rows_are_known_by_their_content(kind: str) -> None:
    """Neither bins nor answers belong to an address: rows may be written to."""
    x, y = digits([3, 8])
    rows = x.copy()
    for _ in range(2):
        rngs = [generator(seed) for seed in (0, 1)]
        first, _ = learner(kind).fit_many([(rows, y), (rows, y)], rngs=rngs)
        alone = learner(kind).fit(rows, y, rng=generator(0))
        assert np.array_equal(first.logits(rows), alone.logits(rows))
        rows += np.arange(64) * rows[:, :1] - rows[:, 5:6]
        assert np.array_equal(first.logits(rows), alone.logits(rows))


@pytest.mark.parametrize("kind", BOOSTED)
def test_other_bins_are_other_rows(kind: str) -> None:
    """Learners of different settings on the same rows do not share what they may not."""
    x, y = generator(0).normal(size=(200, 3)), np.arange(200) % 2
    for bins in (64, 4, 64):
        rngs = [generator(seed) for seed in (0, 1)]
        one, _ = learner(kind, max_bin=bins).fit_many([(x, y), (x, y)], rngs=rngs)
        alone = learner(kind, max_bin=bins).fit(x, y, rng=generator(0))
        assert same(one.to_arrays(), alone.to_arrays())
