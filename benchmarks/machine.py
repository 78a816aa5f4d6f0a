"""Limits of this machine with one core, and measurements relative to them."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")
SIZE = 1024
COPIED = 16 * 2**20  # numbers, larger than any cache


@dataclass(frozen=True)
class Limits:
    """The machine's own speed: large products and copies of memory."""

    gflops: float
    gigabytes_a_second: float

    def to_dict(self) -> dict[str, float | str]:
        """Return them for a file, with the name of the machine's processor family."""
        return {**asdict(self), "machine": platform.machine()}


@dataclass(frozen=True)
class Spent:
    """Seconds of the processor and of the clock, medians."""

    cpu: float
    wall: float


def limits(repeats: int = 5) -> Limits:
    """Measure the limits with one thread."""
    torch.set_num_threads(1)
    left, right, out = (torch.rand(SIZE, SIZE) for _ in range(3))
    long, copy = torch.rand(COPIED), torch.empty(COPIED)
    product, copied = interleaved(
        [lambda: torch.mm(left, right, out=out), lambda: copy.copy_(long)], repeats
    )
    # A copy reads and writes every number.
    return Limits(2 * SIZE**3 / product.cpu / 1e9, 2 * 4 * COPIED / copied.cpu / 1e9)


def interleaved(works: Sequence[Callable[[], object]], repeats: int) -> list[Spent]:
    """Return the medians of all works, each done once a turn so that they share the weather.

    A first turn, in which libraries are loaded, is not counted.
    """
    for work in works:
        work()
    turns = [[_timed(work) for work in works] for _ in range(repeats)]
    return [
        Spent(median(one.cpu for one in times), median(one.wall for one in times))
        for times in zip(*turns, strict=True)
    ]


def seconds(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Return the median processor time of each work, all done once a turn."""
    return [spent.cpu for spent in interleaved(works, repeats)]


def _timed(work: Callable[[], object]) -> Spent:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Spent(time.process_time() - cpu, time.perf_counter() - wall)


def peak_megabytes(module: str, *arguments: str) -> float:
    """Return the most memory of a child process, in MB, libraries and data included.

    The child runs ``python -m module arguments`` and must end by printing `peak_so_far`.
    """
    command = [sys.executable, "-m", module, *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return float(printed.split()[-1])


def peak_so_far() -> float:
    """Return the most memory that this process has had so far, in MB; Linux only.

    Not by `getrusage`: its peak is handed on from parents to the programs they start.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(peak) / 1024
