"""Reading what a party answered, as the answer of a stranger."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from flwr.app import Message

from fl_strategies import keys
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.knowledge import Knowledge, Metrics, count_bytes, read_metrics

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
    request: Message, reply: Message, kind: str, max_bytes: int, read: Callable[[Knowledge], T]
) -> PartyReply[T]:
    """Check a reply against its request; raise if anything in it is not as asked."""
    if reply.has_error():
        raise KnowledgeMismatch(reply.error.reason or f"error code {reply.error.code}")
    knowledge = Knowledge.read(reply.content, kind=kind, max_bytes=max_bytes)
    partition_id = knowledge.meta.get(keys.PARTITION_ID)
    if not isinstance(partition_id, int) or partition_id < 0:
        raise KnowledgeMismatch(
            f"Reply: {keys.PARTITION_ID} must be at least 0, got {partition_id!r}."
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
