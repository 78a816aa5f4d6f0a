"""The party side of FedKT; see `fl_strategies.strategies.fedkt`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import scipy
from flwr.app import ConfigRecord

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.aggregation.votes import (
    CLASS_COUNTS,
    agreement,
    class_counts,
    consistent_mask,
    corrected_labels,
    count_votes,
    plurality,
    valid_counts,
)
from fl_strategies.errors import KnowledgeMismatch, require_known
from fl_strategies.learners import Learner, TrainingSet, fit_ensemble, require_portable
from fl_strategies.party.party import Party
from fl_strategies.party.role import (
    PartyRole,
    PartyState,
    charge_plan,
    check_public_data,
    facts_of,
    finite_logits,
    fit_on_records,
    is_promise,
    labels_of,
    ledger_of,
    ledger_to_text,
    read_seed,
)
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.noise import choose_queries
from fl_strategies.release import Price, ReleaseFacts, ReleasePlan
from fl_strategies.strategies.fedkt.options import (
    SCORES,
    VOTE_INSTEAD,
    FedKTOptions,
    num_queries,
    num_teachers,
    one_scale,
    release_plan,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar, join_arrays, pack_labels


def deal_records(
    party: Party, num_splits: int, num_teachers: int, seed: int
) -> list[list[IntArray]]:
    """Return the positions of the records of every teacher, partition by partition.

    They depend on the number of records and on nothing in a record, so that
    replacing one record changes one subset of each partition and nothing else.
    """
    orders = [
        party.rng(seed, "split", split).permutation(len(party.y)) for split in range(num_splits)
    ]
    return [np.array_split(order, num_teachers) for order in orders]


def train_teachers(
    party: Party, num_splits: int, num_teachers: int, seed: int, *, promised: bool = False
) -> list[Learner]:
    """Train the teachers of all partitions, those of the first partition first.

    With `promised` a teacher that cannot be trained is replaced by one of public rows.
    """
    dealt = deal_records(party, num_splits, num_teachers, seed)
    sets = [(party.x[rows], party.y[rows]) for subsets in dealt for rows in subsets]

    def rngs() -> list[np.random.Generator]:
        places = np.ndindex(num_splits, num_teachers)
        return [party.rng(seed, "teacher", *place) for place in places]

    learner_fn = party.teacher_fn or party.learner_fn
    return fit_on_records(party, learner_fn, sets, rngs, promised=promised)


def teacher_counts(
    party: Party, num_splits: int, num_teachers: int, seed: int
) -> list[FloatArray]:
    """Return how many records of each class every teacher has, in their order."""
    dealt = deal_records(party, num_splits, num_teachers, seed)
    return [
        np.bincount(party.y[rows], minlength=party.num_classes).astype(np.float64)
        for subsets in dealt
        for rows in subsets
    ]


def teacher_votes(
    party: Party,
    teachers: Sequence[Learner],
    num_splits: int,
    counts: Sequence[FloatArray] | None = None,
    *,
    promised: bool = False,
) -> IntArray:
    """Count the teachers' votes, (num_splits, num_public, num_classes).

    With `counts`, those of `teacher_counts`, every teacher votes as if its records had equal
    class shares, among the classes that it has seen. Replacing one record moves no more votes
    than before: a vote depends on the teacher's own subset alone, by its model and its
    counts, and only one subset of each partition has changed (`deal_records`). So one teacher
    of each partition may name another class, also one that it knows only now, and all others
    vote as they did: in a row of a partition one count falls by one and another rises by one
    at most.
    """
    public = party.public
    if counts is None:
        labels = [labels_of(teacher, public, promised=promised) for teacher in teachers]
    else:
        logits = [finite_logits(party.owner, t, public, promised=promised) for t in teachers]
        labels = [corrected_labels(*pair) for pair in zip(logits, counts, strict=True)]
    per_split = np.stack(labels).reshape(num_splits, -1, len(party.public))
    return np.stack([count_votes(votes, party.num_classes) for votes in per_split])


def train_students(party: Party, sets: Sequence[TrainingSet], seed: int) -> list[Learner]:
    """Train one student per partition on public rows with its teachers' labels."""
    if not all(len(labels) for _, labels in sets):
        # Labels have been released with noise, so the server may know that there are none.
        raise KnowledgeMismatch(
            f"{party.owner}: queries must be answered for every student, got "
            f"none for some. Lower the threshold or ask more queries."
        )
    rngs = [party.rng(seed, "student", split) for split in range(len(sets))]
    return fit_ensemble(party.learner_fn, sets, rngs=rngs, kind="students")


def student_scores(party: Party, students: Sequence[Learner]) -> FloatArray:
    """Return how sure the students are of each class on average, (num_public, num_classes)."""
    logits = [finite_logits(party.owner, s, party.public, promised=True) for s in students]
    return one_scale(
        np.mean([scipy.special.log_softmax(own, axis=1) for own in logits], axis=0)
    )


