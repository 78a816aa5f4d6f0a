"""Received models: what a sender can make of 1 MB, and what it costs the receiver.

Time is that of the processor, for rebuilding a model and scoring 50 rows; multi-label models
are tried with up to 350 labels. `clients.tabular.base` says what takes longer.
"""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fl_strategies import Knowledge
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.party.role import receive_model
from fl_strategies.wire import keys
from simulations.config import Value
from simulations.deploy.client_app import build_party
from tests.attacks.hostile_models import ATTACKS, MEGABYTE, WIDTH, many_cosines, moments
from tests.attacks.receiver import Receiver, running

MOST_BYTES = 64 * 2**20
# On a quiet machine all take less than one; a test must not depend on its neighbours.
MOST_SECONDS = 5.0
LARGE = "booster: a chain of 262500 levels in 3 MB"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    yield from running()


@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - {LARGE}))
def test_a_megabyte_takes_at_most_64_megabytes(attack: str, receiver: Receiver) -> None:
    """Peak memory of the whole process, native code included, and time to predict."""
    cost = receiver.cost_of(attack)

    assert cost.outcome.startswith(("refused: ", "accepted")), cost
    assert cost.size <= MEGABYTE, cost
    assert cost.num_bytes <= MOST_BYTES, cost
    assert cost.seconds <= MOST_SECONDS, cost


def test_a_chain_of_262500_levels_does_not_kill_the_receiver(receiver: Receiver) -> None:
    """No tree is walked that is deeper than allowed."""
    cost = receiver.cost_of(LARGE)

    assert "levels" in cost.outcome, cost


def node_config(folder: Path, **more: Value) -> dict[str, Value]:
    """Return what the operator of a small deployed party has written down."""
    x = np.random.default_rng(0).normal(size=(30, 4))
    np.savez(folder / "records.npz", x=x, y=np.arange(30) % 3)
    np.savez(folder / "public.npz", x=x[:10])
    return {
        "partition-id": 0,
        "learner": "random-forest",
        "classes": "0,1,2",
        "data-file": str(folder / "records.npz"),
        "public-file": str(folder / "public.npz"),
        **more,
    }


def test_a_model_that_the_operator_did_not_name_is_refused(tmp_path: Path) -> None:
    """A server's word chooses among what the party expects, never what code reads a model."""
    willing = build_party(node_config(tmp_path, receives="xgboost, mlp"), run="1")
    plain = build_party(node_config(tmp_path, epochs=1), run="1")
    for name in ("xgboost", "mlp"):
        learner = willing.catalogue[name]().fit(plain.x, plain.y, rng=np.random.default_rng(0))
        sent = Knowledge("model", learner.to_arrays(), {keys.LEARNER: name})

        assert receive_model(willing, sent).num_classes == 3
        known = (
            "extra-trees, logistic-regression, moments, random-features, random-forest, ridge"
        )
        with pytest.raises(KnowledgeMismatch, match=f"one of {known}, got.* receives in a"):
            receive_model(plain, sent)


def test_moments_of_many_features_take_no_memory_for_many_rows() -> None:
    """A small model once took 60 kB for each row that it was asked about."""
    learner, arrays = many_cosines()
    model, rows = learner.from_arrays(arrays), np.zeros((20_000, WIDTH))
    tracemalloc.start()
    model.predict(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 400 * 2**20


@pytest.mark.parametrize("value", [1e308, -1e308])
@pytest.mark.parametrize("name", ["weights", "errors", "scale", "waves", "height"])
@pytest.mark.filterwarnings("error")
def test_extreme_moments_have_finite_scores_or_are_refused(name: str, value: float) -> None:
    learner, arrays = moments()
    arrays["errors"] = np.ones_like(arrays["weights"])
    largest = np.finfo(arrays[name].dtype).max
    arrays[name] = np.full_like(arrays[name], np.clip(value, -largest, largest))
    rows = np.random.default_rng(0).normal(size=(9, WIDTH)) * 10.0 ** np.arange(-4, 5)[:, None]
    if name == "errors" and value < 0:
        with pytest.raises(KnowledgeMismatch, match="errors must be at least 0"):
            learner.from_arrays(arrays)
        return

    assert np.isfinite(learner.from_arrays(arrays).logits(rows)).all()


@pytest.mark.parametrize("name", ["logistic-regression", "ridge"])
def test_linear_models_are_always_read(tmp_path: Path, name: str) -> None:
    """A few numbers for each column and class, whatever an operator names."""
    party = build_party(node_config(tmp_path, receives="mlp"), run="1")
    learner = party.catalogue[name]().fit(party.x, party.y, rng=np.random.default_rng(0))
    sent = Knowledge("model", learner.to_arrays(), {keys.LEARNER: name})

    assert (receive_model(party, sent).predict(party.x) == learner.predict(party.x)).all()
