"""What one round of a strategy leaves to the next, and a checkpoint therefore holds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

from fl_strategies.core.members import Known
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics
from fl_strategies.wire.replies import PartyReply, PartyReport

PRICE: Final[Sequence[str]] = (
    keys.EPSILON_PARTY,
    keys.DELTA_PARTY,
    keys.EPSILON_EXAMPLE,
    keys.DELTA_EXAMPLE,
    keys.NUM_RELEASES,
)
"""What a party reports about the cost of all that it has released."""


@dataclass(kw_only=True)
class State:
    """State of every strategy; one that leaves more to the next round adds fields.

    Parameters
    ----------
    ledger : PrivacyLedger
        What the run has released.
    round : int
        Rounds asked so far, over all calls of `start`.
    history : dict
        Metrics of the rounds, by phase and round.
    parties : dict of partition id to PartyReport
        What each party reported last.
    prices : dict of round to dict of partition id to metrics
        What each party's releases had cost by the end of a round, as it reports.
    members : dict
        Which node is which party.
    delivery : Knowledge, optional
        What parties are given after a round.
    """

    kinds: ClassVar[tuple[type, ...]] = (Knowledge, PartyReport)
    """Data classes that occur in the fields."""

    ledger: PrivacyLedger
    round: int = 0
    history: dict[str, dict[int, dict[str, Any]]] = field(
        default_factory=lambda: {"train": {}, "evaluate": {}}
    )
    parties: dict[int, PartyReport] = field(default_factory=dict)
    prices: dict[int, dict[int, Metrics]] = field(default_factory=dict)
    members: Known = field(default_factory=dict)
    delivery: Knowledge | None = None

    def to_dict(self) -> dict[str, object]:
        """Return all fields by their names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def note(self, replies: Iterable[PartyReply[None]], *, evaluated: bool) -> None:
        """Keep what parties report: after training also what their releases have cost."""
        for reply in replies:
            party, told = reply.partition_id, reply.metrics
            report = self.parties.setdefault(party, PartyReport(reply.learner_name, {}, {}))
            (report.evaluate if evaluated else report.train).update(told)
            if not evaluated:
                price = {key: told[key] for key in PRICE if key in told}
                self.prices.setdefault(self.round, {})[party] = price

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take what `to_dict` once gave."""
        for name, value in values.items():
            setattr(self, name, value)
