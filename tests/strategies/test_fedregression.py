"""FedRegression: features, sensitivity, the regression that sums determine, price, levels."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from clients.app import client_app
from fl_strategies import REGISTRY, FedRegression, Party
from fl_strategies._util import Array
from fl_strategies.errors import InvalidParameter, RunFailed
from fl_strategies.learners import Task
from fl_strategies.party.party import PartyPolicy
from fl_strategies.privacy.planning import usual_components
from fl_strategies.strategies.sums.options import SumPrivacy
from fl_strategies.strategies.sums.regression import LEVELS, Components, fitted_shares
from fl_strategies.strategies.sums.summary import DIRECTION, is_direction
from fl_strategies.wire import keys
from simulations.runtime.local import run_local
from tests.toys import (
    PUBLIC,
    TEST,
    accuracy,
    blobs,
    common_options,
    load_toy_party,
    load_with,
    loading,
    toy_party,
    weights_of,
)

NUM_PARTIES = 4
APP = client_app(load_toy_party)
TASKS: tuple[Task, ...] = ("single-label", "multi-label")
WIDE = np.random.default_rng(0).normal(size=(300, 12)) * np.arange(1, 13)
COMPONENTS = Components.of_rows(WIDE, 8)


def regression(**changes: Any) -> FedRegression:
    return FedRegression.from_settings(**{**common_options(NUM_PARTIES), **changes})


# Features and what a record can move.


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=12, max_size=12))
def test_no_row_is_longer_than_is_accounted(values: list[float]) -> None:
    """Also rows that overflow, or are not numbers."""
    features = COMPONENTS.features(np.array([values]))

    assert features.dtype == np.int64
    assert np.linalg.norm(features) <= COMPONENTS.longest


def test_most_public_rows_keep_their_length() -> None:
    """Nine of ten are only turned; the others are shortened to the sphere."""
    placed = COMPONENTS.features(WIDE)[:, :-1] / (LEVELS / math.hypot(1, 0.2))
    turned = (WIDE - COMPONENTS.mean) @ COMPONENTS.turn
    inside = np.linalg.norm(turned, axis=1) <= 1

    assert inside.mean() == pytest.approx(0.9, abs=0.01)
    np.testing.assert_allclose(placed[inside], turned[inside], atol=0.6 / LEVELS)
    np.testing.assert_allclose(np.linalg.norm(placed[~inside], axis=1), 1.0, atol=0.01)


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("task", TASKS)
def test_one_record_moves_a_sum_by_at_most_what_is_accounted(
    task: Task, num_classes: int
) -> None:
    """A thousand pairs of records, some far out, and the pair that is furthest apart."""
    rng = np.random.default_rng(0)
    shape = (2000, num_classes) if task == "multi-label" else (2000,)
    y = (
        rng.integers(-1, 2, shape)
        if task == "multi-label"
        else rng.integers(num_classes, size=shape)
    )
    x = rng.normal(size=(2000, 12)) * rng.choice([1, 10, 1e6], size=(2000, 1))
    x[1], y[0], y[1] = -x[0], y[0] * 0 + 1, y[0] * 0 + 1

    def summed(row: int) -> Array:
        one = slice(row, row + 1)
        return COMPONENTS.of_records(x[one], y[one], num_classes, task)

    moved = [np.linalg.norm(summed(row) - summed(row + 1)) for row in range(0, 2000, 2)]

    most = COMPONENTS.moved(num_classes, task)
    assert max(moved) <= most
    assert max(moved) > 0.9 * most


def test_sums_are_those_of_pooled_records() -> None:
    """Whoever holds which record, and in pieces as well as at once."""
    x, y = blobs(500, "pooled")
    components = Components.of_rows(PUBLIC, 2)
    parts = [
        components.of_records(x[y == label], y[y == label], 3, "single-label")
        for label in range(3)
    ]

    np.testing.assert_array_equal(sum(parts), components.of_records(x, y, 3, "single-label"))
    np.testing.assert_array_equal(sum(parts).sum(axis=1), components.features(x).sum(axis=0))


def test_components_have_the_same_signs_on_every_machine() -> None:
    """A solver may turn an axis round; the largest entry of each is positive here."""
    largest = np.abs(COMPONENTS.turn).argmax(axis=0)

    assert (COMPONENTS.turn[largest, range(8)] > 0).all()


# The regression.


@pytest.mark.parametrize("num_classes", [2, 3])
def test_exact_sums_give_the_logistic_regression_of_the_records(num_classes: int) -> None:
    """By a second route: scikit-learn's, on the labelled rows themselves."""
    x, labels = blobs(400, "regression")
    y = np.minimum(labels, num_classes - 1)
    components = Components.of_rows(x, 2)
    features = components.features(x)
    means = components.of_records(x, y, num_classes, "single-label") / (LEVELS * len(x))

    shares = fitted_shares(features, means, 0.0, num_classes, "single-label")

    direct = LogisticRegression(C=1e4, fit_intercept=False, tol=1e-8, max_iter=10_000)
    expected = direct.fit(features / LEVELS, y).predict_proba(features / LEVELS)
    np.testing.assert_allclose(shares, expected, atol=0.01)


