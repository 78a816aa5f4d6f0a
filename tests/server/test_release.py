"""What a strategy declares is what both ledgers get, also if a round fails."""

import math

import pytest
from flwr.app import ConfigRecord

from fl_strategies.errors import PrivacyBudgetExceeded
from fl_strategies.party.role import PartyState, charge_plan
from fl_strategies.release import ReleasePlan
from fl_strategies.strategies.fedkt.party import FedKTParty
from tests.toys import toy_fedkt, toy_party

L1 = {"privacy_level": "L1", "gamma": 0.05, "num_queries": 20}
L2 = {"privacy_level": "L2", "gamma": 0.05, "num_queries": 20, "num_teachers": 4}


def test_both_sides_charge_the_same() -> None:
    strategy, party, state = toy_fedkt(**L2), toy_party(0), PartyState()
    config = ConfigRecord(strategy.party_config())

    _, ledger, _ = charge_plan(party, FedKTParty().plan(party, config), state)
    strategy.charge()

    assert ledger.entries == strategy.ledger_.entries
    assert len(ledger.entries) > 0


def test_a_round_is_charged_once() -> None:
    strategy = toy_fedkt(**L2)

    strategy.charge()
    once = strategy.ledger_.entries
    strategy.charge(failed=True)

    assert strategy.ledger_.entries == once


@pytest.mark.parametrize(("options", "left"), [(L1, False), (L2, True)])
def test_a_failed_round_costs_what_has_left(options: dict[str, object], left: bool) -> None:
    """The parties' noise is spent by then, a trusted server has not drawn any."""
    strategy = toy_fedkt(**options)

    strategy.charge(failed=True)

    assert bool(strategy.ledger_.entries) == left


def test_a_failed_round_is_charged_beyond_the_budget() -> None:
    """A budget refuses to make anything of answers; that they have left is no matter of it."""
    strategy = toy_fedkt(**L2, max_epsilon=1e-3)
    with pytest.raises(PrivacyBudgetExceeded):
        strategy.charge()
    failed = toy_fedkt(**L2, max_epsilon=1e-3)

    failed.charge(failed=True)

    assert failed.ledger_.get_epsilon() > 1e-3


def test_who_declares_nothing_promises_nothing() -> None:
    plan = ReleasePlan(name="anything")

    assert plan.models
    assert not plan.promises
    assert not plan.trains_privately
    _, ledger, _ = charge_plan(toy_party(0), plan, PartyState())
    assert ledger.get_epsilon() == math.inf
