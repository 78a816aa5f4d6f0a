"""Scaling of a whole run with parties, public rows, rounds, records and classes.

Every axis is stretched by itself; the others stay at a small usual size. Parties are inside
one process, with messages encoded as for the wire, and models so cheap that what the
strategies and the transport do is a large part of the time.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from benchmarks.machine import interleaved
from clients import RidgeLearner, client_app
from fl_strategies import FedKD, FedMD
from fl_strategies._util import one_blas_thread
from fl_strategies.party.party import Party
from simulations.runtime.local import run_local

USUAL = {"parties": 8, "public-rows": 400, "rounds": 1, "records": 800, "classes": 5}
NUM_FEATURES = 10
STEPS = {
    "parties": (8, 16, 32, 64, 96),
    "public-rows": (400, 5_000, 10_000, 20_000, 40_000),
    "rounds": (1, 4, 8, 16, 24),
    "records": (800, 5_000, 10_000, 20_000, 40_000),
    "classes": (5, 25, 50, 100, 150),
}
QUICK = {name: steps[:2] for name, steps in STEPS.items()}


@one_blas_thread()
def measure(repeats: int, steps: Mapping[str, Sequence[int]] = STEPS) -> dict[str, Any]:
    """Return processor seconds along every axis, and whether the line bends."""
    with _quiet(logging.getLogger("flwr")):
        return {name: _axis(name, sizes, repeats) for name, sizes in steps.items()}


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _axis(name: str, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    kind = FedMD if name == "rounds" else FedKD  # which has one round
    works = [_work(kind, {**USUAL, name: size}) for size in sizes]
    seconds = [spent.cpu for spent in interleaved(works, repeats)]
    return {"sizes": list(sizes), "cpu-seconds": seconds, "bend": bend(sizes, seconds)}


def bend(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return how much faster than straight the last stretch climbs; 1 is a straight line.

    Examples
    --------
    >>> bend([1, 2, 4], [3.0, 4.0, 6.0])
    1.0
    >>> bend([1, 2, 4], [1.0, 4.0, 16.0])
    1.2
    """
    if len(sizes) < 3:
        return math.nan
    along = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    end = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return end / along if along > 0 else math.nan


def _work(kind: type[FedKD | FedMD], size: Mapping[str, int]) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    classes = size["classes"]
    centres = rng.normal(scale=3.0, size=(classes, NUM_FEATURES))

    def rows(number: int) -> tuple[Any, Any]:
        labels = np.arange(number) % classes
        return centres[labels] + rng.normal(size=(number, NUM_FEATURES)), labels

    public, _ = rows(size["public-rows"])
    shares = [rows(size["records"] // size["parties"]) for _ in range(size["parties"])]

    def learner_fn() -> RidgeLearner:
        return RidgeLearner(num_classes=classes)

    def load(context: Context) -> Party:
        number = int(context.node_config["partition-id"])
        x, y = shares[number]
        return Party(
            x=x,
            y=y,
            public=public,
            num_classes=classes,
            learner_fn=learner_fn,
            partition_id=number,
        )

    return lambda: run_local(
        kind(public=public, num_classes=classes, learner_fn=learner_fn),
        client_app(load),
        size["parties"],
        num_rounds=size["rounds"],
    )


def draw(found: Mapping[str, Mapping[str, Any]], target: Path) -> None:
    """Write one picture (PNG) with a panel for every axis; it needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 3.0), layout="constrained")
    for axes, (name, line) in zip(
        np.atleast_1d(figure.subplots(1, len(found))), found.items(), strict=True
    ):
        sizes, seconds = line["sizes"], line["cpu-seconds"]
        ends = [sizes[0], sizes[-1]], [seconds[0], seconds[-1]]
        axes.plot(*ends, color="0.7", linestyle="--", label="straight")
        axes.plot(sizes, seconds, marker="o", color="tab:blue", label="measured")
        axes.set_title(name.replace("-", " "))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("number")
        axes.set_ylabel("processor seconds of a run")
    figure.axes[0].legend()
    figure.savefig(target, format="png", dpi=120)
