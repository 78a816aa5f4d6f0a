"""FedMoments: the model of pooled records to the bit, its sensitivity, and what it refuses."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from scipy.optimize import minimize
from sklearn.datasets import load_diabetes, load_digits, load_wine
from sklearn.linear_model import LinearRegression

from clients import MomentsLearner, SklearnLearner, client_app, load_model, save_model
from clients.saved_model import ModelCard
from fl_strategies import FedMoments, FedMomentsOptions, Party, SumPrivacy
from fl_strategies._util import Array
from fl_strategies.errors import InvalidParameter
from fl_strategies.features import FeatureMap
from fl_strategies.learners import Task
from fl_strategies.strategies.sums.moments import SummedMoments
from simulations.runtime.local import run_local

WINE = load_wine()
ORDER = np.random.default_rng(0).permutation(len(WINE.target))
TRAIN, PUBLIC, TEST = np.split(ORDER, [100, 130])
X, Y = WINE.data, WINE.target
LOW, HIGH = np.zeros(13), np.array([15.0, 6, 4, 30, 170, 5, 6, 1, 4, 15, 2, 5, 1700])


def federate(
    deal: Sequence[Array],
    x: Array = X,
    y: Array = Y,
    *,
    task: Task = "single-label",
    num_classes: int = 3,
    public: Array | None = X[PUBLIC],
    **given: Any,
) -> FedMoments:
    """Return the strategy after a round in which parties hold these rows."""

    def make() -> MomentsLearner:
        return MomentsLearner(num_classes=num_classes, task=task)

    def load_party(context: Context) -> Party:
        number = int(context.node_config["partition-id"])
        return Party(
            x=x[deal[number]],
            y=y[deal[number]],
            public=public,
            num_classes=num_classes,
            task=task,
            learner_fn=make,
            catalogue={"moments": make},
            partition_id=number,
        )

    names = ("bounds", "target_bounds", "learner_fn", "seed")
    own: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
    options = FedMomentsOptions(**{"num_records": sum(map(len, deal)), **given})
    strategy = FedMoments(
        public=public,
        num_classes=num_classes,
        task=task,
        num_parties=len(deal),
        options=options,
        **{"learner_fn": make, "learner_name": "moments", **own},
    )
    run_local(strategy, client_app(load_party), len(deal))
    return strategy


def deals() -> dict[str, list[Array]]:
    """Return the same records as one party, as parties alike, by label, and of all sizes."""
    by_label = TRAIN[np.argsort(Y[TRAIN], kind="stable")]
    return {
        "one": [TRAIN],
        "five alike": np.array_split(TRAIN, 5),
        "twenty of five, by label": np.array_split(by_label, 20),
        "of all sizes": np.split(TRAIN, [1, 3, 10, 40]),
    }


def weights_of(strategy: FedMoments) -> bytes:
    assert isinstance(strategy.model_, MomentsLearner)
    return strategy.model_.to_arrays()["weights"].tobytes()


HEADS: list[dict[str, Any]] = [
    {"head": "ridge"},
    {"head": "lda", "num_cosines": 60},
    {"head": "logistic", "num_cosines": 60},
    {"features": "products"},
    {"features": "columns", "bounds": (LOW, HIGH), "public": None},
]


@pytest.mark.parametrize("settings", HEADS, ids=lambda given: "-".join(map(str, given)))
def test_every_division_of_the_records_gives_the_same_bits(settings: dict[str, Any]) -> None:
    found = {name: federate(deal, **settings) for name, deal in deals().items()}

    first = weights_of(found["one"])
    assert {name for name, one in found.items() if weights_of(one) != first} == set()
    assert (found["one"].model_.predict(X[TEST]) == Y[TEST]).mean() > 0.85


def test_digits_dealt_by_label_are_learned_as_well_as_pooled() -> None:
    """Five parties that know two digits each; no party alone has more than a fifth."""
    x, y = load_digits(return_X_y=True)
    x, order = x / 16, np.random.default_rng(1).permutation(len(y))
    train, public, test = np.split(order, [1000, 1300])
    deal = np.array_split(train[np.argsort(y[train], kind="stable")], 5)

    found = federate(deal, x, y, num_classes=10, public=x[public])

    assert (found.model_.predict(x[test]) == y[test]).mean() > 0.96


def test_the_final_model_saves_loads_and_travels(tmp_path: Any) -> None:
    found = federate(deals()["five alike"]).model_
    assert isinstance(found, MomentsLearner)
    card = ModelCard(learner="moments", row_shape=(13,), classes=("a", "b", "c"))

    save_model(found, tmp_path, card)

    assert np.array_equal(load_model(tmp_path).logits(X), found.logits(X))


def test_a_model_that_is_not_linear_learns_the_public_rows() -> None:
    from sklearn.ensemble import ExtraTreesClassifier

    def forest() -> SklearnLearner:
        return SklearnLearner(ExtraTreesClassifier(random_state=0), num_classes=3)

    found = federate(deals()["five alike"], learner_fn=forest)

    assert (found.model_.predict(X[TEST]) == Y[TEST]).mean() > 0.8


# Leaving


def test_a_model_without_a_party_is_that_of_a_round_without_it() -> None:
    deal = np.array_split(TRAIN[np.argsort(Y[TRAIN], kind="stable")], 5)
    found = federate(deal)

    assert isinstance(left := found.without(2), MomentsLearner)
    other = federate([*deal[:2], *deal[3:]])
    assert isinstance(other.model_, MomentsLearner)
    assert np.array_equal(left.to_arrays()["weights"], other.model_.to_arrays()["weights"])


@pytest.mark.parametrize(("level", "times"), [("L2", 1), ("central", 2)])
def test_noise_for_those_who_stay_is_new_and_charged_again(level: str, times: int) -> None:
    privacy = SumPrivacy(privacy_level=level, target_epsilon=2.0, accept_noise=True)
    found = federate(deals()["five alike"], privacy=privacy)
    (before,) = found.ledger_.entries

    found.without(0)

    ((event, count),) = found.ledger_.entries
    assert (event, count) == (before[0], times * before[1])


@pytest.mark.parametrize(
    ("leaves", "match"), [(7, "one of the last round's"), (1, "at least 2")]
)
def test_who_is_not_there_cannot_leave(leaves: int, match: str) -> None:
    deal = deals()["five alike"]

    with pytest.raises(InvalidParameter, match=match):
        federate(deal[:2] if leaves == 1 else deal).without(leaves)


# Numbers and labels


def test_numeric_targets_give_the_regression_of_pooled_records() -> None:
    x, y = load_diabetes(return_X_y=True)
    x, y = x * 10, y[:, None]
    train, test = np.arange(0, 400), np.arange(400, len(y))
    bounds = np.array([25.0]), np.array([346.0])
    given: dict[str, Any] = {"task": "regression", "num_classes": 1, "target_bounds": bounds}
    given |= {"public": x[test], "features": "columns", "penalty": 1e-6}

    found = federate(np.array_split(train, 4), x, y, **given)

    def explained(predicted: Array) -> float:
        return float(1 - np.square(predicted - y[test]).sum() / y[test].var() / len(test))

    pooled = LinearRegression().fit(x[train], y[train])
    one, other = (explained(model.predict(x[test])) for model in (found.model_, pooled))
    assert one == pytest.approx(other, abs=0.01)
    assert isinstance(found.model_, MomentsLearner)
    largest = found.model_.coefficients([f"c{n}" for n in range(10)])[0]
    assert largest.column == f"c{np.abs(pooled.coef_).argmax()}"
    assert abs(largest.weight) == pytest.approx(np.abs(pooled.coef_).max(), rel=0.2)
    assert 0 < largest.error < abs(largest.weight)


def test_several_labels_are_several_scores() -> None:
    y = np.stack([Y == 0, Y == 2], axis=1).astype(np.int64)
    y[TRAIN[:5]] = -1

    found = federate(
        np.array_split(TRAIN[np.argsort(Y[TRAIN], kind="stable")], 5),
        y=y,
        task="multi-label",
        num_classes=2,
    )

    assert (found.model_.predict(X[TEST]) == y[TEST]).mean() > 0.95


# Sensitivity


def summary(task: Task, num_classes: int, num_values: int = 2) -> SummedMoments:
    """Return columns of rows up to length 1, of full resolution."""
    ones = np.ones(num_values)
    made = FeatureMap.of_bounds(-ones, ones, length=1.0).settled()
    numeric = num_classes if task == "regression" else 0
    return SummedMoments(made, 1, np.zeros(numeric), np.ones(numeric))


CASES: list[tuple[Task, int]] = [
    ("single-label", 2),
    ("single-label", 3),
    ("multi-label", 1),
    ("multi-label", 3),
    ("regression", 1),
    ("regression", 2),
]


@pytest.mark.parametrize(("task", "num_classes"), CASES)
def test_no_replaced_record_moves_sums_more_than_is_accounted(
    task: Task, num_classes: int
) -> None:
    """By brute force over rows and targets, and by search from the worst pairs found."""
    made, rng = summary(task, num_classes), np.random.default_rng(0)
    multiples = made.multiples(num_classes, task)

    def target() -> Array:
        if task == "single-label":
            return rng.integers(0, num_classes, 1)
        if task == "multi-label":
            return rng.integers(-1, 2, (1, num_classes))
        return rng.choice([-9.0, -1, 1, 9, rng.uniform(-1, 1)], (1, num_classes))

    def moved(rows: Array, one: Array, other: Array) -> float:
        pairs = zip(rows.reshape(2, 1, 2), (one, other), strict=True)
        a, b = (made.of_records(row, y, num_classes, task) * multiples for row, y in pairs)
        return float(np.linalg.norm((a - b).astype(float)))

    tried = []
    for _ in range(400):
        rows = rng.normal(size=4) * 10 ** rng.uniform(-1, 2)
        one, other = target(), target()
        tried.append((moved(rows, one, other), rows, one, other))
    worst = []
    for _, rows, one, other in sorted(tried, key=lambda case: -case[0])[:10]:
        search = minimize(lambda r, a=one, b=other: -moved(r, a, b), rows, method="Nelder-Mead")
        worst.append(-search.fun)

    bound = made.moved(num_classes, task)
    assert max(worst) <= bound
    assert max(worst) > 0.9 * bound


@pytest.mark.parametrize(("task", "labels"), [("multi-label", 4), ("regression", 3)])
@pytest.mark.parametrize("folds", [1, 3])
def test_no_search_in_more_dimensions_beats_the_proof(
    task: Task, labels: int, folds: int
) -> None:
    """Over real features and targets, by gradients, from another formula than the proof's."""
    made, rng, size = summary(task, labels, 5), np.random.default_rng(1), 6
    made = SummedMoments(made.features, folds, made.centre, made.reach)
    longest, unit = made.features.longest, made.target_unit(task)
    multiples = made.multiples(labels, task)[0]
    weights = [
        multiples[: size * labels].reshape(size, labels) * unit,
        multiples[size * labels : -21] * unit**2,
        multiples[-21:],
    ]

    def sums(row: Array, targets: Array) -> Array:
        length = max(1.0, float(np.linalg.norm(row)))
        row, targets = row / length * longest, np.clip(targets, -1, 1)
        parts = [np.outer(row, targets), targets**2, np.outer(row, row)[np.triu_indices(size)]]
        pairs = zip(parts, weights, strict=True)
        kept = [part * own for part, own in pairs if part.size == own.size]
        return np.concatenate([part.ravel() for part in kept])

    def moved(flat: Array) -> float:
        one, other = np.split(flat, 2)
        a, b = (sums(each[:size], each[size:]) for each in (one, other))
        apart = a - b if folds == 1 else np.concatenate([a, b])
        return float(np.linalg.norm(apart))

    found = []
    for _ in range(12):
        start = rng.normal(size=2 * (size + labels))
        search = minimize(lambda flat: -moved(flat), start, method="L-BFGS-B")
        corners = np.where(rng.random(start.shape) < 0.5, search.x, np.sign(start))
        found += [-search.fun, moved(corners)]

    bound = made.moved(labels, task)
    assert max(found) <= bound * (1 + 1e-12)
    assert max(found) > (0.85 if folds == 1 else 0.5) * bound


