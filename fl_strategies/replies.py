"""Reading what a party answered, as the answer of a stranger."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

from flwr.app import Message, RecordDict

from fl_strategies import keys
from fl_strategies.exceptions import InvalidData, KnowledgeMismatch
from fl_strategies.knowledge import Knowledge, Metrics, count_bytes, read_metrics, shown
from fl_strategies.metrics import LONGEST_NAME, clean_metrics
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import (
    MOST,
    DPSGDEvent,
    NonPrivateEvent,
    PrivacyEvent,
    event_to_json,
)
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.reporting import DEFAULT_DELTA
from fl_strategies.tasks import METRICS

T = TypeVar("T")

EVALUATION = "evaluation"
"""Kind of a reply that carries metrics alone."""

MAX_EVENTS_TEXT: Final = 100_000
MAX_EVENTS: Final = 2**20
MAX_DISTINCT_EVENTS: Final = 8
MAX_REASON: Final = 200
MAX_NAME: Final = 200
MAX_METRICS: Final = 200
# What a party says about itself goes into logs and results.
MAX_ERROR: Final = 2_000
# Accounting for DP-SGD takes time in proportion to the range of losses that it lays out; at
# this many, all events of a party together, it is done within about half a minute.
MAX_RANGE: Final = 100.0
LEAST_NOISE, MOST_NOISE, LEAST_CHANCE, MOST_STEPS = 0.1, 1e4, 1e-9, 10**6
UNCOUNTED: Final = NonPrivateEvent(
    unit="example", reason="a party reported more events, or other ones, than are counted here"
)
"""Stands for a stranger's events that would keep the accountant busy for too long."""


Told: TypeAlias = tuple[float, PrivacyLedger]
"""What a party says its releases cost a record: its own epsilon, and the events."""


@dataclass(frozen=True, slots=True)
class PartyReport:
    """What one party has told about itself."""

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


def parse_reply(
    request: Message,
    reply: Message,
    kind: str,
    max_bytes: int,
    read: Callable[[Knowledge], T],
    *,
    check: Callable[[int], None] = lambda _: None,
) -> PartyReply[T]:
    """Check a reply against its request; raise if anything in it is not as asked.

    `check` raises if the sender is not the party that it says it is. `read` comes
    last, after everything is checked.
    """
    if reply.has_error():
        reason = cut_short(reply.error.reason or "")
        raise KnowledgeMismatch(reason or f"error code {reply.error.code}")
    size = check_size(reply.content, max_bytes)
    knowledge = Knowledge.read(reply.content, kind=kind, max_bytes=max_bytes)
    partition_id = knowledge.meta.get(keys.PARTITION_ID)
    if type(partition_id) is not int or not 0 <= partition_id <= MOST:
        raise KnowledgeMismatch(
            f"Reply: {keys.PARTITION_ID} must be a whole number, at least 0, "
            f"got {shown(partition_id)}."
        )
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
        knowledge=read(knowledge),
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
    """Return a stranger's sentence as one line that a terminal shows as it is."""
    plain = "".join(c if c.isprintable() else " " for c in reason[: 2 * MAX_ERROR])
    return " ".join(plain.split())[:MAX_ERROR]


def figures_by_party(replies: Sequence[PartyReply[T]]) -> dict[str, list[float]]:
    """Return each party's own figure of its task, in the order of ``partition-ids``."""
    ids = [float(reply.partition_id) for reply in replies]
    figures = {
        f"{name}-by-party": [float(reply.metrics.get(name, math.nan)) for reply in replies]
        for name in METRICS.values()
        if any(name in reply.metrics for reply in replies)
    }
    return {keys.PARTITION_IDS: ids, **figures}


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


def enter_told(
    known: dict[int, Told], reply: PartyReply[T], charges: Sequence[Entry], times: int,
    empty: PrivacyLedger,
) -> PrivacyLedger:  # fmt: skip
    """Enter a party's events, as often as it was asked, and return the costliest ledger.

    Parameters
    ----------
    known : dict of partition id to what the party has told before; changed here
    reply : PartyReply
    charges : sequence of (event, count)
    times : int
    empty : PrivacyLedger
        What a party that has told nothing begins with.
    """
    _, ledger = known.get(reply.partition_id, (0.0, empty))
    for _ in range(times):
        ledger.compose_all(charges)
    limit_events(ledger)
    known[reply.partition_id] = told_epsilon(reply.metrics, ledger), ledger
    return costliest(known.values())


def costliest(known: Iterable[Told]) -> PrivacyLedger:
    """Return the ledger whose events cost most.

    What parties tell only says where to look first, because accounting takes time: a party
    that tells a large epsilon for small events would otherwise hide the others' events. Whose
    own epsilon is honest costs no more than it tells.
    """
    in_order = sorted(known, key=lambda told: -told[0])
    worst, cost = in_order[0][1], -1.0
    for told, ledger in in_order:
        if told <= cost:
            break
        found = ledger.get_epsilon()
        if found > cost:
            worst, cost = ledger, found
    return worst


def told_epsilon(metrics: Metrics, ledger: PrivacyLedger) -> float:
    """Return a party's own epsilon; infinite if it is none, or its ledger says otherwise."""
    told = metrics.get(keys.EPSILON_EXAMPLE, math.nan)
    private = not any(isinstance(event, NonPrivateEvent) for event, _ in ledger.entries)
    return told if private and told >= 0 else math.inf


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
