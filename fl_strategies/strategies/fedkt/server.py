"""The server half of FedKT; see `fl_strategies.strategies.fedkt`."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Unpack

from flwr.app import ArrayRecord

from fl_strategies.aggregation.evidence_pool import ClassShare
from fl_strategies.aggregation.voting import least_agreeing
from fl_strategies.arrays import Array, IntArray, content_hash
from fl_strategies.core.accounting import AUDIENCES, privacy_metrics
from fl_strategies.core.party import check_rows
from fl_strategies.core.protocols import LearnerFactory
from fl_strategies.core.reported_ledgers import Told, enter_told, read_charges
from fl_strategies.core.strategy import FederationOptions, KnowledgeStrategy, logger
from fl_strategies.exceptions import PrivacyBudgetExceeded, require
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.votes import (
    VoteMechanism,
    VoteNoise,
    VotePrivacy,
    choose_queries,
    count_queries,
    data_dependent_figure,
)
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.fedkt import checks, words
from fl_strategies.strategies.fedkt.reading import VoteReader
from fl_strategies.strategies.fedkt.tally import PartyAnswer, VoteTally
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar
from fl_strategies.wire.replies import PartyReply


class FedKT(KnowledgeStrategy[PartyAnswer]):
    """One round of two-tier knowledge transfer with consistent, corrected voting.

    Leaves the party
        ``exchange="votes"``: the labels its s students give to the public rows, packed
        into ceil(log2 C) bits each. ``exchange="models"``: the students themselves, as in
        the paper. The server uses students only to label the public rows, so both lead
        to the same final model, to the bit; except that with t = 1, below L2, the teacher
        votes itself and no student is trained, unless models are asked for. With
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
    num_splits, num_teachers : int, optional
        The paper's s and t, there 2 and 5. By default whole-party models, s = t = 1, and at
        L2 as many teachers as make a unanimous vote four times the scale of the noise, from
        5 to 25. A party with fewer than t records trains fewer teachers.
    corrected : bool (default: True)
        Every teacher votes as if its records had equal class shares, among the classes it
        has seen, by its own subset's counts; see `aggregation.evidence`. False: the
        paper's votes. Teachers that train with DP-SGD vote plainly at L0 and L1, because
        nothing but the model is protected there.
    vote_weights : "auto", "none", "counts" or "noisy-counts"
        Weigh a party's votes by how well its records let it know each class, then match
        `class_share`. The counts are exact, at L0 only, or cost an example `count_epsilon`,
        at L0 and L2. ``"auto"``: counts at L0, none at L1 and L2.
    count_epsilon : float
        Part of `target_epsilon` at L2, if that is given.
    class_share : "auto", "pooled", "none" or numbers
        For weighted votes, see `EvidencePool`; ``"auto"`` is ``"pooled"`` here. Say
        ``"none"`` if public rows come from another domain.
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
    exclude_outliers : bool (default: True)
        Of weighted votes, do not count those of parties that contradict most others: see
        `aggregation.outliers`.
    vote_trim : float (default: 0)
        Largest share of parties, rounded down and below one half, whose votes are not
        counted because they contradict all others: see Notes and `voting.least_agreeing`.
        For unweighted votes; it does not see a party that names one class for every row
        where honest parties know few classes, as `exclude_outliers` does.
    max_epsilon : float, optional
        The server refuses to label anything if epsilon would exceed it.
    private_diagnostics : bool (default: False)
        L1: report how far votes agree before noise, and the data-dependent epsilon. Both are
        computed from private votes, protected by nothing and not to be published.
    seeded_noise : bool (default: False)
        Draw noise from the seed, for repeatable simulations. Epsilon is then infinite.
    accept_noise : bool (default: False)
        Go on although noise decides more labels than votes do, even if all agree: those of
        all parties at L1, of a partition's teachers at L2. Refused otherwise, because
        epsilon would be spent on labels that are mostly noise.
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
    `vote_trim` is meant against parties that lie, also together, for example by exchanging
    labels. It finds them while honest parties have the plurality on most rows. A party that
    knows few classes is not taken for a liar; so a liar that names one class where honest
    parties do the same is not found either. Of equals, the higher partition ids leave. At
    L0 and L2 trimming is free: votes are unprotected, or protected before they come. At L1
    it is refused: there one party's votes would decide whether another's are counted, and
    noise for one party's votes would not cover that. Measurements: docs/robustness.md.

    Corrected votes cost no more than plain ones. L2: a record is in one subset of each
    partition, so it moves the model and the counts of one teacher, and by them its one vote
    a row (`teaching.teacher_votes`). L1: a party decides its own s votes a row, however it
    comes to them. What the server makes of noisy votes and noisy counts is free.

    The server keeps sums alone, whatever the number of parties; to exclude outliers or with
    `vote_trim` it keeps a byte for each party and public row (two from 129 classes on).

    Ties, among teachers and on the server, go to one of the leading classes at random,
    from a generator named by the seed. Public rows on which no party is consistent take
    no part in the final training; their number is the metric ``num-unlabelled``.

    Deviations from the authors' code: it gives such rows, and ties, to class 0; and for
    neural networks it counts all students' votes, consistent or not.
    """

    name: ClassVar[str] = "fedkt"
    last_round = 1
    kept = (*KnowledgeStrategy.kept, "_ledgers")

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        num_splits: int | None = None,
        num_teachers: int | None = None,
        corrected: bool = True,
        vote_weights: words.VoteWeights = "auto",
        count_epsilon: float = 1.0,
        class_share: ClassShare = "auto",
        exchange: words.Exchange = "votes",
        student_fns: Mapping[str, LearnerFactory] | None = None,
        privacy_level: words.PrivacyLevel = "L0",
        noise: VoteNoise = "gumbel",
        gamma: float | None = None,
        sigma: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        threshold: float | None = None,
        threshold_sigma: float | None = None,
        seeded_noise: bool = False,
        accept_noise: bool = False,
        num_queries: int | None = None,
        fraction_query: float = 1.0,
        max_epsilon: float | None = None,
        exclude_outliers: bool = True,
        vote_trim: float = 0.0,
        private_diagnostics: bool = False,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        check_rows("FedKT", "public", public)
        require(len(public) > 0, "FedKT", "public", "at least one row", len(public))
        require(num_classes >= 2, "FedKT", "num_classes", "at least 2", num_classes)
        checks.check_level(privacy_level, exchange, vote_trim)
        self.vote_weights = checks.read_weights(vote_weights, privacy_level)
        weighted = self.vote_weights != "none"
        self.class_share = checks.read_share(class_share, num_classes, weighted=weighted)
        self.public = public
        self.num_classes = num_classes
        self.learner_fn = learner_fn
        self.model_name = learner_name
        self.corrected = corrected
        self.count_epsilon = count_epsilon
        splits = 1 if num_splits is None else num_splits
        self.num_splits = checks.check_number(words.NUM_SPLITS, splits, words.MAX_SPLITS)
        self.privacy_level = privacy_level
        self.reply_kind = exchange
        self.student_fns = {learner_name: learner_fn, **(student_fns or {})}
        self.num_queries = count_queries(len(public), num_queries, fraction_query)
        self.exclude_outliers = exclude_outliers
        self.outliers_: tuple[int, ...] = ()
        self.vote_trim, self.private_diagnostics = vote_trim, private_diagnostics
        self.trimmed_: tuple[int, ...] = ()
        if self.vote_weights == "noisy-counts":
            checks.check_counts(count_epsilon, target_epsilon)
        self.privacy = None
        given, rule = (gamma, sigma, target_epsilon), "left out at L0, which adds no noise"
        noisy = privacy_level != "L0" or given == (None, None, None)
        require(noisy, "FedKT", "gamma, sigma and target_epsilon", rule, given)
        if privacy_level != "L0":
            self.privacy = VotePrivacy(
                noise=noise,
                gamma=gamma,
                sigma=sigma,
                target_epsilon=target_epsilon,
                delta=delta,
                threshold=threshold,
                threshold_sigma=threshold_sigma,
                seeded_noise=seeded_noise,
            )
        teachers = self._teachers() if num_teachers is None else num_teachers
        self.num_teachers = checks.check_number(
            words.NUM_TEACHERS, teachers, words.MAX_TEACHERS
        )
        if self.privacy is not None:
            self._check_noise(self.privacy, accepted=accept_noise)
        self._gather()
        self._ledgers: dict[int, Told] = {}
        self.ledger_ = PrivacyLedger(
            "party" if privacy_level == "L1" else "example",
            delta=delta,
            max_epsilon=max_epsilon,
            num_parties=self.num_parties,
            audience=AUDIENCES[privacy_level],
        )

    def _teachers(self) -> int:
        """Return one, or at L2 as many teachers as the noise needs."""
        if self.privacy is None or self.privacy_level != "L2":
            return 1
        return words.teachers_for(self._mechanism(self.privacy).scale)

    def _check_noise(self, privacy: VotePrivacy, *, accepted: bool) -> None:
        """Raise if noise would drown the votes of all parties at L1, of all teachers at L2."""
        at_server = self.privacy_level == "L1"
        votes = self.num_parties * self.num_splits if at_server else self.num_teachers
        checks.check_noise(self._mechanism(privacy), votes, accepted=accepted)

    def _mechanism(self, privacy: VotePrivacy) -> VoteMechanism:
        """Return the server's noise at L1, that of every party at L2."""
        if self.privacy_level == "L1":
            return privacy.mechanism(
                unit="party",
                sensitivity=self.num_splits,
                num_classes=self.num_classes,
                num_queries=self.num_queries,
            )
        return privacy.for_examples(
            self.num_classes,
            self.num_splits * self.num_queries,
            besides=self._count_charges(seeded=False),
        )

    def _count_charges(self, *, seeded: bool) -> Sequence[Entry]:
        """Return what a party's class counts cost."""
        if self.vote_weights == "counts":
            return [(NonPrivateEvent(unit="example", reason=words.EXACT_COUNTS), 1)]
        if self.vote_weights == "none":
            return []
        return words.count_noise(self.count_epsilon).charges(seeded=seeded)

    def party_config(self) -> dict[str, Scalar]:
        """Return s, t, how votes are cast and what identifies the public data."""
        noise = self.privacy.to_config() if self.privacy and self.privacy_level == "L2" else {}
        return {
            words.NUM_SPLITS: self.num_splits,
            words.NUM_TEACHERS: self.num_teachers,
            words.NUM_QUERIES: self.num_queries,
            words.PRIVACY_LEVEL: self.privacy_level,
            words.EXCHANGE: self.reply_kind,
            words.CORRECTED: self.corrected,
            words.VOTE_WEIGHTS: self.vote_weights,
            words.COUNT_EPSILON: self.count_epsilon,
            words.PRIVATE_DIAGNOSTICS: self.private_diagnostics,
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: content_hash(self.public),
            **noise,
        }

    def _gather(self) -> None:
        """Make room for the votes of a round."""
        self._tally = VoteTally(
            (len(self.public), self.num_classes),
            worth=self.num_splits,
            share=self.class_share if self.vote_weights != "none" else None,
            exclude_outliers=self.exclude_outliers,
        )

    def prepare_round(self) -> bool:
        """Begin to count."""
        self._gather()
        return True

    def read(self, knowledge: Knowledge) -> PartyAnswer:
        """Count one party's votes; keep them only if some may be trimmed."""
        told = knowledge.meta.get(keys.PRIVACY_EVENTS)
        training = () if told is None else read_charges(told)
        reader = VoteReader(self.public, self.num_classes, self.num_splits, self.student_fns)
        votes = reader.read(knowledge, weighted=self.vote_weights != "none")
        if self.vote_trim:
            return PartyAnswer(votes, training)
        self._tally.add(votes)
        return PartyAnswer(None, training)

    def aggregate(
        self, replies: Sequence[PartyReply[PartyAnswer]]
    ) -> tuple[ArrayRecord | None, Metrics]:
        """Train the final model on the winners of the votes that `read` has gathered."""
        self._count_without_trimmed(replies)
        tally = self._tally
        self._gather()
        try:
            rows, labels, metrics = self._label(tally, replies)
        except PrivacyBudgetExceeded as error:
            self._fail(str(error))
            return None, {}
        metrics[words.NUM_TRIMMED] = len(self.trimmed_)
        metrics[keys.NUM_UNLABELLED] = len(self.public) - len(rows)
        if not len(rows):
            self._fail("no public row got a label")
            return None, metrics
        rng = derive_rng(self.seed, "server", "final")
        model = self.learner_fn().fit(self.public[rows], labels, rng=rng)
        return self._keep_model(model), metrics

    def _count_without_trimmed(self, replies: Sequence[PartyReply[PartyAnswer]]) -> None:
        """Count the votes that were kept, if any, except those of outliers."""
        answers = [(reply.partition_id, reply.knowledge.votes) for reply in replies]
        kept = [(party, votes) for party, votes in answers if votes is not None]
        labels = [votes.labels for _, votes in kept]
        left_out = least_agreeing(labels, self.num_classes, self.vote_trim)
        self.trimmed_ = tuple(kept[position][0] for position in left_out)
        if self.trimmed_:
            logger.info("%s does not count the votes of parties %s.", self.name, self.trimmed_)
        for position in sorted({*range(len(kept))} - {*left_out}):
            self._tally.add(kept[position][1])

    def _label(
        self, tally: VoteTally, replies: Sequence[PartyReply[PartyAnswer]]
    ) -> tuple[IntArray, IntArray, Metrics]:
        """Return the rows that get a label, their labels and what that costs."""
        if self.privacy_level == "L1" and self.privacy is not None:
            return self._label_with_noise(tally.counts, self.privacy)
        self._enter_releases(self.ledger_.charge_all, replies)
        self.ledger_.check_budget()
        # Which rows have no vote is itself private at L1, and post-processing otherwise.
        rows, labels = tally.winners(derive_rng(self.seed, "server", "ties"))
        self.outliers_, metrics = tally.report()
        return rows, labels, metrics

    def record_releases(self, replies: Sequence[PartyReply[PartyAnswer]]) -> None:
        """Record the students of a failed round; at L1 the server is trusted."""
        if self.privacy is None or self.privacy_level == "L2":
            self._enter_releases(self.ledger_.compose_all, replies)

    def _enter_releases(
        self,
        enter: Callable[[Sequence[Entry]], None],
        replies: Sequence[PartyReply[PartyAnswer]],
    ) -> None:
        """Enter what every party was asked to release in this run."""
        if self.privacy is None:
            self._enter_told(replies)
            return
        num_labels = self.num_splits * self.num_queries
        mechanism, seeded = self._mechanism(self.privacy), self.privacy.seeded_noise
        votes = mechanism.charges(num_labels, seeded=seeded)
        charges = [*votes, *self._count_charges(seeded=seeded)]
        for _ in range(self.num_attempts):
            enter(charges)

    def _enter_told(self, replies: Sequence[PartyReply[PartyAnswer]]) -> None:
        """Enter what the parties say their teachers cost, and the counts beside them."""
        counts = self._count_charges(seeded=False)
        unknown = PartyReply(words.NOBODY, words.NOBODY, "", PartyAnswer(None), {})
        for reply in replies or [unknown]:
            charges = [*(reply.knowledge.training or words.OPEN_VOTES), *counts]
            times = max(1, self.attempts_of(reply.node_id))
            empty = self.ledger_.emptied()
            self.ledger_ = enter_told(self._ledgers, reply, charges, times, empty)

    def _label_with_noise(
        self, counts: IntArray, privacy: VotePrivacy
    ) -> tuple[IntArray, IntArray, Metrics]:
        rows = choose_queries(len(self.public), self.num_queries, self.seed)
        mechanism = self._mechanism(privacy)
        # The worst case is charged before anything is drawn.
        self.ledger_.charge_all(mechanism.charges(len(rows), seeded=privacy.seeded_noise))
        rng = privacy.rng(self.seed, "server")
        drawn = self.once(
            "noisy-labels", lambda: {"labels": mechanism.release(counts[rows], rng).values}
        )
        labels: IntArray = drawn["labels"]
        answered = labels >= 0
        metrics = privacy_metrics(party=self.ledger_, example=self.ledger_)
        if self.private_diagnostics and not privacy.seeded_noise:
            figure = data_dependent_figure(mechanism, counts[rows], privacy.delta)
            figure = min(figure, metrics[keys.EPSILON_PARTY])
            metrics[keys.EPSILON_PARTY_DATA_DEPENDENT] = figure
        return rows[answered], labels[answered], metrics
