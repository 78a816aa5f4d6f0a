"""A receiver in a process of its own, and what a received model costs it.

`python -m tests.attacks.receiver` imports the learners once, reads names of attacks from its
standard input and answers each with one line. Every attack runs in a fork, so that one that
kills the process is an answer too.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_BYTES = 2**30
LIMIT_SECONDS = 20
ROOT = Path(__file__).parents[2]


class Cost(NamedTuple):
    """What came of a received model, and the most that the receiver needed meanwhile."""

    outcome: str
    size: int
    num_bytes: int
    seconds: float


class Receiver:
    """The parent's side: start the process, ask for one attack after the other."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.receiver"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def cost_of(self, attack: str) -> Cost:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{attack}\n")
        self._process.stdin.flush()
        return Cost(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=LIMIT_SECONDS)


def running() -> Iterator[Receiver]:
    """Yield a receiver, and end its process afterwards."""
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def _own_bytes(array: Any) -> int:
    """Return the bytes of an array; a view that repeats one number has only that."""
    return int(array.itemsize if 0 in array.strides and array.size else array.nbytes)


def _attempt(attack: str) -> dict[str, Any]:
    """Receive one hostile model and let it predict, under a limit that saves the machine."""
    from fl_strategies.errors import StrategyError
    from tests.attacks.hostile_models import ATTACKS, ROWS

    learner, arrays = ATTACKS[attack]()
    size = sum(len(name) + 128 + _own_bytes(array) for name, array in arrays.items())
    most = _status("VmSize") + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.alarm(LIMIT_SECONDS)
    # Forgets the peak so far, which building the attack may have raised.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.process_time()
    try:
        model = learner.from_arrays(arrays)
        model.predict(ROWS(model))
        outcome = "accepted"
    except StrategyError as error:
        outcome = f"refused: {error}"
    except Exception as error:
        outcome = f"raised {type(error).__name__}: {error}"
    seconds = time.process_time() - start
    return {
        "outcome": outcome[:300],
        "size": size,
        "num_bytes": _status("VmHWM") - before,
        "seconds": seconds,
    }


def _fork(attack: str) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(_attempt(attack)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        found: dict[str, Any] = json.loads(answer)
        return found
    ended = f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended"
    return {"outcome": ended, "size": 0, "num_bytes": 0, "seconds": 0.0}


if __name__ == "__main__":
    from tests.attacks import hostile_models

    hostile_models.warm_up()
    for line in sys.stdin:
        print(json.dumps(_fork(line.strip())), flush=True)  # noqa: T201
