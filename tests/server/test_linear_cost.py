"""With a checkpoint, what a run costs the server grows with the parties and no faster."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message

import fl_strategies
from clients import client_app
from fl_strategies import REGISTRY
from fl_strategies.server.replies import PartyReply, settle
from simulations.runtime.local import InMemoryGrid
from tests.toys import SHORT, common_options, load_toy_party

APP = client_app(load_toy_party)
FEW, MANY = 6, 24
PACKAGE = str(Path(fl_strategies.__file__).parent)

NUM_ROUNDS = {"avgkd": 1, "fens": 1, "pkd": 1}
"""From round 2 on these send every agent the models of all others."""
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {} for name in REGISTRY},
    **SHORT,
    "ekd": {"evaluate": False},  # delivers all models to all agents
    "fens": {"evaluate": False},
    "fedmd-nfdp": {"release": "nfdp", "num_samples": 20},
}


class Work:
    """Counts executed lines of the package, and every turn of a loop within a line."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()

    @contextmanager
    def counted(self, *, on: bool = True) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter if on else None)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _: str, __: object) -> Any:
        return self._step if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1
        return self._step


class PartiesApart(InMemoryGrid):
    """Parties that run in the server's process, but not at its expense."""

    def __init__(self, num_parties: int, work: Work) -> None:
        super().__init__(APP, num_parties)
        self.work = work

    def _deliver(self, messages: list[Message]) -> Iterator[Message]:
        with self.work.counted(on=False):
            replies = list(super()._deliver(messages))
        return iter(replies)


def run_and_resume(name: str, num_parties: int, folder: Path) -> Counter[str]:
    """Return how often the server runs each line; the last round is replayed from disk."""
    settings = {**common_options(num_parties), "checkpoint_dir": folder, **SETTINGS[name]}
    kind, num_rounds = REGISTRY[name.partition("-")[0]].strategy, NUM_ROUNDS.get(name, 2)
    work = Work()
    grid = PartiesApart(num_parties, work)
    for resume in (False, True):
        strategy = kind.from_settings(**settings, resume=resume)
        with work.counted():
            strategy.start(grid, ArrayRecord(), num_rounds=num_rounds)
        assert not strategy.rejected_
    return work.lines


def more_than_linear(few: Counter[str], many: Counter[str]) -> dict[str, tuple[int, int]]:
    """Return the lines that run much more than four times as often for four times as many.

    Eight times and more is what squares come to at these sizes.
    """
    return {line: (few[line], n) for line, n in many.items() if n > 6 * few[line] + FEW}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_work_and_disk_grow_with_the_parties(name: str, tmp_path: Path) -> None:
    """With four times the parties no line runs 16 times as often, and the folder is linear."""
    few, many = (run_and_resume(name, n, tmp_path / f"{n}") for n in (FEW, MANY))

    assert not more_than_linear(few, many)
    assert size_of(tmp_path / f"{MANY}") < 4.2 * size_of(tmp_path / f"{FEW}")


def test_claims_of_one_number_cost_no_more_than_others() -> None:
    def settled(num_nodes: int) -> Counter[str]:
        replies = [PartyReply(0, node, "", None, {}) for node in range(num_nodes)]
        work = Work()
        with work.counted():
            settle({}, replies)
        return work.lines

    assert not more_than_linear(settled(FEW), settled(MANY))
