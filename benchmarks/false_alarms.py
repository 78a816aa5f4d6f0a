"""Honest parties that FedKD's default leaves out, limits or accuses, on twenty real tables.

Run: ``python benchmarks/false_alarms.py --tables FOLDER``, with a folder of CSV files whose
label is the column `label`, and FL_STRATEGIES_DATA for the others. Ten parties with default
models, iid and Dirichlet 0.5, nobody lies. Per run: parties that were left out, parties
that count with fewer records than they have, and warnings that name a party.
"""

import argparse
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from clients.app import client_app
from fl_strategies import FedKD
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.federation import load_federation
from simulations.runtime.local import run_local

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "false_alarms.json"
SEEDS: Final = (210, 211, 212)
NUM_PARTIES: Final = 10
DEALS: Mapping[str, Mapping[str, Value]] = {
    "iid": {"partition": "iid"},
    "Dirichlet 0.5": {"partition": "dirichlet", "beta": 0.5},
}
FEW: Mapping[str, Value] = {"train-rows": 3000, "public-rows": 1000, "test-rows": 1000}
NAMED: Mapping[str, Mapping[str, Value]] = {
    "digits": {},
    "breast-cancer": {},
    "adult": FEW,
    "cod-rna": FEW,
    "mnist": FEW,
    "emnist-letters": FEW,
    "pneumonia": FEW,
}


class Warnings(logging.Handler):
    """Counts warnings that name parties."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message about parties."""
        if "parties" in record.getMessage():
            self.messages.append(record.getMessage())


def outcome(own: Mapping[str, Value]) -> dict[str, float]:
    """Return what an honest federation says about its members, and its accuracy."""
    settings = Settings.from_run_config({"num-parties": NUM_PARTIES, "min-records": 3, **own})
    federation = load_federation(settings)
    strategy = federation.strategy()
    if not isinstance(strategy, FedKD):
        raise TypeError(f"false_alarms: strategy must be fedkd, got {strategy.name}.")
    strategy.evaluate = False
    seen, logger = Warnings(), logging.getLogger("flwr.fl_strategies")
    logger.addHandler(seen)
    app = client_app(lambda context: federation.party(int(context.node_config["partition-id"])))
    try:
        metrics = run_local(strategy, app, NUM_PARTIES).train_metrics_clientapp[1]
    finally:
        logger.removeHandler(seen)
    return {
        "left-out": float(metrics[keys.NUM_OUTLIERS]),  # type: ignore[arg-type]
        "limited": float(metrics[keys.NUM_CAPPED]),  # type: ignore[arg-type]
        "warnings": float(len(seen.messages)),
        "accuracy": 100 * federation.quality(strategy.model_),
    }


def tables(folder: Path | None) -> dict[str, Mapping[str, Value]]:
    """Return the data sets: those with a name, and every CSV file."""
    found: dict[str, Mapping[str, Value]] = {}
    for name, more in NAMED.items():
        found[name] = {"data": name, **more}
    for path in sorted(folder.glob("*.csv")) if folder else ():
        found[path.stem] = {"data": str(path), "label": "label"}
    heart = Path(os.environ.get("FL_STRATEGIES_DATA", ".")) / "heart_disease.csv"
    if heart.exists():
        found[heart.stem] = {"data": str(heart), "label": "label", "drop": "hospital"}
    return found


def summary(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table: per deal, runs and parties that each notice concerns."""
    lines = ["| parties | runs | with a warning | with a party left out | parties left out |"]
    lines[0] += " parties limited |"
    lines.append("| --- " * 6 + "|")
    for deal in DEALS:
        runs = [own for name, own in found.items() if name.split(" | ")[1] == deal]
        parties = NUM_PARTIES * len(runs)
        warned = sum(own["warnings"] > 0 for own in runs)
        without = sum(own["left-out"] > 0 for own in runs)
        left, limited = (sum(own[k] for own in runs) for k in ("left-out", "limited"))
        lines.append(
            f"| {deal} | {len(runs)} | {warned} | {without} | "
            f"{left:.0f} of {parties} | {limited:.0f} of {parties} |"
        )
    return "\n".join(lines)


def measure(path: Path, data: Mapping[str, Mapping[str, Value]], seeds: Sequence[int]) -> None:
    """Measure what is missing in a file of results."""
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, own in data.items():
        for deal, partition in DEALS.items():
            for seed in seeds:
                key = f"{name} | {deal} | {seed}"
                if key not in found:
                    found[key] = outcome({**own, **partition, "seed": seed})
                    print(key, found[key], flush=True)
                    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tables", type=Path, help="folder of CSV files")
    parser.add_argument("--show", action="store_true", help="only print finished results")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    if not arguments.show:
        measure(arguments.results, tables(arguments.tables), SEEDS)
    print(summary(json.loads(arguments.results.read_text())))


if __name__ == "__main__":
    main()
