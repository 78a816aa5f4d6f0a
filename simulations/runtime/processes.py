"""Processes that end together, with everything that they have started.

Flower's processes start others, some of which lead sessions of their own and outlive their
parent. Each process therefore carries a mark in its environment, which all that it starts
inherit: whoever carries the mark at the end is ended.
"""

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from fl_strategies._util import keep_to_one_thread
from fl_strategies.errors import RunFailed

MARK: Final = "FL_STRATEGIES_PROCESSES"
_PATIENCE_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.1


class Processes:
    """The processes of one owner.

    Examples
    --------
    >>> family = Processes()
    >>> sleeper = family.start(["sleep", "60"], os.environ, subprocess.DEVNULL)
    >>> family.end()
    >>> sleeper.poll() is not None, family.living()
    (True, set())
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[Any] | int
    ) -> subprocess.Popen[bytes]:
        """Start a process in the root folder, which can hold no packages of our names.

        What it writes is for its owner only: logs and databases hold what parties sent.
        """
        with uninterrupted():
            process = subprocess.Popen(
                command,
                env={**environment, MARK: self._mark},
                cwd="/",
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                umask=0o077,
            )
            self._started.append(process)
        return process

    def living(self) -> set[int]:
        """Return the ids of all processes that were started, and of those they started."""
        return marked(MARK, self._mark) | _family(self._started)

    def end(self, only: Sequence[subprocess.Popen[bytes]] | None = None) -> None:
        """End all of them, or these and what they started: first politely, then for good."""
        with uninterrupted():
            family = self.living() if only is None else _family(only)
            for number in (signal.SIGTERM, signal.SIGKILL):
                family = self._signal_all(family, number, all_of_them=only is None)
            _wait_for(self._started if only is None else only)

    def _signal_all(
        self, family: set[int], number: signal.Signals, *, all_of_them: bool
    ) -> set[int]:
        """Signal processes, and those that they start meanwhile; return who is left."""
        signalled: set[int] = set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while family and time.monotonic() < deadline:
            for pid in family - signalled:
                send_signal(pid, number)
            signalled |= family
            time.sleep(_POLL_SECONDS)
            living = self.living()
            family = living if all_of_them else living & (family | _below(family))
        return family


def _wait_for(ended: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let the system forget processes, whose last threads may live a little longer."""
    for process in ended:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)


def marked(name: str, value: str) -> set[int]:
    """Return the ids of other processes that were started with this in their environment.

    Empty where the system does not tell (without ``/proc``).
    """
    wanted, found = f"{name}={value}".encode(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while they are looked at, and others' are not shown.
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found - {os.getpid()}


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _family(started: Sequence[subprocess.Popen[bytes]]) -> set[int]:
    """Return those that live, with all that they have started; the system forgets the rest.

    The number of one that has ended may be another process's by now.
    """
    return _below({process.pid for process in started if process.poll() is None})


def _below(leaders: set[int]) -> set[int]:
    """Return which of these processes live, and all that they have started."""
    command = ["ps", "-eo", "pid=,ppid=,stat="]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [line.split() for line in listing.splitlines()]
    living = [(int(pid), int(parent)) for pid, parent, state in rows if state[0] != "Z"]
    family = {pid for pid, _ in living} & leaders
    while new := {pid for pid, parent in living if parent in family} - family:
        family |= new
    return family


@contextmanager
def terminable() -> Iterator[None]:
    """Let a TERM leave the block like an exception, so that nothing is left behind.

    A process that has a rule of its own for TERM keeps it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def become_worker() -> None:
    """Prepare a forked process for work, which its parent may have done before it."""
    # Ctrl-C reaches every process of a terminal. A worker ends at once and without a word: an
    # exception in the middle of somebody's library may be lost, and the worker stay behind.
    # Where the run itself ignores Ctrl-C, as in the background of a shell, so does its worker.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_to_one_thread()


@contextmanager
def all_workers_needed(owner: str) -> Iterator[None]:
    """Raise `RunFailed` if a worker is ended from outside."""
    try:
        yield
    except BrokenProcessPool as error:
        raise RunFailed(
            f"{owner}: a worker process must live until it has answered, got one that was "
            "ended from outside. The system ends processes when memory runs out: try a "
            "smaller num-workers, such as 1."
        ) from error


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and TERM back until the block ends, so that no process is lost in it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    # Not blocked by a mask, which the processes that are started here would inherit.
    before = [signal.signal(number, lambda got, _: held.append(got)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    for got in held[:1]:
        signal.raise_signal(got)
