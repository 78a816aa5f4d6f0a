"""Replies of parties: waiting for them, reading them, and whose they are.

Nodes register while the server already runs, so it waits for the expected ones first.
Flower's `send_and_receive` holds all replies in memory, and a single one that Flower itself
cannot read raises there and ends the run. Here every reply is fetched by itself: a bad one
becomes an error of its sender, and one that has been used is gone before the next is read.

Flower vouches for a node's id, by its key where SuperNodes have keys. The number of a party
is only what the node says, so it is believed once. Later answers of the node count under the
same number, and no other node gets it while this one is there. Two new nodes that claim one
number in the same round are two parties all the same: the server cannot know who is right,
and whoever lost its place by this would lose it by anybody's claim.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fl_strategies import _compat
from fl_strategies.aggregation.metrics import LONGEST_NAME, clean_metrics
from fl_strategies.errors import KnowledgeMismatch, NotEnoughParties, require
from fl_strategies.privacy.events import (
    MOST,
)
from fl_strategies.tasks import METRICS
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, count_bytes, read_metrics, shown

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

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

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
    require(
        len({*numbers}) == len(numbers), owner, "members", "one node for each party", numbers
    )
    enough = len(numbers) >= num_parties
    require(enough, owner, "members", f"at least num_parties={num_parties} nodes", len(numbers))
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
                _warn_of_two(reply, number)
            known[reply.node_id] = claimed, number
            claims.add(claimed)
    found = [replace(reply, partition_id=known[reply.node_id][1]) for reply in by_node]
    return sorted(found, key=lambda reply: reply.partition_id)


def _warn_of_two(reply: PartyReply[S], number: int) -> None:
    logger.warning(
        "Node %s and another one both say that they are party %s. It counts as party %s; "
        "give the strategy members to say who is who.",
        reply.node_id,
        reply.partition_id,
        number,
    )