class FedKTParty(PartyRole):
    """The party's role: teachers on private subsets, students on the public rows."""

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return what a level and so many teachers mean for the party."""
        return _plan(party, FedKTOptions.received(config))

    def train(
        self,
        party: Party,
        received: Knowledge | None,  # noqa: ARG002 - one round, nothing to receive
        config: ConfigRecord,
        state: PartyState,
    ) -> tuple[Knowledge, Metrics]:
        """Return the labels of the public rows or the students, and class counts if asked."""
        check_public_data(party, config)
        require_known(len(party.y) > 0, party.owner, "x", "records to learn from", "none")
        options = FedKTOptions.received(config)
        # Charged before a record is looked at.
        price, _, metrics = charge_plan(party, _plan(party, options), state)
        work = _Work(party, options, price, read_seed(config))
        sets, agreed = work.label(work.votes())
        arrays, labels = work.answer(sets)
        metrics |= {
            keys.VOTE_AGREEMENT: work.diagnostic(agreed),
            keys.NUM_TEACHERS_MISSING: work.num_missing,
            keys.CONSISTENT_FRACTION: work.diagnostic(consistent_mask(labels).mean()),
        }
        return Knowledge(options.exchange, arrays | work.class_counts(), work.events()), metrics


def _facts(party: Party) -> ReleaseFacts:
    return replace(facts_of(party), trainer=party.teacher_fn or party.learner_fn)


def _plan(party: Party, options: FedKTOptions) -> ReleasePlan:
    facts = _facts(party)
    asked, most = num_queries(options, facts), facts.num_public
    rule = f"at most {most}, the public rows"
    require_known(asked <= most, party.owner, "num-queries", rule, asked)
    return release_plan(options, facts)


class _Work:
    """What a party is asked to do, step by step; it has been charged before."""

    def __init__(self, party: Party, options: FedKTOptions, price: Price, seed: int) -> None:
        self.party, self.options, self.price, self.seed = party, options, price, seed
        facts = _facts(party)
        self.num_teachers = num_teachers(options, facts)
        asked = options.num_teachers or 1
        self.num_missing = options.num_splits * (asked - self.num_teachers)
        # Whether anybody is promised anything, so that the party must not fail.
        self.promised = options.level != "L0" or is_promise(price.record)
        self.rows, self.noise = np.arange(facts.num_public), None
        if privacy := options.party_privacy:
            self.rows = choose_queries(facts.num_public, num_queries(options, facts), seed)
            mechanism = options.mechanism(privacy, party.num_classes, len(self.rows))
            self.noise = privacy, mechanism

    def votes(self) -> IntArray:
        """Count the teachers' votes, corrected if that is asked for and free.

        The vote of a privately trained teacher is free as long as nothing but its model
        decides it; the exact counts of its records would undo that where no noise follows.
        """
        party, splits, promised = self.party, self.options.num_splits, self.promised
        size = splits, self.num_teachers
        teachers = train_teachers(party, *size, self.seed, promised=promised)
        paid = not self.noise and self.price.training
        corrected = self.options.corrected and not paid
        counts = teacher_counts(party, *size, self.seed) if corrected else None
        return teacher_votes(party, teachers, splits, counts, promised=promised)

    def label(self, votes: IntArray) -> tuple[list[TrainingSet], float]:
        """Return each student's training data, and the teachers' agreement if it is sent."""
        party = self.party
        if not self.noise:
            sets = [
                (party.public, plurality(own, party.rng(self.seed, "ties", split)))
                for split, own in enumerate(votes)
            ]
            return sets, agreement(votes.reshape(-1, party.num_classes))
        sets, (privacy, mechanism) = [], self.noise
        for split, own in enumerate(votes):
            rng = privacy.rng(self.seed, "party", party.partition_id, split)
            labels = mechanism.release(own[self.rows], rng).values
            answered = labels >= 0
            sets.append((party.public[self.rows[answered]], labels[answered]))
        # How far the teachers agree is private here.
        return sets, math.nan

    def answer(self, sets: Sequence[TrainingSet]) -> tuple[dict[str, Array], IntArray]:
        """Return what leaves the party, votes or students, and the labels that these give."""
        party, options = self.party, self.options
        alone = options.num_teachers == 1 and options.level != "L2"
        if alone and options.exchange == "votes":
            # A student would but copy its only teacher.
            labels = np.stack([labels for _, labels in sets])
            return {"votes": pack_labels(labels, party.num_classes)}, labels
        students = train_students(party, sets, self.seed)
        if options.exchange == "scores":
            scores = student_scores(party, students)
            packed = SCORES.to_wire(scores, party.rng(self.seed, "scores"))
            return {"scores": packed}, scores.argmax(axis=1)[None]
        labels = np.stack([student.predict(party.public) for student in students])
        if options.exchange == "votes":
            return {"votes": pack_labels(labels, party.num_classes)}, labels
        models = [require_portable(student, VOTE_INSTEAD).to_arrays() for student in students]
        return join_arrays(models), labels

    def diagnostic(self, value: float) -> float:
        """Return a metric of votes without noise; at L1 only if it is asked for by name."""
        hidden = self.options.level == "L1" and not self.options.private_diagnostics
        return math.nan if hidden else float(value)

    def events(self) -> dict[str, Scalar]:
        """Return what privately trained teachers cost, for the server's account at L0."""
        training = self.price.training
        if self.options.level != "L0" or not training:
            return {}
        return {keys.PRIVACY_EVENTS: ledger_to_text(ledger_of(training, DEFAULT_DELTA))}

    def class_counts(self) -> dict[str, Array]:
        """Return the class counts that leave the party, if any do."""
        party, options = self.party, self.options
        if options.weights == "none":
            return {}
        counts = class_counts(party.y, party.num_classes, party.task)
        if options.weights == "counts":
            return {CLASS_COUNTS: counts.astype(np.float64)}
        noise = options.count_noise()
        rng = party.rng(self.seed, "counts") if options.seeded_noise else None
        return {CLASS_COUNTS: valid_counts(noise.release(counts, rng).values, noise.scale)}
