"""A federation of twenty parties, each with processes of its own, on one machine."""

import threading
import time
from pathlib import Path

import pytest

from simulations.config import Settings
from simulations.deploy.federation import Deployment, prepare
from simulations.runtime.processes import Processes
from tests.faults.conftest import Measured
from tests.faults.federation import FEDKT, check_journals
from tests.leftovers import PATIENCE

pytestmark = [pytest.mark.flower, pytest.mark.faults]

NUM_PARTIES = 20
TIMEOUT = 600.0


class Memory(threading.Thread):
    """Watches how much memory some processes have in all."""

    def __init__(self, processes: Processes) -> None:
        super().__init__(daemon=True)
        self.most, self.num_processes = 0, 0
        self._processes = processes
        self._done = threading.Event()

    def run(self) -> None:
        """Look every few seconds until `stop` is called."""
        while not self._done.wait(3.0):
            living = self._processes.living()
            self.most = max(self.most, sum(map(resident, living)))
            self.num_processes = max(self.num_processes, len(living))

    def stop(self) -> None:
        """Stop looking."""
        self._done.set()
        self.join()


def resident(pid: int) -> int:
    """Return the bytes that a process holds in memory, what it shares with others too."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * 4096


def test_twenty_supernodes_end_well(tmp_path: Path, measured: Measured) -> None:
    """All twenty take part through a SuperLink with a database, and their journals say so."""
    settings = Settings.from_run_config(
        FEDKT.to_run_config(),
        num_parties=NUM_PARTIES,
        train_rows=800,
        max_wait=PATIENCE,
        timeout=TIMEOUT,
    )
    prepared = prepare(settings, tmp_path / "federation", formats=["npz"])
    start = time.monotonic()
    with Deployment(prepared) as deployment:
        online = time.monotonic() - start
        memory = Memory(deployment.processes)
        memory.start()
        report = deployment.run(settings, timeout=2 * PATIENCE)
        memory.stop()

    assert report["rejected"] == {}
    assert [party["partition-id"] for party in report["parties"]] == list(range(NUM_PARTIES))
    assert report["rounds"][0]["evaluate"] != {}
    check_journals(prepared, report)
    measured(
        "20 SuperNodes",
        report["seconds"],
        f"online after {online:.0f} s; {memory.num_processes} processes, at most "
        f"{memory.most / 2**30:.1f} GB resident, accuracy {report['accuracy']:.3f}",
    )
