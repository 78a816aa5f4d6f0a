"""Callbacks: user functions that the server calls after each round."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from flwr.app import ArrayRecord, MetricRecord

from fl_strategies.errors import require
from fl_strategies.wire import keys

logger = logging.getLogger("flwr.fl_strategies")

OnRound: TypeAlias = Callable[[int, dict[str, float]], object]
"""Is called as `on_round(number, metrics)`; what it returns does not matter."""

SECONDS: Final = "seconds"


class Callbacks:
    """The user's functions, each called once a round that asked anybody.

    What one of them raises costs neither the run nor the others anything: it is logged the
    first time. Each gets a copy, so none can change what another sees.

    Parameters
    ----------
    owner : str
    on_round : callable, list of callables or None
    """

    def __init__(self, owner: str, on_round: OnRound | Sequence[OnRound] | None) -> None:
        several = isinstance(on_round, Sequence)
        given: Any = on_round if several else [on_round] if on_round is not None else []
        rule = "a function of round and metrics, or a list of such functions"
        require(all(map(callable, given)), owner, "on_round", rule, on_round)
        self._owner, self._given, self._failed = owner, tuple(given), set[int]()
        self._began, self._told = 0.0, 0

    def begin(self, rounds_before: int) -> None:
        """Start the clock of a round."""
        self._began, self._told = time.monotonic(), rounds_before

    def end(self, number: int, num_rejected: int, **phases: Mapping[str, Any] | None) -> None:
        """Call every callback, unless no party was asked or they already ran for this round."""
        if number <= self._told:
            return
        self._told = number
        spent = {SECONDS: time.monotonic() - self._began, keys.NUM_REJECTED: num_rejected}
        metrics = {**spent, **dict(_figures(phases))}
        for position, function in enumerate(self._given):
            try:
                function(number, dict(metrics))
            except Exception as error:  # a user's own function may raise anything
                self._warn(position, function, number, error)

    def _warn(self, position: int, function: OnRound, number: int, error: Exception) -> None:
        if position in self._failed:
            return
        self._failed.add(position)
        logger.warning(
            "%s goes on although on_round function %s failed in round %s (%s: %s). "
            "Later failures of it are not logged.",
            self._owner,
            getattr(function, "__qualname__", type(function).__qualname__),
            number,
            type(error).__name__,
            error,
        )


def _figures(
    phases: Mapping[str, Mapping[str, Any] | None],
) -> Iterator[tuple[str, float]]:
    """Give the metrics of all phases under one name each; what nobody knows is missing."""
    for phase, metrics in phases.items():
        found = dict(metrics or {})
        parties = [int(number) for number in found.pop(keys.PARTITION_IDS, [])]
        for name, value in found.items():
            several = isinstance(value, list)
            places = parties if several and len(parties) == len(value) else None
            for place, one in enumerate(value if several else [value]):
                at = f"/{places[place] if places else place}" if several else ""
                if not math.isnan(one):
                    yield f"{phase}/{name}{at}", one


def followed_by(
    evaluate: Callable[[int, ArrayRecord], MetricRecord | None],
    end: Callable[[MetricRecord | None], None],
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return a server's evaluation after which a round has ended."""

    def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        found = evaluate(number, arrays)
        if number:
            end(found)
        return found

    return evaluated
