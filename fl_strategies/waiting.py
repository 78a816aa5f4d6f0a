"""Waiting until parties have connected, and no longer than was agreed."""

import logging
import time
from collections.abc import Collection

from flwr.serverapp import Grid

from fl_strategies.exceptions import NotEnoughParties

logger = logging.getLogger("flwr.fl_strategies")

_POLL_SECONDS = 0.2
_SECONDS_BETWEEN_REMINDERS = 10.0


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
        time.sleep(_POLL_SECONDS)
    if len(nodes) < min_parties:
        raise NotEnoughParties(
            f"{owner}: {min_parties} of {num_parties} parties must connect within "
            f"max_wait={max_wait} seconds, got {len(nodes)}."
        )
    if len(nodes) < num_parties:
        logger.warning(
            "%s goes on with %s of %s parties after waiting %s seconds.",
            owner, len(nodes), num_parties, max_wait,
        )  # fmt: skip
    return nodes


def _connected(grid: Grid, only: Collection[int]) -> list[int]:
    return sorted(node for node in grid.get_node_ids() if not only or node in only)
