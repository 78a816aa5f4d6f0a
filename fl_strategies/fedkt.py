"""FedKT: federated learning via knowledge transfer, in one round.

Li, He, Song: Practical One-Shot Federated Learning for Cross-Silo Setting (IJCAI 2021),
Algorithm 1.

    party    s random partitions of its records, each into t disjoint subsets
             a teacher per subset; the t teachers of a partition vote on the public rows
             a student per partition, trained on the public rows with these labels
    server   a party whose s students agree on a row gives s votes, otherwise none
             the final model is trained on the public rows with the winning labels

At level L1 the server puts noise on the parties' votes, at L2 each party on its teachers'.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies import keys
from fl_strategies.base import FederationOptions, KnowledgeStrategy, logger
from fl_strategies.exceptions import (
    InvalidData,
    KnowledgeMismatch,
    PrivacyBudgetExceeded,
    require,
)
from fl_strategies.half import PartyHalf, check_public_data, read_seed
from fl_strategies.knowledge import (
    Knowledge,
    Metrics,
    Scalar,
    config_choice,
    config_int,
    join_arrays,
    part_arrays,
    shown,
)
from fl_strategies.packing import pack_labels, unpack_labels
from fl_strategies.party import Party, check_rows, content_hash
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.reporting import (
    AUDIENCES,
    DEFAULT_DELTA,
    UNPROTECTED,
    data_dependent_figure,
    ledger_of,
    privacy_metrics,
    spend,
    training_charges,
    unprotected,
)
from fl_strategies.privacy.votes import (
    VoteNoise,
    VotePrivacy,
    choose_queries,
    count_queries,
)
from fl_strategies.protocols import (
    Array,
    IntArray,
    Learner,
    LearnerFactory,
    TrainingSet,
    require_portable,
)
from fl_strategies.randomness import derive_rng
from fl_strategies.replies import PartyReply
from fl_strategies.teaching import teacher_votes, train_students, train_teachers
from fl_strategies.voting import (
    add_votes,
    agreement,
    consistent_labels,
    consistent_mask,
    least_agreeing,
    plurality,
)

Exchange = Literal["votes", "models"]
PrivacyLevel = Literal["L0", "L1", "L2"]

NUM_SPLITS = "num-splits"
NUM_TEACHERS = "num-teachers"
NUM_QUERIES = "num-queries"
PRIVACY_LEVEL = "privacy-level"
EXCHANGE = "exchange"
VOTE_TRIM = "vote-trim"
NUM_TRIMMED = "num-trimmed"
EXCHANGES: Sequence[str] = ("votes", "models")
VOTE_INSTEAD = "Let it vote instead: exchange='votes'."
LEVELS: Sequence[str] = ("L0", "L1", "L2")

# A server cannot make a party train without end.
MAX_SPLITS = 1_000
MAX_TEACHERS = 100_000


class FedKT(KnowledgeStrategy[Array | None]):
    """One round of two-tier knowledge transfer with consistent voting.

    Leaves the party
        ``exchange="votes"``: the labels its s students give to the public rows, packed
        into ceil(log2 C) bits each. ``exchange="models"``: the students themselves, as in
        the paper. The server uses students only to label the public rows, so both lead
        to the same final model, to the bit.
    Guarantee
        L0: none. Epsilon is reported as infinite.
        L1: a party, replaced by another, against everybody who sees the final model. The
        server sees the votes and is trusted to add the noise.
        L2: an example, replaced by another within its party, against the server and
        everybody else. Each party adds its own noise, and the largest epsilon is reported.
        Not covered: rows that parties only evaluate on, the number of records, settings
        chosen on private data; and records of one person at several parties add up.

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
    num_splits, num_teachers : int
        The paper's s and t. A party with fewer than t records trains fewer teachers.
    exchange : "votes" or "models"
    student_fns : mapping of learner name to factory
        For ``exchange="models"``: how the server rebuilds the students it receives.
    privacy_level : "L0", "L1" or "L2"
    noise, gamma, sigma, target_epsilon, delta, threshold, threshold_sigma
        See `VotePrivacy`. L1 and L2 need one of gamma, sigma and target_epsilon.
    num_queries, fraction_query : int, float
        How many public rows are labelled by noisy votes, on the server at L1 and at each
        party at L2, as a number or as a share; all by default. They are drawn by the
        seed, and only they train the models that learn from noisy labels. Fewer queries
        cost less epsilon.
    vote_trim : float (default: 0)
        Largest share of parties, rounded down and below one half, whose votes are not
        counted because they contradict all others: see Notes and `voting.least_agreeing`.
    max_epsilon : float, optional
        L1: the server refuses to label anything if epsilon would exceed it.
    seeded_noise : bool (default: False)
        Draw noise from the seed, for repeatable simulations. Epsilon is then infinite.
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    trimmed_ : tuple of int
        Partition ids of the parties whose votes were not counted; their number is the
        metric ``num-trimmed``.

    Notes
    -----
    `vote_trim` is meant against parties that lie, also together, for example by exchanging
    labels. It finds them while honest parties have the plurality on most rows. A party that
    knows few classes is not taken for a liar; so a liar that names one class where honest
    parties do the same is not found either. Of equals, the higher partition ids leave. At
    L0 and L2 trimming is free: votes are unprotected, or protected before they come. At L1
    it is refused: there one party's votes would decide whether another's are counted, and
    noise for one party's votes would not cover that. Measurements: docs/robustness.md.

    The server keeps counts alone, whatever the number of parties; with `vote_trim` it
    keeps a byte for each party and public row (two from 129 classes on).

    Ties, among teachers and on the server, go to one of the leading classes at random,
    from a generator named by the seed. Public rows on which no party is consistent take
    no part in the final training; their number is the metric ``num-unlabelled``.

    Deviations from the authors' code: it gives such rows, and ties, to class 0; and for
    neural networks it counts all students' votes, consistent or not.
    """

    name: ClassVar[str] = "fedkt"
    last_round = 1

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        num_splits: int = 2,
        num_teachers: int = 5,
        exchange: Exchange = "votes",
        student_fns: Mapping[str, LearnerFactory] | None = None,
        privacy_level: PrivacyLevel = "L0",
        noise: VoteNoise = "gumbel",
        gamma: float | None = None,
        sigma: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        threshold: float | None = None,
        threshold_sigma: float | None = None,
        seeded_noise: bool = False,
        num_queries: int | None = None,
        fraction_query: float = 1.0,
        max_epsilon: float | None = None,
        vote_trim: float = 0.0,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        check_rows("FedKT", "public", public)
        require(len(public) > 0, "FedKT", "public", "at least one row", len(public))
        require(num_classes >= 2, "FedKT", "num_classes", "at least 2", num_classes)
        counts = [
            (NUM_SPLITS, num_splits, MAX_SPLITS),
            (NUM_TEACHERS, num_teachers, MAX_TEACHERS),
        ]
        for name, value, most in counts:
            require(1 <= value <= most, "FedKT", name, f"from 1 to {most}", value)
        require(privacy_level in LEVELS, "FedKT", PRIVACY_LEVEL, "L0, L1 or L2", privacy_level)
        require(exchange in EXCHANGES, "FedKT", EXCHANGE, "'votes' or 'models'", exchange)
        _check_trim(vote_trim, privacy_level)
        self.public = public
        self.num_classes = num_classes
        self.learner_fn = learner_fn
        self.model_name = learner_name
        self.num_splits = num_splits
        self.num_teachers = num_teachers
        self.privacy_level = privacy_level
        self.reply_kind = exchange
        self.student_fns = {learner_name: learner_fn, **(student_fns or {})}
        self.num_queries = count_queries(len(public), num_queries, fraction_query)
        self.vote_trim = vote_trim
        self.trimmed_: tuple[int, ...] = ()
        self._gather()
        self.privacy = None
        given, rule = (gamma, sigma, target_epsilon), "left out at L0, which adds no noise"
        noisy = privacy_level != "L0" or given == (None, None, None)
        require(noisy, "FedKT", "gamma, sigma and target_epsilon", rule, given)
        if privacy_level != "L0":
            self.privacy = VotePrivacy(
                noise=noise, gamma=gamma, sigma=sigma, target_epsilon=target_epsilon,
                delta=delta, threshold=threshold, threshold_sigma=threshold_sigma,
                seeded_noise=seeded_noise,
            )  # fmt: skip
        self.ledger_ = PrivacyLedger(
            "party" if privacy_level == "L1" else "example",
            delta=delta, max_epsilon=max_epsilon, num_parties=self.num_parties,
            audience=AUDIENCES[privacy_level],
        )  # fmt: skip

    def party_config(self, server_round: int) -> dict[str, Scalar]:  # noqa: ARG002
        """Return s, t and what identifies the public data."""
        noise = self.privacy.to_config() if self.privacy and self.privacy_level == "L2" else {}
        return {
            NUM_SPLITS: self.num_splits,
            NUM_TEACHERS: self.num_teachers,
            NUM_QUERIES: self.num_queries,
            PRIVACY_LEVEL: self.privacy_level,
            EXCHANGE: self.reply_kind,
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: content_hash(self.public),
            **noise,
        }

    def _gather(self) -> None:
        """Make room for the votes of a round."""
        self._counts = np.zeros((len(self.public), self.num_classes), dtype=np.int64)

    def prepare_round(self) -> bool:
        """Begin to count."""
        self._gather()
        return True

    def read(self, knowledge: Knowledge) -> Array | None:
        """Count one party's votes; keep them, (num_public,), only if some may be trimmed."""
        votes = consistent_labels(self._read_labels(knowledge), self.num_classes)
        if self.vote_trim:
            return votes
        add_votes(self._counts, votes, self.num_splits)
        return None

    def _read_labels(self, knowledge: Knowledge) -> IntArray:
        """Return the labels of one party's students, (num_splits, num_public)."""
        shape = self.num_splits, len(self.public)
        if self.reply_kind == "votes":
            packed = knowledge.arrays.get("votes", np.empty(0, np.uint8))
            return unpack_labels(packed, shape, self.num_classes)
        students = self._read_students(knowledge)
        labels = np.stack([student.predict(self.public) for student in students])
        if labels.shape != shape or labels.min() < 0 or labels.max() >= self.num_classes:
            raise KnowledgeMismatch(
                f"FedKT: students must name a class below {self.num_classes} for each of "
                f"{len(self.public)} public rows, got others."
            )
        return labels

    def _read_students(self, knowledge: Knowledge) -> list[Learner]:
        name = str(knowledge.meta.get(keys.LEARNER))
        if name not in self.student_fns:
            raise KnowledgeMismatch(
                f"FedKT: a student's learner must be one of {', '.join(self.student_fns)}, "
                f"got {shown(name)}. Name its factory in student_fns."
            )
        models = part_arrays(knowledge.arrays, self.num_splits)
        return [
            require_portable(self.student_fns[name](), VOTE_INSTEAD).from_arrays(arrays)
            for arrays in models
        ]

    def aggregate(
        self,
        server_round: int,  # noqa: ARG002 - there is only one
        replies: Sequence[PartyReply[Array | None]],
    ) -> tuple[ArrayRecord | None, Metrics]:
        """Train the final model on the winners of the votes that `read` has gathered."""
        self._count_without_trimmed(replies)
        counts = self._counts
        self._gather()
        try:
            rows, labels, metrics = self._label(counts)
        except PrivacyBudgetExceeded as error:
            self._fail(str(error))
            return None, {}
        metrics[NUM_TRIMMED] = len(self.trimmed_)
        metrics[keys.NUM_UNLABELLED] = len(self.public) - len(rows)
        if not len(rows):
            self._fail("no public row got a label")
            return None, metrics
        rng = derive_rng(self.seed, "server", "final")
        model = self.learner_fn().fit(self.public[rows], labels, rng=rng)
        return self._keep_model(model), metrics

    def _count_without_trimmed(self, replies: Sequence[PartyReply[Array | None]]) -> None:
        """Count the votes that were kept, if any, except those of outliers."""
        kept = [(r.partition_id, r.knowledge) for r in replies if r.knowledge is not None]
        votes = [own for _, own in kept]
        left_out = least_agreeing(votes, self.num_classes, self.vote_trim)
        self.trimmed_ = tuple(kept[position][0] for position in left_out)
        if self.trimmed_:
            logger.info("%s does not count the votes of parties %s.", self.name, self.trimmed_)
        for position in sorted({*range(len(votes))} - {*left_out}):
            add_votes(self._counts, votes[position], self.num_splits)

    def _label(self, counts: IntArray) -> tuple[IntArray, IntArray, Metrics]:
        """Return the rows that get a label, their labels and what that costs."""
        if self.privacy_level == "L1" and self.privacy is not None:
            return self._label_with_noise(counts, self.privacy)
        self._record_parties_releases()
        # Which rows have no vote is itself private at L1, and post-processing otherwise.
        rows = np.flatnonzero(counts.any(axis=1))
        labels = plurality(counts, derive_rng(self.seed, "server", "ties"))[rows]
        return rows, labels, {}

    def _record_parties_releases(self) -> None:
        """Enter what every party was asked to release in this run."""
        if self.privacy is None:
            self.ledger_.charge(NonPrivateEvent(unit="example", reason=UNPROTECTED))
            return
        num_labels = self.num_splits * self.num_queries
        mechanism = self.privacy.for_examples(self.num_classes, num_labels)
        charges = mechanism.charges(num_labels, seeded=self.privacy.seeded_noise)
        for _ in range(self.num_attempts):
            self.ledger_.charge_all(charges)

    def _label_with_noise(
        self, counts: IntArray, privacy: VotePrivacy
    ) -> tuple[IntArray, IntArray, Metrics]:
        rows = choose_queries(len(self.public), self.num_queries, self.seed)
        mechanism = privacy.mechanism(
            unit="party", sensitivity=self.num_splits,
            num_classes=self.num_classes, num_queries=len(rows),
        )  # fmt: skip
        # The worst case is charged before anything is drawn.
        self.ledger_.charge_all(mechanism.charges(len(rows), seeded=privacy.seeded_noise))
        rng = privacy.rng(self.seed, "server")
        drawn = self.once(
            "noisy-labels", lambda: {"labels": mechanism.release(counts[rows], rng).values}
        )
        labels: IntArray = drawn["labels"]
        answered = labels >= 0
        metrics = privacy_metrics(party=self.ledger_, example=self.ledger_)
        figure = data_dependent_figure(mechanism, counts[rows], privacy.delta)
        metrics[keys.EPSILON_PARTY_DATA_DEPENDENT] = min(figure, metrics[keys.EPSILON_PARTY])
        return rows[answered], labels[answered], metrics


