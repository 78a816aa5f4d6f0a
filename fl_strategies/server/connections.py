"""Connections to parties: waiting for them, and their replies one by one as they come.

Nodes register while the server already runs, so it waits for the expected ones first.
Flower's `send_and_receive` holds all replies in memory, and a single one that Flower itself
cannot read raises there and ends the run. Here every reply is fetched by itself: a bad one
becomes an error of its sender, and one that has been used is gone before the next is read.
"""

import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fl_strategies import _compat
from fl_strategies.errors import NotEnoughParties

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
