"""Locks where `fcntl` is missing, as on Windows: in processes that cannot import it."""

import subprocess
import sys
from pathlib import Path

import fl_strategies

# Windows' own locking is not here to be tried; its stand-in refuses in the same words.
WINDOWS = """
import subprocess, sys, types  # subprocess takes msvcrt for Windows itself
import fcntl
real = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN
sys.modules["fcntl"] = None
{}
"""
STAND_IN = """
def locking(descriptor, mode, size):
    flock, lock, unlock = real
    try:
        flock(descriptor, unlock if mode == 0 else lock)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error

sys.modules["msvcrt"] = types.SimpleNamespace(LK_UNLCK=0, LK_NBLCK=2, locking=locking)
"""


def run_without_fcntl(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WINDOWS.format(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(fl_strategies.__file__).parent.parent,
        timeout=60,
    )


def test_everything_can_be_imported() -> None:
    """Only who locks a file needs a way to lock it."""
    done = run_without_fcntl("import fl_strategies, clients.app, fl_strategies.privacy.journal")

    assert done.returncode == 0, done.stderr


def test_the_command_line_counts_processor_time_without_resource() -> None:
    """That of this process alone, which is all that Windows tells."""
    code = """
sys.modules["resource"] = None
from simulations.runtime.running import cpu_seconds
start = cpu_seconds()
sum(range(10**6))
print(cpu_seconds() > start >= 0)
"""
    done = run_without_fcntl(code)

    assert done.stdout.strip() == "True", done.stderr


def test_a_journal_charges_and_a_taken_lock_is_waited_for(tmp_path: Path) -> None:
    """A charge waits for the lock of another, and who does not wait is told at once."""
    code = f"""{STAND_IN}
import threading, time
from pathlib import Path
from fl_strategies.privacy.events import LaplaceEvent
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies._util.files import locked

folder = Path(sys.argv[1])
journal = PartyJournal(folder, fingerprint="0" * 64)
mean = LaplaceEvent(unit="example", relation="replace-one", scale=4, l1_sensitivity=1)
charged = threading.Event()
def charge():
    journal.charge([(mean, 1)], run="run", purpose="test")
    charged.set()
with locked(folder / ".lock"):
    try:
        with locked(folder / ".lock", wait=False):
            pass
    except BlockingIOError:
        print("refused")
    thread = threading.Thread(target=charge)
    thread.start()
    print("waits", not charged.wait(0.2))
thread.join()
print("lines", len(journal.path.read_text().splitlines()))
"""
    done = run_without_fcntl(code, str(tmp_path))

    assert done.stdout.split() == ["refused", "waits", "True", "lines", "1"], done.stderr
