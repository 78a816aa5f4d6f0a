"""A check that tests leave no process behind, for the folders whose tests start some."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simulations.runtime.processes import marked, send_signal

MARK = "FL_STRATEGIES_TESTS"
_GRACE_SECONDS = 15.0
PATIENCE = 900.0
"""Seconds after which something counts as hanging; far more than anything takes."""


def left_behind(value: str, *, grace: float = _GRACE_SECONDS) -> list[str]:
    """End processes with our mark that do not end by themselves; return what they were."""
    deadline = time.monotonic() + grace
    while (left := marked(MARK, value)) and time.monotonic() < deadline:
        time.sleep(0.2)
    lines = [command_line(pid) for pid in left]
    for pid in left:
        send_signal(pid, signal.SIGKILL)
    return lines


def command_line(pid: int) -> str:
    """Return how a process was started, in at most 200 characters."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return f"process {pid}, which has just ended"
    return line.replace(b"\0", b" ").decode(errors="replace")[:200]


def living(*words: str) -> list[str]:
    """Return the lines of living processes whose command line holds all the words."""
    command = ["ps", "-ewwo", "pid=,stat=,args="]  # whole lines, whatever COLUMNS says
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    for line in listing.splitlines():
        pid, state, arguments = line.split(maxsplit=2)
        named = all(word in arguments for word in words) and int(pid) != os.getpid()
        if named and not state.startswith("Z"):
            found.append(line)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    """Poll for as long as a busy machine may need."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a module whose processes, or any that these started, outlive it."""
    with pytest.MonkeyPatch.context() as patch:
        # A pytest that a test starts keeps the mark, so that this test sees its processes.
        patch.setenv(MARK, os.environ.get(MARK) or secrets.token_hex(16))
        # A TERM ends the session like Ctrl-C, so that fixtures end what they started.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
        assert left_behind(os.environ[MARK]) == []
