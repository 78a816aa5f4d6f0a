"""Co-distillation: what one agent sends must not cost the others a round, or their names."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from clients.app import client_app
from clients.tabular.kernel import KernelRidgeLearner, RidgeLearner
from clients.tabular.sklearn import SklearnLearner
from fl_strategies import Knowledge, Party
from fl_strategies._util import derive_rng
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch
from fl_strategies.strategies.codistill import (
    AKD,
    EKD,
    PKD,
    AvgKD,
    Codistillation,
    CodistillParty,
)
from fl_strategies.strategies.codistill.options import MODEL, MODELS, NUM_MODELS, part_models
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import encode_arrays
from simulations.runtime.local import InMemoryGrid
from tests.toys import (
    NUM_CLASSES,
    PUBLIC,
    CentroidLearner,
    EditedGrid,
    blobs,
    loading,
    toy_party,
)

SCHEMES: dict[str, type[Codistillation]] = {"akd": AKD, "avgkd": AvgKD, "pkd": PKD, "ekd": EKD}
FIRST_NODE = 1000
ATTACKER = 0
LIMIT = 40_000
"""What a message may hold in the test of large models, instead of 256 MiB."""


def ridge() -> RidgeLearner:
    return RidgeLearner(num_classes=NUM_CLASSES)


def kernel() -> KernelRidgeLearner:
    return KernelRidgeLearner(num_classes=NUM_CLASSES, reveal_rows=True)


FACTORIES = {"ridge": ridge, "kernel": kernel}


def agent(number: int) -> Party:
    party = toy_party(number, num_records=12)
    return replace(party, learner_fn=ridge, learner_name="ridge", catalogue=FACTORIES)


def hostile_grid(
    name: str = "ridge", arrays: dict[str, np.ndarray] | None = None
) -> InMemoryGrid:
    """Return three agents of which the first sends another model than it has trained."""

    def change(_: int, replies: list[Message]) -> None:
        for content in (reply.content for reply in replies if reply.has_content()):
            meta = content.config_records[keys.META]
            if meta[keys.PARTITION_ID] == ATTACKER and meta[keys.KIND] == MODEL:
                meta[keys.LEARNER] = name
                if arrays is not None:
                    content[keys.ARRAYS] = encode_arrays(arrays)

    app = client_app(loading(agent), roles=dict.fromkeys(SCHEMES, CodistillParty()))
    return EditedGrid(app, 3, change)


def trained(learner: Any, num_rows: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(num_rows, width)), np.arange(num_rows) % NUM_CLASSES
    return dict(learner.fit(x, y, rng=rng).to_arrays())


def strategy_of(scheme: str, **options: Any) -> Codistillation:
    given: dict[str, Any] = {
        "num_classes": NUM_CLASSES,
        "model_fns": FACTORIES,
        "num_parties": 3,
        "max_wait": 0.0,
        "public": PUBLIC,
    }
    return SCHEMES[scheme](**{**given, **options})


def excluded(strategy: Codistillation, grid: InMemoryGrid, rounds: int = 3) -> list[set[int]]:
    """Play some rounds and return whose replies were refused in each."""
    found = []
    for _ in range(rounds):
        strategy.start(grid, ArrayRecord(), num_rounds=1)
        found.append({node - FIRST_NODE for node in strategy.rejected_})
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_oversized_model_costs_only_its_sender_the_round(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fits into a reply, but not into the message to others, together with their models."""
    for place in ("clients.app", "fl_strategies.strategies.codistill.server"):
        monkeypatch.setattr(f"{place}.MAX_REPLY_BYTES", LIMIT, raising=False)

    num_rows = LIMIT // (8 * (2 + NUM_CLASSES)) - 40
    grid = hostile_grid("kernel", trained(kernel(), num_rows, 2))
    strategy = strategy_of(scheme, max_reply_bytes=LIMIT)

    rounds = excluded(strategy, grid)

    assert ATTACKER in rounds[0]
    assert set().union(*rounds) == {ATTACKER}, "honest agents were blamed"
    assert strategy.model_.predict(PUBLIC).shape == (len(PUBLIC),)


NOT_RELAYED: dict[str, tuple[str, dict[str, np.ndarray] | None]] = {
    "a name that nobody knows": ("crystal-ball", None),
    "another width": ("ridge", trained(ridge(), 12, 3)),
    "another architecture": (
        "ridge",
        dict(CentroidLearner().fit(*blobs(12), rng=derive_rng(0)).to_arrays()),
    ),
}


@pytest.mark.parametrize("rows", [{"public": PUBLIC}, {"public": None, "row_shape": (2,)}])
@pytest.mark.parametrize("sent", NOT_RELAYED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_nobody_can_use_ends_at_the_server(
    scheme: str, sent: str, rows: dict[str, Any]
) -> None:
    """It is asked about rows, public or made up, before anybody else gets it and the blame."""
    strategy = strategy_of(scheme, **rows)

    rounds = excluded(strategy, hostile_grid(*NOT_RELAYED[sent]))

    assert rounds[0] == set().union(*rounds) == {ATTACKER}
    assert strategy.model_.predict(PUBLIC).shape == (len(PUBLIC),)


def test_a_model_that_fails_on_real_rows_is_not_relayed() -> None:
    """A scaler that divides by almost zero scores zeros, and raises for everything else."""
    scaled = functools.partial(
        SklearnLearner, make_pipeline(StandardScaler(), LogisticRegression()), num_classes=3
    )
    arrays = trained(scaled(), 12, 2)
    grid = hostile_grid("scaled", {**arrays, "step-0/scale_": np.full(2, 1e-310)})
    strategy = strategy_of("akd", model_fns={**FACTORIES, "scaled": scaled})

    with np.errstate(all="ignore"):
        rounds = excluded(strategy, grid)

    assert set().union(*rounds) == {ATTACKER}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"model_fns": {}}, "model_fns must be given, or learner_fn"),
        ({"public": None}, "row_shape must be given, or public"),
        ({"row_shape": (3,)}, r"row_shape must be \(2,\) as in public"),
        ({"public": None, "row_shape": (2, 0)}, "row_shape must be sides of at least 1"),
    ],
)
def test_a_server_that_could_not_judge_models_does_not_start(
    options: dict[str, Any], rule: str
) -> None:
    """Relaying unread what one agent sent to all others is not offered."""
    with pytest.raises(InvalidParameter, match=rule):
        strategy_of("avgkd", **options)


def test_a_claim_of_100000_models_makes_no_lists() -> None:
    """Each model has an array, so there cannot be more models than arrays."""
    claim = Knowledge(MODELS, {"0/w": np.zeros(1)}, {NUM_MODELS: 100_000})

    with pytest.raises(KnowledgeMismatch, match=r"an array or more each .* with 1 arrays"):
        part_models(claim)


def test_an_agent_that_is_too_far_behind_is_not_sent_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EKD sends the terms that an agent lacks; more than a message holds are not sent."""
    late = FIRST_NODE + 2
    strategy, grid = strategy_of("ekd"), hostile_grid()
    excluded(strategy, grid, rounds=3)
    assert strategy.delivery_for(late) is None, "it has everything"
    strategy.state.delivered.pop(late)  # type: ignore[attr-defined]
    whole = strategy.delivery_for(late)
    assert whole is not None
    size = sum(array.nbytes for array in whole.arrays.values())

    strategy._deliveries.clear()  # type: ignore[attr-defined]
    monkeypatch.setattr("fl_strategies.strategies.codistill.server.MAX_REPLY_BYTES", size)

    assert strategy.delivery_for(late) is None
