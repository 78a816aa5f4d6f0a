"""A check that tests leave no process behind, for the folders whose tests start some."""

import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulations.runtime.processes import marked, send_signal

MARK = "FL_STRATEGIES_TESTS"
_GRACE_SECONDS = 15.0


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
