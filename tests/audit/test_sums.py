"""Noisy sums survive the audit, from records to what leaves; broken ones are caught.

Seeds are fixed, so nothing depends on luck.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from fl_strategies import FedHistogram, FedMoments, FedRegression, Knowledge
from fl_strategies._util import Array, IntArray
from fl_strategies.privacy.mechanisms import GaussianSums, Release
from fl_strategies.strategies.sums import moments, party, server
from fl_strategies.strategies.sums.histogram import Cells
from fl_strategies.strategies.sums.moments import SummedMoments
from fl_strategies.strategies.sums.regression import LEVELS, Components
from fl_strategies.strategies.sums.statistics import Tally
from fl_strategies.strategies.sums.summary import DIRECTION, Summary, direction
from tests.audit.mechanisms import AuditResult, audit, audit_sums
from tests.audit.sum_cases import (
    BROKEN,
    CASES,
    EPSILON,
    FOLDED,
    PLAIN,
    DrawnBefore,
    Quiet,
    calibrated,
    caught_by,
    honest,
    repeat_noise,
    seeded,
)
from tests.toys import common_options

RUNS = 10_000
HISTOGRAMS = np.array([6, 3, 0, 2]), np.array([5, 3, 1, 2])
SIGNED = np.array([140, -95, 9]), np.array([100, 1, 9])


def gaussian(kind: type[GaussianSums] = GaussianSums, **changes: Any) -> GaussianSums:
    return kind(**{"scale": 2.0, "l2_sensitivity": 2**0.5, "unit": "example", **changes})


@pytest.mark.parametrize("kind", BROKEN)
def test_wrong_noise_on_sums_is_caught(kind: Any) -> None:
    """Too little of it, one draw for all sums, or one for two releases."""
    signed = {"scale": 90.0, "l2_sensitivity": 104.0}
    for broken, sums in ((gaussian(kind), HISTOGRAMS), (gaussian(kind, **signed), SIGNED)):
        assert caught_by(audit(broken, sums, runs=RUNS, rng=seeded())) >= BROKEN[kind]


@pytest.mark.parametrize(
    ("claimed", "sums"), [(1.0, HISTOGRAMS), (52.0, SIGNED)], ids=["1", "B"]
)
def test_a_sensitivity_too_small_is_caught(claimed: float, sums: Any) -> None:
    """A record that enters one count has left another; its opposite is twice as far."""
    broken = gaussian(scale=1.5 * claimed, l2_sensitivity=claimed)

    assert "attack" in caught_by(audit(broken, sums, runs=8 * RUNS, rng=seeded()))


# What a party releases, from its records.


def audit_records(name: str, kind: type[GaussianSums] = GaussianSums) -> AuditResult:
    """Audit what records sum up to, with noise for how far one may move it."""
    case = CASES[name]
    shared = case.num_classes, case.task
    right = calibrated(case.summary.moved(*shared))
    mechanism = kind(scale=right.scale, l2_sensitivity=right.l2_sensitivity, unit="example")
    pairs, multiples = zip(case.x, case.y, strict=True), case.summary.multiples(*shared)
    sums = [case.summary.of_records(x, y, *shared) * multiples for x, y in pairs]
    rng = seeded()

    def draw(side: int, size: int) -> Array:
        stack = np.broadcast_to(sums[side], (size, *sums[side].shape))
        return mechanism.release(stack, rng).values

    return audit_sums(mechanism, case.exact, draw, runs=RUNS)


@pytest.mark.parametrize("name", CASES)
def test_sums_of_neighbouring_records_keep_the_claim(name: str) -> None:
    """The attack proves most of what is claimed, and no more."""
    result = audit_records(name)

    assert caught_by(result) == set()
    assert result.passed
    assert result.lower_bound > 0.5 * result.claimed_epsilon


@pytest.mark.parametrize(
    "name",
    ["histogram", "components of two classes", "moments of a class", "products of columns"],
)
@pytest.mark.parametrize("kind", BROKEN)
def test_wrong_noise_of_a_party_is_caught(kind: Any, name: str) -> None:
    """Whatever is summed up."""
    assert caught_by(audit_records(name, kind)) >= BROKEN[kind]


@pytest.mark.parametrize("name", CASES)
def test_a_distance_too_short_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One count instead of two, the length of features, or one part of two or three."""
    monkeypatch.setattr(Cells, "moved", lambda *_: 1.0)
    monkeypatch.setattr(Tally, "moved", lambda self, *_: math.sqrt(self._moved_values))
    monkeypatch.setattr(Components, "moved", lambda self, *_: self.longest)
    right = SummedMoments.moved
    monkeypatch.setattr(SummedMoments, "moved", lambda self, *given: right(self, *given) / 2)

    assert "attack" in caught_by(audit_records(name))


