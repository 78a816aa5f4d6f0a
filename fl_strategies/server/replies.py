"""Replies of parties: waiting for them, reading them, whose they are, and what they report.

Nodes register while the server already runs, so it waits for the expected ones first.
Flower's `send_and_receive` holds all replies in memory, and a single one that Flower itself
cannot read raises there and ends the run. Here every reply is fetched by itself: a bad one
becomes an error of its sender, and one that has been used is gone before the next is read.

Flower vouches for a node's id, by its key where SuperNodes have keys. The number of a party
is only what the node claims, so it is believed once. Later answers of the node count under the
same number, and no other node gets it while this one is there. Two new nodes that claim one
number in the same round are two parties all the same: the server cannot know who is right,
and whoever lost its place by this would lose it by anybody's claim.

Metrics are combined by the rule that each one's meaning asks for. Flower's default is a
weighted mean; for an epsilon that is wrong, because the mean of 1 and 50 promises more to the
second party than anybody kept. So privacy metrics are combined by maximum, and a party that
reports none counts as unprotected.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fl_strategies import _compat
from fl_strategies.errors import (
    InvalidData,
    KnowledgeMismatch,
    NotEnoughParties,
    require,
    require_known,
)
from fl_strategies.learners import METRICS
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import (
    MOST,
    DPSGDEvent,
    NonPrivateEvent,
    PrivacyEvent,
    event_to_json,
)
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, count_bytes, mismatch, read_metrics

Rule: TypeAlias = Callable[[Sequence[float], Sequence[float]], float]


def _total(values: Sequence[float], _: Sequence[float]) -> float:
    return sum(value for value in values if not math.isnan(value))


def _largest(values: Sequence[float], _: Sequence[float]) -> float:
    return math.inf if any(map(math.isnan, values)) else max(values)


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    pairs = [
        (value, weight)
        for value, weight in zip(values, weights, strict=True)
        if weight > 0 and not math.isnan(value)
    ]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else math.nan


RULES: Mapping[str, Rule] = {
    keys.NUM_EXAMPLES: _total,
    keys.NUM_BYTES_SENT: _total,
    keys.NUM_BYTES_RECEIVED: _total,
    keys.NUM_RELEASES: _total,
    keys.NUM_TEACHERS_MISSING: _total,
    keys.NUM_MODELS_REFUSED: _total,
    keys.EPSILON_PARTY: _largest,
    keys.EPSILON_EXAMPLE: _largest,
    keys.DELTA_PARTY: _largest,
    keys.DELTA_EXAMPLE: _largest,
}
"""Everything not listed is averaged, weighted by the number of examples."""


LONGEST_NAME: Final = 64
# Times a number of examples, and summed over all parties, it still fits into a float.
_LARGEST: Final = 1e100
_SHARES: Final = frozenset(
    {
        keys.ACCURACY,
        keys.BALANCED_ACCURACY,
        keys.MACRO_F1,
        keys.AUC,
        keys.MEAN_AUC,
        keys.BETTER_THAN_ALONE,
        keys.VOTE_AGREEMENT,
        keys.CONSISTENT_FRACTION,
    }
)


def clean_metrics(reported: Mapping[str, float]) -> dict[str, float]:
    """Return the reported metrics that can be true; the rest counts as not reported.

    NaN is what an honest party says where it has nothing to measure, and epsilon is
    infinite where nothing is promised.

    Examples
    --------
    >>> clean_metrics({"accuracy": 1e308, "num-examples": float("inf"), "auc": 0.5})
    {'auc': 0.5}
    """
    return {name: value for name, value in reported.items() if _can_be(name, value)}


def _can_be(name: str, value: float) -> bool:
    least, most = _range_of(name)
    # Compared as it is: a whole number may be too large for a float. Only NaN is not itself.
    inside = value != value or least <= value <= most
    return inside and 1 <= len(name) <= LONGEST_NAME and name.isprintable()


def _range_of(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value that a metric can have."""
    if name in _SHARES or name.startswith("delta-"):
        return 0.0, 1.0
    if name.startswith("epsilon-"):
        return 0.0, math.inf
    if name.startswith("num-"):
        return 0, MOST
    is_positive = name in (keys.MEAN_SQUARED_ERROR, keys.RMSE, keys.MAE)
    return 0.0 if is_positive else -_LARGEST, _LARGEST


