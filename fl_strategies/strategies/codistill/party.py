"""The party's role in AKD, AvgKD, PKD and EKD; see `fl_strategies.strategies.codistill`."""

import functools
import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import Array, FloatArray
from fl_strategies.aggregation.ensembles import (
    RememberedScores,
    SignedEnsemble,
    describe,
    outputs,
    require_members,
)
from fl_strategies.errors import KnowledgeMismatch, UnsupportedLearner, between, require_known
from fl_strategies.learners import (
    Learner,
    PortableLearner,
    plan_of,
    require_portable,
    require_soft,
)
from fl_strategies.party.party import Party
from fl_strategies.party.role import (
    KnowledgeField,
    PartyRole,
    PartyState,
    check_num_classes,
    check_public_data,
    check_run,
    facts_of,
    ledger_to_text,
    privacy_metrics,
    public_model,
    read_round,
    read_seed,
    receive_model,
    require_finite,
    require_plan,
    trained,
    unprotected,
)
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.release import Price, ReleasePlan
from fl_strategies.strategies.codistill.options import (
    MODEL,
    MODELS,
    CodistillOptions,
    join_models,
    part_models,
    release_plan,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, config_choice

logger = logging.getLogger("flwr.fl_strategies")

SCHEMES: Final[Sequence[str]] = ("akd", "avgkd", "ekd", "pkd")

TASK: Final = "task"
KEPT: Final = "kept-model"
SIGN: Final = "sign"
FIRST_TERM: Final = "first-term"
NUM_TERMS: Final = "num-terms"
SCORES: Final = "scores"


class CodistillPartyState(PartyState):
    """What an agent keeps."""

    model = KnowledgeField("codistill-model", MODEL)
    """Its own newest: PKD needs its predictions, and it is measured where it is."""
    terms = KnowledgeField("codistill-terms", MODELS)
    """In EKD, all terms of the ensemble that were delivered."""
    scores = KnowledgeField("codistill-scores", SCORES)
    """In EKD, the sum of the terms' predictions on the held-out rows."""


class CodistillParty(PartyRole):
    """What an agent does in all four schemes: predict its inputs, train from scratch.

    Notes
    -----
    A received model that cannot be read (another architecture, another number of classes)
    is skipped and counted in ``num-models-refused``; if none is left to learn from, the
    agent reports why and takes no part in the round. A record for which a model predicts
    nothing finite gets even odds from it, or 0 in regression: were the model skipped,
    one record could decide about the targets of all others, which no noise covers.

    The agent's own model is kept, and measured without crossing the wire again. In EKD all
    terms are, with the sum of their predictions on the held-out rows, so that every term is
    evaluated once. A term that it cannot read is skipped in its sum, and counted as well.
    """

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return that a model leaves, after it has learned from others'."""
        facts = facts_of(party)
        recipe = CodistillOptions.received(config).recipe(party.task)
        return release_plan(
            str(config.get(keys.STRATEGY)),
            facts,
            training=lambda: plan_of(
                party.learner_fn(), facts.num_records, epochs=recipe.epochs, distill=True
            ),
        )

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return a new model, trained on what the scheme makes of the received ones."""
        scheme = config_choice(config, keys.STRATEGY, SCHEMES)
        server_round = read_round(config)
        check_problem(party, config)
        recipe = CodistillOptions.received(config).recipe(party.task)
        learner = require_soft(party.owner, new_portable(party))
        # Before it is paid for: whoever can read none of the models takes no part.
        models, refused = ([], 0) if received is None else _readable(party, received)
        price, ledger, metrics = charge_model(party, self.plan(party, config), state)
        kept = CodistillPartyState(state.records)
        targets = _targets(party, scheme, models, kept)
        rng = party.rng(read_seed(config), "codistill", server_round)

        def train() -> PortableLearner:
            model = learner.distill(party.x, targets, rng=rng, recipe=recipe)
            require_plan(model, price.training)
            portable = require_portable(model)
            require_finite(portable)
            return portable

        stand_in = functools.partial(portable_stand_in, party)
        arrays = trained(train, stand_in, promised=bool(price.training)).to_arrays()
        kept.model = Knowledge(MODEL, arrays, {keys.LEARNER: party.learner_name})
        meta = {keys.PRIVACY_EVENTS: ledger_to_text(ledger)}
        return Knowledge(MODEL, arrays, meta), {keys.NUM_MODELS_REFUSED: refused, **metrics}

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
    ) -> tuple[Learner, Metrics]:
        """Measure the agent's own newest model or, in EKD, the ensemble with its new terms."""
        kept = CodistillPartyState(state.records)
        if config_choice(config, keys.STRATEGY, SCHEMES) == "ekd":
            return self._evaluate_ensemble(party, received, config, kept)
        own = kept.model
        if own is None or received.kind != KEPT:
            raise KnowledgeMismatch(
                f"{party.owner}: a model must be kept from training to be "
                f"measured, got {received.kind!r} and {'no' if own is None else 'a'} model."
            )
        model = receive_model(party, own)
        return model, self.measure(party, model, config, state)

    def _evaluate_ensemble(
        self,
        party: Party,
        received: Knowledge,
        config: ConfigRecord,
        state: CodistillPartyState,
    ) -> tuple[Learner, Metrics]:
        """Add the delivered terms to those that are kept, and measure the sum of all."""
        kept = state.terms
        known = part_models(kept) if kept else []
        first = received.meta.get(FIRST_TERM)
        if type(first) is not int or not 0 <= first <= len(known):
            raise KnowledgeMismatch(
                f"Server: {FIRST_TERM} must be {between(0, len(known))}, the terms known so "
                f"far, got {first!r}."
            )
        terms = known[:first] + part_models(received)
        signs = [_read_sign(term) for term in terms]
        models, errors = receive_all(party, terms)
        ensemble = SignedEnsemble(
            list(models.values()),
            [signs[number] for number in models],
            [str(terms[number].meta[keys.LEARNER]) for number in models],
            num_classes=party.num_classes,
            task=party.task,
            model_fns={party.learner_name: party.learner_fn, **party.catalogue},
        )
        require_members(party.owner, len(terms), errors)
        known_before = sum(number < first for number in models)
        measured, refused = self._measure_sum(party, ensemble, known_before, config, state)
        state.terms = join_models(terms)
        return ensemble, {**measured, keys.NUM_MODELS_REFUSED: len(errors) + refused}

    def _measure_sum(
        self,
        party: Party,
        ensemble: SignedEnsemble,
        first: int,
        config: ConfigRecord,
        state: CodistillPartyState,
    ) -> tuple[Metrics, int]:
        """Measure the ensemble, and count the members that cannot predict.

        Members before `first` are not evaluated a second time.
        """
        x = party.x_test
        if x is None or not self.reports_metrics(party, config, state):
            return self.measure(party, ensemble, config, state), 0
        kept = state.scores
        scores, refused = np.zeros((len(x), party.num_classes)), 0
        same = kept is not None and kept.meta[NUM_TERMS] == first
        if kept is not None and same and len(kept.arrays[SCORES]) == len(x):
            scores, refused = (
                kept.arrays[SCORES].copy(),
                int(kept.meta[keys.NUM_MODELS_REFUSED]),
            )
        else:
            first = 0
        errors = ensemble.add_from(first, x, scores)
        refused += len(errors)
        if refused == len(ensemble.members):
            require_members(party.owner, len(errors), errors)
        meta = {NUM_TERMS: len(ensemble.members), keys.NUM_MODELS_REFUSED: refused}
        state.scores = Knowledge(SCORES, {SCORES: scores}, meta)
        return self.measure(party, RememberedScores(scores), config, state), refused


def portable_stand_in(party: Party) -> PortableLearner:
    """Return a model of public rows alone, which can travel."""
    return require_portable(public_model(party, party.learner_fn))


def check_problem(party: Party, config: ConfigRecord) -> None:
    """Raise unless server and party mean the same problem, and there are records."""
    if keys.PUBLIC_HASH in config:
        check_public_data(party, config)
    check_num_classes(party, config)
    config_choice(config, TASK, [party.task])
    owner = party.owner
    require_known(len(party.x) > 0, owner, "x", "records to learn from", "none")


def new_portable(party: Party) -> PortableLearner:
    """Return an unfitted model that can travel."""
    learner = party.learner_fn()
    if isinstance(learner, PortableLearner):
        return learner
    raise UnsupportedLearner(
        f"{party.owner}: the learner must have to_arrays and from_arrays, because models "
        f"travel from agent to agent, got {type(learner).__name__}."
    )


def _labels(party: Party) -> FloatArray:
    """Return the agent's own labels as targets, (n, num_classes)."""
    if party.task == "regression":
        return party.y.astype(np.float64)
    return np.eye(party.num_classes)[party.y]


def _readable(party: Party, received: Knowledge) -> tuple[list[Learner], int]:
    """Return the received models that this agent can use, and how many it cannot."""
    models, errors = receive_all(party, part_models(received), rows=party.rows_to_try())
    if not models:
        raise KnowledgeMismatch(
            f"{party.owner}: a model to learn from must be one that this party "
            f"can read, got none of {len(errors)}: {describe(errors[-1])}."
        )
    return list(models.values()), len(errors)


def _on_records(party: Party, model: Learner) -> FloatArray:
    """Return what a model predicts on the agent's inputs, whatever they are.

    Where it fails on all of them at once they are predicted one by one: no record may
    decide about the targets of others.
    """
    try:
        return outputs(model, party.x, party.task)
    except Exception:
        logger.warning("A received model fails on some records, which get even odds from it.")
    rows = [_on_record(party, model, row) for row in party.x[:, None]]
    return np.concatenate(rows)


def _on_record(party: Party, model: Learner, row: Array) -> FloatArray:
    try:
        return outputs(model, row, party.task)
    except Exception:
        nothing = 0.0 if party.task == "regression" else 1 / party.num_classes
        return np.full((1, party.num_classes), nothing)


def _targets(
    party: Party, scheme: str, models: Sequence[Learner], state: CodistillPartyState
) -> FloatArray:
    """Return what the agent is to learn: its labels, or what the scheme makes of models."""
    if not models:
        return _labels(party)
    predictions = [_on_records(party, model) for model in models]
    if scheme == "avgkd":
        predictions.append(_labels(party))
    own = state.model
    if scheme == "pkd" and own is not None:
        predictions.append(outputs(receive_model(party, own), party.x, party.task))
    return np.asarray(np.mean(predictions, axis=0))


def charge_model(
    party: Party, plan: ReleasePlan, state: PartyState
) -> tuple[Price, PrivacyLedger, Metrics]:
    """Record what a round costs a record of the party, on top of all rounds before.

    Returns the price, and the ledger of this run for the server, which may have missed a
    round. The metrics are those of the journal, where there is one: it knows other runs too.
    """
    price, journal = plan.price(), party.journal
    check_run(party, price.record, state)
    lasting = journal and journal.charge(price.record, run=party.run, purpose=plan.name)
    ledger = state.charge(price.record, plan.record_delta)
    known = lasting or ledger
    return price, ledger, privacy_metrics(party=unprotected(plan.reason), example=known)


def receive_all(
    party: Party, parts: Sequence[Knowledge], *, rows: Array | None = None
) -> tuple[dict[int, Learner], list[Exception]]:
    """Return the models that this party can rebuild, by number, and why not the others.

    With `rows`, they must also be able to score these.
    """
    models: dict[int, Learner] = {}
    errors: list[Exception] = []
    for number, part in enumerate(parts):
        try:
            model = receive_model(party, part)
            if rows is not None:
                outputs(model, rows, party.task)
            models[number] = model
        except Exception as error:  # a hostile model may make a learner raise anything
            errors.append(error)
    return models, errors


def _read_sign(term: Knowledge) -> int:
    sign = term.meta.get(SIGN)
    if type(sign) is not int or abs(sign) != 1:
        raise KnowledgeMismatch(f"Server: the sign of a term must be 1 or -1, got {sign!r}.")
    return sign