def test_labels_are_regressed_one_by_one() -> None:
    """Two labels at once are two regressions of two classes."""
    x, labels = blobs(300, "labels")
    y = np.stack([labels == 1, labels == 2], axis=1).astype(np.int64)
    components = Components.of_rows(x, 2)
    features, whole = components.features(x), LEVELS * len(x)

    both = fitted_shares(
        features, components.of_records(x, y, 2, "multi-label") / whole, 0.0, 2, "multi-label"
    )

    for label in range(2):
        alone = components.of_records(x, y[:, label], 2, "single-label") / whole
        shares = fitted_shares(features, alone, 0.0, 2, "single-label")
        np.testing.assert_allclose(both[:, label], shares[:, 1], atol=0.01)


def test_noise_is_met_by_a_penalty() -> None:
    """More noise makes the regression less sure; with endless noise it knows nothing."""
    x, y = blobs(300, "noise")
    components = Components.of_rows(x, 2)
    means = components.of_records(x, y, 3, "single-label") / (LEVELS * len(x))
    sure = [
        float(
            fitted_shares(components.features(x), means, noise, 3, "single-label").max(1).mean()
        )
        for noise in (0.0, 0.01, 0.1, 1e6)
    ]

    assert sure == sorted(sure, reverse=True)
    assert sure[-1] == pytest.approx(1 / 3, abs=1e-3)


def test_components_follow_from_the_noise() -> None:
    """Fewer of them where noise is stronger; columns and public rows are limits."""
    assert [usual_components(4000, 123, noise) for noise in (1.0, 0.05, 0.004)] == [2, 8, 100]
    assert usual_components(4000, 8, 0.0) == 8
    assert usual_components(50, 123, 0.0) == 10


# Directions.


@pytest.mark.parametrize(
    "sums", [[DIRECTION + 1, 0], [DIRECTION, 1], [-(2**31), 2**31 - 1], [3000, -3000]]
)
def test_a_longer_vector_is_no_direction(sums: list[int]) -> None:
    """By whole numbers, also where squares would overflow."""
    assert not is_direction(np.array(sums))
    assert is_direction(np.array([-DIRECTION, 0]))


# Runs.


@pytest.mark.parametrize("level", ["L2", "central"])
@pytest.mark.parametrize(
    ("kind", "detail"),
    [("fedregression", {"num_components": 2}), ("fedhistogram", {"num_cells": 4})],
)
def test_a_private_run_is_useful_and_paid_for(
    kind: str, detail: dict[str, object], level: str
) -> None:
    """The model is good, the ledger has one release of the target's price, and says so."""
    private = {"target_epsilon": 3.0, "num_records": 160, "privacy_level": level, **detail}
    strategy = REGISTRY[kind].strategy.from_settings(**common_options(NUM_PARTIES), **private)

    result = run_local(strategy, APP, NUM_PARTIES)

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.7
    assert 2.99 < strategy.ledger_.get_epsilon() <= 3.0
    told = result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE]
    assert told == pytest.approx(strategy.ledger_.get_epsilon())
    assert strategy.ledger_.unit == "example"
    assert "1 x vector (gaussian noise" in strategy.ledger_.statement()


