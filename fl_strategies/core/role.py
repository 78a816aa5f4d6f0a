"""The party role that every strategy of this package shares."""

import math
from abc import ABC, abstractmethod

from flwr.app import ConfigRecord

from fl_strategies.arrays import content_hash
from fl_strategies.core.accounting import has_promised
from fl_strategies.core.party import Party
from fl_strategies.core.party_state import PartyState
from fl_strategies.core.policy import Request
from fl_strategies.core.protocols import Learner, PortableLearner
from fl_strategies.core.tasks import figure_names, judge
from fl_strategies.exceptions import KnowledgeMismatch, PublicDataMismatch
from fl_strategies.wire import keys
from fl_strategies.wire.config import config_int
from fl_strategies.wire.knowledge import Knowledge, Metrics, shown

MAX_SEED = 2**63 - 1
MAX_ROUNDS = 2**31


class PartyRole(ABC):
    """What a party does when the server asks; stateless, so one instance serves all.

    Whatever must outlive a message belongs into `state`; a strategy whose parties keep more
    than all others do reads it by a `PartyState` of its own.
    """

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return what a message asks for, for the party's policy to judge."""
        return Request(name=str(config.get(keys.STRATEGY)), trainer=party.learner_fn)

    @abstractmethod
    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Learn from private data and return what may leave the party."""

    def evaluate(
        self,
        party: Party,
        received: Knowledge,
        config: ConfigRecord,  # noqa: ARG002 - for roles that evaluate by their own rules
        state: PartyState,
    ) -> tuple[Learner, Metrics]:
        """Take the final model and measure it on the party's held-out rows, if it has any."""
        model = receive_model(party, received)
        return model, measure(party, model, state)


def measure(party: Party, model: Learner, state: PartyState) -> Metrics:
    """Return how good a model is on the held-out rows, or NaN if that stays at home.

    An accuracy is a release that no event accounts for. So a party tells none that keeps a
    journal or has promised privacy in this run; its own ledger says so, whatever the
    server's message says.
    """
    nothing = dict.fromkeys(figure_names(party.task, party.num_classes), math.nan)
    held = party.journal is not None or not party.policy.allow_unprotected
    silent = held or has_promised(state)
    if silent or party.x_test is None or party.y_test is None or not len(party.y_test):
        return {keys.NUM_EXAMPLES: 0, **nothing}
    found = judge(model, party.x_test, party.y_test, party.task).figures
    told = {name: found.get(name, math.nan) for name in nothing}
    return {keys.NUM_EXAMPLES: len(party.y_test), **told}


def read_seed(config: ConfigRecord) -> int:
    """Return the experiment's seed, named by the server."""
    return config_int(config, keys.SEED, minimum=0, maximum=MAX_SEED)


def read_round(config: ConfigRecord) -> int:
    """Return the number of the round, named by the server."""
    return config_int(config, keys.SERVER_ROUND, minimum=1, maximum=MAX_ROUNDS)


def require_public_rows(party: Party, config: ConfigRecord) -> None:
    """Raise if the strategy works on public rows and the party holds none."""
    if keys.PUBLIC_HASH in config and not len(party.public):
        raise PublicDataMismatch(
            f"{party.owner}: public must be given for {shown(config.get(keys.STRATEGY))}, "
            f"which works on public rows, got none."
        )


def check_public_data(party: Party, config: ConfigRecord) -> None:
    """Raise unless server and party hold the same public rows and class list."""
    config_int(config, keys.NUM_CLASSES, minimum=party.num_classes, maximum=party.num_classes)
    asked, held = config.get(keys.PUBLIC_HASH), content_hash(party.public)
    if asked != held:
        raise PublicDataMismatch(
            f"{party.owner}: public data must be the server's "
            f"(sha256 {str(asked)[:12]}), got {party.public.shape} {party.public.dtype} "
            f"(sha256 {held[:12]}). Use the same file, order and preprocessing everywhere."
        )


def receive_model(party: Party, received: Knowledge) -> Learner:
    """Rebuild a model that travelled as arrays, with code that the party chose itself."""
    return receiver_of(party, received).from_arrays(received.arrays)


def receiver_of(party: Party, received: Knowledge) -> PortableLearner:
    """Return the party's own learner of the name that accompanies a model."""
    return _receiver(party, str(received.meta.get(keys.LEARNER)))


def require_readable(party: Party, config: ConfigRecord) -> None:
    """Raise unless the party can read the model that it is to be sent, before it pays."""
    if keys.FINAL_LEARNER in config:
        _receiver(party, str(config[keys.FINAL_LEARNER]))


def _receiver(party: Party, name: str) -> PortableLearner:
    factories = {party.learner_name: party.learner_fn, **party.catalogue}
    if name not in factories:
        raise KnowledgeMismatch(
            f"{party.owner}: the model's learner must be one of "
            f"{', '.join(sorted(factories))}, got {shown(name)}. Add it to the party's "
            f"catalogue, which is receives in a node-config."
        )
    twin = factories[name]()
    if not isinstance(twin, PortableLearner):
        raise KnowledgeMismatch(
            f"{party.owner}: the learner {name!r} must have from_arrays to "
            f"receive a model, got {type(twin).__name__}."
        )
    return twin