def test_one_label_costs_the_root_of_four_and_a_half() -> None:
    made = summary("single-label", 2)

    bound = made.moved(2, "single-label") / (5 * made.features.longest**2)

    assert bound == pytest.approx(math.sqrt(4.5), rel=2e-3)


def test_a_record_that_changes_its_fold_moves_less() -> None:
    rng, ones = np.random.default_rng(0), np.ones(2)
    features = FeatureMap.of_bounds(-ones, ones, length=1.0).settled()
    folded = SummedMoments(features, 5, np.empty(0), np.empty(0))
    multiples = folded.multiples(3, "single-label")

    for _ in range(100):
        one, other = (
            folded.of_records(
                rng.normal(size=(1, 2)) * 9, rng.integers(0, 3, 1), 3, "single-label"
            )
            for _ in range(2)
        )
        moved = np.linalg.norm(((one - other) * multiples).astype(float))
        assert moved <= folded.moved(3, "single-label")


def test_folds_are_even_and_follow_the_record_alone() -> None:
    made = SummedMoments(FeatureMap.of_rows(X), 5, np.empty(0), np.empty(0))

    folds = made.folds_of(made.features(X))

    assert np.bincount(folds, minlength=5).min() > len(X) / 10
    assert np.array_equal(made.folds_of(made.features(X[::-1])), folds[::-1])


