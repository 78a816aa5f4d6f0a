"""What a server of FedMD asks of a party, for the party's policy."""

from flwr.app import ConfigRecord

from fl_strategies.core.party import Party
from fl_strategies.core.policy import Request, asked_number
from fl_strategies.privacy.bounds.nfdp import nfdp_tight
from fl_strategies.strategies.fedmd.settings import FedMDSettings, drowned_answers
from fl_strategies.wire import keys


def request_of(party: Party, config: ConfigRecord) -> Request:
    """Return what a message of FedMD asks for."""
    settings = FedMDSettings.from_config(
        config, num_public=len(party.public), num_classes=party.num_classes
    )
    epochs = settings.epochs
    return Request(
        name=f"fedmd {settings.release}",
        trainer=party.learner_fn,
        models=False,
        protected=settings.release != "none",
        sample_delta=_sample_delta(party, settings),
        seeded=settings.seeded_noise,
        epochs=epochs.pretrain + epochs.initial + epochs.digest + epochs.revisit,
        predictions=settings.num_public,
        drowned=lambda: drowned_answers(
            settings.noise, max(asked_number(config, keys.NUM_PARTIES), 1)
        ),
    )


def _sample_delta(party: Party, settings: FedMDSettings) -> float:
    samples, records = settings.num_samples, len(party.y)
    if samples is None:
        return 0.0
    if not settings.with_replacement and samples >= records:
        return 1.0
    return nfdp_tight(records, samples, replacement=settings.with_replacement).delta
