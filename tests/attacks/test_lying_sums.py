"""Parties that lie about sums or records in strategies on sums."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import scipy
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.app import client_app
from fl_strategies import FedHistogram, FedMoments, FedRegression, Knowledge
from fl_strategies._util import Array, IntArray
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.features import FeatureMap
from fl_strategies.learners import Task
from fl_strategies.privacy.mechanisms import GaussianSums
from fl_strategies.strategies.sums.histogram import Cells, plausible_counts
from fl_strategies.strategies.sums.moments import SummedMoments, _limited_products
from fl_strategies.strategies.sums.regression import FARTHEST, Components, Ellipsoid
from fl_strategies.strategies.sums.summary import PartySums
from fl_strategies.wire import keys
from tests.toys import (
    PUBLIC,
    TEST,
    CentroidLearner,
    EditedGrid,
    accuracy,
    common_options,
    load_toy_party,
    toy_party,
)

NUM_PARTIES, NUM_RECORDS, TARGET = 10, 40, 2
BOTH = [FedHistogram, FedRegression]
ALL = [*BOTH, FedMoments]
DETAIL: Mapping[Any, Mapping[str, Any]] = {
    FedHistogram: {"num_cells": 6},
    FedRegression: {"num_components": 2},
    FedMoments: {},
}
TASKS: tuple[Task, ...] = ("single-label", "multi-label")
SEEDED = {"accept_noise": True, "seeded_noise": True}
LEVELS: Mapping[str, Mapping[str, Any]] = {
    "L0": {},
    "L2": {"target_epsilon": 6.0, **SEEDED},
    "central": {"target_epsilon": 2.0, "privacy_level": "central", **SEEDED},
}
COMPONENTS = Components.of_rows(PUBLIC, 2)
CELLS = Cells.of_rows(PUBLIC, 6, 2, np.random.default_rng(0), 3)

Lie = Callable[[Any, IntArray], tuple[IntArray, int]]


def federation(kind: Any, level: str, **changes: Any) -> Any:
    common = {**common_options(NUM_PARTIES), "min_parties": NUM_PARTIES - 3}
    known = {"num_records": NUM_PARTIES * NUM_RECORDS}
    return kind.from_settings(**{**common, **DETAIL[kind], **known, **LEVELS[level], **changes})


def run(strategy: Any, lie: Lie, liars: int = 1) -> dict[str, Any]:
    """Return the metrics of a run in which the first parties send something else."""

    def change(_: int, replies: list[Message]) -> None:
        for content in (reply.content for reply in replies):
            meta = content.config_records[keys.META]
            if meta[keys.KIND] == "sums" and int(meta[keys.PARTITION_ID]) < liars:  # type: ignore[arg-type]
                sums = content.array_records["arrays"]["sums"].numpy().astype(np.int64)
                sent, meta[keys.NUM_EXAMPLES] = lie(strategy, sums)
                inside = np.clip(sent, -(2**31) + 1, 2**31 - 1).astype(np.int32)
                content["arrays"] = ArrayRecord({"sums": FlowerArray(inside)})

    grid = EditedGrid(client_app(load_toy_party), NUM_PARTIES, change)
    result = strategy.start(grid, ArrayRecord(), num_rounds=1)
    return dict(result.train_metrics_clientapp.get(1, {}))


# What a liar sends: sums that its records could have with other labels, so many times.


def relabelled(label: Callable[[IntArray], IntArray], times: int = 1) -> Lie:
    def lie(strategy: Any, sums: IntArray) -> tuple[IntArray, int]:  # noqa: ARG001
        own = toy_party(0)
        said = strategy._summary.of_records(own.x, label(own.y), 3, "single-label")
        return times * said, times * NUM_RECORDS

    return lie


def targeted(times: int) -> Lie:
    return relabelled(lambda y: np.full_like(y, TARGET), times)


def permuted(times: int) -> Lie:
    return relabelled(lambda y: (y + 1) % 3, times)


ATTACKS = {
    f"{attack.__name__} x {times}": attack(times)
    for attack in (targeted, permuted)
    for times in (1, 2, 100_000)
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ALL)
def test_one_liar_of_ten_decides_nothing(kind: Any, level: str, attack: str) -> None:
    strategy = federation(kind, level)

    run(strategy, ATTACKS[attack])

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.75


@pytest.mark.parametrize("kind", ALL)
def test_a_claim_of_many_records_is_cut_to_what_the_others_leave(kind: Any) -> None:
    """At most the median party's, if the number of all records is known; twice, if not."""
    claims = [PartySums(np.zeros(1, np.int64), n) for n in [NUM_RECORDS] * 9 + [10**6]]

    known = federation(kind, "central")._believed(claims)
    unknown = federation(kind, "central", num_records=None)._believed(claims)

    assert known.tolist() == [NUM_RECORDS] * 10
    assert unknown.tolist() == [NUM_RECORDS] * 9 + [2 * NUM_RECORDS]


