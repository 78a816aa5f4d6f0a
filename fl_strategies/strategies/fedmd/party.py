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
from fl_strategies.aggregation.evidence import CLASS_COUNTS, class_evidence, corrected_labels
from fl_strategies.aggregation.pool import CONTRAST
from fl_strategies.errors import KnowledgeMismatch, NotFitted, require_known
from fl_strategies.learners import METRICS, Learner, TrainingSet
from fl_strategies.party.party import Party, asked_number
from fl_strategies.party.role import (
    PartyRole,
    PartyState,
    check_public_data,
    contrasted,
    facts_of,
    finite_logits,
    has_promised,
    is_promise,
    labels_of,
    read_round,
    read_seed,
    receive_model,
    spend,
)
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.bounds.theorems import nfdp_theorem
from fl_strategies.privacy.mechanisms import Charges, SubsampleOnce
from fl_strategies.release import ReleasePlan
from fl_strategies.strategies.fedmd.options import (
    LOGIT_SPREAD,
    FedMDSettings,
    Payload,
    public_rows,
    release_plan,
)
from fl_strategies.strategies.fedmd.samples import (
    NUM_RECORDS,
    SAMPLE_ID,
    FedMDPartyState,
    check_size,
    sample_records,
    spent_metrics,
)
from fl_strategies.strategies.fedmd.student import Lesson, Student, student_of
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar, config_int

EPSILON_THEOREM: Final = "epsilon-theorem"
ANSWERS: Final = "answers"
CONSENSUS: Final = "consensus"
MODEL: Final = "model"
CONSENSUS_ROUND: Final = "consensus-round"


def answer(model: Learner, x: Array, payload: Payload, *, promised: bool = False) -> Array:
    """Return what a model says about rows: scores (n, num_classes) or labels (n,).

    Where privacy is promised (`promised`), a model that fails says even scores or class 0.

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
        context = RoundContext(party, config, state)
        lesson = context.lesson(received, newest=context.server_round - 1)
        given = received if _is_own_model(party, received) else None
        if given is not None:
            receive_model(party, given)  # what cannot be read is refused before it is paid for
        training = context.charge(lesson)
        if context.server_round == 1:
            context.state.start_anew()
        model = context.student.learn(lesson, given)
        context.state.terms = context.terms
        arrays, meta = context.reply(model, private=bool(training))
        measured = self._measured(context, model, config, state)
        metrics = {**context.metrics(), keys.LOCAL_FIGURE: measured[METRICS[party.task]]}
        return Knowledge(ANSWERS, arrays, meta), metrics

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
    ) -> tuple[Learner, Metrics]:
        """Digest the consensus of the round and measure the party's own model."""
        context = RoundContext(party, config, state)
        lesson = context.lesson(received, newest=context.server_round)
        if lesson is None:
            raise KnowledgeMismatch(
                f"Server: an evaluate message must carry a {CONSENSUS}, "
                f"got {received.kind[:40]!r}."
            )
        context.check_terms()
        model = context.student.finish(lesson)
        return model, self._measured(context, model, config, state)

    def _measured(
        self, context: "RoundContext", model: Learner, config: ConfigRecord, state: PartyState
    ) -> Metrics:
        secret = context.settings.noise is not None
        return self.measure(context.party, model, config, state, secret=secret)


def _is_own_model(party: Party, received: Knowledge | None) -> bool:
    """Return whether this is a model to start from, of the kind that the party has."""
    if received is None or received.kind != MODEL:
        return False
    return received.meta.get(keys.LEARNER) == party.learner_name


