"""Replies of a round, one by one: parsed, matched to their senders, taken or refused."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from flwr.app import Message

from fl_strategies.core.members import Known, check_claim, holders, settle
from fl_strategies.runtime.runs import Run
from fl_strategies.wire.knowledge import Knowledge
from fl_strategies.wire.replies import PartyReply, parse_reply

logger = logging.getLogger("flwr.fl_strategies")

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Collector(Generic[S]):
    """Reads replies to some messages; a bad one costs its own party the round.

    Parameters
    ----------
    owner : str
        Who reads, for the log.
    sent : sequence of Message
        What was asked.
    members : dict
        Which node is which party; new ones are entered.
    run : Run
    kind : str
        What a reply must be.
    max_bytes : int
    check : callable
        Return what a reply's knowledge says; raise, and change nothing, if it is not as asked.
    restore : callable
        Return knowledge as it was before it was made smaller to travel; see `wire.compact`.
    reject : callable
        Note why a node's reply does not count.
    """

    owner: str
    sent: Sequence[Message]
    members: Known
    run: Run
    kind: str
    max_bytes: int
    check: Callable[[Knowledge], S]
    restore: Callable[[Knowledge], Knowledge]
    reject: Callable[[int, str], None]
    refused: set[int] = field(default_factory=set, init=False)
    """Nodes that have sent an error in place of an answer."""

    def collect(self, replies: Iterable[Message]) -> Iterator[PartyReply[S]]:
        """Yield the replies that are as asked, in the order in which they come."""
        waiting = {m.metadata.message_id: m for m in self.sent}
        asked, attempt = {m.metadata.dst_node_id for m in self.sent}, 1
        held = holders(self.members, asked)
        new: list[PartyReply[None]] = []
        for reply in replies:
            request = waiting.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                logger.warning("%s ignores a reply to no open question.", self.owner)
                continue
            node = request.metadata.dst_node_id
            if self.run.first_attempt_of(node) > attempt:
                # Who answered before a resume is known by now; see `check_claim`.
                attempt = self.run.first_attempt_of(node)
                settle(self.members, new)
                held = holders(self.members, asked)
            if reply.has_error():
                self.refused.add(node)
            claim = partial(check_claim, self.members, held, node)
            try:
                read = parse_reply(
                    request,
                    reply,
                    self.kind,
                    self.max_bytes,
                    self.check,
                    check=claim,
                    restore=self.restore,
                )
            except Exception as error:  # hostile input may make a learner raise anything
                self.reject(node, str(error) or type(error).__name__)
                continue
            new.append(read.without_knowledge())
            yield read
        for request in waiting.values():
            self.reject(request.metadata.dst_node_id, "it did not answer in time")
