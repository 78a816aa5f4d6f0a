"""What one round of a strategy leaves to the next, and a checkpoint therefore holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from fl_strategies.core.members import Known
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.wire.knowledge import Knowledge
from fl_strategies.wire.replies import PartyReport


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
    members: Known = field(default_factory=dict)
    delivery: Knowledge | None = None

    def to_dict(self) -> dict[str, object]:
        """Return all fields by their names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take what `to_dict` once gave."""
        for name, value in values.items():
            setattr(self, name, value)
