"""Progress of a run: a few lines, a bar on a terminal, or nothing.

Flower's own log has some seventy lines for one round; it is shown to whoever asks.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from fl_strategies._util import listening

FLOWER: Final = "flwr"
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
ALONE: Final = "alone"
WORDS: Final = {
    TRAIN: "parties have trained",
    EVALUATE: "parties have the result",
    ALONE: "parties trained alone, to compare",
}
SECONDS_BETWEEN_LINES: Final = 2.0
SECONDS_BETWEEN_STEPS: Final = 10.0
SECONDS_BETWEEN_RELAYS: Final = 1.0


class Watch:
    """Counts the seconds of each part of a run, and says nothing.

    Parameters
    ----------
    num_rounds : int (default: 1)
        Rounds that are planned.
    """

    def __init__(self, num_rounds: int = 1) -> None:
        self.num_rounds = num_rounds
        self.seconds: dict[str, float] = {}

    def say(self, line: str) -> None:
        """Announce the next step."""

    def answered(self, kind: str, count: int, total: int, number: int = 0) -> None:
        """Report the number of parties that are done with one kind of work in a round."""

    @contextmanager
    def party(self, place: int, total: int, number: int = 0) -> Iterator[None]:
        """Follow teachers and epochs while one of so many parties works in a round."""
        words = f"{self._round(number)}party {place} of {total}"
        steps: dict[str, str] = {}

        def step(kind: str, count: int, planned: int) -> None:
            kinds = [*steps, kind]
            for inner in kinds[kinds.index(kind) : -1]:
                del steps[inner]
            if count < planned and planned > 1:
                steps[kind] = f"{count} of {planned} {kind}"
            if steps:
                self.stepped(f"{words}: {', '.join(steps.values())}")

        with listening(step):
            yield

    def stepped(self, words: str) -> None:
        """Report the progress inside a party."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the time of loading, and hear of records that are encoded meanwhile."""

        def step(kind: str, count: int, total: int) -> None:
            self.stepped(f"{count} of {total} {kind}")

        with self.phase("loading"), listening(step):
            yield

    def counted(self, kind: str, count: int, total: int, number: int) -> str:
        """Return the line about some answers."""
        return f"{self._round(number)}{count} of {total} {WORDS.get(kind, kind)}"

    def _round(self, number: int) -> str:
        several = self.num_rounds > 1 and number
        return f"round {number} of {self.num_rounds}: " if several else ""


class Relay(Watch):
    """Hands on, once a second at most, how far the work inside a party is."""

    def __init__(self, num_rounds: int, hand_on: Callable[[str], None]) -> None:
        super().__init__(num_rounds)
        self._hand_on = hand_on
        self._last = time.monotonic()

    def stepped(self, words: str) -> None:
        """Hand the words on, unless others have just gone."""
        if time.monotonic() - self._last >= SECONDS_BETWEEN_RELAYS:
            self._hand_on(words)
            self._last = time.monotonic()


class Lines(Watch):
    """Says a line at the end of each piece of work, and now and then if it is long."""

    def __init__(self, num_rounds: int = 1, stream: TextIO | None = None) -> None:
        super().__init__(num_rounds)
        self._stream = stream or sys.stderr
        self._last = time.monotonic()

    def say(self, line: str) -> None:
        """Write a line at once."""
        self._stream.write(f"{line}\n")
        self._stream.flush()
        self._last = time.monotonic()

    def answered(self, kind: str, count: int, total: int, number: int = 0) -> None:
        """Write a line if the work is done or takes long; not one for each of many rounds."""
        waited = time.monotonic() - self._last >= SECONDS_BETWEEN_LINES
        ends = count == total and number in (0, 1, self.num_rounds)
        if waited or ends:
            self.say(self.counted(kind, count, total, number))

    def stepped(self, words: str) -> None:
        """Write a line if there was none for a while."""
        if time.monotonic() - self._last >= SECONDS_BETWEEN_STEPS:
            self.say(words)


class Bars(Watch):
    """Shows a bar by `rich`, which Flower brings; it is gone when the work is done."""

    def __init__(self, num_rounds: int, bars: Any) -> None:
        super().__init__(num_rounds)
        self._bars = bars
        self._task: Any = None

    def say(self, line: str) -> None:
        """Write a line above the bar."""
        self._bars.console.print(line, markup=False, highlight=False)

    def answered(self, kind: str, count: int, total: int, number: int = 0) -> None:
        """Move the bar; a new piece of work has a new one."""
        words = self.counted(kind, count, total, number)
        task = self._shown(words, total)
        self._bars.update(task, completed=count, total=total)
        if count == total:
            self._bars.remove_task(task)
            self._task = None
            if number in (0, 1, self.num_rounds):
                self.say(words)

    def stepped(self, words: str) -> None:
        """Show the words beside the bar, which there is from the first party on."""
        self._shown(words)

    def _shown(self, words: str, total: int | None = None) -> Any:
        """Return the bar of this piece of work, with these words."""
        if self._task is None:
            self._task = self._bars.add_task(words, total=total)
        self._bars.update(self._task, description=words)
        return self._task


@contextmanager
def watching(num_rounds: int, *, quiet: bool = False, verbose: bool = False) -> Iterator[Watch]:
    """Show the progress of a block: nothing, Flower's log, a bar, or a few lines."""
    if quiet or verbose:
        with log_level(logging.CRITICAL if quiet else logging.INFO):
            yield Watch(num_rounds)
        return
    with log_level(logging.WARNING):
        if not sys.stderr.isatty():
            yield Lines(num_rounds)
            return
        with _bars() as bars:
            yield Lines(num_rounds) if bars is None else Bars(num_rounds, bars)


@contextmanager
def _bars() -> Iterator[Any]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield bars


@contextmanager
def log_level(level: int) -> Iterator[None]:
    """Let Flower's logger, and ours below it, say what is at least so important."""
    logger = logging.getLogger(FLOWER)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def no_louder_than(level: int) -> Iterator[None]:
    """Keep what is less important out of the log, unless it is kept out already."""
    with log_level(max(level, logging.getLogger(FLOWER).getEffectiveLevel())):
        yield


def duration(seconds: float) -> str:
    """Return a time as people say it.

    Examples
    --------
    >>> duration(42), duration(300), duration(9000)
    ('42 s', '5 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
