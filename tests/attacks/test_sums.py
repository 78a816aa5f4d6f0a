"""Strategies on sums among hostile servers, hostile parties and curious ones."""

import math
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.app import client_app
from fl_strategies import REGISTRY, FedHistogram, FedMoments, FedRegression, Knowledge, Party
from fl_strategies._util import Array, IntArray, content_hash
from fl_strategies.errors import KnowledgeMismatch, PrivacyBudgetExceeded, RunFailed
from fl_strategies.features import FeatureMap
from fl_strategies.party.party import PartyPolicy
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.mechanisms import GaussianSums, Release
from fl_strategies.strategies.sums.histogram import Cells
from fl_strategies.strategies.sums.moments import SummedMoments
from fl_strategies.strategies.sums.regression import Components
from fl_strategies.strategies.sums.statistics import NUMBER, Tally
from fl_strategies.strategies.sums.summary import DIRECTION, direction, is_direction
from fl_strategies.wire import keys
from simulations.runtime.local import run_local
from tests.attacks import test_non_interference as check
from tests.attacks.interference import NEIGHBOURS, ORDINARY, Records
from tests.kept import Killed, MortalGrid, journal_of
from tests.toys import PUBLIC, common_options, load_toy_party, load_with, toy_party

ALL = [FedHistogram, FedRegression, FedMoments]
ROLES = {
    "cells": REGISTRY["fedhistogram"].party,
    "components": REGISTRY["fedregression"].party,
    "moments": REGISTRY["fedmoments"].party,
    "columns": REGISTRY["fedstatistics"].party,
}
SUMMARIES: dict[str, Any] = {
    "cells": Cells,
    "components": Components,
    "moments": SummedMoments,
    "columns": Tally,
}
COLUMNS = Tally(
    num_values=2,
    low=np.full(2, -5.0),
    high=np.full(2, 5.0),
    kinds=np.full(2, NUMBER),
    gaps=np.full(2, -1),
    levels=20,
    digits=1,
    num_bins=4,
    num_times=2,
)
SENT: dict[str, dict[str, Array]] = {
    "cells": Cells.of_rows(PUBLIC, 6, 2, np.random.default_rng(0)).to_arrays(),
    "components": Components.of_rows(PUBLIC, 2).to_arrays(),
    "moments": SummedMoments(
        FeatureMap.of_rows(PUBLIC)
        .with_cosines(PUBLIC, 6, np.random.default_rng(0))
        .for_records(100, scale=100.0),
        1,
        np.empty(0),
        np.empty(0),
    ).to_arrays(),
    "columns": COLUMNS.to_arrays(),
}
APP = client_app(load_toy_party)


def asked(party: Party, **changes: Any) -> ConfigRecord:
    """Return the configuration of a server, of which some settings are others."""
    usual = {
        "privacy-level": "L2",
        "target-epsilon": 1.0,
        "task": party.task,
        keys.NUM_CLASSES: party.num_classes,
        keys.PUBLIC_HASH: content_hash(party.public),
        keys.SEED: 0,
    }
    return ConfigRecord({**usual, **{k.replace("_", "-"): v for k, v in changes.items()}})


def answer(
    kind: str, arrays: dict[str, Array], party: Party | None = None, **given: Any
) -> Any:
    own = party or toy_party(0)
    received = Knowledge(kind, arrays)
    return ROLES[kind].train(own, received, asked(own, **given), PartyState())


# A hostile server: what it sends.

TURNS = [
    *(np.full((2, 2), value, np.float32) for value in (np.nan, np.inf)),
    *(np.full((2, 2), value) for value in (5e-324, 1e300)),
    *(np.ones((2, 2), kind) for kind in (np.float16, np.longdouble, np.complex64, ">f4")),
    *(np.ones(shape, np.float32) for shape in ((2, 3), (2, 0), (0, 2), (2,), (2, 2, 1), ())),
]


WRONG = [
    *({"turn": turn} for turn in TURNS),
    {"mean": np.zeros(3, np.float32)},
    {"turn": np.zeros((2, 2**12 + 1), np.float32)},
    {"turn": np.zeros((2, 2), np.int32)},
    {"more": np.zeros(1, np.float32)},
]
CENTRES = [
    *((0, 6, 2), (1, 0, 2), (1, 2**16 + 1, 2), (65, 6, 2), (6, 2), ()),
    *(np.full((1, 6, 2), np.nan, np.float32), np.zeros((1, 6, 2), np.int64)),
]


