"""Weights that travel with the number of records of every class, as some methods need."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.aggregation.evidence import believed_sizes
from fl_strategies.arrays import FloatArray, IntArray
from fl_strategies.core.party import Party
from fl_strategies.core.party_state import PartyState
from fl_strategies.core.policy import Request
from fl_strategies.exceptions import require_known
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.strategies.weights.party import WeightsParty
from fl_strategies.strategies.weights.restraint import MAX_RECORDS, LocalWeights
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics

CLASS_COUNTS: Final = "class-counts"


class CountedParty(WeightsParty):
    """The role of `WeightsParty` that also tells its class counts, as they are."""

    also_leaves = (
        (NonPrivateEvent(unit="example", reason="class counts left the party exactly"), 1),
    )

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return that nothing protects what leaves, however the model is trained."""
        return replace(super().request(party, config), tells_counts=True)

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the weights after training, and how many records of each class there are."""
        said, metrics = super().train(party, received, config, state)
        counts = np.bincount(party.y, minlength=party.num_classes)
        return replace(said, arrays={**said.arrays, CLASS_COUNTS: counts}), metrics


@dataclass(frozen=True, slots=True)
class CountedWeights(LocalWeights):
    """Also the number of records of every class, (num_classes,)."""

    counts: IntArray

    @classmethod
    def of(cls, weights: LocalWeights, counts: IntArray) -> "CountedWeights":
        """Return checked weights with their counts."""
        known = {each.name: getattr(weights, each.name) for each in fields(weights)}
        return cls(**known, counts=counts)


def split_counts(knowledge: Knowledge, num_classes: int) -> tuple[Knowledge, IntArray]:
    """Return the weights alone, and the counts; raise `KnowledgeMismatch` for others."""
    arrays = dict(knowledge.arrays)
    counts = arrays.pop(CLASS_COUNTS, np.empty(0))
    rule = f"int64 of shape {(num_classes,)}"
    found = f"{counts.dtype} of shape {counts.shape}"
    require_known(found == rule, "Reply", CLASS_COUNTS, rule, found)
    # Bounded first: a sum of large numbers could overflow.
    total = int(counts.sum()) if ((counts >= 0) & (counts <= MAX_RECORDS)).all() else -1
    said = knowledge.meta.get(keys.NUM_EXAMPLES)
    rule = "numbers from 0 that add up to the number of records"
    require_known(total == said, "Reply", CLASS_COUNTS, rule, "others")
    return replace(knowledge, arrays=arrays), counts


def believed_counts(parts: Sequence[CountedWeights], *, restrain: bool) -> FloatArray:
    """Return all parties' counts, (num_parties, num_classes); no party claims any number."""
    counts = np.array([part.counts for part in parts], dtype=np.float64)
    if not restrain:
        return counts
    sizes = counts.sum(axis=1)
    return np.asarray(counts * (believed_sizes(sizes) / np.maximum(sizes, 1))[:, None])