# Possible sums


@pytest.mark.parametrize(("task", "num_classes"), CASES)
def test_sums_of_records_are_possible(task: Task, num_classes: int) -> None:
    rng, made = np.random.default_rng(0), summary(task, num_classes)
    for number in (1, 2, 50):
        x = rng.normal(size=(number, 2)) * 10 ** rng.uniform(-3, 3)
        y: Array = rng.integers(0, num_classes, number)
        if task != "single-label":
            low = -1 if task == "multi-label" else -5
            y = rng.integers(low, 2, (number, num_classes))

        sums = made.of_records(x, y, num_classes, task)

        assert made.possible(sums, number, task)
        assert not made.possible(sums, number + 1, task)


@pytest.mark.parametrize("place", range(9))
def test_sums_that_no_records_give_are_impossible(place: int) -> None:
    """A change of any single sum breaks a rule that the constant makes known."""
    made = summary("single-label", 3)
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 3
    sums = made.of_records(x, y, 3, "single-label")

    sums[0, place] += 2**20

    assert not made.possible(sums, 40, "single-label")


def test_products_with_a_negative_direction_are_impossible() -> None:
    made = summary("single-label", 2)
    sums = made.of_records(np.ones((4, 2)), np.zeros(4, int), 2, "single-label")
    gram = made.split(sums, 2, "single-label")[2]

    gram[0, 0] = -gram[0, 0]

    assert not made.possible(sums, 4, "single-label")


