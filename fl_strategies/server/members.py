"""Map nodes to parties: by a node's first answer, for the whole run.

Flower vouches for a node's id, by its key where SuperNodes have keys. The number of a party
is only what the node says, so it is believed once. Later answers of the node count under the
same number, and no other node gets it while this one is there. Two new nodes that claim one
number in the same round are two parties all the same: the server cannot know who is right,
and whoever lost its place by this would lose it by anybody's claim.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias, TypeVar

from fl_strategies.errors import KnowledgeMismatch, require
from fl_strategies.server.replies import PartyReply
from fl_strategies.wire import keys

logger = logging.getLogger("flwr.fl_strategies")

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