class RoundContext:
    """Everything that one message is about, checked."""

    def __init__(self, party: Party, config: ConfigRecord, state: PartyState) -> None:
        owner = party.owner
        check_public_data(party, config)
        require_known(len(party.y) > 0, owner, "x", "records to learn from", "none")
        single = party.task == "single-label"
        require_known(single, owner, "task", "single-label for FedMD", party.task)
        self.party = party
        self.seed = read_seed(config)
        self.server_round = read_round(config)
        self.settings = FedMDSettings.from_config(
            config, num_public=len(party.public), num_classes=party.num_classes
        )
        self.options = self.settings.options
        self.state = FedMDPartyState(state.records)
        self.student: Student = student_of(party)(
            party=party,
            state=self.state,
            settings=self.settings,
            seed=self.seed,
            server_round=self.server_round,
            terms=self.terms,
            records=self.records,
            promised=has_promised(state) or self.options.is_private,
        )
        sample = self.options.sample
        if sample is not None:
            check_size(party, sample.num_samples, replacement=sample.with_replacement)

    @property
    def terms(self) -> str:
        """What a model of this message is trained on, and for whom."""
        return f"{self.options.terms}, {len(self.party.y)} records, run {self.party.run}"

    def check_terms(self) -> None:
        """Raise unless the party has trained, and under the terms of this message."""
        trained = self.state.terms
        if not trained:
            raise NotFitted(
                f"{self.party.owner}: a consensus must find a model that was "
                f"trained before, got none."
            )
        if trained != self.terms:
            raise KnowledgeMismatch(
                f"Server: release and sample of an evaluate message must be those of the "
                f"party's last training, got {self.options.terms}."
            )

    def records(self) -> TrainingSet:
        """Return the records in use; with NFDP a sample, and nothing else is looked at."""
        party, options, sample = self.party, self.options, self.options.sample
        if sample is None:
            return party.x, party.y
        mechanism = SubsampleOnce(
            records=len(party.y),
            samples=sample.num_samples,
            replacement=sample.with_replacement,
        )
        rng = options.secret_rng(self.seed, "sample", party.partition_id)
        rows = sample_records(party, self.state, mechanism, rng, delta=options.delta)
        return party.x[rows], party.y[rows]

    def lesson(self, received: Knowledge | None, *, newest: int) -> Lesson | None:
        """Read the consensus that a message carries, if it carries one."""
        if received is None or received.kind != CONSENSUS:
            return None
        require_known(newest > 0, "Server", CONSENSUS, "omitted before the second round", "one")
        server_round = config_int(
            ConfigRecord({**received.meta}), CONSENSUS_ROUND, minimum=1, maximum=newest
        )
        rows = self._rows(server_round)
        return Lesson(server_round, rows, self.settings.consensus.decode(received.arrays))

    def _rows(self, server_round: int) -> IntArray:
        num_rows, num_public = len(self.party.public), self.settings.num_public
        return public_rows(self.seed, server_round, num_rows, num_public)

    def reply(
        self, model: Learner, *, private: bool
    ) -> tuple[dict[str, Array], dict[str, Scalar]]:
        """Return what leaves; `private`: the model's training is paid for by itself."""
        if self.options.sends_evidence:
            return self._evidence(model, private=private)
        arrays = self.settings.replies.encode(self._released(model))
        if self.options.sends_counts:
            arrays[CLASS_COUNTS] = self._class_counts()
        return arrays, self._meta()

    def _evidence(
        self, model: Learner, *, private: bool
    ) -> tuple[dict[str, Array], dict[str, Scalar]]:
        """Return answers without the party's class shares, and these beside them.

        A model that was trained privately must not be followed by what was not: it answers
        as one of equal class shares, and the number of records is public.
        """
        rows = self._rows(self.server_round)
        counts = self._equal_counts() if private else self._class_counts()
        shares = counts if private else self.student.class_counts()
        ratio, contrast = (None, "none") if private else self._contrast(rows)
        public, promised = self.party.public[rows], self.student.promised
        logits = finite_logits("FedMD", model, public, promised=promised)
        held = shares.astype(np.float64)
        if self.options.payload == "argmax":
            answers: Array = corrected_labels(logits, held)
        else:
            answers = class_evidence(logits, held, ratio)
        arrays = {**self.settings.replies.encode(answers), CLASS_COUNTS: counts}
        return arrays, {**self._meta(), CONTRAST: contrast}

    def _contrast(self, rows: IntArray) -> tuple[FloatArray | None, str]:
        """Return how rows compare to the records in use, for a first answer by scores.

        Later the model has learned from the public rows, and compares by itself.
        """
        found, ratio = self.state.contrast(self.terms), None
        if not found:
            x, y = self.records()
            own = replace(self.party, x=x, y=y)
            ratio, found = contrasted(own, [self.party.public], self.seed)
            self.state.keep_contrast(found, self.terms)
        if found == "uncovered":
            return None, "uncovered"
        if ratio is None or self.state.digested_round or self.options.payload == "argmax":
            return None, "none"
        return ratio[rows], "public"

    def charge(self, lesson: Lesson | None) -> Sequence[Entry]:
        """Record what the round will cost before a record is looked at.

        Returns what training costs by itself; nothing if it promises no privacy.
        """
        party, number, noise = self.party, self.server_round, self.settings.noise
        if self.options.sample is not None:
            self.records()  # drawing the sample is what costs
            return ()
        training: Charges = ()
        if noise is None:
            training = tuple(self.student.plan(lesson))
        plan = release_plan(
            "fedmd", self.settings, facts_of(party), server_round=number, training=training
        )
        charges = plan.price().record
        if noise is None:
            self.student.promised = is_promise(charges)
        spend(party, charges, plan.purpose, plan.record_delta, self.state)
        return training

    def _released(self, model: Learner) -> Array:
        """Return the answers that may leave; they have been paid for."""
        party, number, noise = self.party, self.server_round, self.settings.noise
        public, promised = party.public[self._rows(number)], self.student.promised
        answers = answer(model, public, self.options.payload, promised=promised)
        if noise is None:
            return answers
        rng = self.options.secret_rng(self.seed, "party", party.partition_id, number)
        return noise.release(answers, rng)

    def _equal_counts(self) -> IntArray:
        """Return counts that say nothing but how many records there are, about."""
        num_classes = self.settings.num_classes
        return np.full(num_classes, max(len(self.party.y) // num_classes, 1), dtype=np.int64)

    def _class_counts(self) -> IntArray:
        """Return how many records of each class are in use."""
        _, y = self.records()
        counts = np.bincount(y, minlength=self.settings.num_classes).astype(np.int64)
        return np.minimum(counts, MAX_WEIGHT)

    def _meta(self) -> dict[str, Scalar]:
        """Return what lets the server tell one sample of this party from another."""
        if self.options.sample is None:
            return {}
        return {SAMPLE_ID: self.state.sample_id, NUM_RECORDS: len(self.party.y)}

    def metrics(self) -> Metrics:
        """Return how many records are in use, and what the party has spent."""
        options, records = self.options, len(self.party.y)
        journal, sample = self.party.journal, options.sample
        known = self.state.ledger(options.delta) if journal is None else journal.ledger()
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
