"""FedMoments without a single public row: tables whose bounds and categories are declared.

Run: ``python benchmarks/declared.py --data FOLDER``, with a folder that holds `adult.csv.xz`
(the raw table of UCI) and `cod_rna.npz` (see `simulations.data.sets`). Twenty parties, one
trusted server that adds the noise, and the schemas beside this file. Finished cells are kept,
so a run goes on where it stopped. ``--show`` prints the table.

The schemas were tried on splits by seeds 100 to 103, of the same tables.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from simulations.config import Settings
from simulations.runtime.local import run_once

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "declared.json"
SCHEMAS: Final = Path(__file__).parent / "schemas"
SEEDS: Final = (700, 701, 702, 703, 704)
NUM_PARTIES: Final = 20
EPSILONS: Final = (0.0, 1.0, 0.3, 0.1)
"""0: exact sums."""
ROWS: Final[Mapping[str, str]] = {
    "adult": "Adult, bounds and categories",
    "adult_brackets": "Adult, ages and hours in brackets",
    "cod_rna": "cod-rna",
}
"""Schemas, and what the table calls them."""
COD_RNA: Final = ("energy", "length", "A1", "U1", "C1", "A2", "U2", "C2")
"""Columns of cod-rna: free energy, length of the shorter sequence, shares of three bases."""
Results = dict[str, dict[str, float]]


def table_of(name: str, data: Path, scratch: Path) -> Path:
    """Return the table that a schema is about; cod-rna's is written, by names."""
    if name != "cod_rna":
        return data / "adult.csv.xz"
    path = scratch / "cod_rna.csv"
    if not path.exists():
        with np.load(data / "cod_rna.npz") as archive:
            x, y = archive["x_train"], archive["y_train"]
        lines = [",".join([*COD_RNA, "label"])]
        lines += [
            ",".join([*map(str, row), "1" if label else "-1"])
            for row, label in zip(x.tolist(), y.tolist(), strict=True)
        ]
        path.write_text("\n".join(lines) + "\n")
    return path


def outcome(name: str, table: Path, epsilon: float, seed: int) -> dict[str, float]:
    """Return accuracy and CPU seconds of one federation."""
    noise: dict[str, Any] = {"privacy_level": "central", "target_epsilon": epsilon}
    settings = Settings.of(
        strategy="fedmoments",
        data=str(table),
        schema=str(SCHEMAS / f"{name}.json"),
        num_parties=NUM_PARTIES,
        num_workers=1,
        solo=False,
        pooled=False,
        seed=seed,
        **(noise if epsilon else {}),
    )
    report = run_once(settings)
    return {"accuracy": 100 * report["accuracy"], "cpu-seconds": report["cpu-seconds"]}


def cell_of(name: str, epsilon: float, seed: int) -> str:
    """Return the name of a cell of the results."""
    return f"{name}, epsilon {epsilon:g}, seed {seed}"


def mean_of(found: Results, name: str, epsilon: float, key: str = "accuracy") -> float:
    """Return a mean over seeds."""
    return float(np.mean([found[cell_of(name, epsilon, seed)][key] for seed in SEEDS]))


def markdown(found: Results) -> str:
    """Return the table of the docs."""
    heads = ["exact sums" if not epsilon else f"epsilon {epsilon:g}" for epsilon in EPSILONS]
    lines = [f"| | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for name, shown in ROWS.items():
        cells = [f"{mean_of(found, name, epsilon):.1f}" for epsilon in EPSILONS]
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with both data sets")
    parser.add_argument("--show", action="store_true", help="print the table only")
    options = parser.parse_args()
    found: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.show:
        if options.data is None:
            parser.error("--data must be given")
        with tempfile.TemporaryDirectory() as scratch:
            for name in ROWS:
                table = table_of(name, options.data, Path(scratch))
                for epsilon in EPSILONS:
                    for seed in SEEDS:
                        cell = cell_of(name, epsilon, seed)
                        if cell not in found:
                            found[cell] = outcome(name, table, epsilon, seed)
                            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found))


if __name__ == "__main__":
    main()
