"""The party role that every strategy of this package shares."""

import math
from abc import ABC, abstractmethod
from typing import Final

from flwr.app import ConfigRecord

from fl_strategies._util.arrays import content_hash
from fl_strategies.errors import KnowledgeMismatch, PublicDataMismatch
from fl_strategies.learners import Learner, PortableLearner
from fl_strategies.party.accounting import has_promised, spend
from fl_strategies.party.party import Party
from fl_strategies.party.state import PartyState
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.release import ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.tasks import figure_names, judge
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, config_int, shown

OPEN_METRICS: Final = open_charges("metrics on held-out rows left the party")
MAX_SEED = 2**63 - 1
MAX_ROUNDS = 2**31


class PartyRole(ABC):
    """What a party does when the server asks; stateless, so one instance serves all.

    Whatever must outlive a message belongs into `state`; a strategy whose parties keep more
    than all others do reads it by a `PartyState` of its own.
    """

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return what an answer to this message releases; the worst unless a role says so."""
        return ReleasePlan(name=str(config.get(keys.STRATEGY)), trainer=party.learner_fn)

    @abstractmethod
    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Learn from private data and return what may leave the party."""

    def evaluate(
        self,
        party: Party,
        received: Knowledge,
        config: ConfigRecord,
        state: PartyState,
    ) -> tuple[Learner, Metrics]:
        """Take the final model and measure it on the party's held-out rows, if it has any."""
        model = receive_model(party, received)
        return model, self.measure(party, model, config, state)

    def measure(
        self,
        party: Party,
        model: Learner,
        config: ConfigRecord,
        state: PartyState,
        *,
        secret: bool = False,
    ) -> Metrics:
        """Return how good a model is on the held-out rows, or NaN if that stays at home.

        The first accuracy of a run in which nothing has left the party is recorded: what is
        promised later does not hold for all that has left.
        """
        nothing = dict.fromkeys(figure_names(party.task, party.num_classes), math.nan)
        x, y = party.x_test, party.y_test
        tells = self.tells_metrics(party, config, state, secret=secret)
        if not tells or x is None or y is None:
            return {keys.NUM_EXAMPLES: 0, **nothing}
        if not (party.public_test or state.has_released):
            spend(party, OPEN_METRICS, "evaluate", DEFAULT_DELTA, state)
        found = judge(model, x, y, party.task).figures
        return {keys.NUM_EXAMPLES: len(y), **{n: found.get(n, math.nan) for n in nothing}}

    def tells_metrics(
        self, party: Party, config: ConfigRecord, state: PartyState, *, secret: bool = False
    ) -> bool:
        """Return whether metrics of a model on the held-out rows may leave the party.

        They are a release that no event accounts for. So none leave a party that keeps a
        journal, or whose policy lets nothing leave unprotected, or where anything is
        promised. On public test rows they say no more than the model does, which makes them
        free unless it is `secret`: it stays at home, and only noisy answers of it leave.
        """
        if party.y_test is None or not len(party.y_test):
            return False
        if party.journal is not None or not party.policy.allow_unprotected:
            return False
        free = party.public_test and not secret
        return free or not self.promises(party, config, state)

    def promises(self, party: Party, config: ConfigRecord, state: PartyState) -> bool:
        """Return whether a run promises privacy to a record or to the party.

        By the server's message, or by what the party has released in this run, which no
        server can change; before there is anything, by how its learner trains.
        """
        asked = self.plan(party, config)
        learned = has_promised(state) if state.has_released else asked.trains_privately
        return asked.promises or learned


def facts_of(party: Party, *, num_parties: int = 0) -> ReleaseFacts:
    """Return the public facts about a party, for its plans."""
    return ReleaseFacts(
        num_classes=party.num_classes,
        num_public=len(party.public),
        task=party.task,
        num_parties=num_parties,
        num_records=len(party.y),
        trainer=party.learner_fn,
    )


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


def check_num_classes(party: Party, config: ConfigRecord) -> None:
    """Raise unless server and party have a class list of the same length."""
    asked, held = config.get(keys.NUM_CLASSES), party.num_classes
    if type(asked) is not int or asked != held:
        raise KnowledgeMismatch(
            f"Server: {keys.NUM_CLASSES} must be {held}, as this party has classes, labels or "
            f"targets, got {shown(asked)}. Give server and parties the same class list."
        )


def check_public_data(party: Party, config: ConfigRecord) -> None:
    """Raise unless server and party hold the same public rows and class list."""
    check_num_classes(party, config)
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
    if twin.num_classes != party.num_classes:
        raise KnowledgeMismatch(
            f"{party.owner}: the learner {name!r} must have {party.num_classes} classes or "
            f"outputs to receive a model, got {twin.num_classes}."
        )
    return twin
