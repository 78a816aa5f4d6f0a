"""The party's role in FedGen: train on records and on generated features."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.arrays import Array
from fl_strategies.core.party import Party
from fl_strategies.core.policy import Request
from fl_strategies.core.protocols import Objective, require_headed
from fl_strategies.core.role import read_round, read_seed
from fl_strategies.exceptions import require_known
from fl_strategies.strategies.fedgen.generator import Generator
from fl_strategies.strategies.fedgen.options import FedGenOptions
from fl_strategies.strategies.weights.counted import CountedParty
from fl_strategies.wire.knowledge import Knowledge

GENERATOR: Final = "generator/"
"""What names of the generator's arrays begin with; the others are the model's."""
CLASS_SHARES: Final = "class-shares"


class FedGenParty(CountedParty):
    """The role of `CountedParty` that also learns to recognise what a generator makes."""

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return also how many generated features are to be learned."""
        asked, options = super().request(party, config), FedGenOptions.received(config)
        return replace(asked, predictions=options.num_generated * options.local_epochs)

    def weights_of(self, received: Knowledge) -> Mapping[str, Array]:
        """Return the model's arrays."""
        return {n: a for n, a in received.arrays.items() if not n.startswith(GENERATOR)}

    def objective(
        self, party: Party, received: Knowledge | None, config: ConfigRecord
    ) -> Objective | None:
        """Return the cross-entropy of generated features; none before there is a generator."""
        options = FedGenOptions.received(config)
        arrays = {} if received is None else received.arrays
        own = {
            name.removeprefix(GENERATOR): array
            for name, array in arrays.items()
            if name.startswith(GENERATOR)
        }
        if received is None or not own or not options.strength:
            return None
        shares = np.asarray(own.pop(CLASS_SHARES, np.empty(0)))
        fits = shares.shape == (party.num_classes,) and bool((shares >= 0).all())
        fits = fits and bool(np.isclose(shares.sum(), 1))
        require_known(fits, "Generator", CLASS_SHARES, "shares of all classes", "others")
        learner = require_headed(party.owner, party.learner_fn())
        weight, _ = learner.from_arrays(self.weights_of(received)).head()
        generator = Generator.from_arrays(own, party.num_classes, weight.shape[1])
        rng = party.rng(read_seed(config), "generated", read_round(config))
        labels = rng.choice(len(shares), size=options.num_generated, p=shares / shares.sum())
        return Objective(
            features=generator.sample(labels, rng), labels=labels, strength=options.strength
        )
