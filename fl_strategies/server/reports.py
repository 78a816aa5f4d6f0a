"""What a round reports: epsilon per party, `epsilon.csv`, and calls of `on_round`."""

import csv
import io
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from flwr.app import ArrayRecord, MetricRecord

from fl_strategies._util import SHARED, replace_file
from fl_strategies.errors import InvalidData, KnowledgeMismatch, MissingExtra, require
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import (
    MOST,
    DPSGDEvent,
    NonPrivateEvent,
    PrivacyEvent,
    event_to_json,
)
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.server.replies import PartyReply
from fl_strategies.server.run import State
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics

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


T = TypeVar("T")

MAX_EVENTS_TEXT: Final = 100_000
MAX_EVENTS: Final = 2**20
MAX_DISTINCT_EVENTS: Final = 8
MAX_REASON: Final = 200
# Accounting for DP-SGD takes time in proportion to the range of losses that it lays out; at
# this many, all events of a party together, it is done within about half a minute.
MAX_RANGE: Final = 100.0
LEAST_NOISE, MOST_NOISE, LEAST_CHANCE, MOST_STEPS = 0.1, 1e4, 1e-9, 10**6
UNCOUNTED: Final = NonPrivateEvent(
    unit="example", reason="a party reported more events, or other ones, than are counted here"
)
"""Stands for untrusted events that would keep the accountant busy for too long."""


Reported: TypeAlias = tuple[float, PrivacyLedger]
"""A party's statement of the cost per record: its own epsilon, and the events."""


def read_ledger(text: object) -> PrivacyLedger:
    """Read what a party says its releases have cost each of its records.

    Raises `KnowledgeMismatch` for text that no ledger has written. Events that would take
    the accountant too long count as `UNCOUNTED`; see `limit_events`.
    """
    problem = KnowledgeMismatch("Reply: privacy events must be as written here, got others.")
    if not isinstance(text, str) or len(text) > MAX_EVENTS_TEXT:
        raise problem
    ledger = PrivacyLedger("example", delta=DEFAULT_DELTA)
    try:
        ledger.load_state_dict(json.loads(text))
    except (InvalidData, ValueError, TypeError, RecursionError) as error:
        raise problem from error
    if not ledger.entries:
        raise problem
    return limit_events(ledger)


def read_charges(text: object) -> Sequence[Entry]:
    """Read what a party says its round has cost each of its records."""
    entries = read_ledger(text).entries
    # Unbounded counts would overflow the server's ledger after some rounds.
    if sum(count for _, count in entries) > MAX_EVENTS:
        raise KnowledgeMismatch(
            f"Reply: privacy events must be as written here, at most {MAX_EVENTS} a round, "
            f"got more."
        )
    return entries


def enter_reported(
    known: dict[int, Reported],
    reply: PartyReply[T],
    charges: Sequence[Entry],
    times: int,
    empty: PrivacyLedger,
) -> None:
    """Enter a party's events, as often as it was asked.

    Whose ledger is shown is decided by `most_expensive`, once all parties are entered.

    Parameters
    ----------
    known : dict of partition id to what the party has reported before; changed here
    reply : PartyReply
    charges : sequence of (event, count)
    times : int
    empty : PrivacyLedger
        What a party that has reported nothing begins with.
    """
    _, ledger = known.get(reply.partition_id, (0.0, empty))
    for _ in range(times):
        ledger.compose_all(charges)
    limit_events(ledger)
    known[reply.partition_id] = reported_epsilon(reply.metrics, ledger), ledger


def most_expensive(known: Iterable[Reported]) -> PrivacyLedger:
    """Return the ledger whose events cost most.

    What parties tell only says where to look first, because accounting takes time: a party
    that tells a large epsilon for small events would otherwise hide the others' events. Whose
    own epsilon is honest costs no more than it tells.
    """
    in_order = sorted(known, key=lambda reported: -reported[0])
    worst, cost = in_order[0][1], -1.0
    for reported, ledger in in_order:
        if reported <= cost:
            break
        found = ledger.get_epsilon()
        if found > cost:
            worst, cost = ledger, found
    return worst


def reported_epsilon(metrics: Metrics, ledger: PrivacyLedger) -> float:
    """Return a party's own epsilon; infinite if it is none, or its ledger says otherwise."""
    reported = metrics.get(keys.EPSILON_EXAMPLE, math.nan)
    private = not any(isinstance(event, NonPrivateEvent) for event, _ in ledger.entries)
    return reported if private and reported >= 0 else math.inf


