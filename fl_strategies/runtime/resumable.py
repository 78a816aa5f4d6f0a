"""Flower's loop over the rounds, which goes on where a killed server was.

What is on disk, and why a round can be gone through again, is in `checkpoint`. Here is the
strategy's side: which attributes are kept, and how rounds are counted after a resume.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fl_strategies.arrays import content_hash
from fl_strategies.exceptions import require
from fl_strategies.runtime import _compat
from fl_strategies.runtime.checkpoint import Checkpoint, RecordedGrid
from fl_strategies.runtime.connections import StreamingGrid

logger = logging.getLogger("flwr.fl_strategies")


class ResumableStrategy(Strategy):
    """A strategy that a folder can bring back.

    Parameters
    ----------
    checkpoint_dir : str or Path, optional
    resume : bool
        See `KnowledgeStrategy`.
    """

    name: ClassVar[str]
    kept: ClassVar[tuple[str, ...]] = ("round_", "_history")
    """Attributes that one round leaves to the next, and a checkpoint therefore holds."""
    kept_kinds: ClassVar[tuple[type, ...]] = ()
    """Data classes that occur in them."""
    max_reply_bytes: int

    def __init__(self, checkpoint_dir: str | Path | None, *, resume: bool) -> None:
        self.round_ = 0
        self._history: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "evaluate": {}}
        self._checkpoint: Checkpoint | None = None
        given = bool(checkpoint_dir) or not resume
        owner = type(self).__name__
        require(given, owner, "checkpoint_dir", "given with resume", checkpoint_dir)
        if checkpoint_dir:
            folder = Path(checkpoint_dir)
            self._checkpoint = Checkpoint(folder, resume=resume, kinds=self.kept_kinds)

    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """Return, in words of JSON, what must be the same for a run to go on."""

    @property
    def num_attempts(self) -> int:
        """How often the parties were asked in this round: once, and again after a resume.

        What a party drew for the first question may have left it although it never arrived.
        Charging the round so many times is therefore never too little; a party that keeps a
        state folder has given the same answer twice and spent less.
        """
        return 1 if self._checkpoint is None else self._checkpoint.num_attempts

    def attempts_of(self, node_id: int) -> int:
        """Return how often one party was asked in this round; see `num_attempts`."""
        return 1 if self._checkpoint is None else self._checkpoint.attempts_of(node_id)

    def first_attempt_of(self, node_id: int) -> int:
        """Return at which time of asking in this round a party was asked first."""
        return 1 if self._checkpoint is None else self._checkpoint.first_attempt_of(node_id)

    def once(self, name: str, draw: Callable[[], Mapping[str, object]]) -> Mapping[str, Any]:
        """Return what `draw` gives; after a resume what it gave before.

        For noise: drawn a second time for the same data, it would protect less.
        """
        return draw() if self._checkpoint is None else self._checkpoint.once(name, draw)

    def _begin_round(self) -> None:
        """Keep what the rounds so far have left."""
        if self._checkpoint is not None:
            state = {name: getattr(self, name) for name in self.kept}
            self._checkpoint.begin_round(self.round_ + 1, state)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run some rounds; see Flower's `Strategy.start`.

        With a checkpoint `num_rounds` counts from the beginning of the run, and rounds that
        are over are not repeated.
        """
        checkpoint, owner = self._checkpoint, type(self).__name__
        if checkpoint is None:
            careful = StreamingGrid(grid) if _compat.is_flowers_own(grid) else grid
            return super().start(
                careful,
                initial_arrays,
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                evaluate_fn,
            )
        first = self.round_ == 0
        require(first, owner, "checkpoint_dir", "left out to start a second time", self.round_)
        with checkpoint.opened(self.identity()) as state:
            for name, value in (state or {}).items():
                setattr(self, name, value)
            done = self.round_
            rule = f"at least {done + 1}, the round that the checkpoint is in"
            require(num_rounds > done, owner, "num_rounds", rule, num_rounds)
            if state is not None:
                logger.info("%s goes on in round %s of %s.", self.name, done + 1, num_rounds)
            result = super().start(
                RecordedGrid(grid, checkpoint, max_reply_bytes=self.max_reply_bytes),
                initial_arrays,
                num_rounds - done,
                timeout,
                train_config,
                evaluate_config,
                evaluate_fn and _counted_from(done, evaluate_fn),
            )
        return self._whole(result, done)

    def _whole(self, result: Result, done: int) -> Result:
        """Add the rounds before a resume to a result, and count its rounds after them."""
        for phase in ("train", "evaluate"):
            metrics = getattr(result, f"{phase}_metrics_clientapp")
            late = {number + done: record for number, record in metrics.items()}
            early = {n: MetricRecord(m) for n, m in self._history[phase].items() if n <= done}
            metrics.clear()
            metrics.update({**early, **late})
        central = result.evaluate_metrics_serverapp
        result.evaluate_metrics_serverapp = {n + done: record for n, record in central.items()}
        return result


def _counted_from(
    done: int, evaluate: Callable[[int, ArrayRecord], MetricRecord | None]
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Let rounds be counted from the beginning of a run that goes on; round 0 is over."""

    def counted(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        return evaluate(number + done, arrays) if number or not done else None

    return counted


def described(value: object) -> object:
    """Return a setting in words of JSON; of code, which has none, only that it is there."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return content_hash(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: described(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): described(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    return value if isinstance(value, str | int | float | None) else "..."