def aggregate_metrics(parties: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of all parties key by key.

    A key that some party lacks counts as NaN there: ignored by totals and means, infinite
    in privacy metrics.

    Examples
    --------
    >>> a = {"num-examples": 10, "accuracy": 0.5, "epsilon-example": 1.0}
    >>> b = {"num-examples": 30, "accuracy": 0.9, "epsilon-example": 50.0}
    >>> aggregate_metrics([a, b])
    {'accuracy': 0.8, 'epsilon-example': 50.0, 'num-examples': 40}
    """
    weights = [max(party.get(keys.NUM_EXAMPLES, 0), 0) for party in parties]
    names = sorted({name for party in parties for name in party})
    return {
        name: RULES.get(name, _weighted_mean)(
            [party.get(name, math.nan) for party in parties], weights
        )
        for name in names
    }


def without_unknown(
    metrics: Mapping[str, float | list[float]],
) -> dict[str, float | list[float]]:
    """Return metrics without those that nobody knows.

    Examples
    --------
    >>> without_unknown({"accuracy": math.nan, "accuracy-by-party": [0.5, math.nan]})
    {'accuracy-by-party': [0.5, nan]}
    """
    return {
        name: value
        for name, value in metrics.items()
        if not all(map(math.isnan, value if isinstance(value, list) else [value]))
    }


logger = logging.getLogger("flwr.fl_strategies")

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_REMINDERS = 10.0

_SHORTEST_POLL, _LONGEST_POLL = 0.1, 3.0
_UNREADABLE = 2


class GridAround(Grid):
    """A grid that does as another one does; subclasses change what they need to."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @property
    def run(self) -> "_compat.Run":
        """The run that the grid serves."""
        return self._grid.run

    def set_run(self, run: "_compat.Run") -> None:
        """Take the description of another run."""
        self._grid.set_run(run)

    def create_message(self, *parts: Any, **named: Any) -> Message:
        """Return a message."""
        return self._grid.create_message(*parts, **named)

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return their replies."""
        return self._grid.send_and_receive(messages, timeout=timeout)


class StreamingGrid(GridAround):
    """Gives each reply when it is there."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages at once; replies come while they are read."""
        return (reply for _, reply in stream_replies(self._grid, list(messages), timeout))


def stream_replies(
    grid: Grid, requests: Sequence[Message], timeout: float | None
) -> Iterator[tuple[Message, Message]]:
    """Send messages, and give each of them with its reply when that is there.

    When the time is over, all that has arrived meanwhile is still fetched: neither the time
    that replies take to be read here nor one that comes slowly costs others their place.
    """
    numbers = [str(number) for number in grid.push_messages(requests) if number]
    known = {request.metadata.message_id: request for request in requests}
    return _arriving(grid, {number: known[number] for number in numbers}, timeout)


def _arriving(
    grid: Grid, waiting: dict[str, Message], timeout: float | None
) -> Iterator[tuple[Message, Message]]:
    left, pause = timeout if timeout is not None else math.inf, _SHORTEST_POLL
    end = time.monotonic() + left
    while True:
        is_last = time.monotonic() >= end
        for number, request in list(waiting.items()):
            reply = _pull(grid, number, request)
            if reply is not None:
                del waiting[number]
                yield request, reply
        if is_last or not waiting:
            return
        time.sleep(max(0.0, min(pause, end - time.monotonic())))
        # Every look is work for the SuperLink, so those who take long are asked rarely.
        pause = min(2 * pause, _LONGEST_POLL)


def _pull(grid: Grid, number: str, request: Message) -> Message | None:
    """Return the reply to a message, or None while there is none.

    Together with others, one that cannot be read would take those with it that came at the
    same time: Flower hands out every reply once.
    """
    try:
        replies = list(grid.pull_messages([number]))
    except _compat.TRANSPORT_ERRORS as error:
        if _compat.is_temporary(error):
            return None
        raise
    except Exception as error:  # untrusted bytes may fail in any way
        reason = f"Reply: it must be a message of Flower's, got {type(error).__name__}."
        return Message(Error(_UNREADABLE, reason), reply_to=request)
    return next((r for r in replies if r.metadata.reply_to_message_id == number), None)


def wait_for_parties(
    owner: str,
    grid: Grid,
    *,
    num_parties: int,
    min_parties: int,
    max_wait: float,
    only: Collection[int] = (),
) -> list[int]:
    """Return all connected nodes, once the expected ones are there or the time is over.

    Nodes register while the server already runs, so asking once would race with them. If
    `only` names nodes, no others count.

    Raises
    ------
    NotEnoughParties
        If fewer than `min_parties` have come after `max_wait` seconds.
    """
    start = reminded = time.monotonic()
    while len(nodes := _connected(grid, only)) < num_parties:
        now = time.monotonic()
        if now - start >= max_wait:
            break
        if now - reminded >= _SECONDS_BETWEEN_REMINDERS:
            reminded = now
            logger.info(
                "%s waits for parties: %s of %s are connected.", owner, len(nodes), num_parties
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    if len(nodes) < min_parties:
        raise NotEnoughParties(
            f"{owner}: {min_parties} of {num_parties} parties must connect within "
            f"max_wait={max_wait} seconds, got {len(nodes)}."
        )
    if len(nodes) < num_parties:
        logger.warning(
            "%s continues with %s of %s parties after waiting %s seconds.",
            owner,
            len(nodes),
            num_parties,
            max_wait,
        )
    return nodes


def _connected(grid: Grid, only: Collection[int]) -> list[int]:
    return sorted(node for node in grid.get_node_ids() if not only or node in only)


T = TypeVar("T")

EVALUATION = "evaluation"
"""Kind of a reply that carries metrics alone."""

MAX_NAME: Final = 200
MAX_METRICS: Final = 200
# Reports of a party about itself go into logs and results.
MAX_ERROR: Final = 2_000


@dataclass(frozen=True, slots=True)
class PartyReport:
    """Metrics that one party has reported about itself."""

    learner_name: str
    train: Metrics
    evaluate: Metrics


@dataclass(frozen=True, slots=True)
class PartyReply(Generic[T]):
    """One accepted reply: what the party knows, already checked, and its metrics."""

    partition_id: int
    node_id: int
    learner_name: str
    knowledge: T
    metrics: Metrics

    def without_knowledge(self) -> "PartyReply[None]":
        """Return who answered and what was measured, without the answer itself."""
        stripped: PartyReply[Any] = replace(self, knowledge=None)  # type: ignore[arg-type]
        return stripped


def parse_reply(
    request: Message,
    reply: Message,
    kind: str,
    max_bytes: int,
    read: Callable[[Knowledge], T],
    *,
    check: Callable[[int], None] = lambda _: None,
    restore: Callable[[Knowledge], Knowledge] = lambda knowledge: knowledge,
) -> PartyReply[T]:
    """Check a reply against its request; raise if anything in it is not as asked.

    `check` raises if the sender is not the party that it claims to be. `restore` gives the
    reply as it was before it was made smaller. `read` comes last, after everything is
    checked.
    """
    if reply.has_error():
        reason = cut_short(reply.error.reason or "")
        raise KnowledgeMismatch(reason or f"error code {reply.error.code}")
    size = check_size(reply.content, max_bytes)
    knowledge = Knowledge.read(reply.content, kind=kind, max_bytes=max_bytes)
    partition_id = knowledge.meta.get(keys.PARTITION_ID)
    if type(partition_id) is not int or not 0 <= partition_id <= MOST:
        rule = "a whole number, at least 0"
        raise mismatch("Reply", keys.PARTITION_ID, rule, partition_id)
    check(partition_id)
    metrics = clean_metrics(read_metrics(reply.content))
    # Measured here, because a party could write anything.
    metrics[keys.NUM_BYTES_SENT] = size
    metrics[keys.NUM_BYTES_RECEIVED] = count_bytes(request.content)
    return PartyReply(
        partition_id=partition_id,
        # The sender's address is not used: Flower gives node 1 for errors of dead nodes.
        node_id=request.metadata.dst_node_id,
        learner_name=cut_short(str(knowledge.meta.get(keys.LEARNER, "")))[:LONGEST_NAME],
        knowledge=read(restore(knowledge)),
        metrics=metrics,
    )


def check_size(content: RecordDict, max_bytes: int) -> int:
    """Return the bytes of a reply; raise `KnowledgeMismatch` if they are more than agreed."""
    for record in content.metric_records.values():
        if len(record) > MAX_METRICS or max(map(len, record), default=0) > MAX_NAME:
            raise KnowledgeMismatch(
                f"Reply: metrics must be at most {MAX_METRICS}, with names of at most "
                f"{MAX_NAME} letters, got more."
            )
    size = count_bytes(content)
    if size > max_bytes:
        raise KnowledgeMismatch(
            f"Reply: it must be at most {max_bytes} bytes, got {size}. "
            f"Raise max_reply_bytes if larger ones are due."
        )
    return size


def cut_short(reason: str) -> str:
    """Return an untrusted sentence as one line that a terminal shows as it is."""
    plain = "".join(c if c.isprintable() else " " for c in reason[: 2 * MAX_ERROR])
    return " ".join(plain.split())[:MAX_ERROR]


def metrics_by_party(replies: Sequence[PartyReply[T]]) -> dict[str, list[float]]:
    """Return each party's own main metrics of its task, in the order of ``partition-ids``."""
    ids = [float(reply.partition_id) for reply in replies]
    metrics = {
        f"{name}-by-party": [float(reply.metrics.get(name, math.nan)) for reply in replies]
        for name in (*METRICS.values(), keys.R2)
        if any(name in reply.metrics for reply in replies)
    }
    return {keys.PARTITION_IDS: ids, **metrics}


S = TypeVar("S")
Known: TypeAlias = dict[int, tuple[int, int]]
"""Per node id: what the node calls itself and the number it has, longest known first."""


def registered(owner: str, members: Mapping[int, int] | None, num_parties: int) -> Known:
    """Return the nodes that an operator has named, each with its number; none by default."""
    if members is None:
        return {}
    numbers = list(members.values())
    whole = all(type(number) is int and number >= 0 for number in numbers)
    require(whole, owner, "members", "whole numbers, at least 0", numbers)
    different = len({*numbers}) == len(numbers)
    require(different, owner, "members", "one node for each party", numbers)
    enough, rule = len(numbers) >= num_parties, f"at least num_parties={num_parties} nodes"
    require(enough, owner, "members", rule, len(numbers))
    return {node: (number, number) for node, number in members.items()}


def holders(known: Known, asked: Collection[int]) -> dict[int, int]:
    """Return which node of the round has each number; of several, the longest known.

    Nodes that are not `asked` hold nothing: a party that has left may come back as a new node.
    """
    found: dict[int, int] = {}
    for node, (_, number) in known.items():
        if node in asked:
            found.setdefault(number, node)
    return found


def check_claim(known: Known, held: Mapping[int, int], node: int, claimed: int) -> None:
    """Raise `KnowledgeMismatch` if a node is known by another number, or another by this one.

    `held` is what `holders` gives. It is made once a round, since every reply needs it.
    """
    own, number = known.get(node, (claimed, claimed))
    if own != claimed:
        raise KnowledgeMismatch(
            f"Reply: {keys.PARTITION_ID} must stay the same as this node's own, {own}, "
            f"got {claimed}."
        )
    holder = held.get(number, node)
    if holder != node:
        raise KnowledgeMismatch(
            f"Reply: {keys.PARTITION_ID} must be the party's own, got {claimed}, "
            f"which node {holder} has in this run."
        )


def settle(known: Known, replies: Iterable[PartyReply[S]]) -> list[PartyReply[S]]:
    """Remember new nodes, and return the replies by the numbers of their parties, sorted.

    The first of several new nodes with one claim, by node id, gets the number. The others
    get negative ones, which nobody can claim.
    """
    claims: set[int] = set()
    nameless = sum(number < 0 for _, number in known.values())
    by_node = sorted(replies, key=lambda reply: reply.node_id)
    for reply in by_node:
        if reply.node_id not in known:
            claimed = number = reply.partition_id
            if claimed in claims:
                nameless += 1
                number = -nameless
                logger.warning(
                    "Node %s and another one both claim to be party %s. It counts as party %s; "
                    "give the strategy members to say who is who.",
                    reply.node_id,
                    claimed,
                    number,
                )
            known[reply.node_id] = claimed, number
            claims.add(claimed)
    found = [replace(reply, partition_id=known[reply.node_id][1]) for reply in by_node]
    return sorted(found, key=lambda reply: reply.partition_id)


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
    """Read the reported cost of a party's releases, per record.

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
    """Read the reported cost of a party's round, per record."""
    entries = read_ledger(text).entries
    # Unbounded counts would overflow the server's ledger after some rounds.
    few = sum(count for _, count in entries) <= MAX_EVENTS
    rule = f"as written here, at most {MAX_EVENTS} a round"
    require_known(few, "Reply", "privacy events", rule, "more")
    return entries


def enter_reported(
    known: dict[int, Reported],
    reply: PartyReply[T],
    charges: Sequence[Entry],
    times: int,
    empty: PrivacyLedger,
) -> None:
    """Enter a party's events into `known`, as often as it was asked.

    That has, per partition id, what a party has reported before; one that has reported nothing
    begins with the `empty` ledger. Whose ledger is shown is decided by `most_expensive`, once
    all parties are entered.
    """
    _, ledger = known.get(reply.partition_id, (0.0, empty))
    for _ in range(times):
        ledger.compose_all(charges)
    limit_events(ledger)
    known[reply.partition_id] = reported_epsilon(reply.metrics, ledger), ledger


def most_expensive(known: Iterable[Reported]) -> PrivacyLedger:
    """Return the ledger whose events cost most.

    What parties report only decides where to look first, because accounting takes time: a
    party that reports a large epsilon for small events would otherwise hide the others' events.
    A party whose own epsilon is honest costs no more than it reports.
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
    """Return a party's own epsilon; infinite if it is none, or its ledger contradicts it."""
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