WRONG_MOMENTS: list[dict[str, Array]] = [
    *({"waves": turn} for turn in TURNS),
    # Features need not be fewer than values.
    *({"turn": turn} for turn in TURNS if turn.shape not in ((2, 0), (2, 3))),
    *({"folds": np.array([value], np.int32)} for value in (-1, 0, 21, 2**31 - 1)),
    *({"folds": folds} for folds in (np.array([1]), np.array(1, np.int32), np.ones(1, bool))),
    *({"levels": np.array([value], np.int32)} for value in (-(2**31), 0, 15, 257)),
    *({"height": np.ones(number, np.float32)} for number in (0, 5, 7, 10**5)),
    {"pairs": np.array([[0, 2]], np.int32), "products": np.ones(1, np.float32)},
    {"pairs": np.array([[-1, 0]], np.int32), "products": np.ones(1, np.float32)},
    {"target-centre": np.zeros(3), "target-reach": np.ones(3)},
    {"target-centre": np.zeros(3), "target-reach": np.zeros(3)},
    {"target-centre": np.zeros(0, np.float32)},
    {"target-reach": np.ones(1)},
    {"more": np.zeros(1, np.float32)},
    # As many features as a map may have, and more sums than noise may be drawn for.
    {"turn": np.zeros((2, 2**12 - 9), np.float32)},
    {"turn": np.zeros((2, 1500), np.float32)},
]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, change) for kind in ("cells", "components") for change in WRONG),
        *(("moments", change) for change in WRONG_MOMENTS),
        *(
            ("cells", {"centres": c if isinstance(c, np.ndarray) else np.zeros(c, np.float32)})
            for c in CENTRES
        ),
    ],
    ids=str,
)
def test_other_arrays_are_refused_before_anything_is_paid(
    kind: str, change: dict[str, Array], tmp_path: Path
) -> None:
    """Also those that are as wide as each other, but wider than rows are."""
    party = toy_party(0)
    journal = journal_of(party, tmp_path)
    sent = {**SENT[kind], **change}
    if kind == "cells" and "turn" in change and change["turn"].ndim == 2:
        sent["centres"] = np.ones((1, 3, change["turn"].shape[1]), np.float32)

    rules = {"moments": r"(features|moments|bounds of targets) must "}
    rule = rules.get(kind, f"{kind} must be mean")
    with pytest.raises(KnowledgeMismatch, match=f"Server: {rule}"):
        answer(kind, sent, replace(party, journal=journal))

    assert journal.entries() == []


@pytest.mark.parametrize("kind", ROLES)
@pytest.mark.parametrize("size", [3e38, -3e38, 1e-38, 1e-45, 0.0])
@pytest.mark.filterwarnings("error")
def test_extreme_arrays_change_nothing_about_the_price(kind: str, size: float) -> None:
    """Whatever they are, a record has one place, and the length of its features an end."""
    sent = {
        name: np.full_like(array, size) if array.dtype == np.float32 else array
        for name, array in SENT[kind].items()
    }
    first = answer(kind, sent)[1][keys.EPSILON_EXAMPLE]

    assert first == answer(kind, SENT[kind])[1][keys.EPSILON_EXAMPLE]
    assert 0.99 < first <= 1


@pytest.mark.parametrize("kind", ROLES)
def test_few_bytes_cannot_fill_a_partys_memory(kind: str) -> None:
    """Neither with one cell or component of many rows, nor with many classes."""
    num_rows, width, num_classes = 50_000, 600, 1000
    x = np.broadcast_to(np.float32(1), (num_rows, width))
    y = np.arange(num_rows) % num_classes
    sent = {
        "mean": np.zeros(width, np.float32),
        "turn": np.ones((width, 1), np.float32),
        "centres": np.ones((64, 1, 1), np.float32),
    }
    own = {name: array for name, array in sent.items() if kind == "cells" or name != "centres"}
    if kind == "moments":
        own = dict(FeatureMap.of_bounds(-np.ones(width), np.ones(width)).to_arrays())
        own |= {"columns": np.zeros(0, np.float32), "turn": sent["turn"]}
        own |= {"folds": np.array([20], np.int32)}
        own |= {"target-centre": np.zeros(0), "target-reach": np.zeros(0)}
    if kind == "columns":
        num_classes, places = 10, np.full(width, NUMBER)  # more are refused by their sums
        y = y % num_classes
        ones, gaps = np.ones(width), np.full(width, -1)
        own = replace(COLUMNS, low=-ones, high=ones, kinds=places, gaps=gaps).to_arrays()
    tracemalloc.start()
    SUMMARIES[kind].from_arrays(own, width).of_records(x, y, num_classes, "single-label")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 160 * 2**20


