"""Effect of parties with wrong labels on Cronus, FedMD's mean of scores and FedAvg.

Run: ``python benchmarks/cronus.py [LIARS]``. Digits, ten parties, iid, networks; the first
LIARS parties (3 unless given) learn the next class in place of every label. Figures are the
accuracy of the server's model on the test rows, mean and deviation over three seeds.
"""

import sys
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from flwr.app import Context

from clients.app import client_app
from fl_strategies import Party
from fl_strategies.wire import keys
from simulations.config import Settings
from simulations.federation import load_federation
from simulations.runtime.local import run_local

SEEDS = (200, 201, 202)
COMMON: dict[str, Any] = {
    "num_parties": 10,
    "partition": "iid",
    "learner": "mlp",
    "epochs": 20,
}
ROWS: dict[str, dict[str, Any]] = {
    "FedAvg, 10 rounds": {"strategy": "fedavg", "num_server_rounds": 10},
    "FedMD, mean of scores": {"strategy": "fedmd", "payload": "softmax", "consensus": "mean"},
    "Cronus": {"strategy": "cronus"},
}


def accuracy(settings: Settings, num_liars: int) -> float:
    """Return the accuracy of a federation in which some parties have wrong labels."""
    federation = load_federation(settings)
    strategy = federation.strategy()

    def load(context: Context) -> Party:
        party = federation.party(int(context.node_config[keys.PARTITION_ID]))
        lies = party.partition_id < num_liars
        return replace(party, y=(party.y + 1) % party.num_classes) if lies else party

    app = client_app(load)
    run_local(strategy, app, settings.num_parties, num_rounds=settings.num_rounds)
    return federation.quality(strategy.model_)


def main() -> None:
    """Print a line for each strategy."""
    num_liars = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for name, given in ROWS.items():
        found = [
            100 * accuracy(Settings.of(seed=seed, **COMMON, **given), num_liars)
            for seed in SEEDS
        ]
        print(f"{name:24} {fmean(found):.1f} ± {pstdev(found):.1f}")


if __name__ == "__main__":
    main()
