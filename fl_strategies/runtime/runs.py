"""Runs of a strategy: one that leaves nothing behind, and one that a folder can bring back.

What is on disk, and why a round can be replayed, is in `checkpoint`. Here is how rounds are
counted after a resume, and what a strategy asks of its run: how often parties were asked, and
that nothing random is drawn twice.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fl_strategies.exceptions import require
from fl_strategies.runtime import _compat
from fl_strategies.runtime.checkpoint import Checkpoint, RecordedGrid
from fl_strategies.runtime.connections import StreamingGrid

logger = logging.getLogger("flwr.fl_strategies")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Start(Protocol):
    """Flower's loop over rounds, with everything given but these."""

    def __call__(
        self, grid: Grid, *, num_rounds: int, evaluate_fn: EvaluateFn | None
    ) -> Result:
        """Run some rounds."""


class Resumable(Protocol):
    """What a run needs to know of a strategy to bring it back."""

    max_reply_bytes: int

    @property
    def name(self) -> str:
        """What logs call it."""

    def identity(self) -> Mapping[str, object]:
        """Return, as JSON has it, what must be the same for a run to be resumed."""

    @property
    def state(self) -> Any:
        """Its `State`."""


class Run:
    """A run that leaves nothing behind: everything is asked and drawn once."""

    name = ""
    """What parties keep their state by; empty for a run that cannot be resumed."""
    is_kept = False

    @property
    def num_attempts(self) -> int:
        """How often the parties were asked in this round: once, and again after a resume.

        What a party drew for the first question may have left it although it never arrived.
        Charging the round so many times is therefore never too little; a party that keeps a
        state folder has given the same answer twice and spent less.
        """
        return 1

    def attempts_of(self, node_id: int) -> int:  # noqa: ARG002 - see `KeptRun`
        """Return how often one party was asked in this round; see `num_attempts`."""
        return 1

    def first_attempt_of(self, node_id: int) -> int:  # noqa: ARG002 - see `KeptRun`
        """Return at which time of asking in this round a party was asked first."""
        return 1

    def draw_once(
        self,
        name: str,  # noqa: ARG002 - see `KeptRun`
        draw: Callable[[], Mapping[str, object]],
    ) -> Mapping[str, Any]:
        """Return what `draw` gives; after a resume what it gave before.

        For noise: drawn a second time for the same data, it would protect less.
        """
        return draw()

    def begin_round(self, strategy: Resumable) -> None:
        """Keep what the rounds so far have left."""

    def reopen(self, nodes: Iterable[int]) -> None:
        """Let a resume ask these nodes again."""

    def execute(
        self,
        strategy: Resumable,  # noqa: ARG002 - see `KeptRun`
        start: Start,
        grid: Grid,
        num_rounds: int,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        """Run some rounds."""
        careful = StreamingGrid(grid) if _compat.is_flowers_own(grid) else grid
        return start(careful, num_rounds=num_rounds, evaluate_fn=evaluate_fn)


class KeptRun(Run):
    """A run that a folder can bring back.

    Parameters
    ----------
    folder : Path
    resume : bool
        See `KnowledgeStrategy`.
    kinds : tuple of types
        Data classes in the state.
    """

    is_kept = True

    def __init__(self, folder: Path, *, resume: bool, kinds: tuple[type, ...]) -> None:
        self.checkpoint = Checkpoint(folder, resume=resume, kinds=kinds)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The run's name, the same after every resume."""
        return self.checkpoint.run_name

    @property
    def num_attempts(self) -> int:
        """See `Run`."""
        return self.checkpoint.num_attempts

    def attempts_of(self, node_id: int) -> int:
        """See `Run`."""
        return self.checkpoint.attempts_of(node_id)

    def first_attempt_of(self, node_id: int) -> int:
        """See `Run`."""
        return self.checkpoint.first_attempt_of(node_id)

    def draw_once(
        self, name: str, draw: Callable[[], Mapping[str, object]]
    ) -> Mapping[str, Any]:
        """See `Run`."""
        return self.checkpoint.draw_once(name, draw)

    def begin_round(self, strategy: Resumable) -> None:
        """See `Run`."""
        self.checkpoint.begin_round(strategy.state.round + 1, strategy.state.to_dict())

    def reopen(self, nodes: Iterable[int]) -> None:
        """See `Run`."""
        self.checkpoint.reopen(nodes)

    def execute(
        self,
        strategy: Resumable,
        start: Start,
        grid: Grid,
        num_rounds: int,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        """Run the rounds that are not over; `num_rounds` counts from the beginning."""
        owner, first = type(strategy).__name__, strategy.state.round == 0
        rule = "omitted to start a second time"
        require(first, owner, "checkpoint_dir", rule, strategy.state.round)
        with self.checkpoint.opened(strategy.identity()) as kept:
            strategy.state.restore(kept or {})
            done = strategy.state.round
            rule = f"at least {done + 1}, the round that the checkpoint is in"
            require(num_rounds > done, owner, "num_rounds", rule, num_rounds)
            if kept is not None:
                logger.info(
                    "%s resumes in round %s of %s.", strategy.name, done + 1, num_rounds
                )
            recorded = RecordedGrid(
                grid, self.checkpoint, max_reply_bytes=strategy.max_reply_bytes
            )
            counted = evaluate_fn and _counted_from(done, evaluate_fn)
            result = start(recorded, num_rounds=num_rounds - done, evaluate_fn=counted)
        return _whole(result, done, strategy.state.history)


def _whole(result: Result, done: int, history: Mapping[str, Mapping[int, Any]]) -> Result:
    """Add the rounds before a resume to a result, and count its rounds after them."""
    for phase in ("train", "evaluate"):
        metrics = getattr(result, f"{phase}_metrics_clientapp")
        late = {number + done: record for number, record in metrics.items()}
        early = {n: MetricRecord(m) for n, m in history[phase].items() if n <= done}
        metrics.clear()
        metrics.update({**early, **late})
    central = result.evaluate_metrics_serverapp
    result.evaluate_metrics_serverapp = {n + done: record for n, record in central.items()}
    return result


def once_there_is_a_model(evaluate: EvaluateFn) -> EvaluateFn:
    """Spare a user's function Flower's round 0 where no model was there to begin with.

    Whoever loads arrays into a model would fail there, and end the run.
    """

    def careful(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        return evaluate(number, arrays) if number or arrays else None

    return careful


def _counted_from(done: int, evaluate: EvaluateFn) -> EvaluateFn:
    """Let rounds be counted from the beginning of a resumed run; round 0 is over."""

    def counted(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        return evaluate(number + done, arrays) if number or not done else None

    return counted