# Sums that no records have.


def shifted(sums: IntArray) -> IntArray:
    changed = sums.copy()
    changed[(0,) * sums.ndim] += 1
    return changed


IMPOSSIBLE: Mapping[str, Lie] = {
    "one record more": lambda _, sums: (shifted(sums), NUM_RECORDS),
    "fewer records claimed": lambda _, sums: (sums, NUM_RECORDS - 1),
    "twice the records": lambda _, sums: (2 * sums, NUM_RECORDS),
    "millions": lambda _, sums: (np.full_like(sums, 10**9), NUM_RECORDS),
    "more of a class in one division": lambda _, sums: (rolled(sums), NUM_RECORDS),
}


def rolled(sums: IntArray) -> IntArray:
    changed = sums.copy()
    changed[0] = np.roll(changed[0], 1, axis=-1)
    if sums.ndim == 2:
        changed[-1] = np.array([sums[-1].sum(), 0, 0])
    return changed


CASES = [(kind, lie) for kind in BOTH for lie in IMPOSSIBLE]
# A sum of features that is larger by one is possible.
CASES.remove((FedRegression, "one record more"))


@pytest.mark.parametrize(("kind", "lie"), CASES)
@pytest.mark.parametrize("level", ["L0", "central"])
def test_impossible_sums_cost_their_party_the_round(kind: Any, level: str, lie: str) -> None:
    strategy = federation(kind, level)

    run(strategy, IMPOSSIBLE[lie])

    (reason,) = strategy.rejected_.values()
    assert "sums without noise must be those of" in reason
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.75


# Moments that no records have.

MOMENTS = {
    folds: SummedMoments(
        FeatureMap.of_rows(PUBLIC).with_products(2).settled(), folds, np.empty(0), np.empty(0)
    )
    for folds in (1, 5)
}


def honest_moments(folds: int, num_records: int = NUM_RECORDS) -> IntArray:
    own = toy_party(0, num_records=num_records)
    return MOMENTS[folds].of_records(own.x, own.y, 3, "single-label")


def parts_of(sums: IntArray) -> tuple[IntArray, IntArray]:
    """Return views of targets and packed products, which change the sums."""
    targets, _, packed = MOMENTS[len(sums)].split(sums, 3, "single-label")
    return targets, packed


def hollow(sums: IntArray) -> None:
    """Keep what the constant makes known, and have no products of features."""
    targets, packed = parts_of(sums)
    size = targets.shape[1]
    diagonal = np.cumsum([0, *range(size, 1, -1)])
    targets[:, :-1, 0] += 3 * targets[:, -1:, 0]
    targets[:, :-1, 1] -= 3 * targets[:, -1:, 0]
    packed[:, diagonal[:-1]] = packed[:, diagonal[:-1]] // 10


def opposed(sums: IntArray) -> None:
    """Have targets against each other that no products of these records allow."""
    targets, _ = parts_of(sums)
    size = MOMENTS[len(sums)].features.constant * targets[:, -1].min() // 50
    targets[:, 0, 0] += 5 * size
    targets[:, 0, 1] -= 5 * size


