"""The party's role in PFNM: train a network of its own, send it and its class counts."""

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.core.party import Party
from fl_strategies.core.party_state import PartyState
from fl_strategies.core.protocols import DenseLearner, Learner
from fl_strategies.core.role import read_round, read_seed, receiver_of
from fl_strategies.strategies.pfnm.server import PFNMOptions
from fl_strategies.strategies.weights.counted import CountedParty
from fl_strategies.wire.knowledge import Knowledge, Metrics


class PFNMParty(CountedParty):
    """The role of `CountedParty`, whose networks are not alike, and the result is wider."""

    def rng(
        self, party: Party, received: Knowledge | None, config: ConfigRecord
    ) -> np.random.Generator:
        """Return a generator of the party's own, unless all are to start alike."""
        if PFNMOptions.received(config).common_start:
            return super().rng(party, received, config)
        return party.rng(read_seed(config), "weights", read_round(config))

    def evaluate(
        self,
        party: Party,
        received: Knowledge,
        config: ConfigRecord,
        state: PartyState,
    ) -> tuple[Learner, Metrics]:
        """Take the matched network, of whatever width, and measure it."""
        twin = receiver_of(party, received)
        if isinstance(twin, DenseLearner):
            twin = twin.sized_for(received.arrays)
        model = twin.from_arrays(received.arrays)
        return model, self.measure(party, model, config, state)
