"""The party's role in FedMD; see `fl_strategies.strategies.fedmd`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import scipy
from flwr.app import ConfigRecord

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.aggregation.consensus import MAX_WEIGHT
from fl_strategies.aggregation.pool import CONTRAST
from fl_strategies.aggregation.votes import CLASS_COUNTS, class_evidence, corrected_labels
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.learners import METRICS, Learner
from fl_strategies.party.party import Party, asked_number
from fl_strategies.party.role import (
    PartyRole,
    PartyState,
    contrasted,
    facts_of,
    finite_logits,
    is_promise,
    labels_of,
    receive_model,
    spend,
)
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.bounds.theorems import nfdp_theorem
from fl_strategies.privacy.mechanisms import Charges
from fl_strategies.release import ReleasePlan
from fl_strategies.strategies.fedmd.options import (
    LOGIT_SPREAD,
    FedMDSettings,
    Payload,
    release_plan,
)
from fl_strategies.strategies.fedmd.samples import NUM_RECORDS, SAMPLE_ID, spent_metrics
from fl_strategies.strategies.fedmd.student import CONSENSUS, Lesson, Student, student_of
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar

EPSILON_THEOREM: Final = "epsilon-theorem"
ANSWERS: Final = "answers"
MODEL: Final = "model"


def answer(model: Learner, x: Array, payload: Payload, *, promised: bool = False) -> Array:
    """Return a model's answers about rows: scores (n, num_classes) or labels (n,).

    Where privacy is promised (`promised`), a model that fails gives even scores or class 0.

    Logits are moved so that each row has mean zero, and cut at `LOGIT_SPREAD` below the
    largest of the row. The first changes no probability, the second none that matters, and
    without them models with other offsets, or a class that one party has never seen, would
    rule the mean.
    """
    if payload == "argmax":
        return labels_of(model, x, promised=promised)
    logits = finite_logits("FedMD", model, x, promised=promised)
    if payload == "softmax":
        return np.asarray(scipy.special.softmax(logits, axis=1))
    kept = np.maximum(scipy.special.log_softmax(logits, axis=1), -LOGIT_SPREAD)
    kept = np.maximum(kept, kept.max(axis=1, keepdims=True) - LOGIT_SPREAD)
    return np.asarray(kept - kept.mean(axis=1, keepdims=True))


class FedMDParty(PartyRole):
    """The party's role: digest, revisit, answer; the model stays at home.

    A party whose budget is spent sends nothing more, but continues to learn from the others.
    """

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return what a release and so many passes mean for the party."""
        settings = FedMDSettings.from_config(
            config, num_public=len(party.public), num_classes=party.num_classes
        )
        facts = facts_of(party, num_parties=asked_number(config, keys.NUM_PARTIES))
        return release_plan(str(config.get(keys.STRATEGY)), settings, facts)

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Learn for one round and return answers about its public rows."""
        student = student_of(party)(party, config, state)
        lesson = student.lesson(received, newest=student.server_round - 1)
        given = None  # a model to start from, if it is of the kind that the party has
        if received is not None and received.kind == MODEL:
            given = received if received.meta.get(keys.LEARNER) == party.learner_name else None
        if given is not None:
            receive_model(party, given)  # what cannot be read is refused before it is paid for
        training = _charge(student, lesson)
        if student.server_round == 1:
            student.state.start_anew()
        model = student.learn(lesson, given)
        student.state.terms = student.terms
        arrays, meta = _reply(student, model, private=bool(training))
        measured = self._measured(student, model, config)
        metrics = {**_metrics(student), keys.LOCAL_FIGURE: measured[METRICS[party.task]]}
        return Knowledge(ANSWERS, arrays, meta), metrics

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
    ) -> tuple[Learner, Metrics]:
        """Digest the consensus of the round and measure the party's own model."""
        student = student_of(party)(party, config, state)
        lesson = student.lesson(received, newest=student.server_round)
        if lesson is None:
            raise KnowledgeMismatch(
                f"Server: an evaluate message must carry a {CONSENSUS}, "
                f"got {received.kind[:40]!r}."
            )
        student.check_terms()
        model = student.finish(lesson)
        return model, self._measured(student, model, config)

    def _measured(self, student: Student, model: Learner, config: ConfigRecord) -> Metrics:
        secret = student.settings.noise is not None
        return self.measure(student.party, model, config, student.state, secret=secret)