def half_a_record(sums: IntArray) -> None:
    targets, _ = parts_of(sums)
    targets[:, -1, 0] += 1
    targets[:, -1, 1] -= 1


def shared_energy(sums: IntArray) -> None:
    """Let each class be as long as all records together allow, against another."""
    targets, packed = parts_of(sums)
    features = MOMENTS[len(sums)].features
    number = int(packed[0, -1]) // features.constant**2
    row = np.zeros(targets.shape[1], dtype=np.int64)
    row[0], row[-1] = 240, features.constant
    gram = number * np.outer(row, row)
    gram[0, -1] = gram[-1, 0] = 0
    counts = np.array([number // 2, number - number // 2, 0])
    targets[:] = 0
    targets[:, -1] = counts * features.constant
    targets[:, 0, 0], targets[:, 0, 1] = 239 * counts[0], -239 * counts[0]
    packed[:] = gram[np.triu_indices(len(gram))]


@pytest.mark.parametrize(
    ("break_", "folds"),
    [(hollow, 1), (hollow, 5), (opposed, 1), (half_a_record, 1), (half_a_record, 5)],
)
def test_targets_that_products_do_not_allow_are_refused(break_: Any, folds: int) -> None:
    """Though products alone, and targets alone, are those of some records."""
    sums = honest_moments(folds)
    assert MOMENTS[folds].possible(sums, NUM_RECORDS, "single-label")

    break_(sums)

    assert not MOMENTS[folds].possible(sums, NUM_RECORDS, "single-label")


def test_records_at_two_opposite_places_have_the_most_that_classes_share() -> None:
    """Two classes may be as far apart as all records are long, and not farther."""
    sums = honest_moments(1)
    shared_energy(sums)
    assert MOMENTS[1].possible(sums, NUM_RECORDS, "single-label")
    targets, _ = parts_of(sums)

    targets[:, 0, 0] = 239 * targets[:, -1, 0] // MOMENTS[1].features.constant * 11 // 10
    targets[:, 0, 1] = -targets[:, 0, 0]

    assert not MOMENTS[1].possible(sums, NUM_RECORDS, "single-label")


@pytest.mark.parametrize("value", [-(2**31), -(2**31) + 1, 2**31 - 1])
@pytest.mark.parametrize("folds", MOMENTS)
@pytest.mark.parametrize("claim", [NUM_RECORDS, 6000, 10**5])
def test_a_claim_of_many_records_opens_no_door(value: int, folds: int, claim: int) -> None:
    """Moments were once believed where a party claimed so many that some might be cut."""
    honest = honest_moments(folds, num_records=claim)
    for place in range(honest.shape[1]):
        sums = honest.copy()
        sums[0, place] = value
        assert not MOMENTS[folds].possible(sums, claim, "single-label")
    assert not MOMENTS[folds].possible(np.full_like(honest, value), claim, "single-label")


@pytest.mark.parametrize("times", [1, 100, 1000, 50_000, 10**7])
@pytest.mark.parametrize("folds", MOMENTS)
@pytest.mark.parametrize("far", [1.0, 1e6])
def test_moments_of_very_many_records_are_possible_though_cut(
    times: int, folds: int, far: float
) -> None:
    own = toy_party(0)
    summed = MOMENTS[folds].of_records(far * own.x, own.y, 3, "single-label")
    sums = np.clip(times * summed, -(2**31) + 1, 2**31 - 1)

    assert MOMENTS[folds].possible(sums, times * NUM_RECORDS, "single-label")
    if times == 1:
        assert not MOMENTS[folds].possible(sums, NUM_RECORDS + 1, "single-label")


MOMENT_TASKS: list[tuple[Task, int]] = [
    *(("single-label", 2), ("single-label", 4)),
    *(("multi-label", 3), ("regression", 1), ("regression", 3)),
]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(MOMENT_TASKS), st.sampled_from([1, 4, 20]))
def test_moments_of_records_are_always_possible(
    seed: int, kind: tuple[Task, int], folds: int
) -> None:
    """So that a refusal tells of no record: also of equal ones, far ones and single ones."""
    (task, num_classes), rng = kind, np.random.default_rng(seed)
    number, width = int(rng.integers(1, 60)), int(rng.integers(1, 6))
    x = rng.standard_cauchy(size=(number, width)) * 10.0 ** rng.integers(-30, 30)
    if rng.random() < 0.3:
        x[:] = x[0]
    y: Array = rng.integers(num_classes, size=number)
    if task == "multi-label":
        y = rng.integers(-1, 2, (number, num_classes))
    elif task == "regression":
        y = rng.normal(size=(number, num_classes)) * rng.choice([0.0, 1e-3, 1.0, 1e30])
    made = FeatureMap.of_rows(rng.normal(size=(40, width))).with_cosines(None, 9, rng)
    numeric = num_classes if task == "regression" else 0
    summary = SummedMoments(made, folds, np.zeros(numeric), np.ones(numeric))

    sums = summary.of_records(x, y, num_classes, task)

    assert summary.possible(sums, number, task)
    assert not summary.possible(sums, number + 1, task)
    assert not summary.possible(1000 * sums, number, task)


@pytest.mark.parametrize("lie", ["fewer records claimed", "twice the records", "millions"])
@pytest.mark.parametrize("level", ["L0", "central"])
def test_impossible_moments_cost_their_party_the_round(level: str, lie: str) -> None:
    strategy = federation(FedMoments, level)

    run(strategy, IMPOSSIBLE[lie])

    (reason,) = strategy.rejected_.values()
    assert "sums without noise must be those of" in reason
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.75


def test_products_beyond_the_noise_are_cut() -> None:
    """Every direction, and all of them together; plausible ones are left alone."""
    rng, size, noise, longest = np.random.default_rng(0), 30, 7000.0, 256.0
    deviations = np.where(np.eye(size), noise / 5, noise / 7)
    draws = np.triu(rng.normal(size=(size, size)) * deviations)
    plain = np.rint(draws + np.triu(draws, 1).T).astype(np.int64)
    high, low, many = plain.copy(), plain.copy(), plain.copy()
    high[0, 0] += 10**8
    low[0, 0] -= 10**8
    many[np.diag_indices(size)] += 2 * 10**6

    room = 2 * noise / 7 * math.sqrt(size) + 6 * noise / 5
    assert _limited_products(plain, 40, longest, noise) is plain
    cut = np.linalg.eigvalsh(_limited_products(high, 40, longest, noise))
    assert cut[-1] <= 40 * longest**2 + room
    assert np.linalg.eigvalsh(_limited_products(low, 40, longest, noise))[0] >= -room
    total = np.trace(_limited_products(many, 40, longest, noise))
    assert total < 1.1 * 40 * longest**2 + size * room


def aligned(times: int) -> Lie:
    """Return sums against the truth that are as long as noise is, or longer."""

    def lie(strategy: Any, sums: IntArray) -> tuple[IntArray, int]:
        own = toy_party(0)
        exact = strategy._summary.of_records(own.x, own.y, 3, "single-label")
        targets, _, _ = strategy._summary.split(exact, 3, "single-label")
        centred = targets[0] - targets[0].mean(axis=1, keepdims=True)
        noise = strategy._mechanism.drawn_scale / strategy._summary.multiples(3, "single-label")
        sent = sums.copy()
        length = times * noise[0, 0] * math.sqrt(centred.size) / np.linalg.norm(centred)
        sent[0, : centred.size] -= np.rint(length * centred).astype(np.int64).ravel()
        return sent, NUM_RECORDS

    return lie


@pytest.mark.parametrize(("liars", "times"), [(1, 20), (1, 1000), (3, 1000)])
def test_noise_that_points_against_the_others_is_none(liars: int, times: int) -> None:
    """It is as long as noise may be, or is cut to that, and not as noise points."""
    strategy = federation(FedMoments, "L2")

    run(strategy, aligned(times), liars=liars)

    assert strategy.outliers_ == tuple(range(liars))


def test_honest_noise_is_against_nobody() -> None:
    """In no order of parties, and however much of it there is, in a hundred rounds."""
    for seed in range(100):
        strategy = federation(FedMoments, "L2", seed=seed, target_epsilon=0.5 + seed / 10)
        parts = []
        for number in range(NUM_PARTIES):
            own = toy_party(number)
            sums = strategy._summary.of_records(own.x, own.y, 3, "single-label")
            multiples = strategy._summary.multiples(3, "single-label")
            rng = np.random.default_rng([seed, number])
            noisy = strategy._mechanism.release(sums * multiples, rng).values / multiples
            parts.append(np.rint(noisy).astype(np.int64))

        assert strategy._find_outliers(parts, np.full(NUM_PARTIES, float(NUM_RECORDS))) == []


def test_naming_one_class_for_all_is_no_evidence() -> None:
    """Three of ten call all their records one class; honest parties of one class count."""
    strategy = federation(FedMoments, "L0")

    run(strategy, targeted(1), liars=3)

    assert strategy.outliers_ == (0, 1, 2)
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.85


@pytest.mark.parametrize("claim", [0, -1, True, 2.0, "40", 2**41])
def test_a_claim_is_a_number_of_records(claim: Any) -> None:
    sums = np.zeros((3, 3), np.int32)
    with pytest.raises(KnowledgeMismatch, match="num-examples must be a whole number"):
        federation(FedRegression, "L2").check(
            Knowledge("sums", {"sums": sums}, {keys.NUM_EXAMPLES: claim})
        )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(TASKS), st.sampled_from([2, 4]), st.booleans())
