"""FedHistogram and FedRegression among hostile servers, hostile parties and curious ones."""

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from clients.app import client_app
from fl_strategies import REGISTRY, FedHistogram, FedRegression, Knowledge, Party
from fl_strategies._util.arrays import Array, content_hash
from fl_strategies.errors import KnowledgeMismatch, PrivacyBudgetExceeded, RunFailed
from fl_strategies.party.policy import PartyPolicy
from fl_strategies.party.state import PartyState
from fl_strategies.privacy.counts import GaussianSums
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.privacy.mechanisms import Release
from fl_strategies.strategies.sums import HISTOGRAM_PARTY, REGRESSION_PARTY, SumParty
from fl_strategies.strategies.sums.regression import Components
from fl_strategies.strategies.sums.summary import DIRECTION, Cells
from fl_strategies.wire import keys
from simulations.runtime.local import run_local
from tests.toys import PUBLIC, common_options, load_toy_party, toy_party

BOTH = [FedHistogram, FedRegression]
ROLES = {"cells": HISTOGRAM_PARTY, "components": REGRESSION_PARTY}
SENT: dict[str, dict[str, Array]] = {
    "cells": Cells.of_rows(PUBLIC, 6, 2, np.random.default_rng(0)).to_arrays(),
    "components": Components.of_rows(PUBLIC, 2).to_arrays(),
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

WRONG = [
    np.full((2, 2), np.nan, np.float32),
    np.full((2, 2), np.inf, np.float32),
    np.full((2, 2), 5e-324),
    np.full((2, 2), 1e300),
    np.ones((2, 2), np.float16),
    np.ones((2, 2), np.longdouble),
    np.ones((2, 2), np.complex64),
    np.ones((2, 2), ">f4"),
    np.ones((2, 3), np.float32),
    np.ones((2, 0), np.float32),
    np.ones((0, 2), np.float32),
    np.ones(2, np.float32),
    np.ones((2, 2, 1), np.float32),
    np.ones((), np.float32),
]


@pytest.mark.parametrize("kind", ROLES)
@pytest.mark.parametrize("turn", WRONG, ids=lambda a: f"{a.dtype} {a.shape}")
def test_other_arrays_are_refused_before_anything_is_paid(
    kind: str, turn: Array, tmp_path: Path
) -> None:
    """Also those that are as wide as each other, but wider than rows are."""
    party = toy_party(0)
    journal = PartyJournal(tmp_path, fingerprint=data_fingerprint(party.x, party.y))
    sent = {**SENT[kind], "turn": turn}
    if kind == "cells" and turn.ndim == 2:
        sent["centres"] = np.ones((1, 3, turn.shape[1]), np.float32)

    with pytest.raises(KnowledgeMismatch, match=f"Server: {kind} must be mean"):
        answer(kind, sent, replace(party, journal=journal))

    assert journal.entries() == []


@pytest.mark.parametrize("kind", ROLES)
@pytest.mark.parametrize("size", [3e38, -3e38, 1e-38, 1e-45, 0.0])
@pytest.mark.filterwarnings("error")
def test_extreme_arrays_change_nothing_about_the_price(kind: str, size: float) -> None:
    """Whatever they are, a record has one place, and the length of its features an end."""
    sent = {name: np.full_like(array, size) for name, array in SENT[kind].items()}
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
    summary = {"cells": Cells, "components": Components}[kind]
    own = {name: array for name, array in sent.items() if kind == "cells" or name != "centres"}
    tracemalloc.start()
    summary.from_arrays(own, width).of_records(x, y, num_classes, "single-label")
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
    journal = PartyJournal(tmp_path, fingerprint=data_fingerprint(party.x, party.y))
    answer(kind, SENT[kind], replace(party, journal=journal), **given)
    ((event, count),) = journal.entries()[0].charges

    assert (event.scale, event.l2_sensitivity, count) == (  # type: ignore[attr-defined]
        drawn[0].drawn_scale,
        drawn[0].l2_sensitivity,
        1,
    )
    assert event.l2_sensitivity >= (math.sqrt(2) if kind == "cells" else 512)  # type: ignore[attr-defined]
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
    """Before a record is looked at, in a sentence about the request."""
    with pytest.raises(KnowledgeMismatch):
        answer(kind, SENT[kind], **given)

    assert drawn == []


@pytest.mark.parametrize("kind", ROLES)
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
@pytest.mark.parametrize("kind", BOTH)
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


# A hostile party.

FLOODS = [
    np.full((3, 3), -(2**31), np.int32),
    np.full((3, 3), 2**31 - 1, np.int32),
    np.array([[DIRECTION, 1, 0], [0, 0, 0], [0, 0, 0]], np.int32),
    np.zeros((3, 3), np.int64),
    np.zeros((3, 3), ">i4"),
    np.zeros((3, 3), np.float32),
    np.zeros((3, 3), bool),
    np.zeros((3, 3, 1), np.int32),
    np.zeros((0, 3), np.int32),
    np.zeros((), np.int32),
]


@pytest.mark.parametrize("kind", BOTH)
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
    """Killed while it sums up, it has paid."""

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    party = toy_party(0)
    journal = PartyJournal(tmp_path, fingerprint=data_fingerprint(party.x, party.y))
    monkeypatch.setattr({"cells": Cells, "components": Components}[kind], "of_records", killed)
    with pytest.raises(KeyboardInterrupt):
        answer(kind, SENT[kind], replace(party, journal=journal))

    assert len(journal.entries()) == 1


def test_roles_are_those_of_the_registry() -> None:
    """What is attacked here is what parties use."""
    registry = REGISTRY

    assert {registry[name].party for name in ("fedhistogram", "fedregression")} == set(
        ROLES.values()
    )
    assert all(isinstance(role, SumParty) for role in ROLES.values())