def limit_events(ledger: PrivacyLedger) -> PrivacyLedger:
    """Let one event without protection stand for all that cannot be accounted for quickly.

    Kept are the first `MAX_DISTINCT_EVENTS` events, as long as accounting for them takes
    reasonable time. Changes the ledger and returns it. Epsilon can only grow by this.
    """
    state = ledger.state_dict()
    kept: list[dict[str, Any]] = []
    uncounted = {"event": event_to_json(UNCOUNTED), "count": 0, "batches": 0}
    left = MAX_RANGE
    for (event, count), entry in zip(ledger.entries, state["entries"], strict=True):
        needed = _range_of_losses(event, count)
        if event != UNCOUNTED and needed <= left and len(kept) < MAX_DISTINCT_EVENTS:
            left -= needed
            kept.append(entry)
            continue
        for name in ("count", "batches"):
            uncounted[name] = min(uncounted[name] + entry[name], MOST)
    if uncounted["count"]:
        ledger.load_state_dict({**state, "entries": [*kept, uncounted]})
    return ledger


def _range_of_losses(event: PrivacyEvent, count: int) -> float:
    """Return how wide a range of losses the accountant lays out, infinite if hopeless."""
    if isinstance(event, NonPrivateEvent):
        # The reason is printed, so it must be a sentence.
        plain = len(event.reason) <= MAX_REASON and event.reason.isprintable()
        return 0.0 if plain else math.inf
    if not isinstance(event, DPSGDEvent):
        return 0.0
    noise, chance = event.noise_multiplier, event.batch_size / event.records
    steps = event.steps * count
    plain = LEAST_NOISE <= noise <= MOST_NOISE and chance >= LEAST_CHANCE
    if not plain or steps > MOST_STEPS:
        return math.inf
    gain = 1 / noise**2
    # Two bounds: from the batches that hold the record, and from the chi-square divergence.
    variance = min(chance * (gain + gain**2 / 4), chance**2 * math.expm1(gain))
    tails = 10 / noise + gain / 2
    return tails + 12 * math.sqrt(steps * variance)


ALL: Final = "all"
COLUMNS: Final = (
    "round",
    "party",
    "unit",
    "epsilon",
    f"epsilon{keys.UNBOUNDED}",
    "delta",
    keys.NUM_RELEASES,
    "mechanism",
)
_UNITS: Final = (
    ("example", keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
    ("party", keys.EPSILON_PARTY, keys.DELTA_PARTY),
)


class Ran(Protocol):
    """A strategy after a run, as far as its costs go."""

    state: State

    @property
    def ledger_(self) -> PrivacyLedger:
        """What the run released."""


def write_epsilon_csv(strategy: Ran, path: str | Path) -> None:
    """Write what each party's releases have cost by the end of each round.

    A figure is what the party itself reports, and counts everything that it has released by
    then. The lines of the party ``all`` have what the round's metrics say: the worst of all
    parties, or, where the server is trusted to add noise, what everybody else learns.

    Parameters
    ----------
    strategy : KnowledgeStrategy
        After a run, also one that failed.
    path : str or Path
        Of the file, which is replaced if it is there.

    Notes
    -----
    ``epsilon`` is empty and ``epsilon-unbounded`` true where nothing is promised, also
    because a party reports nothing. ``mechanism`` names the kinds of event in the run's ledger
    by which a finite epsilon holds; it is empty where that ledger promises nothing.
    """
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(_lines(strategy))
    replace_file(Path(path), text.getvalue().encode(), SHARED)


def _lines(strategy: Ran) -> Iterator[dict[str, object]]:
    combined, mechanism = strategy.state.history["train"], _mechanism(strategy)
    prices = strategy.state.prices
    for number in sorted({*prices, *combined}):
        told: dict[object, Mapping[str, float]] = dict(sorted(prices.get(number, {}).items()))
        if number in combined:
            told[ALL] = combined[number]
        for party, figures in told.items():
            for unit, epsilon, delta in _UNITS:
                found = figures.get(epsilon, math.inf)
                bounded = math.isfinite(found)
                values = (
                    number,
                    party,
                    unit,
                    _known(found),
                    "false" if bounded else "true",
                    _known(figures.get(delta, math.nan)),
                    _known(figures.get(keys.NUM_RELEASES, math.nan)),
                    mechanism if bounded else "",
                )
                yield dict(zip(COLUMNS, values, strict=True))


def _known(figure: float) -> float | str:
    return figure if math.isfinite(figure) else ""


def _mechanism(strategy: Ran) -> str:
    """Return the kinds of event that bound what a run costs; nothing if none does."""
    ledger = strategy.ledger_
    try:
        bounded = math.isfinite(ledger.get_epsilon())
    except MissingExtra:  # events of parties may need one
        return ""
    kinds = {str(event_to_json(event)["type"]) for event, _ in ledger.entries}
    return " ".join(sorted(kinds)) if bounded else ""
