"""Trying hostile inputs one by one: what may happen, and how often it did."""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from fl_strategies.errors import StrategyError

SECONDS = 60
"""An input that keeps a decoder busy for longer hangs it; the slowest takes about a second."""


ENOUGH = 100
LONGEST = 5_000


class Hang(BaseException):
    """Not an `Exception`, which decoders may catch."""


class Trials:
    """Numbered inputs of one test, and what became of them.

    Parameters
    ----------
    name : str
        Of the test; together with the number of an input it is the seed.
    num_inputs : int
    """

    def __init__(self, name: str, num_inputs: int) -> None:
        self.name = name
        self.num_inputs = num_inputs
        self.tried = self.refused = self.taken = self.last = 0

    def numbers(self) -> Iterator[random.Random]:
        """Yield the source of every input."""
        for number in range(self.num_inputs):
            self.last = number
            yield random.Random(f"{self.name} {number}")  # noqa: S311 - repeatable

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a decoder; return None if it refuses, which only typed errors may say."""
        self.tried += 1
        try:
            with time_limit():
                result = function(*arguments)
        except StrategyError as error:
            sentence = str(error)
        else:
            self.taken += 1
            return result
        assert len(sentence) < LONGEST, "an error must not fill the logs"
        self.refused += 1
        return None

    def count(self, *, refused: bool) -> None:
        """Count an input whose outcome the test itself has judged."""
        self.tried += 1
        self.refused += refused
        self.taken += not refused

    def require_both(self) -> None:
        """Fail unless some inputs were refused and some taken: else the search is blind.

        A handful may all be of one kind by chance.
        """
        assert self.tried >= self.num_inputs
        if self.tried >= ENOUGH:
            assert self.refused > 0
            assert self.taken > 0


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise `Hang` if the block takes too long, however busy the machine is."""

    def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise Hang(f"the input took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
