"""Reading what a party answered, as the answer of an untrusted party."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from flwr.app import Message, RecordDict

from fl_strategies.aggregation.metrics import LONGEST_NAME, clean_metrics
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.privacy.events import (
    MOST,
)
from fl_strategies.tasks import METRICS
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, count_bytes, read_metrics, shown

T = TypeVar("T")

EVALUATION = "evaluation"
"""Kind of a reply that carries metrics alone."""

MAX_NAME: Final = 200
MAX_METRICS: Final = 200
# What a party says about itself goes into logs and results.
MAX_ERROR: Final = 2_000


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

    def without_knowledge(self) -> "PartyReply[None]":
        """Return who answered and what was measured, without what was said."""
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

    `check` raises if the sender is not the party that it says it is. `restore` gives the
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


def figures_by_party(replies: Sequence[PartyReply[T]]) -> dict[str, list[float]]:
    """Return each party's own figure of its task, in the order of ``partition-ids``."""
    ids = [float(reply.partition_id) for reply in replies]
    figures = {
        f"{name}-by-party": [float(reply.metrics.get(name, math.nan)) for reply in replies]
        for name in METRICS.values()
        if any(name in reply.metrics for reply in replies)
    }
    return {keys.PARTITION_IDS: ids, **figures}
