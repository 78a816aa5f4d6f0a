"""FedMoments on small real tables, beside FedKD, parties alone and pooled data.

Run: ``python benchmarks/moments.py --tables FOLDER``, with a folder of CSV files whose label is
the column `label`. Five parties with default models and all default settings; every division
of the records is a federation of its own. Finished cells are kept, so a run goes on where it
stopped. ``--show`` prints the table.
"""

import argparse
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from flwr.app import Context

from clients.app import client_app
from fl_strategies import Party
from simulations.config import Settings, Value
from simulations.federation import Federation, load_federation
from simulations.runtime.local import run_local

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "moments.json"
SEEDS: Final = (500, 501, 502, 503, 504)
"""None of them was used to choose a default."""
NUM_PARTIES: Final = 5
DEALS: Final[Mapping[str, Mapping[str, Value]]] = {
    "iid": {"partition": "iid"},
    "Dirichlet 0.5": {"partition": "dirichlet", "beta": 0.5},
    "Dirichlet 0.1": {"partition": "dirichlet", "beta": 0.1},
}
COLUMNS: Final[Mapping[str, str]] = {
    "fedmoments": "FedMoments",
    "fedkd": "FedKD",
    "mean": "mean party alone",
    "best": "best party alone",
    "pooled": "pooled, extra-trees",
    "pooled-moments": "pooled, the same model",
}
Cell = Mapping[str, float | str]


def outcome(settings: Mapping[str, Value]) -> Cell:
    """Return the accuracies of one federation, and a hash of what FedMoments predicts."""
    usual: dict[str, Value] = {"num-parties": NUM_PARTIES, "min-records": 1, **settings}
    found: dict[str, float | str] = {}
    for name in ("fedmoments", "fedkd"):
        federation = load_federation(Settings.from_run_config({**usual, "strategy": name}))
        strategy = federation.strategy()
        strategy.evaluate = False
        run_local(strategy, client_app(party_of(federation)), NUM_PARTIES)
        found[name] = 100 * federation.quality(strategy.model_)
        if name == "fedmoments":
            scores = strategy.model_.logits(federation.dataset.x_test)
            found["bits"] = hashlib.sha256(scores.tobytes()).hexdigest()[:16]
    alone = [100 * one.metrics[federation.metric] for one in federation.evaluate_parties()]
    found |= {"mean": float(np.mean(alone)), "best": max(alone)}
    for key, name in (("pooled", "extra-trees"), ("pooled-moments", "moments")):
        pooled = {**usual, "strategy": "fedmoments", "pooled-learner": name}
        model = load_federation(Settings.from_run_config(pooled)).evaluate_pooled()
        found[key] = 100 * model.metrics[federation.metric]
    return found


def party_of(federation: Federation) -> Callable[[Context], Party]:
    """Return what loads a party of a federation."""
    return lambda context: federation.party(int(context.node_config["partition-id"]))


def cells(folder: Path) -> Iterator[tuple[str, dict[str, Value]]]:
    """Yield every federation by its name."""
    for seed in SEEDS:
        for path in sorted(folder.glob("*.csv")):
            for deal, settings in DEALS.items():
                own: dict[str, Value] = {"data": str(path), "label": "label", "seed": seed}
                yield f"{path.stem} | {deal} | {seed}", {**own, **settings}


def summary(found: Mapping[str, Cell]) -> str:
    """Return the table: one line per division of the records, means over tables and seeds."""
    lines = ["| five parties | " + " | ".join(COLUMNS.values()) + " | tables below the mean |"]
    lines += ["| --- " * (len(COLUMNS) + 2) + "|"]
    for deal in DEALS:
        own = {name: cell for name, cell in found.items() if name.split(" | ")[1] == deal}
        tables = sorted({name.split(" | ")[0] for name in own})
        means = {table: _means(own, table) for table in tables}
        values = [float(np.mean([means[table][key] for table in tables])) for key in COLUMNS]
        below = sum(one["fedmoments"] < one["mean"] for one in means.values())
        shown = " | ".join(f"{value:.1f}" for value in values)
        lines.append(f"| {deal} | {shown} | {below} of {len(tables)} |")
    return "\n".join(lines)


def _means(cells_of_deal: Mapping[str, Cell], table: str) -> dict[str, float]:
    own = [cell for name, cell in cells_of_deal.items() if name.split(" | ")[0] == table]
    return {key: float(np.mean([float(cell[key]) for cell in own])) for key in COLUMNS}


def divided(found: Mapping[str, Cell]) -> int:
    """Return for how many tables and seeds the divisions did not give the same bits."""
    bits: dict[tuple[str, str], set[object]] = {}
    for name, cell in found.items():
        table, _, seed = name.split(" | ")
        bits.setdefault((table, seed), set()).add(cell["bits"])
    return sum(len(each) > 1 for each in bits.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tables", type=Path, help="folder of CSV files")
    parser.add_argument("--show", action="store_true", help="only print finished results")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    path: Path = arguments.results
    found = json.loads(path.read_text()) if path.exists() else {}
    if not arguments.show:
        if arguments.tables is None:
            parser.error("--tables must be a folder of CSV files, got none.")
        for name, settings in cells(arguments.tables):
            if name not in found:
                found[name] = outcome(settings)
                print(name, found[name], flush=True)
                path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(summary(found))
    print(f"\nDivisions that changed a bit: {divided(found)} of {len(found) // len(DEALS)}.")


if __name__ == "__main__":
    main()
