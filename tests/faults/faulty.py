"""A party's own code, copied into its folder: it fails as a file there says, once."""

import os
import resource
import time
from pathlib import Path

from fl_strategies import Learner
from simulations.config import Settings, Value
from simulations.models import learner_factory

HERE = Path(__file__).resolve().parent
FAULT, MET, GO, LEARNER = (HERE / name for name in ("fault", "met", "go", "learner"))
SETTINGS: dict[str, Value] = {"num-trees": 3, "epochs": 2}
"""Of its models."""


def make(*, row_shape: tuple[int, ...], num_classes: int) -> Learner:
    """Meet the fault that is planned, if any; then return a model by its name."""
    kind, _, lines = FAULT.read_text().partition(" ") if FAULT.exists() else ("", "", "")
    if kind and num_paid() >= int(lines or 0):
        FAULT.rename(MET)
        meet(kind)
    settings = Settings.from_run_config(SETTINGS)
    return learner_factory(
        LEARNER.read_text(), row_shape=row_shape, num_classes=num_classes, settings=settings
    )()


def num_paid() -> int:
    """Return how many releases are in the party's journal."""
    path = HERE / "state" / "private-data.example.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def meet(kind: str) -> None:
    """Fail in one way."""
    if kind == "raise":
        raise ValueError("the record of Jane Doe is odd")
    if kind == "exit":
        os._exit(3)
    if kind == "no-space":
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    while kind == "wait" and not GO.exists():
        time.sleep(0.1)