def test_sums_of_records_are_always_possible(
    seed: int, task: Task, num_classes: int, far: bool
) -> None:
    """So that a refusal tells of no record: any rows, also far out, and any labels."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 30))
    x = rng.standard_cauchy(size=(number, 2)) * (1e30 if far else 1.0)
    several = task == "multi-label"
    y = rng.integers(-1, 2, (number, 4)) if several else rng.integers(num_classes, size=number)
    classes = 4 if several else num_classes
    for summary in (CELLS, COMPONENTS):
        sums = summary.of_records(x, y, classes, task)
        assert summary.possible(sums, number, task)
        assert not summary.possible(sums * 1000, number, task) or not sums.any()


def test_sums_of_very_many_records_are_possible_though_cut() -> None:
    """Sums beyond the largest number that travels are cut, and tell no number of records."""
    number = 10**9
    features = COMPONENTS.features(PUBLIC[:1])[0]
    sums = np.clip(features[:, None] * number, -(2**31) + 1, 2**31 - 1)

    assert COMPONENTS.possible(sums, number, "single-label")
    assert not COMPONENTS.possible(sums, 10**6, "single-label")


# What limits do to two neighbours.


def in_grains(strategy: Any, part: Array) -> IntArray:
    """Return a limited part in the noise's units, as it is added up."""
    part = part * strategy._summary.multiples(3, "single-label")
    low = np.floor(part).astype(np.int64)
    mechanism = strategy._mechanism
    units = mechanism.in_units(part - low) if part.dtype.kind == "f" else 0
    return np.asarray(low * round(1 / mechanism.grain) + units)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([0.01, 2.0]), st.sampled_from([1.0, 0.7, 0.123]))
