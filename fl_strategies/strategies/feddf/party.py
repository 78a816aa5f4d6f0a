"""The party's role in FedDF: that of FedAvg, where models may be of several kinds."""

from flwr.app import ConfigRecord

from fl_strategies.core.party import Party
from fl_strategies.core.party_state import PartyState
from fl_strategies.core.role import check_public_data
from fl_strategies.exceptions import require_known
from fl_strategies.strategies.codistill.model_exchange import MODELS, part_models
from fl_strategies.strategies.feddf.options import SERVER_PUBLIC
from fl_strategies.strategies.weights.party import WeightsParty
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics


class FedDFParty(WeightsParty):
    """The party's role: train the model of its own kind on the own records, and send it."""

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the weights after training, and how many records they have seen."""
        if SERVER_PUBLIC in config and len(party.public):
            # No party needs public rows; other ones mostly mean other preprocessing.
            asked = {**config, keys.PUBLIC_HASH: config[SERVER_PUBLIC]}
            check_public_data(party, ConfigRecord(asked))
        if received is not None and received.kind == MODELS:
            received = _own_kind(party, received)
        return super().train(party, received, config, state)


def _own_kind(party: Party, received: Knowledge) -> Knowledge:
    """Return this party's model among those of all kinds."""
    found = {str(model.meta.get(keys.LEARNER)): model for model in part_models(received)}
    name, rule = party.learner_name, f"one the server has ({', '.join(found)[:200]})"
    require_known(name in found, party.owner, "learner_name", rule, repr(name))
    return found[name]
