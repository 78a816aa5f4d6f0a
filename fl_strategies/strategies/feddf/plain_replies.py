"""Answers of parties that know nothing of this package: weights, and a number of examples.

Flower's own client code reads `arrays` and `config` of a message, and answers with one
`ArrayRecord` and one `MetricRecord` of any names. Whoever answers so has said neither which
party it is nor what its answer cost a record: the server numbers it, and its weights count
as sent without noise.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_strategies.core.accounting import (
    ledger_of,
    ledger_to_text,
    privacy_metrics,
    unprotected,
)
from fl_strategies.core.members import Known
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.strategies.weights.options import WEIGHTS
from fl_strategies.strategies.weights.party import UNPROTECTED, UNPROTECTED_WEIGHTS
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Scalar
from fl_strategies.wire.replies import EVALUATION

_LEDGER: Final = ledger_of(UNPROTECTED, DEFAULT_DELTA)


def read_plain(
    replies: Iterable[Message], sent: Sequence[Message], members: Known, learner: str
) -> Iterator[Message]:
    """Yield replies, plain ones as our own parties would have written them.

    Parameters
    ----------
    sent : sequence of Message
        What was asked.
    members : dict
        Which node is which party; new ones get the numbers that nobody has, by node id.
    learner : str
        The kind of model that a plain party has.
    """
    nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in sent}
    numbers = _numbers(nodes.values(), members)
    for reply in replies:
        node = nodes.get(reply.metadata.reply_to_message_id)
        if node is not None and reply.has_content() and keys.META not in reply.content:
            meta: dict[str, Scalar] = {keys.PARTITION_ID: numbers[node], keys.LEARNER: learner}
            reply.content = _as_ours(reply.content, meta)
        yield reply


def _numbers(nodes: Iterable[int], members: Known) -> dict[int, int]:
    taken = {number for claim in members.values() for number in claim}
    free = (number for number in count() if number not in taken)
    return {n: members[n][0] if n in members else next(free) for n in sorted(nodes)}


def _as_ours(content: RecordDict, meta: dict[str, Scalar]) -> RecordDict:
    """Return the records of a plain answer under our names; what is missing stays missing."""
    arrays = next(iter(content.array_records.values()), None)
    metrics = next(iter(content.metric_records.values()), None)
    if metrics is None:
        return content
    told = dict(metrics)
    if arrays is None:
        return _records(ArrayRecord(), {**meta, keys.KIND: EVALUATION}, told)
    num_examples = told.get(keys.NUM_EXAMPLES)
    if isinstance(num_examples, int | float):
        meta = {**meta, keys.NUM_EXAMPLES: num_examples}
    meta = {**meta, keys.KIND: WEIGHTS, keys.PRIVACY_EVENTS: ledger_to_text(_LEDGER)}
    paid = privacy_metrics(party=unprotected(UNPROTECTED_WEIGHTS), example=_LEDGER)
    return _records(arrays, meta, {**told, **paid})


def _records(arrays: ArrayRecord, meta: dict[str, Scalar], metrics: object) -> RecordDict:
    told, own = MetricRecord(metrics), ConfigRecord({**meta})  # type: ignore[arg-type]
    return RecordDict({keys.ARRAYS: arrays, keys.META: own, keys.METRICS: told})