@pytest.mark.parametrize("kind", ALL)
def test_limits_bring_no_neighbours_farther_apart_than_is_charged(
    kind: Any, seed: int, epsilon: float, part: float
) -> None:
    """At `central`, for records that are projected, or cut to a part, or both."""
    strategy = federation(kind, "central", target_epsilon=epsilon)
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 60))
    x, y = 5.0 * rng.standard_cauchy(size=(number, 2)), rng.integers(3, size=number)
    if rng.random() < 0.5:
        x[:], y[:] = x[0], y[0]
    sums = []
    for _ in range(2):
        whole = strategy._summary.of_records(x, y, 3, "single-label")
        limited = strategy._limited(PartySums(whole, number), part * number)
        sums.append(in_grains(strategy, limited))
        x[0], y[0] = -x[0] * 10.0 ** rng.integers(-2, 3), rng.integers(3)

    apart = float(np.linalg.norm((sums[0] - sums[1]) * strategy._mechanism.grain))
    assert apart <= strategy._mechanism.l2_sensitivity


def test_what_is_left_of_the_charge_is_left() -> None:
    """By the longest features there are: of rows at the edge, all rounded up."""
    for width in (1, 2, 40, 3000):
        turned = Components(np.zeros(width), np.eye(width))
        rng = np.random.default_rng(width)
        rows = np.abs(rng.normal(size=(200, width))) + rng.uniform(0, 3, size=(200, 1))
        longest = float(np.linalg.norm(turned.features(rows), axis=1).max())

        unused = turned.unused(2, "single-label")
        assert unused > 0.25
        assert 2 * longest <= turned.moved(2, "single-label") - unused