def _check_trim(vote_trim: float, privacy_level: PrivacyLevel) -> None:
    rule = "at least 0 and below 0.5"
    require(0 <= vote_trim < 0.5, "FedKT", VOTE_TRIM, rule, vote_trim)
    rule = "0 at L1, where whether a party's votes count must not depend on other parties"
    require(privacy_level != "L1" or not vote_trim, "FedKT", VOTE_TRIM, rule, vote_trim)


class FedKTParty(PartyHalf):
    """The party's half: teachers on private subsets, students on the public rows."""

    def train(
        self,
        party: Party,
        received: Knowledge | None,  # noqa: ARG002 - one round, nothing to receive
        config: ConfigRecord,
        state: RecordDict,
    ) -> tuple[Knowledge, Metrics]:
        """Return the students or their labels on the public rows."""
        check_public_data(party, config)
        if not len(party.y):
            raise InvalidData(f"Party {party.partition_id}: x must hold records, got none.")
        num_splits = config_int(config, NUM_SPLITS, minimum=1, maximum=MAX_SPLITS)
        asked = config_int(config, NUM_TEACHERS, minimum=1, maximum=MAX_TEACHERS)
        num_teachers = min(asked, len(party.y))
        seed = read_seed(config)
        teachers = train_teachers(party, num_splits, num_teachers, seed)
        counts = teacher_votes(party, teachers, num_splits)
        sets, metrics = self._label(party, counts, teachers, config, state)
        students = train_students(party, sets, seed)
        labels = np.stack([student.predict(party.public) for student in students])
        metrics |= {
            keys.NUM_TEACHERS_MISSING: num_splits * (asked - num_teachers),
            keys.CONSISTENT_FRACTION: float(consistent_mask(labels).mean()),
        }
        if config_choice(config, EXCHANGE, EXCHANGES) == "votes":
            packed = pack_labels(labels, party.num_classes)
            return Knowledge("votes", {"votes": packed}), metrics
        models = [require_portable(student, VOTE_INSTEAD).to_arrays() for student in students]
        return Knowledge("models", join_arrays(models)), metrics

    def _label(
        self,
        party: Party,
        counts: IntArray,
        teachers: Sequence[Learner],
        config: ConfigRecord,
        state: RecordDict,
    ) -> tuple[list[TrainingSet], Metrics]:
        """Return what each student learns from, after recording what it costs."""
        level, seed = config_choice(config, PRIVACY_LEVEL, LEVELS), read_seed(config)
        if level == "L2":
            return self._label_with_noise(party, counts, config, state)
        unprotected_labels = NonPrivateEvent(unit="example", reason=UNPROTECTED)
        charges = training_charges(teachers, len(counts)) or [(unprotected_labels, 1)]
        ledger = spend(party, charges, f"fedkt {level}", DEFAULT_DELTA, state)
        sets = [
            (party.public, plurality(votes, party.rng(seed, "ties", split)))
            for split, votes in enumerate(counts)
        ]
        return sets, {
            keys.VOTE_AGREEMENT: agreement(counts.reshape(-1, party.num_classes)),
            **privacy_metrics(party=unprotected(UNPROTECTED), example=ledger),
        }

    def _label_with_noise(
        self, party: Party, counts: IntArray, config: ConfigRecord, state: RecordDict
    ) -> tuple[list[TrainingSet], Metrics]:
        num_public, seed = len(party.public), read_seed(config)
        asked = config_int(config, NUM_QUERIES, minimum=1, maximum=num_public)
        rows = choose_queries(num_public, asked, seed)
        privacy, num_labels = VotePrivacy.from_config(config), len(counts) * len(rows)
        mechanism = privacy.for_examples(party.num_classes, num_labels)
        seeded = privacy.seeded_noise
        charges = mechanism.charges(num_labels, seeded=seeded)
        example = spend(party, charges, "fedkt L2", privacy.delta, state)
        sets = []
        for split, votes in enumerate(counts):
            rng = privacy.rng(seed, "party", party.partition_id, split)
            labels = mechanism.release(votes[rows], rng).values
            answered = labels >= 0
            sets.append((party.public[rows[answered]], labels[answered]))
        # All teachers of a partition change when the whole party does.
        whole = replace(mechanism, unit="party", sensitivity=int(counts[0, 0].sum()))
        everybody = ledger_of(whole.charges(num_labels, seeded=seeded), privacy.delta)
        # How far the teachers agree is private here.
        unknown = {keys.VOTE_AGREEMENT: math.nan}
        return sets, {**unknown, **privacy_metrics(party=everybody, example=example)}

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: RecordDict
    ) -> tuple[Learner, Metrics]:
        """Take the final model; tell a server that is not trusted nothing about it."""
        model, metrics = super().evaluate(party, received, config, state)
        if config.get(PRIVACY_LEVEL) == "L2":
            metrics[keys.ACCURACY] = math.nan
        return model, metrics
