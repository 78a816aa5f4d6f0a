"""Received models: what a sender can make of 1 MB, and what it costs the receiver.

Time is that of the processor, for rebuilding a model and scoring 50 rows; multi-label models
are tried with up to 350 labels. `clients.tabular.base` says what takes longer.
"""

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
from tests.attacks.hostile_models import ATTACKS, MEGABYTE
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
        known = "extra-trees, logistic-regression, random-features, random-forest, ridge"
        with pytest.raises(KnowledgeMismatch, match=f"one of {known}, got.* receives in a"):
            receive_model(plain, sent)


@pytest.mark.parametrize("name", ["logistic-regression", "ridge"])
def test_linear_models_are_always_read(tmp_path: Path, name: str) -> None:
    """A few numbers for each column and class, whatever an operator names."""
    party = build_party(node_config(tmp_path, receives="mlp"), run="1")
    learner = party.catalogue[name]().fit(party.x, party.y, rng=np.random.default_rng(0))
    sent = Knowledge("model", learner.to_arrays(), {keys.LEARNER: name})

    assert (receive_model(party, sent).predict(party.x) == learner.predict(party.x)).all()