def test_noise_that_is_too_coarse_is_projected_for_by_nobody() -> None:
    """Where units of the noise are more than the charge leaves; sums stay whole then."""
    width, num_classes = 200, 50
    wide = {
        **common_options(NUM_PARTIES),
        "learner_fn": type("Wide", (CentroidLearner,), {"num_classes": num_classes}),
        "public": np.random.default_rng(0).normal(size=(1000, width)),
        "num_classes": num_classes,
        "num_components": width,
        "privacy_level": "central",
        "accept_noise": True,
    }
    far = np.zeros((width + 1, num_classes), dtype=np.int64)
    far[0, 0], far[-1, 0] = 10_000, 2000
    fine, coarse = (
        FedRegression.from_settings(**wide, target_epsilon=epsilon) for epsilon in (0.1, 0.001)
    )

    assert fine._limited(PartySums(far, 40), 40).dtype == np.float64
    assert coarse._limited(PartySums(far, 40), 40) is far
    assert coarse._limited(PartySums(far, 40), 20).dtype == np.int64


def test_a_trusted_server_names_only_public_cuts() -> None:
    """How many sums were projected depends on records; how many claims were cut does not."""
    far: Lie = lambda s, _: (_longest(s), NUM_RECORDS)  # noqa: E731
    strategy, open_ = (federation(FedRegression, level) for level in ("central", "L0"))

    assert run(strategy, far)[keys.NUM_CAPPED] == 0
    assert keys.NUM_OUTLIERS not in run(federation(FedHistogram, "central"), targeted(1))
    assert run(open_, far)[keys.NUM_CAPPED] == 1


def _longest(strategy: Any) -> IntArray:
    """Return the longest sums of one class that its records can have."""
    features = strategy._summary.features(np.array([[1e6, -1e6]]))[0]
    return np.asarray(np.outer(NUM_RECORDS * features, [1, 0, 0]))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 400.0]))
def test_a_projection_is_the_nearest_plausible_point(seed: int, noise: float) -> None:
    """By a second route, of a general solver; and two points come no farther apart."""
    rng = np.random.default_rng(seed)
    ellipsoid = Ellipsoid.of_features(COMPONENTS.features(PUBLIC), COMPONENTS.longest)
    number = int(rng.integers(5, 500))
    sums = [np.rint(rng.normal(size=(3, 2)) * 256 * number) for _ in range(2)]
    first, second = (ellipsoid.project(s.astype(np.int64), number, noise) for s in sums)

    assert np.linalg.norm(first - second) <= np.linalg.norm(sums[0] - sums[1]) * (1 + 1e-12)
    assert ellipsoid.project(first, number, noise * (1 - 1e-9)).shape == first.shape
    inner = np.linalg.inv(ellipsoid.axes @ np.diag(ellipsoid.squares) @ ellipsoid.axes.T)
    if noise == 0:
        most = FARTHEST + 3 / number
        found = scipy.optimize.minimize(
            lambda m: float(np.sum((m.reshape(3, 2) - sums[0] / number) ** 2)),
            np.zeros(6),
            constraints={
                "type": "ineq",
                "fun": lambda m: most - np.sum(m.reshape(3, 2) * (inner @ m.reshape(3, 2))),
            },
            options={"maxiter": 1000, "ftol": 1e-14},
        )
        own = float(np.sum((first / number - sums[0] / number) ** 2))
        assert own <= found.fun * (1 + 1e-4) + 1e-6
        inside = np.sum((first / number) * (inner @ (first / number)))
        assert inside <= most * (1 + 1e-9)


