"""Received models: whatever a sender makes of 1 MB, the receiver stays alive and small."""

from collections.abc import Iterator

import pytest

from tests.attacks.hostile_models import ATTACKS, MEGABYTE
from tests.attacks.receiver import Receiver, running

MOST_BYTES = 64 * 2**20
MOST_SECONDS = 1.0
LARGE = "booster: a chain of 262500 levels in 18 MB"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    yield from running()


@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - {LARGE}))
def test_a_megabyte_takes_at_most_64_and_a_second(attack: str, receiver: Receiver) -> None:
    """Peak memory of the whole process, native code included, and time to predict."""
    cost = receiver.cost_of(attack)

    assert cost.outcome.startswith(("refused: ", "accepted")), cost
    assert cost.size <= MEGABYTE, cost
    assert cost.num_bytes <= MOST_BYTES, cost
    assert cost.seconds <= MOST_SECONDS, cost


def test_a_chain_of_262500_levels_does_not_kill_the_receiver(receiver: Receiver) -> None:
    """XGBoost walks trees by recursion: no tree may reach it that is deeper than allowed."""
    cost = receiver.cost_of(LARGE)

    assert "levels" in cost.outcome, cost
