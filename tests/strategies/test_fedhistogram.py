"""FedHistogram: cells, sensitivity, noise, labels, price, and untrusted counts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import kstest

from clients.app import client_app
from fl_strategies import FedHistogram, Party
from fl_strategies.errors import InvalidParameter, RunFailed
from fl_strategies.learners import Task
from fl_strategies.party.party import PartyPolicy
from fl_strategies.privacy.mechanisms import GaussianSums
from fl_strategies.privacy.planning import usual_cells
from fl_strategies.strategies.sums.histogram import Cells, class_shares, count_records
from fl_strategies.strategies.sums.options import SumPrivacy
from fl_strategies.wire import keys
from simulations.runtime.local import run_local
from tests.kept import with_journal
from tests.toys import (
    PUBLIC,
    WatchedGrid,
    common_options,
    load_toy_party,
    loading,
    toy_party,
    with_arrays,
)

NUM_PARTIES = 4
APP = client_app(load_toy_party)
CELLS = Cells.of_rows(PUBLIC, 6, 2, np.random.default_rng(0))
PRIVATE = {"target_epsilon": 3.0, "num_cells": 4}
TASKS: tuple[Task, ...] = ("single-label", "multi-label")
CLAIMED = {task: CELLS.moved(4, task) for task in TASKS}


def histogram(**changes: Any) -> FedHistogram:
    return FedHistogram.from_settings(**{**common_options(NUM_PARTIES), **changes})


# Cells.


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=2, max_size=40))
def test_every_row_is_in_one_cell_whatever_its_values(values: list[float]) -> None:
    """Also rows that overflow, or are not numbers."""
    rows = np.array(values[: len(values) // 2 * 2]).reshape(-1, 2)

    found = CELLS.find(rows)

    assert found.shape == (1, len(rows))
    assert ((found >= 0) & (found < 6)).all()


def test_cells_are_nearest_centres_of_scaled_rows() -> None:
    """By a second route: distances in the turned space, one by one."""
    turned = (PUBLIC - CELLS.mean) @ CELLS.turn
    nearest = [np.argmin([np.sum((row - c) ** 2) for c in CELLS.centres[0]]) for row in turned]

    assert CELLS.find(PUBLIC)[0].tolist() == nearest
    assert len(set(nearest)) == 6


def test_components_are_flattened() -> None:
    """Each is divided by the fourth root of its spread, whatever the columns' common unit."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, size=(5000, 3)) * np.array([1.0, 0.8, 0.6])

    turned = (rows - rows.mean(axis=0)) @ Cells.of_rows(rows, 5, 3, rng).turn

    np.testing.assert_allclose(turned.std(axis=0), rows.std(axis=0) ** 0.75, rtol=0.01)


def test_cells_are_found_where_rows_are_crowded() -> None:
    """No cell of any division holds rows of two heaps, far apart; each heap has its own."""
    rng = np.random.default_rng(0)
    heaps = np.stack(np.meshgrid([0.0, 5.0, 10.0], [0.0, 5.0, 10.0]), axis=-1).reshape(9, 2)
    which = np.repeat(np.arange(9), np.arange(10, 100, 10))
    rows = heaps[which] + rng.normal(size=(len(which), 2)) * 0.3

    for found in Cells.of_rows(rows, 40, 2, np.random.default_rng(1), 3).find(rows):
        pairs = {*zip(which.tolist(), found.tolist(), strict=True)}
        assert len(pairs) == len({*found.tolist()}) >= 9


