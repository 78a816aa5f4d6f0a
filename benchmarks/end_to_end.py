"""Whole runs of FedKT at its paper's settings: processor seconds, start-up and all.

Run: ``python benchmarks/end_to_end.py [--repeats 5]``. Prints JSON. A run is a process of its
own, with those that it starts; nothing is trained for comparison. Needs the data sets, and
leaves out what is not there. Runs on MNIST take minutes and are not repeated.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

SEED = 3
"""One that no table reports."""
PAPER: Mapping[str, object] = {
    "partition": "dirichlet",
    "beta": 0.5,
    "min-records": 10,
    "num-splits": 2,
    "num-teachers": 5,
    "corrected": "false",
    "vote-weights": "none",
    "solo": "false",
    "pooled": "false",
}
TREES = {**PAPER, "num-parties": 50, "max-depth": 6}
BOOSTING = {**TREES, "boosting-learning-rate": 0.05, "boosting-gamma": 1.0}
MNIST = {**PAPER, "num-parties": 10, "epochs": 100, "batch-size": 32, "weight-decay": 1e-5}
STOPPED = {**MNIST, "patience": 20}
RUNS: Mapping[str, tuple[str, str, str, Mapping[str, object]]] = {
    "adult, forest": ("a9a.npz", "adult", "forest", TREES),
    "cod-rna, boosted-trees": ("cod_rna.npz", "cod-rna", "boosted-trees", BOOSTING),
    "mnist, mlp": ("mnist.npz", "mnist", "mlp", MNIST),
    "mnist, mlp, early stopping": ("mnist.npz", "mnist", "mlp", STOPPED),
}


def measure(repeats: int) -> dict[str, Any]:
    """Return the processor seconds and the accuracy of every run whose data are there."""
    data = Path(os.environ.get("FL_STRATEGIES_DATA", "."))
    return {
        name: _median(repeats if settings["num-parties"] == 50 else 1, *own, settings)
        for name, (file, *own, settings) in RUNS.items()
        if (data / file).is_file()
    }


def _median(
    repeats: int, data: str, learner: str, settings: Mapping[str, object]
) -> dict[str, Any]:
    found = [_run(data, learner, settings) for _ in range(repeats)]
    seconds = median(cpu for cpu, _ in found)
    return {"runs": repeats, "cpu-seconds": seconds, "accuracy": found[0][1]}


def _run(data: str, learner: str, settings: Mapping[str, object]) -> tuple[float, float]:
    own = {**settings, "learner": learner, "final-learner": learner}
    options = [part for name, value in own.items() for part in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "simulations", "run", "--quiet", "--strategy", "fedkt"]
        command += ["--data", data, "--seed", str(SEED), "--json", str(result), *options]
        before = _seconds()
        command += ["--set", f"output-dir={folder}"]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=one_thread, stdout=subprocess.DEVNULL)  # noqa: S603
        return _seconds() - before, json.loads(result.read_text())["accuracy"]


def _seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args().repeats), indent=1))


if __name__ == "__main__":
    main()