# A hostile server: what it asks for.


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[GaussianSums]:
    """Return the list of mechanisms that a party has used."""
    used: list[GaussianSums] = []
    release = GaussianSums.release

    def noted(self: GaussianSums, sums: Array, rng: Any = None) -> Release:
        used.append(self)
        return release(self, sums, rng)

    monkeypatch.setattr(GaussianSums, "release", noted)
    return used


GREEDY = [
    {"target_epsilon": 1e300},
    {"target_epsilon": 10.0},
    {"target_epsilon": 0.5, "delta": 1 - 1e-16},
    {"target_epsilon": 1e-3, "delta": 0.5},
]


@pytest.mark.parametrize("kind", ROLES)
@pytest.mark.parametrize("given", [*GREEDY, {"target_epsilon": 0.5}], ids=str)
def test_what_is_drawn_is_what_is_charged(
    kind: str, given: Any, drawn: list[GaussianSums], tmp_path: Path
) -> None:
    """The journal has the scale of the noise and the distance of the party's own task."""
    party = toy_party(0)
    journal = journal_of(party, tmp_path)
    answer(kind, SENT[kind], replace(party, journal=journal), **given)
    ((event, count),) = journal.entries()[0].charges

    assert (event.scale, event.l2_sensitivity, count) == (  # type: ignore[attr-defined]
        drawn[0].drawn_scale,
        drawn[0].l2_sensitivity,
        1,
    )
    levels = float(SENT["moments"]["levels"][0])
    least = {"cells": math.sqrt(2), "components": 512, "moments": 5 * 4.5**0.5 * levels**2}
    least["columns"] = 5 * 2**0.5 * (2 * 2 * 20**2)
    assert event.l2_sensitivity >= least[kind]  # type: ignore[attr-defined]
    assert not event.seeded


@pytest.mark.parametrize("kind", ROLES)
@pytest.mark.parametrize("given", GREEDY, ids=str)
def test_the_partys_own_delta_decides(kind: str, given: Any, drawn: list[GaussianSums]) -> None:
    """A generous delta of the server's is no way around the limit of a run."""
    careful = replace(toy_party(0), policy=PartyPolicy(max_run_epsilon=1.0))
    with pytest.raises(PrivacyBudgetExceeded, match="max-run-epsilon"):
        answer(kind, SENT[kind], careful, **given)

    assert drawn == []
    assert answer(kind, SENT[kind], careful, target_epsilon=0.9)[1][keys.EPSILON_EXAMPLE] < 1


@pytest.mark.parametrize("kind", ROLES)
@pytest.mark.parametrize(
    "given",
    [
        {"task": "multi-label"},
        {"task": "regression"},
        {"num_classes": 2},
        {"num_classes": 10**9},
        {"privacy_level": "L9"},
        {"privacy_level": "central", "target_epsilon": 0.0},
        {"target_epsilon": math.nan},
        {"target_epsilon": -1.0},
        {"delta": 0.0},
        {"delta": 1.0},
    ],
    ids=str,
)
def test_other_settings_are_refused(kind: str, given: Any, drawn: list[GaussianSums]) -> None:
    with pytest.raises(KnowledgeMismatch):
        answer(kind, SENT[kind], **given)

    assert drawn == []


