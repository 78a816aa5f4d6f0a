"""The party's role in FENS; see `fl_strategies.strategies.fens.server`."""

import functools
from dataclasses import replace
from typing import Final

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.aggregation.ensembles import MeanEnsemble
from fl_strategies.aggregation.stacking import (
    StackedEnsemble,
    Unreadable,
    learned,
    read_weights,
)
from fl_strategies.arrays import IntArray
from fl_strategies.core.accounting import ledger_to_text
from fl_strategies.core.party import Party
from fl_strategies.core.party_state import KnowledgeField, PartyState
from fl_strategies.core.policy import Request
from fl_strategies.core.protocols import Learner, PortableLearner, plan_of, require_portable
from fl_strategies.core.role import PartyRole, read_round, read_seed, receive_model
from fl_strategies.core.training import require_finite, require_plan, trained
from fl_strategies.exceptions import KnowledgeMismatch, RequestRefused
from fl_strategies.strategies.codistill.model_exchange import (
    MODEL,
    MODELS,
    join_models,
    part_models,
)
from fl_strategies.strategies.codistill.party import (
    charge_model,
    check_problem,
    new_portable,
    portable_stand_in,
)
from fl_strategies.strategies.fens.options import FENSOptions
from fl_strategies.wire import keys
from fl_strategies.wire.config import config_choice
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar

AGGREGATOR: Final = "aggregator"
STAGE: Final = "stage"
STAGES: Final = (MODEL, AGGREGATOR)
COMMITTEE: Final = "committee"
MOST_SCORES: Final = 2**27
"""Most that all models together may say about a party's rows: 1 GiB."""
UNPROTECTED_WEIGHTS: Final = "weights of an aggregator left that were trained without noise"


class FENSPartyState(PartyState):
    """What a party keeps."""

    models = KnowledgeField("fens-models", MODELS)
    """All models of the committee, as they came."""


class FENSParty(PartyRole):
    """The party's role: send a model once, then train the aggregator of all models.

    A model that cannot be rebuilt here is counted in ``num-models-refused``; it says nothing.
    """

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return what leaves: a model or, whatever the learner, weights without noise."""
        asked, options = super().request(party, config), FENSOptions.received(config)
        if config.get(STAGE) == MODEL or not options.is_trained:
            return asked
        unprotected = functools.partial(Unreadable, party.num_classes)
        return replace(asked, trainer=unprotected, epochs=options.aggregator_epochs)

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the party's model, or the aggregator after training."""
        check_problem(party, config)
        stage = config_choice(config, STAGE, STAGES)
        if stage == MODEL:
            return _train_model(party, config, state)
        return _train_aggregator(party, received, config, state)

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
    ) -> tuple[Learner, Metrics]:
        """Measure all models together."""
        model, refused = _ensemble(party, received, config, state)
        measured = self.measure(party, model, config, state)
        return model, {**measured, keys.NUM_MODELS_REFUSED: refused}


def held_back(party: Party, config: ConfigRecord) -> IntArray:
    """Return which records the party's own model does not learn from, at least one."""
    options, count = FENSOptions.received(config), len(party.y)
    if not options.is_trained:
        return np.empty(0, dtype=np.int64)
    rows = party.rng(read_seed(config), "holdback").permutation(count)
    return rows[: max(round(options.holdback * count), 1)]


def _train_model(
    party: Party, config: ConfigRecord, state: PartyState
) -> tuple[Knowledge, Metrics]:
    rows = np.setdiff1d(np.arange(len(party.y)), held_back(party, config))
    if not len(rows):  # a single record must do for both
        rows = np.arange(len(party.y))
    learner = new_portable(party)
    plan = plan_of(learner, len(rows))
    ledger, metrics = charge_model(party, plan, state, "fens")
    rng = party.rng(read_seed(config), "fens")

    def train() -> PortableLearner:
        model = require_portable(learner.fit(party.x[rows], party.y[rows], rng=rng))
        require_plan(model, plan)
        require_finite(model)
        return model

    stand_in = functools.partial(portable_stand_in, party)
    model = trained(train, stand_in, promised=bool(plan))
    meta = {keys.PRIVACY_EVENTS: ledger_to_text(ledger)}
    return Knowledge(MODEL, model.to_arrays(), meta), {keys.NUM_MODELS_REFUSED: 0, **metrics}


def _train_aggregator(
    party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
) -> tuple[Knowledge, Metrics]:
    if received is None:
        raise KnowledgeMismatch(f"Server: an {AGGREGATOR} must be sent, got none.")
    ensemble, refused = _ensemble(party, received, config, state)
    if not isinstance(ensemble, StackedEnsemble):
        raise KnowledgeMismatch(f"Server: the {AGGREGATOR} must be one that learns, got mean.")
    ledger, metrics = charge_model(party, (), state, "fens", UNPROTECTED_WEIGHTS)
    options, rows = FENSOptions.received(config), held_back(party, config)
    weights = learned(
        ensemble.weights,
        ensemble.evidence(party.x[rows]),
        party.y[rows],
        rng=party.rng(read_seed(config), "aggregator", read_round(config)),
        epochs=options.aggregator_epochs,
        rate=options.aggregator_rate,
    )
    meta: dict[str, Scalar] = {
        keys.PRIVACY_EVENTS: ledger_to_text(ledger),
        keys.NUM_EXAMPLES: len(rows),
    }
    return Knowledge(AGGREGATOR, weights, meta), {keys.NUM_MODELS_REFUSED: refused, **metrics}


def _ensemble(
    party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
) -> tuple[Learner, int]:
    """Return all models together, and how many of them this party cannot rebuild."""
    kept = FENSPartyState(state.records)
    *models, aggregator = part_models(received)
    if models:
        named = {COMMITTEE: str(received.meta.get(COMMITTEE))}
        kept.models = join_models(models, **named)
    known = kept.models
    if known is None or known.meta.get(COMMITTEE) != received.meta.get(COMMITTEE):
        raise KnowledgeMismatch(
            f"{party.owner}: the models of the {COMMITTEE} must have come before, got others."
        )
    parts = part_models(known)
    _check_work(party, config, len(parts))
    members, refused = [], 0
    for part in parts:
        try:
            members.append(receive_model(party, part))
        except Exception:  # a hostile model may make a learner raise anything
            members.append(Unreadable(party.num_classes))
            refused += 1
    if refused == len(members):
        raise KnowledgeMismatch(
            f"{party.owner}: a model must be one that this party can read, got none of "
            f"{refused}."
        )
    options, num_classes = FENSOptions.received(config), party.num_classes
    if not options.is_trained:
        return MeanEnsemble(members, num_classes=num_classes, task=party.task), refused
    units = options.hidden_units
    weights = read_weights(aggregator.arrays, len(members), num_classes, units)
    return StackedEnsemble(members, weights, num_classes=num_classes), refused


def _check_work(party: Party, config: ConfigRecord, num_models: int) -> None:
    """Raise `RequestRefused` for more models than the party lets look at its rows."""
    num_test = 0 if party.x_test is None else len(party.x_test)
    num_rows = max(len(held_back(party, config)), num_test)
    most = min(party.policy.max_predictions, MOST_SCORES // party.num_classes)
    if num_rows * num_models > most:
        raise RequestRefused(
            f"{party.owner}: predictions of a request must be at most {most}, got those of "
            f"{num_models} models."
        )