# Noise of parties.


@pytest.mark.parametrize("kind", ALL)
def test_noise_alone_reaches_no_limit(kind: Any) -> None:
    """Honest sums with noise are as they are, a hundred draws of them."""
    strategy = federation(kind, "L2", target_epsilon=1.0)
    own, mechanism = toy_party(0), strategy._mechanism
    sums = strategy._summary.of_records(own.x, own.y, 3, "single-label")
    multiples = strategy._summary.multiples(3, "single-label")
    for _ in range(100):
        noisy = np.rint(mechanism.release(sums * multiples).values / multiples).astype(np.int64)
        assert strategy._limited(PartySums(noisy, NUM_RECORDS), NUM_RECORDS) is noisy


def test_counts_beyond_the_noise_are_cut() -> None:
    """Entries, the totals of a class over all divisions, and the length of all of them."""
    counts = np.zeros((4, 10, 3), dtype=np.int64)
    high, loud, long = counts.copy(), counts.copy(), counts.copy()
    high[0, 0, 0] = 10**6
    loud[:, :, 1] = 8
    long[:] = np.where(np.arange(10)[:, None] % 2, 9, -9)

    assert plausible_counts(high, 20, 2.0).max() < 20 + 2.0 * 6.5
    totals = plausible_counts(loud, 20, 2.0).sum(axis=1).mean(axis=0)
    assert 20 < totals[1] < 20 + 2.0 * math.sqrt(10 / 4) * 5.7
    assert totals[0] == totals[2] == 0
    assert np.linalg.norm(plausible_counts(long, 5, 2.0)) < 5 * 2 + 2.0 * (math.sqrt(120) + 6)
    assert plausible_counts(counts + 1, 20, 2.0) is not counts


# Parties that contradict the others.


@pytest.mark.parametrize("level", ["L0", "L2"])
@pytest.mark.parametrize("kind", ALL)
def test_three_of_ten_that_contradict_the_others_are_not_counted(kind: Any, level: str) -> None:
    """Where nothing is promised, or noise was added before; unless nobody is to be judged."""
    strategy = federation(kind, level, **({"target_epsilon": 30.0} if level == "L2" else {}))
    metrics = run(strategy, permuted(1), liars=3)
    believing = federation(kind, "L0", exclude_outliers=False)
    run(believing, permuted(1), liars=3)

    assert strategy.outliers_ == (0, 1, 2)
    assert metrics[keys.NUM_OUTLIERS] == 3
    assert believing.outliers_ == ()
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.85


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ALL)
def test_honest_parties_are_all_counted(kind: Any, level: str) -> None:
    strategy = federation(kind, level)
    metrics = run(strategy, permuted(1), liars=0)

    assert strategy.outliers_ == ()
    assert metrics[keys.NUM_CAPPED] == 0


# Sums that are no whole numbers.


def test_fractions_are_added_in_units_of_the_noise() -> None:
    mechanism = GaussianSums(scale=0.01, l2_sensitivity=1.0, unit="example")
    whole = np.array([3, -5, 2**31])
    units = mechanism.in_units(np.array([0.25, 0.5, 0.75]))

    found = mechanism.release(whole, np.random.default_rng(0), units=units).values
    plain = mechanism.release(whole, np.random.default_rng(0)).values

    np.testing.assert_allclose(found - plain, [0.25, 0.5, 0.0], atol=mechanism.grain)
    far, rng = np.array([-(2**40)]), np.random.default_rng(0)
    assert abs(mechanism.release(far, rng, units=np.array([5])).values[0] + 2**31) < 0.1
