"""Memory of the server of a co-distillation after every round, in megabytes.

Run: ``python benchmarks/codistill_memory.py``. Five agents send models of one megabyte for
ten rounds. AKD, AvgKD and PKD hold the newest model of each agent, so the line is flat; EKD
holds all terms of its sum, and the line rises by five megabytes a round. The peak adds the
messages of a round: in AvgKD and PKD M (M - 1) models are on their way, several copies of
each, because nodes and server share this process.

Agents train on random numbers, and keep nothing.
"""

import gc
import logging
import tracemalloc

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context

from clients.app import client_app
from clients.tabular.kernel import RidgeLearner
from fl_strategies import Knowledge, Party, PartyRole
from fl_strategies.party.role import PartyState, ledger_of, ledger_to_text
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.strategies.codistill import AKD, EKD, PKD, AvgKD, Codistillation
from fl_strategies.strategies.codistill.options import UNPROTECTED_MODEL
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics
from simulations.runtime.local import InMemoryGrid

NUM_AGENTS, NUM_ROUNDS, WIDTH = 5, 10, 2**17
STRATEGIES: tuple[type[Codistillation], ...] = (AKD, AvgKD, PKD, EKD)
RANDOM = np.random.default_rng(0)
EVENTS = ledger_to_text(
    ledger_of([(NonPrivateEvent(unit="example", reason=UNPROTECTED_MODEL), 1)], DEFAULT_DELTA)
)


class RandomModels(PartyRole):
    """A party that sends a new random model whatever it is asked."""

    def train(
        self,
        party: Party,  # noqa: ARG002
        received: Knowledge | None,  # noqa: ARG002
        config: ConfigRecord,  # noqa: ARG002
        state: PartyState,  # noqa: ARG002
    ) -> tuple[Knowledge, Metrics]:
        """Return a model of one megabyte."""
        model = ridge().fit(
            RANDOM.normal(size=(2, WIDTH)), RANDOM.normal(size=(2, 1)), rng=RANDOM
        )
        return Knowledge("model", model.to_arrays(), {keys.PRIVACY_EVENTS: EVENTS}), {}


def ridge() -> RidgeLearner:
    return RidgeLearner(num_classes=1, task="regression")


def load_party(context: Context) -> Party:
    rows = np.zeros((1, 1))
    return Party(
        x=rows,
        y=rows,
        public=rows,
        num_classes=1,
        task="regression",
        learner_fn=ridge,
        learner_name="ridge",
        partition_id=int(context.node_config[keys.PARTITION_ID]),
    )


def memory_by_round(kind: type[Codistillation]) -> tuple[list[float], float]:
    """Return the megabytes held after each round, and the largest number on the way."""
    strategy = kind(
        num_classes=1,
        task="regression",
        num_parties=NUM_AGENTS,
        evaluate=False,
        max_wait=0.0,
        learner_fn=ridge,
        learner_name="ridge",
        row_shape=(WIDTH,),
    )
    app = client_app(load_party, roles={kind.name: RandomModels()})
    grid = InMemoryGrid(app, NUM_AGENTS)
    held = []
    tracemalloc.start()
    for _ in range(NUM_ROUNDS):
        strategy.start(grid, ArrayRecord(), num_rounds=1)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0] / 2**20)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return held, peak


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for kind in STRATEGIES:
        held, peak = memory_by_round(kind)
        line = " ".join(f"{size:5.1f}" for size in held)
        print(f"{kind.name:6} after each round {line}   peak {peak:5.1f}")


if __name__ == "__main__":
    main()
