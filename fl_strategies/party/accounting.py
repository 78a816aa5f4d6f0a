"""From what was charged to the figures in Flower's metrics."""

import json
from collections.abc import Sequence

from fl_strategies.errors import PrivacyBudgetExceeded
from fl_strategies.party.party import Party
from fl_strategies.party.state import PartyState
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.journal import Allowance
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.release import Price, ReleasePlan
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics


def spend(
    party: Party, charges: Sequence[Entry], purpose: str, delta: float, state: PartyState
) -> PrivacyLedger:
    """Record what is about to leave a party, and return all that has been recorded.

    With a journal the party's whole past counts, and what would exceed its budget is
    refused here, before anything leaves. Without one, what the state of this run holds
    counts.
    """
    check_run(party, charges, state)
    if party.journal is not None:
        return party.journal.charge(charges, run=party.run, purpose=purpose)
    return state.charge(charges, delta)


def charge_plan(
    party: Party, plan: ReleasePlan, state: PartyState
) -> tuple[Price, PrivacyLedger, Metrics]:
    """Record what a plan's answer costs; return its price, the ledger and the metrics."""
    price = plan.price()
    ledger = spend(party, price.record, plan.purpose or plan.name, plan.record_delta, state)
    whole = price.whole_party
    known = ledger_of(whole, plan.record_delta) if whole else unprotected(plan.reason)
    return price, ledger, privacy_metrics(party=known, example=ledger)


def check_run(party: Party, charges: Sequence[Entry], state: PartyState) -> None:
    """Raise if a run would cost a record more than the party's policy allows."""
    policy, journal = party.policy, party.journal
    if policy.max_run_epsilon is None:
        return
    allowance = Allowance(
        max_epsilon=policy.max_run_epsilon, delta=policy.delta, sample_delta=policy.sample_delta
    )
    past: Sequence[Sequence[Entry]] = []
    if journal is not None:
        past = journal.releases_of(party.run)
    elif known := state.ledger(policy.delta).entries:
        past = [[entry] for entry in known]
    try:
        allowance.ledger("example", past, charges).charge_all(charges)
    except PrivacyBudgetExceeded as error:
        raise PrivacyBudgetExceeded(
            f"{party.owner}: a run must keep the policy's max-run-epsilon, got: {error}"
        ) from error


def has_promised(state: PartyState) -> bool:
    """Tell whether a run has released something, and all of it under a promise."""
    return is_promise(state.ledger(DEFAULT_DELTA).entries)


def is_promise(charges: Sequence[Entry]) -> bool:
    """Tell whether releases with these charges promise anything to a record."""
    open_ = any(isinstance(event, NonPrivateEvent) or event.seeded for event, _ in charges)
    return bool(charges) and not open_


def ledger_to_text(ledger: PrivacyLedger) -> str:
    """Return a ledger as text, for the server; see `reported_ledgers`."""
    return json.dumps(ledger.state_dict())


def ledger_of(charges: Sequence[Entry], delta: float) -> PrivacyLedger:
    """Return a ledger that holds these charges and nothing else."""
    ledger = PrivacyLedger(charges[0][0].unit, delta=delta)
    ledger.compose_all(charges)
    return ledger


def unprotected(reason: str) -> PrivacyLedger:
    """Return the ledger of something that leaves without protection."""
    return ledger_of([(NonPrivateEvent(unit="party", reason=reason), 1)], DEFAULT_DELTA)


def privacy_metrics(*, party: PrivacyLedger, example: PrivacyLedger) -> Metrics:
    """Return the figures of both units; no epsilon stands without its delta."""
    return {
        keys.EPSILON_PARTY: party.get_epsilon(party.delta),
        keys.DELTA_PARTY: party.delta,
        keys.EPSILON_EXAMPLE: example.get_epsilon(example.delta),
        keys.DELTA_EXAMPLE: example.delta,
        keys.NUM_RELEASES: sum(count for _, count in example.entries),
    }