@pytest.mark.parametrize("kind", ["cells", "components"])
def test_a_party_with_numbers_to_learn_takes_no_part(kind: str) -> None:
    """Even if the server calls them by their name."""
    party = toy_party(0)
    numbers = replace(
        party, y=np.ones((len(party.x), 3)), task="regression", y_test=None, x_test=None
    )

    with pytest.raises(KnowledgeMismatch, match="task must be single-label or multi-label"):
        answer(kind, SENT[kind], numbers)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"privacy-level": "L1"}, "would leave the party without noise"),
        ({"privacy-level": "central"}, "would leave the party without noise"),
        ({"target-epsilon": 0.0, "accept-noise": False}, "would leave the party without noise"),
        ({"seeded-noise": True}, "noise from the seed"),
        ({"target-epsilon": 8.0}, "budget does not allow"),
    ],
)
@pytest.mark.parametrize("kind", ALL)
def test_a_careful_party_answers_with_its_own_noise_only(
    kind: Any, given: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that only limits a run refuses all the rest, through the whole app."""
    strategy = kind.from_settings(**common_options(2), target_epsilon=1.0, accept_noise=True)
    config = {**strategy.party_config(), **given}
    monkeypatch.setattr(strategy, "party_config", lambda: config)
    app = client_app(
        lambda c: replace(load_toy_party(c), policy=PartyPolicy(max_run_epsilon=2.0))
    )

    with pytest.raises(RunFailed, match=sentence):
        run_local(strategy, app, 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 5e-324), (-8e307, 8e307), (1e300, 1.1e300), (-1e-300, 0.0)]
)
def test_extreme_bounds_of_columns_change_nothing_about_the_price(
    low: float, high: float
) -> None:
    """Values beyond are at them, whatever they are, and nothing warns of it."""
    sent = {**SENT["columns"], "low": np.full(2, low), "high": np.full(2, high)}
    for value in (0.0, 1e30, -1e30, 5e-324):
        party = replace(toy_party(0), x=np.full((40, 2), value), y=np.zeros(40, np.int64))

        assert answer("columns", sent, party)[1][keys.EPSILON_EXAMPLE] <= 1


BOUNDS: list[tuple[list[float], list[float]]] = [
    ([], []),
    ([0.0], [1.0]),
    ([0.0] * 3, [1.0] * 3),
    ([0.0] * 2, [0.0, 1.0]),
    ([0.0] * 2, [-1.0, 1.0]),
    ([0.0, np.nan], [1.0] * 2),
    ([0.0] * 2, [np.inf, 1.0]),
]


def numeric_party(y: Array) -> Party:
    numbers = {"y": y, "task": "regression", "num_classes": y.shape[1]}
    return replace(toy_party(0), **numbers, y_test=None, x_test=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("centre", "reach"), BOUNDS, ids=str)
def test_bounds_of_other_targets_are_refused(centre: list[float], reach: list[float]) -> None:
    party = numeric_party(np.ones((40, 2)))
    sent = {"target-centre": np.array(centre), "target-reach": np.array(reach)}

    with pytest.raises(KnowledgeMismatch, match=r"Server: (moments|bounds of targets) must"):
        answer("moments", {**SENT["moments"], **sent}, party)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("centre", [0.0, 1.7e308, -1.7e308, 5e-324])
@pytest.mark.parametrize("reach", [5e-324, 1e-300, 1.0, 1.7e308])
def test_extreme_bounds_of_targets_change_nothing_about_the_price(
    centre: float, reach: float
) -> None:
    """Nor does a target: beyond bounds it is at them, and nothing warns of it."""
    sent = {"target-centre": np.full(2, centre), "target-reach": np.full(2, reach)}
    prices = set()
    for value in (0.0, 1e30, -1e30, 5e-324):
        party = numeric_party(np.full((40, 2), value))
        prices.add(
            answer("moments", {**SENT["moments"], **sent}, party)[1][keys.EPSILON_EXAMPLE]
        )

    assert len(prices) == 1
    assert prices.pop() <= 1


# A hostile party.


@pytest.mark.parametrize("level", ["L1", "L2", "central", "L0"])
@pytest.mark.parametrize(
    "change",
    [
        lambda sums: sums.astype(np.int64),
        lambda sums: sums.astype(np.float32),
        lambda sums: sums.astype(">i4"),
        lambda sums: sums[:, :-1],
        lambda sums: sums[0],
        lambda sums: np.vstack([sums, sums]),
    ],
)
def test_moments_of_another_shape_or_type_are_refused(change: Any, level: str) -> None:
    noise = {"target_epsilon": 1.0, "accept_noise": True, "privacy_level": level}
    strategy = FedMoments.from_settings(**common_options(4), **(noise if level != "L0" else {}))
    sums = np.zeros(strategy._shape, np.int32)

    with pytest.raises(KnowledgeMismatch, match="Reply: "):
        strategy.check(Knowledge("sums", {"sums": change(sums)}, {keys.NUM_EXAMPLES: 40}))


@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1, DIRECTION, 1])
def test_moments_of_a_party_are_no_longer_than_others(value: int) -> None:
    """At the party level: a direction is at most of the length of all others."""
    noise = {"target_epsilon": 1.0, "accept_noise": True, "privacy_level": "L1"}
    strategy = FedMoments.from_settings(**common_options(4), **noise)
    sums = np.zeros(strategy._shape, np.int32)
    sums[0, 0] = DIRECTION
    sums[0, -1] = value

    with pytest.raises(KnowledgeMismatch, match="Reply: sums must be at most"):
        strategy.check(Knowledge("sums", {"sums": sums}))


FLOODS = [
    *(np.full((3, 3), value, np.int32) for value in (-(2**31), 2**31 - 1)),
    np.array([[DIRECTION, 1, 0], [0, 0, 0], [0, 0, 0]], np.int32),
    *(np.zeros((3, 3), kind) for kind in (np.int64, ">i4", np.float32, bool)),
    *(np.zeros(shape, np.int32) for shape in ((3, 3, 1), (0, 3), ())),
]


@pytest.mark.parametrize("kind", [FedHistogram, FedRegression])
@pytest.mark.parametrize("sums", FLOODS, ids=lambda a: f"{a.dtype} {a.shape} {a.sum()}")
def test_no_party_outweighs_another_at_the_party_level(kind: Any, sums: Array) -> None:
    """Longer than all others by one, or no sums at all: the reply is rejected."""
    setting = {"num_cells": 3} if kind is FedHistogram else {"num_components": 2}
    common = {**common_options(4), "target_epsilon": 1.0, "accept_noise": True}
    strategy = kind.from_settings(**common, **setting, privacy_level="L1")

    with pytest.raises(KnowledgeMismatch, match="Reply: "):
        strategy.check(Knowledge("sums", {"sums": sums}))
    with pytest.raises(KnowledgeMismatch, match="nothing else"):
        strategy.check(Knowledge("sums", {"sums": np.zeros((3, 3), np.int32), "more": sums}))


@pytest.mark.parametrize("kind", ROLES)
def test_a_party_pays_before_it_looks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    party = toy_party(0)
    journal = journal_of(party, tmp_path)
    monkeypatch.setattr(SUMMARIES[kind], "of_records", killed)
    with pytest.raises(KeyboardInterrupt):
        answer(kind, SENT[kind], replace(party, journal=journal))

    assert len(journal.entries()) == 1


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
@pytest.mark.parametrize("kind", ALL)
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


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("level", ["L1", "central"])
def test_no_epsilon_stands_beside_another_delta(kind: Any, level: str) -> None:
    """The server's figures are at its own delta, whatever parties tell."""
    result = run_local(priced(kind, level, delta=1e-3), APP, 3)
    metrics = result.train_metrics_clientapp[1]

    assert metrics[keys.DELTA_EXAMPLE] == 1e-3
    assert metrics[keys.EPSILON_EXAMPLE] <= 1.0  # type: ignore[operator]
    if level == "L1":
        assert metrics[keys.DELTA_PARTY] == 1e-3


@pytest.mark.parametrize("kind", ALL)
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


@pytest.mark.parametrize("kind", ALL)
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
@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=200), st.integers(1, 4000))
def test_directions_are_never_too_long(values: list[int], repeats: int) -> None:
    """As whole numbers; of any sums, also of many equal ones."""
    sums = np.tile(np.array(values), repeats)
    found = direction(sums)

    assert sum(v * v for v in found.tolist()) <= DIRECTION**2
    assert is_direction(found)
    assert (np.sign(found) * np.sign(sums) >= 0).all()
    assert not sums.any() or np.linalg.norm(found) > 0.99 * DIRECTION - math.sqrt(len(sums))


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
