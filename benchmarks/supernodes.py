"""Replies lost, and memory used, with many SuperNodes at one SuperLink.

Run: ``python benchmarks/supernodes.py --nodes 20 --runs 10``. A federation as deployed, with
TLS, keys, a database and 40 records a party, stays online for all runs of FedKT; each run
asks every party twice, to train and to evaluate. Prints one line of JSON at the end and a
line about each run on the way.

``--superlink flower`` starts Flower's own `flower-superlink`, ``--database`` names the
database's folder, such as ``/dev/shm``. Memory is the proportional share (Pss): what
processes share is counted once.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from simulations.config import Settings
from simulations.deploy.federation import Deployment, Prepared, prepare
from simulations.runtime.flower import FlowerRunFailed
from simulations.runtime.processes import Processes

RECORDS = 40
GIGABYTE = 2**30
MACHINE_BYTES = 24 * GIGABYTE
LOCKED = "database is locked"
KINDS = ("flower-supernode", "flower-superexec", "flwr-clientapp", "flwr-serverapp")
SUPERLINK = "superlink"
SUPERLINKS = {"queued": Deployment.superlink, "flower": ("flower-superlink",)}


class Watched(Deployment):
    """A deployment whose SuperLink and whose database's place can be chosen."""

    def __init__(self, prepared: Prepared, superlink: str, folder: Path | None) -> None:
        super().__init__(prepared)
        self.superlink = SUPERLINKS[superlink]
        if folder is not None:
            place = Path(tempfile.mkdtemp(dir=folder))
            self._stack.callback(shutil.rmtree, place, ignore_errors=True)
            (prepared.folder / "server" / "superlink.db").symlink_to(place / "superlink.db")

    def locks(self) -> int:
        """Return the number of "database is locked" errors of the SuperLink."""
        return (self.home / "superlink.log").read_text(errors="replace").count(LOCKED)


class Memory(threading.Thread):
    """Watches how much memory the processes of each kind have."""

    def __init__(self, processes: Processes, seconds: float = 4.0) -> None:
        super().__init__(daemon=True)
        self.most: dict[str, int] = {}
        self.in_all = 0
        self._processes, self._seconds = processes, seconds
        self._done = threading.Event()

    def run(self) -> None:
        """Look until `stop` is called."""
        while not self._done.wait(self._seconds):
            now = memory_by_kind(self._processes.living())
            self.in_all = max(self.in_all, sum(map(sum, now.values())))
            for kind, sizes in now.items():
                self.most[kind] = max(self.most.get(kind, 0), *sizes)

    def stop(self) -> None:
        """Stop looking."""
        self._done.set()
        self.join()


def memory_by_kind(pids: set[int]) -> dict[str, list[int]]:
    """Return the bytes of each process by what it is."""
    found: dict[str, list[int]] = {}
    for pid in pids:
        with suppress(OSError, IndexError):  # processes end while they are looked at
            folder = Path(f"/proc/{pid}")
            command = (folder / "cmdline").read_text(errors="replace")
            share = (folder / "smaps_rollup").read_text().partition("\nPss:")[2].split()[0]
            kind = next((name for name in KINDS if name in command), SUPERLINK)
            found.setdefault(kind, []).append(int(share) * 1024)
    return found


def settings_for(nodes: int) -> Settings:
    return Settings.of(
        strategy="fedkt",
        num_parties=nodes,
        train_rows=RECORDS * nodes,
        public_rows=40,
        test_rows=40,
        partition="iid",
        num_teachers=2,
        num_trees=3,
        learner="random-forest",
        seed=7,
        max_wait=900.0,
        timeout=600.0,
    )


def one_run(deployment: Watched, settings: Settings) -> dict[str, Any]:
    """Run once; lost are parties of whom the strategy misses a reply, of either phase."""
    start, before = time.monotonic(), deployment.locks()
    outcome: dict[str, Any] = {"status": "finished:completed"}
    try:
        report = deployment.run(settings, timeout=1800.0)
    except FlowerRunFailed as error:
        outcome |= {"status": str(error), "lost": None, "reasons": []}
    else:
        (played,) = report["rounds"]
        outcome |= {"lost": len(report["rejected"]), "taken": played["train"]["num-parties"]}
        outcome["reasons"] = sorted(set(report["rejected"].values()))
    outcome["locked"] = deployment.locks() - before
    return {**outcome, "seconds": round(time.monotonic() - start, 1)}


def fitting(idle: Mapping[str, list[int]], most: Mapping[str, int]) -> dict[str, int]:
    """Return how many SuperNodes fit: all of them waiting, and all of them at work at once."""
    node = sum(int(median(idle[kind])) for kind in KINDS[:2])
    free = MACHINE_BYTES - sum(idle[SUPERLINK]) - most.get("flwr-serverapp", 0)
    return {
        "bytes-of-a-waiting-node": node,
        "fit-waiting": free // node,
        "fit-at-work": free // (node + most["flwr-clientapp"]),
    }


def measure(
    nodes: int, runs: int, superlink: str = "queued", database: Path | None = None
) -> dict[str, Any]:
    """Start the federation, run it again and again, and return what happened."""
    settings, outcomes = settings_for(nodes), []
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(settings, Path(folder) / "federation", formats=["npz"])
        start = time.monotonic()
        with Watched(prepared, superlink, database) as deployment:
            online = time.monotonic() - start
            memory = Memory(deployment.processes)
            memory.start()
            for _ in range(runs):
                outcomes.append(one_run(deployment, settings))
                print(json.dumps(outcomes[-1]), file=sys.stderr, flush=True)
            memory.stop()
            idle = memory_by_kind(deployment.processes.living())
    failed = sum(outcome["lost"] is None for outcome in outcomes)
    return {
        "nodes": nodes,
        "superlink": superlink,
        "parties-asked": nodes * runs,
        "parties-lost": sum(outcome["lost"] or 0 for outcome in outcomes),
        "runs-failed": failed,
        "locked": sum(outcome["locked"] for outcome in outcomes),
        "seconds-until-online": round(online, 1),
        "seconds-of-a-run": median(outcome["seconds"] for outcome in outcomes),
        "most-bytes": memory.in_all,
        "most-bytes-of-one": memory.most,
        **fitting(idle, memory.most),
        "runs": outcomes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--superlink", choices=SUPERLINKS, default="queued")
    parser.add_argument("--database", type=Path, help="folder for the database")
    given = parser.parse_args()
    print(json.dumps(measure(given.nodes, given.runs, given.superlink, given.database)))


if __name__ == "__main__":
    main()
