"""Reading what a party answered, as the answer of a stranger."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from flwr.app import Message

from fl_strategies import keys
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.knowledge import Knowledge, Metrics, count_bytes, read_metrics
from fl_strategies.tasks import METRICS

T = TypeVar("T")

EVALUATION = "evaluation"
"""Kind of a reply that carries metrics alone."""


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
    taken: Collection[int] = (),
) -> PartyReply[T]:
    """Check a reply against its request; raise if anything in it is not as asked.

    Of two nodes that claim to be the same party, the first to answer is believed: `taken`
    holds the parties that have answered. `read` comes last, after everything is checked.
    """
    if reply.has_error():
        raise KnowledgeMismatch(reply.error.reason or f"error code {reply.error.code}")
    knowledge = Knowledge.read(reply.content, kind=kind, max_bytes=max_bytes)
    partition_id = knowledge.meta.get(keys.PARTITION_ID)
    if not isinstance(partition_id, int) or partition_id < 0:
        raise KnowledgeMismatch(
            f"Reply: {keys.PARTITION_ID} must be at least 0, got {partition_id!r}."
        )
    if partition_id in taken:
        raise KnowledgeMismatch(
            f"Reply: {keys.PARTITION_ID} must be the party's own, got {partition_id}, "
            f"for which another node has answered."
        )
    metrics = read_metrics(reply.content)
    # Measured here, because a party could write anything.
    metrics[keys.NUM_BYTES_SENT] = count_bytes(reply.content)
    metrics[keys.NUM_BYTES_RECEIVED] = count_bytes(request.content)
    return PartyReply(
        partition_id=partition_id,
        # The sender's address is not used: Flower gives node 1 for errors of dead nodes.
        node_id=request.metadata.dst_node_id,
        learner_name=str(knowledge.meta.get(keys.LEARNER, "")),
        knowledge=read(knowledge),
        metrics=metrics,
    )


def figures_by_party(replies: Sequence[PartyReply[T]]) -> dict[str, list[float]]:
    """Return each party's own figure of its task, in the order of ``partition-ids``."""
    ids = [float(reply.partition_id) for reply in replies]
    figures = {
        f"{name}-by-party": [reply.metrics.get(name, math.nan) for reply in replies]
        for name in METRICS.values()
        if any(name in reply.metrics for reply in replies)
    }
    return {keys.PARTITION_IDS: ids, **figures}
