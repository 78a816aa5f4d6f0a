"""What FedHistogram and FedRegression publish, what they say it costs, and why that is true."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.app import client_app
from fl_strategies import FedHistogram, FedRegression
from fl_strategies._util.arrays import IntArray
from fl_strategies.errors import RunFailed
from fl_strategies.privacy.counts import GaussianSums
from fl_strategies.strategies.sums.regression import Components
from fl_strategies.strategies.sums.summary import DIRECTION, Cells, direction, is_direction
from fl_strategies.wire import keys
from simulations.runtime.local import run_local
from tests.attacks import test_non_interference as check
from tests.attacks.interference import NEIGHBOURS, ORDINARY, Records
from tests.kept import Killed, MortalGrid
from tests.toys import common_options, load_toy_party, load_with

BOTH = [FedHistogram, FedRegression]
APP = client_app(load_toy_party)


# A curious server, and whoever sees what a trusted one publishes.


@pytest.mark.parametrize("pair", NEIGHBOURS)
def test_replies_of_regression_depend_on_no_record(
    pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But through the noise: all neighbours, with noise that does not look at sums."""
    monkeypatch.setitem(
        check.MAKERS,  # type: ignore[arg-type]
        "regression",
        lambda learner_fn: FedRegression.from_settings(
            **check.COMMON, learner_fn=learner_fn, target_epsilon=1.0, accept_noise=True
        ),
    )
    check.said_first.cache_clear()
    check.assert_silent("regression", "network", pair)
    check.said_first.cache_clear()


@pytest.mark.parametrize("level", ["L1", "central"])
@pytest.mark.parametrize("kind", BOTH)
def test_what_a_trusted_server_publishes_depends_on_sums_by_noise_alone(
    kind: Any, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records of one party are others; the model, metrics and statement are the same."""
    setting = {"privacy_level": level, "target_epsilon": 1.0, "accept_noise": True}
    make = partial(kind.from_settings, learner_fn=check.family("ridge"), **setting)
    monkeypatch.setitem(check.TRUSTED, "sums", lambda shared: make(**shared))  # type: ignore[arg-type]
    _, neighbour = NEIGHBOURS["beyond float32"]
    others = Records(neighbour.x[::-1], np.zeros_like(neighbour.y))

    assert check.published("sums", ORDINARY) == check.published("sums", others)


# The price that the server names.


def priced(kind: Any, level: str, **options: Any) -> Any:
    common = {**common_options(3), "accept_noise": True, "target_epsilon": 1.0}
    return kind.from_settings(**{**common, "privacy_level": level, **options})


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("level", ["L1", "central"])
def test_no_epsilon_stands_beside_another_delta(kind: Any, level: str) -> None:
    """The server's figures are at its own delta, whatever parties tell."""
    result = run_local(priced(kind, level, delta=1e-3), APP, 3)
    metrics = result.train_metrics_clientapp[1]

    assert metrics[keys.DELTA_EXAMPLE] == 1e-3
    assert metrics[keys.EPSILON_EXAMPLE] <= 1.0  # type: ignore[operator]
    if level == "L1":
        assert metrics[keys.DELTA_PARTY] == 1e-3


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("level", "releases"), [("L1", 1), ("central", 1), ("L2", 2)])
def test_parties_that_are_asked_again_have_released_again(
    kind: Any, level: str, releases: int, tmp_path: Path
) -> None:
    """Killed before any answer was kept; a trusted server draws its noise once."""
    first = priced(kind, level, checkpoint_dir=tmp_path)
    with pytest.raises(Killed):
        first.start(MortalGrid(APP, dies_after=1), ArrayRecord(), num_rounds=1)
    resumed = priced(kind, level, checkpoint_dir=tmp_path, resume=True)
    with pytest.raises(Killed):
        resumed.start(MortalGrid(APP, dies_after=2), ArrayRecord(), num_rounds=1)

    assert sum(count for _, count in resumed.ledger_.entries) == releases


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("level", "releases"), [("L1", 0), ("central", 0), ("L2", 1)])
def test_a_round_that_fails_costs_what_has_left(kind: Any, level: str, releases: int) -> None:
    """The others' sums at L2; nothing where the server would have added the noise."""
    strategy = priced(kind, level, min_parties=3)
    without = load_with(lambda p: replace(p, x=p.x[:0], y=p.y[:0]), only=2)
    with pytest.raises(RunFailed):
        run_local(strategy, client_app(without), 3)

    assert sum(count for _, count in strategy.ledger_.entries) == releases


# What the proofs say.


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 17, 300]), st.integers(-44, 38))
def test_features_are_never_longer_than_is_charged(seed: int, width: int, power: int) -> None:
    """In whole numbers, without an error of the check itself; also for rows at the edge."""
    rng = np.random.default_rng(seed)
    turn = rng.normal(size=(width, width)) * 10.0 ** min(power, 37)
    summary = Components(rng.normal(size=width), turn.astype(np.float32).astype(np.float64))
    rows = rng.normal(size=(20, width)) * 10.0 ** rng.uniform(-30, 30, size=(20, 1))
    edge = Components(np.zeros(width), np.eye(width))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)

    for features in (summary.features(rows), edge.features(unit), edge.features(1e9 * unit)):
        longest = max(math.isqrt(sum(int(v) ** 2 for v in row)) for row in features)
        assert longest <= summary.longest
        assert (features[:, -1] == 50).all()


def test_rounding_can_lengthen_features_almost_as_much_as_is_charged() -> None:
    """So the half that is charged for each entry is needed."""
    width = 4000
    rows = np.full((1, width), 1.0)
    found = Components(np.zeros(width), np.eye(width)).features(rows)[0]
    half = np.full((1, width), 0.5001 / 251.03)
    rounded = Components(np.zeros(width), np.eye(width)).features(half)[0]

    assert np.linalg.norm(found) > 256
    assert np.linalg.norm(rounded[:-1]) > 1.9 * np.linalg.norm(half) * 251.03


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=200),
    st.integers(1, 4000),
)
def test_directions_are_never_too_long(values: list[int], repeats: int) -> None:
    """As whole numbers; of any sums, also of many equal ones."""
    found = direction(np.tile(np.array(values), repeats))

    assert sum(v * v for v in found.tolist()) <= DIRECTION**2
    assert is_direction(found)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 50))
def test_two_parties_are_never_further_apart_than_is_charged(
    seed: int, signed: bool, size: int
) -> None:
    """Opposite at most, or at right angles where nothing is below 0."""
    rng = np.random.default_rng(seed)
    sums = np.rint(rng.standard_cauchy(size=(2, size)) * 100).astype(np.int64)
    first, second = (direction(s if signed else np.abs(s)) for s in sums)
    apart: IntArray = first - second
    most = (Components if signed else Cells).moved_by_party.fget  # type: ignore[attr-defined]
    summary = Components(np.zeros(1), np.eye(1)) if signed else Cells(*[np.ones((1, 1))] * 3)

    assert np.linalg.norm(apart) <= most(summary)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64, np.int64])
def test_sums_of_any_whole_type_are_cut_alike(dtype: Any) -> None:
    """The largest number of a type does not turn into a negative one."""
    most = np.iinfo(dtype).max
    mechanism = GaussianSums(scale=1.0, l2_sensitivity=1.0, unit="example")

    (found,) = mechanism.release(np.array([most], dtype=dtype)).values

    assert abs(found - min(most, 2**31)) < 20