# Privacy


@pytest.mark.parametrize("level", ["L1", "L2", "central"])
@pytest.mark.parametrize("public", [True, False])
def test_weak_noise_has_its_price_and_leaves_a_signal(level: str, public: bool) -> None:
    privacy = SumPrivacy(privacy_level=level, target_epsilon=8.0, accept_noise=True)
    rows: dict[str, Any] = {} if public else {"public": None, "bounds": (LOW, HIGH)}

    many = [np.tile(own, 20) for own in deals()["five alike"]]

    found = federate(many, privacy=privacy, **rows)

    assert found.ledger_.get_epsilon(1e-5) == pytest.approx(8.0, rel=0.03)
    assert found.ledger_.unit == ("party" if level == "L1" else "example")
    if level == "central":
        assert (found.model_.predict(X[TEST]) == Y[TEST]).mean() > 0.8


def test_noise_that_hides_everything_is_refused_before_it_is_paid() -> None:
    privacy = SumPrivacy(target_epsilon=0.01)

    with pytest.raises(InvalidParameter, match="noise"):
        federate(deals()["twenty of five, by label"], privacy=privacy)


def test_products_have_noise_of_the_same_price_as_targets() -> None:
    """Standardised by their multiples, draws have one deviation everywhere."""
    made = summary("single-label", 2)
    privacy = SumPrivacy(target_epsilon=1.0)
    mechanism = privacy.mechanism(
        made.moved(2, "single-label"), made.shape(2, "single-label")[1]
    )
    zero = np.zeros(made.shape(2, "single-label"), dtype=np.int64)

    draws = np.concatenate([mechanism.release(zero).values for _ in range(3000)])

    assert draws.std(axis=0) == pytest.approx(mechanism.drawn_scale, rel=0.06)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"public": None}, "bounds must be given where there are no public rows"),
        (
            {
                "public": None,
                "bounds": (LOW, HIGH),
                "num_records": None,
                "privacy": SumPrivacy(target_epsilon=1.0),
            },
            "num_records must be announced",
        ),
        ({"public": None, "bounds": (LOW, HIGH), "features": "components"}, "features must be"),
        ({"bounds": (LOW[:3], HIGH[:3])}, "bounds must be of 13 columns"),
        ({"task": "regression", "num_classes": 1}, "target_bounds must be given"),
        ({"task": "regression", "num_classes": 1, "target_bounds": ([1], [0])}, "in order"),
    ],
)
def test_what_must_be_declared_is_named(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidParameter, match=match):
        federate(deals()["one"], **given)