@pytest.mark.parametrize("name", [name for name in CASES if "components" in name])
def test_rows_that_nobody_shortened_are_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record nine times beyond the ball moves the sums nine times as far."""

    def as_they_are(self: Components, x: Array) -> IntArray:
        constant = np.full((len(x), 1), 0.2)
        turned = (x - self.mean) @ self.turn
        return np.rint(np.hstack([turned, constant]) * LEVELS / 1.04**0.5).astype(np.int64)

    monkeypatch.setattr(Components, "features", as_they_are)

    assert caught_by(audit_records(name)) == {"attack", "fit"}


MOMENTS = [name for name in CASES if "moments" in name]


@pytest.mark.parametrize("name", MOMENTS)
def test_products_that_weigh_more_than_is_accounted_are_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 times those of two features, where 7 is just below what their length allows."""
    monkeypatch.setattr(moments, "_BESIDE", 8)

    assert "fit" in caught_by(audit_records(name))


@dataclass(frozen=True, kw_only=True)
class OnTargetsAlone(GaussianSums):
    """Adds no noise to the last six sums, which are the products of three features."""

    def release(self, sums: Array, rng: Any = None) -> Release:
        found = honest(self).release(sums, rng)
        found.values[..., -6:] = sums[..., -6:]
        return found


@dataclass(frozen=True, kw_only=True)
class OnceForAllFolds(GaussianSums):
    """Draws the noise of one fold, and adds it to all."""

    def release(self, sums: Array, rng: Any = None) -> Release:
        drawn = honest(self).release(np.zeros_like(sums[..., :1, :]), rng).values
        return Release(sums + drawn, self.charges(sums.size))


@pytest.mark.parametrize("name", MOMENTS)
def test_products_without_noise_are_caught(name: str) -> None:
    """As if features times targets were all that depends on a record."""
    assert "fit" in caught_by(audit_records(name, OnTargetsAlone))


@pytest.mark.parametrize("kind", [GaussianSums, OnceForAllFolds])
def test_noise_that_folds_share_is_caught(kind: Any) -> None:
    """Each fold has its own; a record is in the fold of its features."""
    case = CASES["moments of a class"]
    folds = [int(FOLDED.folds_of(PLAIN(x[-1:]))[0]) for x in case.x]
    (common,) = {int(FOLDED.folds_of(PLAIN(x[:1]))[0]) for x in case.x}
    origin = case.summary.of_records(case.x[0][:-1], case.y[0][:-1], 3, "single-label")
    multiples = case.summary.multiples(3, "single-label")
    exact = []
    for fold, whole in zip(folds, case.exact, strict=True):
        sums = np.zeros((2, whole.shape[1]), dtype=np.int64)
        sums[common] += (origin * multiples)[0]
        sums[fold] += (whole - origin * multiples)[0]
        exact.append(sums)
    right = calibrated(FOLDED.moved(3, "single-label"))
    mechanism = kind(scale=right.scale, l2_sensitivity=right.l2_sensitivity, unit="example")
    pairs = zip(case.x, case.y, strict=True)
    own = FOLDED.multiples(3, "single-label")
    summed = [FOLDED.of_records(x, y, 3, "single-label") * own for x, y in pairs]
    rng = seeded()

    def draw(side: int, size: int) -> Array:
        stack = np.broadcast_to(summed[side], (size, *summed[side].shape))
        return np.asarray(mechanism.release(stack, rng).values)

    result = audit_sums(mechanism, (exact[0], exact[1]), draw, runs=RUNS)
    assert caught_by(result) >= (set() if kind is GaussianSums else {"fit"})
    assert result.passed == (kind is GaussianSums)


# What a trusted server releases at the party level.