def _charge(student: Student, lesson: Lesson | None) -> Sequence[Entry]:
    """Record what the round will cost before a record is looked at.

    Returns what training costs by itself; nothing if it promises no privacy.
    """
    settings, party, number = student.settings, student.party, student.server_round
    if settings.options.sample is not None:
        student.records()  # drawing the sample is what costs
        return ()
    training: Charges = ()
    if settings.noise is None:
        training = tuple(student.plan(lesson))
    plan = release_plan(
        "fedmd", settings, facts_of(party), server_round=number, training=training
    )
    charges = plan.price().record
    if settings.noise is None:
        student.promised = is_promise(charges)
    spend(party, charges, plan.purpose, plan.record_delta, student.state)
    return training


def _reply(
    student: Student, model: Learner, *, private: bool
) -> tuple[dict[str, Array], dict[str, Scalar]]:
    """Return what leaves; `private`: the model's training is paid for by itself.

    Without evidence that is the model's answers, with noise if there is any, and class counts
    if they are asked for. With evidence it is answers without the party's class shares, and
    these beside them. A model that was trained privately must not be followed by what was
    not: it answers as one of equal class shares, and the number of records is public.
    """
    settings, options, party = student.settings, student.options, student.party
    number, promised = student.server_round, student.promised
    rows = student.rows_of(number)
    public = party.public[rows]
    meta: dict[str, Scalar] = {}
    if options.sample is not None:
        # With these the server tells one sample of this party from another.
        meta = {SAMPLE_ID: student.state.sample_id, NUM_RECORDS: len(party.y)}
    if not options.sends_evidence:
        answers = answer(model, public, options.payload, promised=promised)
        if settings.noise is not None:
            rng = options.secret_rng(student.seed, "party", party.partition_id, number)
            answers = settings.noise.release(answers, rng)
        arrays = settings.replies.encode(answers)
        return arrays | ({CLASS_COUNTS: _counts(student)} if options.sends_counts else {}), meta
    # Equal counts reveal nothing but how many records there are, about.
    each = max(len(party.y) // party.num_classes, 1)
    equal = np.full(party.num_classes, each, dtype=np.int64)
    counts = equal if private else _counts(student)
    shares = (counts if private else student.class_counts()).astype(np.float64)
    ratio, contrast = (None, "none") if private else _contrast(student, rows)
    logits = finite_logits("FedMD", model, public, promised=promised)
    if options.payload == "argmax":
        answers = corrected_labels(logits, shares)
    else:
        answers = class_evidence(logits, shares, ratio)
    arrays = {**settings.replies.encode(answers), CLASS_COUNTS: counts}
    return arrays, {**meta, CONTRAST: contrast}


def _contrast(student: Student, rows: IntArray) -> tuple[FloatArray | None, str]:
    """Return how rows compare to the records in use, for a first answer by scores.

    Later the model has learned from the public rows, and compares by itself.
    """
    state, party = student.state, student.party
    found, ratio = state.contrast(student.terms), None
    if not found:
        x, y = student.records()
        own = replace(party, x=x, y=y)
        ratio, found = contrasted(own, [party.public], student.seed)
        state.keep_contrast(found, student.terms)
    if found == "uncovered":
        return None, "uncovered"
    if ratio is None or state.digested_round or student.options.payload == "argmax":
        return None, "none"
    return ratio[rows], "public"


def _counts(student: Student) -> IntArray:
    """Return how many records of each class are in use."""
    _, y = student.records()
    counts = np.bincount(y, minlength=student.party.num_classes).astype(np.int64)
    return np.minimum(counts, MAX_WEIGHT)


def _metrics(student: Student) -> Metrics:
    """Return how many records are in use, and what the party has spent."""
    party, options, records = student.party, student.options, len(student.party.y)
    journal, sample = party.journal, options.sample
    known = student.state.ledger(options.delta) if journal is None else journal.ledger()
    metrics = spent_metrics(known)
    if sample is None:
        return {keys.NUM_EXAMPLES: records, **metrics}
    theorem = nfdp_theorem(records, sample.num_samples, replacement=sample.with_replacement)
    return {
        keys.NUM_EXAMPLES: sample.num_samples,
        NUM_RECORDS: records,
        EPSILON_THEOREM: math.inf if sample.seeded_noise else theorem.epsilon,
        **metrics,
    }
