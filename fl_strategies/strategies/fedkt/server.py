"""The server side of FedKT; see `fl_strategies.strategies.fedkt`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies._util import Array, FloatArray, IntArray, content_hash, derive_rng
from fl_strategies.aggregation.evidence import read_counts
from fl_strategies.aggregation.pool import EvidencePool, read_class_share
from fl_strategies.aggregation.votes import (
    CLASS_COUNTS,
    VOTE_STRENGTH,
    VoteSum,
    consistent_labels,
    least_agreeing,
    plurality,
    vote_evidence,
)
from fl_strategies.errors import KnowledgeMismatch, between, require, require_known
from fl_strategies.learners import LearnerFactory, require_portable
from fl_strategies.party.role import privacy_metrics
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.noise import VotePrivacy, choose_queries, epsilon_of_votes
from fl_strategies.privacy.planning import (
    DECIDED_AT_PARTY,
    DECIDED_AT_SERVER,
    MOST_TEACHERS,
    teachers_for,
    vote_queries,
)
from fl_strategies.release import ReleaseFacts, ReleasePlan, forms_at, variants_at
from fl_strategies.server.replies import PartyReply, read_charges
from fl_strategies.server.run import State
from fl_strategies.server.strategy import (
    FederationOptions,
    KnowledgeStrategy,
    check_factories,
    logger,
    public_array,
)
from fl_strategies.strategies.fedkt.options import (
    LEVELS,
    NOBODY,
    NUM_TRIMMED,
    OPEN_VOTES,
    SCORES,
    VOTE_INSTEAD,
    FedKTOptions,
    release_plan,
    score_evidence,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    Knowledge,
    Metrics,
    Scalar,
    part_arrays,
    party_of,
    shown,
    unpack_labels,
)


@dataclass(frozen=True, eq=False)
class PartyVotes:
    """One party's votes (num_rows,), -1 for none, its class counts or None, and its id.

    Students that vote by themselves have votes of (num_students, num_rows).

    `scores` are how sure it is of each class (num_rows, num_classes), as received, if sent.
    """

    labels: Array
    counts: FloatArray | None
    party: int = 0
    scores: Array | None = None


@dataclass(frozen=True, eq=False)
class PartyAnswer:
    """What was read of a party: votes that are not counted yet, if any, and their training.

    `training` is the reported cost of its privately trained teachers, per record.
    """

    votes: PartyVotes | None
    training: Sequence[Entry] = ()


class FedKT(KnowledgeStrategy[PartyAnswer]):
    """One round of two-tier knowledge transfer with consistent, corrected voting.

    Leaves the party
        ``exchange="votes"``: the labels its s students give to the public rows, packed
        into ceil(log2 C) bits each. ``exchange="models"``: the students themselves, as in
        the paper. The server uses students only to label the public rows, so both lead
        to the same final model, to the bit; except that with t = 1, below L2, the teacher
        votes itself and no student is trained, unless models are asked for.
        ``exchange="scores"``, at L2: the students' mean scores of each class, a byte each. With
        `vote_weights` also how many records of each class the party has.
    Guarantee
        L0: none. Epsilon is reported as infinite; only if all teachers of all parties train
        with DP-SGD and no exact counts leave, an example is protected against everybody. Then
        `ledger_` is that of the party whose events, as the parties report them, cost most.
        The neighbour is a record that is blanked or replaced in its place: removing
        it would deal all others to other teachers.
        L1: a party, replaced by another, against everybody who sees the final model. The
        server sees the votes and is trusted to add the noise.
        L2: an example, replaced by another within its party, against the server and
        everybody else. Each party adds its own noise, and the largest epsilon is reported.
        Not covered: rows that parties only evaluate on, of which no metric leaves where
        anything is promised, the number of records, settings chosen on private data; and
        records of one person at several parties add up.

    Parameters
    ----------
    public : (num_public, ...)
        Unlabelled rows; every party holds the same.
    num_classes : int
        Length of the federation's class list.
    learner_fn : factory
        Makes the final model.
    learner_name : str
        What parties call the final model when it is delivered to them.
    student_fns : mapping of learner name to factory
        For ``exchange="models"``: how the server rebuilds the students it receives.
    options : FedKTOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    outliers_ : tuple of int
        Partition ids of the parties that `exclude_outliers` has not counted; their number
        is the metric ``num-outliers``.
    trimmed_ : tuple of int
        Partition ids of the parties whose votes were not counted; their number is the
        metric ``num-trimmed``.

    Notes
    -----
    `trim_fraction` is meant against parties that lie, also together, for example by exchanging
    labels. It finds them while honest parties have the plurality on most rows. A party that
    knows few classes is not taken for a liar, and so neither is a liar that names one class
    where honest parties do the same (`exclude_outliers` finds it). Of equals, the higher
    partition ids leave. At L0 and L2 trimming is free: votes are unprotected, or protected
    before they come. At L1 it is refused: one party's votes would decide whether another's
    are counted, which noise for one party's votes does not cover. Measurements:
    docs/results/robustness.md.

    Corrected votes cost no more than plain ones. L2: a record is in one subset of each
    partition, so it moves the model and the counts of one teacher, and by them its one vote
    a row (`teacher_votes`). L1: a party decides its own s votes a row, however it comes to
    them. What the server makes of noisy votes and noisy counts is free.

    The server keeps sums alone, whatever the number of parties; to exclude outliers or with
    `trim_fraction` it keeps a byte for each party and public row (two from 129 classes on).

    Ties, among teachers and on the server, go to one of the leading classes at random,
    from a generator named by the seed. Public rows on which no party is consistent take
    no part in the final training; their number is the metric ``num-unlabelled``.

    Deviations from the authors' code: it gives such rows, and ties, to class 0; and for
    neural networks it counts all students' votes, consistent or not.
    """

    name: ClassVar[str] = "fedkt"
    options_type = FedKTOptions
    forms = forms_at(LEVELS, {"gamma": 1.0})
    private_variants = variants_at("fedkt", "L2", "L1")
    takes = ("public", "num_classes", "learner_fn", "learner_name", "student_fns", "options")
    identified_by = (
        "public",
        "num_classes",
        "learner_fn",
        "model_name",
        "student_fns",
        "options",
        "reply_kind",
        "class_share",
    )
    last_round = 1

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        student_fns: Mapping[str, LearnerFactory] | None = None,
        options: FedKTOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        public = public_array("FedKT", public)
        require(len(public) > 0, "FedKT", "public", "at least one row", len(public))
        require(num_classes >= 2, "FedKT", "num_classes", "at least 2", num_classes)
        check_factories("FedKT", learner_fn, num_classes, student_fns=student_fns)
        self.public = public
        self.num_classes = num_classes
        self.learner_fn = learner_fn
        self.model_name = learner_name
        self.student_fns = {learner_name: learner_fn, **(student_fns or {})}
        self.options = self._settled(options or FedKTOptions())
        self.reply_kind = self.options.exchange
        self.class_share = read_class_share(
            "FedKT", self.options.class_share, num_classes, "single-label"
        )
        self.outliers_: tuple[int, ...] = ()
        self.trimmed_: tuple[int, ...] = ()
        self.begin_round()
        self.state = State(
            ledger=self.new_ledger(self.plan, max_epsilon=self.options.max_epsilon)
        )

    @property
    def plan(self) -> ReleasePlan:
        """What one round releases."""
        facts = ReleaseFacts(
            num_classes=self.num_classes,
            num_public=len(self.public),
            num_parties=self.num_parties,
        )
        return release_plan(self.options, facts)

    def _settled(self, options: FedKTOptions) -> FedKTOptions:
        """Return the options with what follows from the public rows and the noise."""
        asked, most = options.num_queries, len(self.public)
        fits, rule = asked is None or asked <= most, f"{between(1, most)}, the public rows"
        require(fits, "FedKT", "num_queries", rule, asked)
        queries = asked or self._planned_queries(options)
        options = replace(options, num_queries=queries, vote_weights=options.weights)
        if options.num_teachers is not None:
            return options
        teachers = 1
        if privacy := options.party_privacy:
            teachers = teachers_for(options.mechanism(privacy, self.num_classes, queries).scale)
        return replace(options, num_teachers=teachers)

    def _planned_queries(self, options: FedKTOptions) -> int:
        """Return all rows, or with a target as many as its noise leaves readable."""
        privacy, most = options.privacy, len(self.public)
        if privacy is None or privacy.target_epsilon is None:
            return most
        voters, share = self.num_parties * options.num_splits, DECIDED_AT_SERVER
        if privacy.level == "L2":
            voters, share = options.num_teachers or MOST_TEACHERS, DECIDED_AT_PARTY
        return vote_queries(
            lambda number: options.mechanism(privacy, self.num_classes, number),
            voters,
            share,
            most,
        )

    @property
    def num_queries(self) -> int:
        """How many public rows are labelled by noisy votes."""
        return self.options.num_queries or len(self.public)

    def party_config(self) -> dict[str, Scalar]:
        """Return s, t, how votes are cast and what identifies the public data."""
        return {
            **self.options.to_config(),
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: content_hash(self.public),
        }

    @property
    def most_score_bytes(self) -> int:
        """Bytes of a party's scores, if it sends any."""
        shape = len(self.public), self.num_classes
        return SCORES.num_bytes(shape) if self.options.exchange == "scores" else 0

    def begin_round(self) -> bool:
        """Make room for the votes of a round."""
        options, shape = self.options, (len(self.public), self.num_classes)
        self._votes = VoteSum(shape, options.num_splits if options.consistent else 1)
        self._pool: EvidencePool | None = None
        if options.weights != "none":
            scored = options.exchange == "scores"
            self._pool = EvidencePool(
                shape,
                bound=SCORES.bound if scored else VOTE_STRENGTH,
                task="single-label",
                share=self.class_share,
                decode=score_evidence if scored else vote_evidence,
                exclude_outliers=options.exclude_outliers,
            )
        return True

    def check(self, knowledge: Knowledge) -> PartyAnswer:
        """Return one party's votes, and what its teachers cost."""
        reported = knowledge.meta.get(keys.PRIVACY_EVENTS)
        training = () if reported is None else read_charges(reported)
        counts, scores, shape = None, None, (len(self.public), self.num_classes)
        if self.options.weights != "none":
            counts = read_counts(knowledge.arrays, self.num_classes)
            rule = "at least 1 in total"
            require_known(counts.sum() >= 1, "FedKT", CLASS_COUNTS, rule, counts[:8])
        if knowledge.kind == "scores":
            packed = knowledge.arrays.get("scores", np.empty(0, np.uint8))
            scores = SCORES.from_wire(packed, shape)
            labels: Array = scores.argmax(axis=1)
        elif self.options.consistent:
            labels = consistent_labels(self._labels(knowledge), self.num_classes)
        else:
            labels = self._labels(knowledge)
        return PartyAnswer(PartyVotes(labels, counts, party_of(knowledge), scores), training)

    def _labels(self, knowledge: Knowledge) -> IntArray:
        """Return the labels of one party's students, (num_splits, num_public)."""
        shape = self.options.num_splits, len(self.public)
        if knowledge.kind == "votes":
            packed = knowledge.arrays.get("votes", np.empty(0, np.uint8))
            return unpack_labels(packed, shape, self.num_classes)
        name = str(knowledge.meta.get(keys.LEARNER))
        if name not in self.student_fns:
            raise KnowledgeMismatch(
                f"FedKT: a student's learner must be one of {', '.join(self.student_fns)}, "
                f"got {shown(name)}. Name its factory in student_fns."
            )
        arrays = {key: a for key, a in knowledge.arrays.items() if key != CLASS_COUNTS}
        students = [
            require_portable(self.student_fns[name](), VOTE_INSTEAD).from_arrays(own)
            for own in part_arrays(arrays, self.options.num_splits)
        ]
        labels = np.stack([student.predict(self.public) for student in students])
        fits = labels.shape == shape and 0 <= labels.min() <= labels.max() < self.num_classes
        rule = f"classes below {self.num_classes} for each of {len(self.public)} public rows"
        require_known(fits, "FedKT", "labels of students", rule, "others")
        return labels

    def add(self, reply: PartyReply[PartyAnswer]) -> None:
        """Count one party's votes; keep them only if some may be trimmed."""
        answer = reply.knowledge
        if answer.votes is not None and not self.options.trim_fraction:
            self._count(answer.votes)
            reply = replace(reply, knowledge=PartyAnswer(None, answer.training))
        super().add(reply)

    def _count(self, votes: PartyVotes) -> None:
        """Add one party's votes to the sums, which are all that is kept of them."""
        if self._pool is not None and votes.counts is not None:
            values = votes.labels if votes.scores is None else votes.scores
            self._pool.add(values, votes.counts, "none", votes.party)
        for labels in np.atleast_2d(votes.labels):
            self._votes.add(labels)

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Train the final model on the winners of the votes that were added."""
        self._count_without_trimmed()
        rows, labels, metrics = self._label()
        metrics[NUM_TRIMMED] = len(self.trimmed_)
        metrics[keys.NUM_UNLABELLED] = len(self.public) - len(rows)
        if not len(rows):
            self.fail("no public row got a label")
            return None, metrics
        rng = derive_rng(self.seed, "server", "final")
        model = self.learner_fn().fit(self.public[rows], labels, rng=rng)
        return self.keep_model(model), metrics

    def _count_without_trimmed(self) -> None:
        """Count the votes that were kept, if any, except those of outliers."""
        answers = [(reply.partition_id, reply.knowledge.votes) for reply in self.replies]
        kept = [(party, votes) for party, votes in answers if votes is not None]
        labels = [votes.labels for _, votes in kept]
        trimmed = least_agreeing(labels, self.num_classes, self.options.trim_fraction)
        self.trimmed_ = tuple(kept[position][0] for position in trimmed)
        if self.trimmed_:
            logger.info("%s does not count the votes of parties %s.", self.name, self.trimmed_)
        for position in sorted({*range(len(kept))} - {*trimmed}):
            self._count(kept[position][1])

    def _label(self) -> tuple[IntArray, IntArray, Metrics]:
        """Return the rows that get a label, their labels and what that costs."""
        counts, pool = self._votes.counts, self._pool
        if privacy := self.options.server_privacy:
            return self._label_with_noise(counts, privacy)
        # Which rows have no vote is itself private at L1, and post-processing otherwise.
        rows = np.flatnonzero(counts.any(axis=1))
        scores = pool.result() if pool is not None and len(rows) else counts
        labels = plurality(scores, derive_rng(self.seed, "server", "ties"))[rows]
        if pool is None:
            return rows, labels, {}
        self.outliers_ = pool.outliers
        return rows, labels, pool.report("FedKT")

    def enter_reported(self, replies: Sequence[PartyReply[PartyAnswer]]) -> None:
        """Enter what parties report; if nobody could read any, that nothing is known."""
        unknown = PartyReply(NOBODY, NOBODY, "", PartyAnswer(None), {})
        super().enter_reported(replies or [unknown])

    def reported(self, reply: PartyReply[PartyAnswer]) -> Sequence[Entry]:
        """Return the reported cost of a party's teachers, and that of the counts."""
        counts = self.options.count_charges(self.num_classes, seeded=False)
        return [*(reply.knowledge.training or OPEN_VOTES), *counts]

    def _label_with_noise(
        self, counts: IntArray, privacy: VotePrivacy
    ) -> tuple[IntArray, IntArray, Metrics]:
        rows = choose_queries(len(self.public), self.num_queries, self.seed)
        mechanism = self.options.mechanism(privacy, self.num_classes, self.num_queries)
        rng = privacy.rng(self.seed, "server")
        drawn = self.run.draw_once(
            "noisy-labels", lambda: {"labels": mechanism.release(counts[rows], rng).values}
        )
        labels: IntArray = drawn["labels"]
        answered = labels >= 0
        metrics = privacy_metrics(party=self.ledger_, example=self.ledger_)
        if self.options.private_diagnostics and not privacy.seeded_noise:
            epsilon = epsilon_of_votes(mechanism, counts[rows], privacy.delta)
            epsilon = min(epsilon, metrics[keys.EPSILON_PARTY])
            metrics[keys.EPSILON_PARTY_DATA_DEPENDENT] = epsilon
        return rows[answered], labels[answered], metrics