def test_there_may_be_more_cells_than_different_rows() -> None:
    """Equal rows are in one cell, and the other cells stay empty."""
    cells = Cells.of_rows(np.repeat(np.eye(3), 4, axis=0), 7, 3, np.random.default_rng(0))

    assert cells.num_cells == 7
    assert len({*cells.find(np.eye(3))[0].tolist()}) == 3


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_columns_of_other_units_are_scaled(factor: float) -> None:
    """A column in other units, among others that differ, does not decide alone."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 4)) * np.array([1.0, 1e3, 1e3 * factor, 1e6])

    turned = (rows - rows.mean(axis=0)) @ Cells.of_rows(rows, 5, 4, rng).turn

    np.testing.assert_allclose(np.cov(turned, rowvar=False), np.eye(4) * 200 / 199, atol=0.6)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(TASKS))
def test_one_record_moves_a_histogram_by_what_is_accounted(seed: int, task: Task) -> None:
    """Replacing any record by any other: at most the root of 2, or of twice the labels."""
    rng = np.random.default_rng(seed)
    cells, several = rng.integers(5, size=9), task == "multi-label"
    shape = (5, 2, 4) if several else (5, 4)
    y = rng.integers(-1, 2, size=(9, 4)) if several else rng.integers(4, size=9)
    cells_after, y_after = cells.copy(), y.copy()
    cells_after[3] = rng.integers(5)
    y_after[3] = rng.integers(-1, 2, size=4) if several else rng.integers(4)

    moved = count_records(cells, y, shape, task) - count_records(
        cells_after, y_after, shape, task
    )

    assert np.linalg.norm(moved) <= CLAIMED[task] + 1e-12


@pytest.mark.parametrize("task", TASKS)
def test_one_record_moves_each_division_alike(task: Task) -> None:
    """It is once in each: replacing it moves the counts by the root of their number more."""
    divided = Cells.of_rows(PUBLIC, 6, 2, np.random.default_rng(0), 5)
    x = np.array([[0.0, 0.0], [3.0, 0.0]])
    y = np.array([0, 2]) if task == "single-label" else np.array([[0, 0, 1], [1, 1, 0]])
    one, other = (divided.of_records(x[i : i + 1], y[i : i + 1], 3, task) for i in range(2))

    assert divided.num_divisions == 5
    assert np.linalg.norm(one - other) == pytest.approx(divided.moved(3, task))
    assert divided.moved(3, task) == pytest.approx(math.sqrt(5) * CELLS.moved(3, task))


def test_a_row_takes_the_mean_of_its_cells() -> None:
    """One by one: the counts of its cell in each division."""
    divided = Cells.of_rows(PUBLIC, 6, 2, np.random.default_rng(0), 3)
    totals = np.arange(3 * 6 * 2, dtype=np.float64).reshape(3, 6, 2)
    cells = divided.find(PUBLIC)

    mean = divided.counts_of(PUBLIC, totals)

    for row in range(len(PUBLIC)):
        expected = np.mean([totals[d, cells[d, row]] for d in range(3)], axis=0)
        np.testing.assert_allclose(mean[row], expected)


# Noise and its price.


def test_noise_has_the_distribution_that_is_charged() -> None:
    """Continuous to the eye, of the scale in the event, without a mean."""
    mechanism = GaussianSums(scale=3.7, l2_sensitivity=math.sqrt(2), unit="example")
    counts = np.arange(20_000)

    drawn = mechanism.release(counts).values - counts

    scale = mechanism.charges(1)[0][0].scale  # type: ignore[attr-defined]
    assert 3.7 <= scale < 3.7001
    assert kstest(drawn / scale, "norm").pvalue > 1e-6


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1.0, 3.0])
def test_the_price_is_that_of_the_gaussian_mechanism(epsilon: float) -> None:
    """By the closed form of delta(epsilon), which is no part of the accountant."""
    mechanism = SumPrivacy(target_epsilon=epsilon).mechanism(math.sqrt(2))
    mu = math.sqrt(2) / mechanism.drawn_scale

    delta = ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)

    assert 0.99e-5 < delta <= 1e-5


def test_cells_follow_from_public_facts() -> None:
    """More records or less noise make more cells; public rows limit them."""
    assert usual_cells(4000, 24000, 24.0) == 142
    assert usual_cells(4000, 24000, 75.0) == 45
    assert usual_cells(100, 10**6, 1.0) == 20
    assert usual_cells(100, 10, 1000.0) == 2


# Labels.


def test_shares_are_those_above_the_noise() -> None:
    """Counts within a deviation are nothing; where all are, the largest decides."""
    shares = class_shares(np.array([[30.0, 10.0, 4.0], [1.0, 3.0, 2.0]]), 5.0)

    np.testing.assert_allclose(shares, [[25 / 30, 5 / 30, 0], [0, 1, 0]])
    of_labels = class_shares(np.array([[[9.0, 2.0], [3.0, 6.0]]]), 0.0)
    np.testing.assert_allclose(of_labels, [[0.25, 0.75]], err_msg="without and with each")


# Runs.


def test_a_trusted_server_adds_noise_once() -> None:
    """Less noise for the same price; and the statement says who is trusted."""
    own, central = histogram(**PRIVATE), histogram(**PRIVATE, privacy_level="central")
    noise = []
    for strategy in (own, central):
        result = run_local(strategy, APP, NUM_PARTIES)
        noise.append(result.train_metrics_clientapp[1]["noise-scale"])

    assert noise[0] == pytest.approx(2 * noise[1])  # type: ignore[operator]
    assert result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE] <= 3.0  # type: ignore[operator]
    assert "except the server, which is trusted" in central.ledger_.statement()


def test_an_upload_is_four_bytes_a_count() -> None:
    """And less than a kilobyte beside."""
    strategy = histogram(target_epsilon=1.0, num_cells=30, accept_noise=True)
    result = run_local(strategy, APP, NUM_PARTIES)

    sent = result.train_metrics_clientapp[1][keys.NUM_BYTES_SENT]
    assert sent / NUM_PARTIES <= 8 * 30 * 3 * 4 + 1024  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c.astype(np.float64), "sums as int32"),
        (lambda c: c[:-1], "sums must have shape"),
        (lambda c: c * 0 - 1, "counts without noise must be at least 0"),
    ],
)
def test_other_counts_cost_their_party_the_round(change: Any, sentence: str) -> None:
    """Three of four make the model."""
    strategy = histogram()
    liar = with_arrays(lambda arrays: {"sums": change(arrays["sums"])})
    WatchedGrid(APP, NUM_PARTIES, liar).serve(strategy)

    (reason,) = strategy.rejected_.values()
    assert sentence in reason


def test_a_partys_own_word_counts(tmp_path: Path) -> None:
    """With a budget it answers at L2 and pays; a trusted server gets nothing from it."""

    def careful(number: int) -> Party:
        party = with_journal(toy_party(number), tmp_path / str(number), max_epsilon=4.0)
        return replace(party, policy=PartyPolicy(max_run_epsilon=4.0))

    load = loading(careful)
    run_local(histogram(**PRIVATE), client_app(load), NUM_PARTIES)
    trusting = histogram(**PRIVATE, privacy_level="central")
    with pytest.raises(RunFailed, match="must be protected, by its budget"):
        run_local(trusting, client_app(load), NUM_PARTIES)
    with pytest.raises(RunFailed, match="budget does not allow this answer"):
        run_local(histogram(**PRIVATE), client_app(load), NUM_PARTIES)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"privacy_level": "central"}, "target_epsilon must be given with the other settings"),
        ({"num_cells": 61}, "num_cells must be at most 60"),
        ({"task": "regression"}, "task must be single-label or multi-label"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    """By their own names."""
    with pytest.raises(InvalidParameter, match=sentence):
        run_local(histogram(**changes), APP, NUM_PARTIES)


def test_noise_that_drowns_all_counts_is_refused_before_anybody_pays() -> None:
    """Ten records in two cells, and noise of a hundred: nothing could be learned."""
    hopeless = {"target_epsilon": 0.1, "num_records": 10}
    with pytest.raises(InvalidParameter, match=r"got noise of .* on 5 records of a cell"):
        histogram(**hopeless)

    assert histogram(**hopeless, accept_noise=True).num_parties == NUM_PARTIES