class Server(NamedTuple):
    """A strategy, sums of the others and of two parties that replace each other."""

    strategy: Any
    sums: tuple[list[IntArray], list[IntArray]]
    exact: tuple[IntArray, IntArray]


def at(shape: tuple[int, ...], **entries: int) -> IntArray:
    """Return an array that is 0 but in its first and last entries."""
    found = np.zeros(shape, dtype=np.int64)
    found.flat[0], found.flat[-1] = entries.get("first", 0), entries.get("last", 0)
    return found


SETTINGS: dict[Any, dict[str, Any]] = {
    FedHistogram: {"num_cells": 2},
    FedRegression: {"num_components": 2},
    FedMoments: {"features": "columns"},
}


def l1_server(kind: Any) -> Server:
    """Return parties with one entry each: at right angles, or opposite if sums are signed."""
    strategy = kind.from_settings(
        **common_options(3),
        **SETTINGS[kind],
        privacy_level="L1",
        target_epsilon=EPSILON,
        accept_noise=True,
    )
    shape, most = strategy._shape, DIRECTION - 1
    others = [at(shape, last=20_000), at(shape, last=1)]
    if kind is FedHistogram:
        second, exact = at(shape, last=1), at(shape, last=3 * most)
    else:
        second, exact = at(shape, first=-3), at(shape, first=-most, last=2 * most)
    return Server(
        strategy,
        ([at(shape, first=50_000), *others], [second, *others]),
        (at(shape, first=most, last=2 * most), exact),
    )


def audit_l1(kind: Any, make: Callable[[Any], Any] = lambda m: m) -> AuditResult:
    """Audit directions of parties, as the server checks them, adds them up and blurs them."""
    own = l1_server(kind)
    mechanism = own.strategy._mechanism = make(own.strategy._mechanism)
    multiples = own.strategy._summary.multiples(3, "single-label")
    checked = [
        [
            own.strategy.check(
                Knowledge("sums", {"sums": party.direction(s).astype("i4")})
            ).sums
            for s in side
        ]
        for side in own.sums
    ]

    def draw(side: int, size: int) -> Array:
        stacks = [np.broadcast_to(s, (size, *s.shape)) for s in checked[side]]
        return np.asarray(own.strategy._total(stacks, "sums") * multiples)

    return audit_sums(mechanism, own.exact, draw, runs=RUNS)


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat_noise(monkeypatch)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_server_keeps_the_claim_of_the_party_level(kind: Any) -> None:
    """Although one of the neighbours has fifty thousand records and the other three."""
    result = audit_l1(kind)

    assert caught_by(result) == set()
    assert result.lower_bound > 0.5 * result.claimed_epsilon


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("broken", [Quiet, DrawnBefore])
def test_wrong_noise_of_the_server_is_caught(broken: Any, kind: Any) -> None:
    """At the party level, in the code that adds parties up."""

    def make(right: GaussianSums) -> GaussianSums:
        sensitivity = right.l2_sensitivity
        twin: GaussianSums = broken(
            scale=right.scale, l2_sensitivity=sensitivity, unit=right.unit
        )
        return twin

    assert caught_by(audit_l1(kind, make)) >= BROKEN[broken]


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_partys_weight_that_nobody_limits_is_caught(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums as they are, from a party that does not shorten them, to a server that lets them."""
    monkeypatch.setattr(party, "direction", lambda sums: sums)
    monkeypatch.setattr(server, "is_direction", lambda _: True)

    assert caught_by(audit_l1(kind)) == {"attack", "fit"}


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_party_that_moves_the_sum_by_its_length_is_caught(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replacement points elsewhere: the root of two, or two times as far."""
    monkeypatch.setattr(Summary, "moved_by_party", DIRECTION)

    assert "attack" in caught_by(audit_l1(kind))


def test_neighbours_are_as_far_apart_as_is_charged() -> None:
    """But for the rounding of features, and a constant that two rows of a class share."""
    for case in CASES.values():
        apart = np.linalg.norm(case.exact[0] - case.exact[1])
        assert 0.97 < apart / case.summary.moved(case.num_classes, case.task) <= 1
    lengths = [np.linalg.norm(direction(s)) for s in l1_server(FedHistogram).sums[0]]
    assert lengths == [DIRECTION - 1] * 3