def test_without_noise_it_is_as_good_as_the_blobs_allow() -> None:
    """And nothing is promised."""
    strategy = regression(num_records=160)
    run_local(strategy, APP, NUM_PARTIES)

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.9
    assert math.isinf(strategy.ledger_.get_epsilon())


@pytest.mark.parametrize("kind", ["fedregression", "fedhistogram"])
def test_a_party_is_protected_by_noise_on_directions(kind: str) -> None:
    """The price is a party's, by the server's noise; the statement says who is trusted."""
    options = {**common_options(40), "target_epsilon": 8.0, "privacy_level": "L1"}
    strategy = REGISTRY[kind].strategy.from_settings(**options)
    result = run_local(strategy, APP, 40)

    metrics = result.train_metrics_clientapp[1]
    assert strategy.ledger_.unit == "party"
    assert 7.99 < strategy.ledger_.get_epsilon() <= 8.0
    assert metrics[keys.EPSILON_PARTY] == metrics[keys.EPSILON_EXAMPLE] <= 8.0  # type: ignore[operator]
    assert "except the server, which is trusted" in strategy.ledger_.statement()
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.5


def test_a_large_party_weighs_as_much_as_a_small_one_at_party_level() -> None:
    """Ten times the records of one party change nothing but its direction's rounding."""
    models = []
    for times in (1, 10):

        def larger(party: Party, times: int = times) -> Party:
            x, y = np.repeat(party.x, times, axis=0), np.repeat(party.y, times)
            return replace(party, x=x, y=y)

        strategy = regression(
            privacy_level="L1", target_epsilon=3.0, seeded_noise=True, accept_noise=True
        )
        run_local(strategy, client_app(load_with(larger, only=1)), NUM_PARTIES)
        models.append(weights_of(strategy)["centroids"])

    np.testing.assert_array_equal(models[0], models[1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"target_epsilon": 0.1, "num_records": 10},
            r"got noise of .* of the sums, where 40% is",
        ),
        ({"num_components": 3}, "num_components must be at most 2"),
    ],
)
def test_noise_that_drowns_all_sums_and_columns_that_are_none_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    """Before anybody pays: ten records with much noise; a row of two columns has two."""
    with pytest.raises(InvalidParameter, match=sentence):
        regression(**settings)


def test_the_price_does_not_depend_on_the_number_of_components() -> None:
    """Noise grows with the length of a record's features, which rounding alone adds to."""
    noise = [
        SumPrivacy(target_epsilon=1.0).mechanism(
            Components.of_rows(WIDE, k).moved(2, "single-label")
        )
        for k in (1, 12)
    ]

    assert noise[0].drawn_scale < noise[1].drawn_scale < 1.005 * noise[0].drawn_scale


@pytest.mark.parametrize("kind", ["fedregression", "fedhistogram"])
def test_a_partys_policy_refuses_noise_that_drowns_all_announced_records(kind: str) -> None:
    """Whatever the server accepts for itself, nothing is paid for noise alone."""
    policy = PartyPolicy(max_run_epsilon=1.0)
    load = loading(lambda n: replace(toy_party(n), policy=policy))
    hopeless = {"target_epsilon": 0.05, "num_records": 20, "accept_noise": True}
    strategy = REGISTRY[kind].strategy.from_settings(**common_options(NUM_PARTIES), **hopeless)

    with pytest.raises(RunFailed, match="noise must be weaker than what it protects"):
        run_local(strategy, client_app(load), NUM_PARTIES)
