"""Start-up time: imports, and `make run` until the first party trains.

Run: ``python benchmarks/startup.py [--repeats 5]``. Prints JSON. Imports are CPU seconds of
fresh interpreters, in turn, with byte code that an earlier start has left. The second part
is wall-clock seconds from the command to the moment at which the first party has its data,
for the app of this checkout and, in turn, for one that does nothing: what Flower itself and
Ray need. Ratios in one run are comparable between machines, seconds are not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from simulations.config import Settings, Value
from simulations.runtime.flower import SuperLink

MODULES = ("flwr", "fl_strategies", "clients.app", "simulations.runtime.client_app")
FLOWER, OURS = "flower", "ours"
PROBE = "startup_probe"
NUM_PARTIES = Settings().num_parties
PATIENCE_SECONDS = 1800.0

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "startup-probe"
version = "0.1.0"
description = "Says when its first party trains."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fl-strategies"

[tool.flwr.app.components]
serverapp = "startup_probe:server"
clientapp = "startup_probe:client"

[tool.flwr.app.config]
"""
STAMPING = """\
import time
from pathlib import Path

def stamp(context):
    path = Path({path!r})
    own = path.with_suffix(f".{{context.node_id}}")
    own.write_text(repr(time.time()))
    if not path.exists():
        own.rename(path)
"""
PROBES = {
    OURS: """
from clients.app import client_app
from simulations.runtime.client_app import load_party
from simulations.runtime.server_app import app

server = app

def load(context):
    party = load_party(context)
    stamp(context)
    return party

client = client_app(load)
""",
    FLOWER: """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    stamp(context)
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    sent = [Message(RecordDict(), dst_node_id=n, message_type="train") for n in nodes]
    list(grid.send_and_receive(sent))
""",
}


# Imports.


def import_seconds(module: str, environment: dict[str, str]) -> float:
    """Return the processor time that a fresh interpreter needs for a module."""
    clock = "time.process_time()"
    code = f"import time; start = {clock}; import {module}; print({clock} - start)"
    done = subprocess.run(  # noqa: S603 - this very Python
        [sys.executable, "-c", code],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


def measure_imports(repeats: int) -> dict[str, float]:
    """Return medians of CPU seconds, and what `fl_strategies` takes beside Flower."""
    seconds: dict[str, list[float]] = {module: [] for module in MODULES}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for module in MODULES:
            import_seconds(module, environment)
        for _ in range(repeats):
            for module in MODULES:
                seconds[module].append(import_seconds(module, environment))
    above = [own - flower for own, flower in zip(*list(seconds.values())[1::-1], strict=True)]
    medians = {module: round(median(taken), 3) for module, taken in seconds.items()}
    return {**medians, "fl_strategies-above-flwr": round(median(above), 3)}


# The first training.


def write_probe(kind: str, folder: Path, stamp: Path) -> dict[str, Value]:
    """Write an app that says when its first party trains; return the run's settings."""
    folder.mkdir()
    settings: dict[str, Value] = {}
    if kind == OURS:
        settings = {**Settings(output_dir=str(folder.parent / "runs")).to_run_config()}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
    (folder / "pyproject.toml").write_text(PYPROJECT + "".join(lines))
    (folder / f"{PROBE}.py").write_text(STAMPING.format(path=str(stamp)) + PROBES[kind])
    return settings


def run_until_training(kind: str, folder: Path, stamp: Path) -> None:
    """Start Flower, submit the app, and end everything once a party trains."""
    settings = write_probe(kind, folder / "app", stamp)
    deadline = time.monotonic() + PATIENCE_SECONDS
    with SuperLink(simulation=True) as superlink:
        run = superlink._submit(folder / "app", settings, num_supernodes=NUM_PARTIES)
        while not stamp.exists():
            status = superlink.control.status(run)
            if status.finished or time.monotonic() > deadline:
                sys.exit(
                    f"{kind}: no party has trained, {status}\n{superlink.control.log(run)}"
                )
            time.sleep(0.2)


def seconds_until_training(kind: str) -> float:
    """Return how long a command takes to its first training, the start of Python included."""
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder) / "stamp"
        start = time.time()
        command = [sys.executable, __file__, "--until-training", kind, folder, str(stamp)]
        subprocess.run(command, check=True)  # noqa: S603 - this very file
        return float(stamp.read_text()) - start


def measure_first_training(repeats: int) -> dict[str, float]:
    """Return medians of seconds until the first party trains, ours and Flower's own."""
    seconds: dict[str, list[float]] = {FLOWER: [], OURS: []}
    for _ in range(repeats):
        for kind, taken in seconds.items():
            taken.append(seconds_until_training(kind))
    flower, ours = (median(taken) for taken in seconds.values())
    return {FLOWER: round(flower, 1), OURS: round(ours, 1), "ratio": round(ours / flower, 2)}


def measure(repeats: int) -> dict[str, Any]:
    """Return all figures; the first training is measured at most three times."""
    return {
        "import-cpu-seconds": measure_imports(repeats),
        "seconds-until-first-training": measure_first_training(min(repeats, 3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--imports", action="store_true", help="leave out the first training")
    parser.add_argument("--until-training", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.until_training:
        kind, folder, stamp = given.until_training
        run_until_training(kind, Path(folder), Path(stamp))
        return
    figures = measure_imports if given.imports else measure
    print(json.dumps(figures(given.repeats), indent=1))


if __name__ == "__main__":
    main()
