"""The server side of FedMD and Cronus; see `fl_strategies.strategies.fedmd`.

Sun, Lyu: Federated Model Distillation with Noise-Free Differential Privacy (IJCAI 2021),
Algorithm 1, after Li, Wang: FedMD (2019).

    round 1   party    a model is trained on private records (with NFDP: on a sample of them,
                       drawn once), and answers about some public rows
              server   combines the answers of all parties to a consensus
    round r   party    digests the consensus of round r - 1 on the public rows it is about,
                       revisits its records and answers about the public rows of round r
              server   combines the answers to the next consensus
    each end  party    digests the consensus of the round and measures its model

Every party keeps its own model, of whatever kind. Which public rows a round is about follows
from seed and round on all sides, so their positions never travel.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Unpack

import numpy as np
import scipy
from flwr.app import ArrayRecord

from fl_strategies._util import Array, FloatArray, IntArray, content_hash, derive_rng
from fl_strategies.aggregation.consensus import (
    MAX_WEIGHT,
    Consensus,
    VoteCounts,
    make_consensus,
    to_probabilities,
)
from fl_strategies.aggregation.pool import (
    Contrast,
    EvidencePool,
    read_class_share,
    read_contrast,
)
from fl_strategies.aggregation.votes import CLASS_COUNTS, agreement, plurality, vote_evidence
from fl_strategies.errors import PrivacyBudgetExceeded, require, require_known
from fl_strategies.learners import Learner, LearnerFactory
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.release import PrivateVariant, ReleaseFacts, ReleasePlan
from fl_strategies.server.replies import PartyReply, aggregate_metrics
from fl_strategies.server.run import State
from fl_strategies.server.strategy import (
    FederationOptions,
    KnowledgeStrategy,
    check_factories,
    public_array,
)
from fl_strategies.strategies.fedmd.options import (
    EVIDENCE_LIMIT,
    CronusOptions,
    FedMDOptions,
    FedMDSettings,
    LocalNoise,
    public_rows,
    release_plan,
)
from fl_strategies.strategies.fedmd.party import ANSWERS, EPSILON_THEOREM, MODEL
from fl_strategies.strategies.fedmd.samples import NUM_RECORDS, Sample, SampleBook
from fl_strategies.strategies.fedmd.student import CONSENSUS, CONSENSUS_ROUND, Lesson, teach
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar, encode_arrays, shown

logger = logging.getLogger("flwr.fl_strategies")


NOISE_SCALE: Final = "noise-scale"


@dataclass(frozen=True, eq=False)
class PartyAnswers:
    """One party's answers of a round, checked, with what accompanies them."""

    answers: Array
    counts: IntArray | None
    contrast: Contrast
    sample: Sample | None


def _known_evidence(answers: Array, counts: FloatArray) -> FloatArray:
    """Return evidence for the classes that a party knows; none for all others."""
    return np.where(counts > 0, answers, 0.0)


def read_counts(arrays: Mapping[str, Array], num_classes: int) -> IntArray:
    """Return a party's class counts; refuse those that cannot be."""
    counts = arrays[CLASS_COUNTS]
    plain = counts.dtype == np.int64 and counts.shape == (num_classes,)
    fits = plain and bool(((counts >= 0) & (counts <= MAX_WEIGHT)).all())
    rule = f"{num_classes} whole numbers (int64) from 0 to {MAX_WEIGHT}"
    found = f"shape {counts.shape} of {counts.dtype} or others"
    require_known(fits, "FedMD", CLASS_COUNTS, rule, found)
    return counts


@dataclass(kw_only=True)
class FedMDState(State):
    """Also the last consensus, which rows it is about, and the samples of all parties."""

    kinds: ClassVar[tuple[type, ...]] = (*State.kinds, SampleBook)

    consensus: Array | None = None
    indices: IntArray | None = None
    samples: SampleBook | None = None


class FedMD(KnowledgeStrategy[PartyAnswers | None]):
    """Parties of any kind learn from each other's predictions on public rows.

    Leaves the party
        In every round its predictions on `num_public` public rows: as labels of
        ceil(log2 C) bits (argmax), or as rows of float32 (logits, softmax). With
        ``consensus="class-weighted"`` or "evidence" also how many records of each class it
        uses; with "evidence" also whether public rows are like its records, one bit.
    Guarantee
        The unit is an example, replaced by another within its party, against the server
        and everybody else; the number of records is public.
        none: no guarantee, epsilon is reported as infinite; but what learners that are
        trained privately (`privacy_events`) spend in each round is composed and reported,
        unless class counts leave as well (class-weighted). With evidence such parties state
        equal counts and correct nothing, so that nothing leaves but what is paid for.
        nfdp: a sample of `num_samples` records, drawn once, is used in the clear, and no
        other record at all. The exact statement is (0, delta), where delta is the chance to
        be drawn, and it does not depend on the number of rounds. Class counts and evidence
        are those of the sample, so it covers them. The theorems' epsilon is
        reported beside it as ``epsilon-theorem``. A sample survives a run, or a party's
        restart, only if the party keeps a journal; without one it is one more sample, and
        the samples of a run, which have random names, are composed by the server.
        ldp: noise on every answer, composed over rows and rounds.
        Not covered: rows that parties only evaluate on; with nfdp and ldp their accuracy
        is therefore kept at home, unless the noise or sample is seeded. Records of one
        person at several parties add up.

    Parameters
    ----------
    public : (num_rows, ...)
        Unlabelled rows; every party holds the same.
    num_classes : int
        Length of the federation's class list.
    learner_fn, learner_name : factory, str
        What `model_` is made of, and what parties call it.
    options : FedMDOptions, optional
    pretrained : mapping of name to array, optional
        A model from which all parties start that call theirs `learner_name`. It
        is sent in round 1; a party that comes later starts by itself.
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    consensus_ : (num_public, num_classes) or (num_public,), or None
        The last consensus: scores, or labels for ``payload="argmax"``.
    indices_ : (num_public,) or None
        Which public rows it is about.
    outliers_ : tuple of int
        Partition ids of parties that were not counted in the last round; their number is
        the metric ``num-outliers``.
    model_ : Learner
        Made when it is first asked for: learned from the last consensus alone. The run's
        real results are the parties' own models.

    Notes
    -----
    Round 1 is the paper's initialisation, so its R rounds are R + 1 here. All that a round
    needs of earlier ones is the last consensus and what each party keeps: a party that was
    away digests the newest consensus when it comes back, and another call of `start` goes
    on where the last one ended.

    Learners that cannot continue, or not be kept as arrays, are fitted anew each time to
    their records together with the public rows of the last consensus and its labels.

    Deviations from the paper: a consensus is digested on the rows that it is about, not on
    newly drawn ones. The sample is uniform over all records, as the theorems ask, not so
    many of each class. Logits have mean zero in each row and are learned by their absolute
    error, as in the code of FedMD; probabilities by cross-entropy.
    """

    name: ClassVar[str] = "fedmd"
    central: ClassVar[bool] = False
    options_type: ClassVar[type[FedMDOptions]] = FedMDOptions
    takes = ("public", "num_classes", "learner_fn", "learner_name", "options", "pretrained")
    identified_by = (
        "settings",
        "options",
        "public",
        "learner_fn",
        "model_name",
        "class_share",
        "start_model",
    )
    usual_rounds: ClassVar[int] = 5
    forms: ClassVar[Mapping[str, Mapping[str, Scalar]]] = {
        "none": {"release": "none", "consensus": "mean"},
        "nfdp": {"release": "nfdp", "consensus": "mean", "num-samples": 1},
        "ldp": {"release": "ldp", "consensus": "mean", "sigma": 1.0},
    }
    private_variants: ClassVar[tuple[PrivateVariant, ...]] = (
        PrivateVariant(
            name="fedmd ldp",
            unit="example",
            decided={"strategy": "fedmd", "release": "ldp"},
            usual={"num-server-rounds": 1},
            note="the server's model, because parties keep the figures of theirs at home",
        ),
        PrivateVariant(
            name="fedmd nfdp",
            unit="example",
            decided={"strategy": "fedmd", "release": "nfdp"},
            sample="num-samples",
        ),
    )
    reply_kind = ANSWERS
    state_type = FedMDState

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        options: FedMDOptions | None = None,
        pretrained: Mapping[str, Array] | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        public = public_array("FedMD", public)
        require(num_classes >= 2, "FedMD", "num_classes", "at least 2", num_classes)
        check_factories("FedMD", learner_fn, num_classes)
        asked = options or self.options_type()
        self.settings = FedMDSettings.settle(
            asked,
            num_rows=len(public),
            num_classes=num_classes,
            num_parties=self.num_parties,
            pretrained=pretrained is not None,
        )
        self.options = self.settings.options
        epochs = self.options.pretrain_epochs
        once = pretrained is None or not epochs
        require(once, "FedMD", "pretrain_epochs", "0 if pretrained is given", epochs)
        self._asked = asked
        self.public = public
        self.learner_fn = learner_fn
        self.model_name = learner_name
        self.outliers_: tuple[int, ...] = ()
        self.class_share = read_class_share(
            "FedMD", self.options.class_share, num_classes, "single-label"
        )
        release = self.options.release
        limit = release.max_epsilon if isinstance(release, LocalNoise) else None
        ledger = self.new_ledger(self.plan, max_epsilon=limit, num_parties=None)
        self._public_hash = content_hash(public)
        self.start_model: Knowledge | None = None
        if pretrained is not None:
            self.warm_start(pretrained)
        samples = None
        if sample := self.options.sample:
            samples = SampleBook(
                sample.num_samples, sample.with_replacement, seeded=sample.seeded_noise
            )
        self.state: FedMDState = FedMDState(ledger=ledger, samples=samples)
        self._gather()

    def warm_start(self, arrays: Mapping[str, Array]) -> None:
        """Let parties with this kind of model begin with these weights; others start anew."""
        given, rule = self.start_model is not None, "empty with pretrained"
        require(not given, "FedMD", "initial_arrays", rule, sorted(arrays))
        self.start_model = Knowledge(MODEL, arrays, {keys.LEARNER: self.model_name})

    @property
    def consensus_(self) -> Array | None:
        """The last consensus."""
        return self.state.consensus

    @property
    def has_result(self) -> bool:
        """Whether there is a consensus, of which a model is made when it is asked for."""
        return self.state.consensus is not None

    @property
    def indices_(self) -> IntArray | None:
        """Which public rows it is about."""
        return self.state.indices

    @property
    def plan(self) -> ReleasePlan:
        """What one round releases."""
        facts = ReleaseFacts(
            num_classes=self.settings.num_classes,
            num_public=len(self.public),
            num_parties=self.num_parties,
        )
        return release_plan(self.name, self.settings, facts, asked=self._asked)

    def _gather(self) -> None:
        """Make room for the answers of a round: evidence, votes or scores."""
        options, shape = self.options, (self.settings.num_public, self.settings.num_classes)
        self._votes = VoteCounts(shape)
        self._pool: EvidencePool | None = None
        self._weighted: VoteCounts | Consensus = VoteCounts(shape)
        if options.sends_evidence:
            self._pool = EvidencePool(
                shape,
                bound=EVIDENCE_LIMIT,
                task="single-label",
                share=self.class_share,
                decode=vote_evidence if options.sends_labels else _known_evidence,
                exclude_outliers=options.exclude_outliers,
            )
        elif not options.sends_labels:
            self._weighted = make_consensus(
                options.consensus,  # type: ignore[arg-type]
                shape,
                bound=self.settings.replies.high,
                capped=options.payload == "logits",
                trim_fraction=options.trim_fraction,
            )

    def party_config(self) -> dict[str, Scalar]:
        """Return the settings, and what identifies the public data."""
        return {
            **self.options.to_config(),
            keys.PUBLIC_HASH: self._public_hash,
            keys.NUM_CLASSES: self.settings.num_classes,
            keys.NUM_PARTIES: self.num_parties,
        }

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return the last consensus, or in round 1 the model to start from."""
        return self.start_model if self.round_ == 1 else self.state.delivery

    @property
    def delivered_learner(self) -> str:
        """None: parties are given a consensus, and learn it by their own models."""
        return ""

    @property
    def most_score_bytes(self) -> int:
        """Bytes of a party's scores, if it sends any; noise is on them before they leave."""
        cells = self.settings.num_public * self.settings.num_classes
        return 0 if self.options.payload == "argmax" else 4 * cells

    def begin_round(self) -> bool:
        """Make room for the answers; ask nobody if they would cost too much."""
        self._gather()
        if self.settings.noise is None:
            return True
        try:
            self.charge()
        except PrivacyBudgetExceeded as error:
            self.fail(str(error).rstrip("."))
            return False
        return True

    def check(self, knowledge: Knowledge) -> PartyAnswers:
        """Return one party's answers, and the class counts and sample they rest on."""
        form, options, samples = self.settings.replies, self.options, self.state.samples
        expected = {*form.names, *([CLASS_COUNTS] if options.sends_counts else [])}
        fits, found = knowledge.arrays.keys() == expected, shown(sorted(knowledge.arrays))
        require_known(fits, "FedMD", "arrays", f"named {sorted(expected)}", found)
        answers = form.decode(knowledge.arrays)
        counts: IntArray | None = None
        if options.sends_counts:
            counts = read_counts(knowledge.arrays, self.settings.num_classes)
        contrast: Contrast = "none"
        if options.sends_evidence and counts is not None:
            some = bool(counts.any())
            require_known(some, "FedMD", CLASS_COUNTS, "above 0 for a class", "none")
            contrast = read_contrast("FedMD", knowledge.meta)
        sample = None if samples is None else samples.check(knowledge.meta)
        return PartyAnswers(answers, counts, contrast, sample)

    def add(self, reply: PartyReply[PartyAnswers | None]) -> None:
        """Add one party's answers to the others; nothing else is kept."""
        sent, samples, party = reply.knowledge, self.state.samples, reply.partition_id
        if sent is None:
            return
        if samples is not None and sent.sample is not None:
            samples.add(party, sent.sample, num_attempts=self.run.num_attempts)
        answers = sent.answers
        self._votes.add(answers if answers.ndim == 1 else answers.argmax(axis=1))
        if self._pool is None:
            self._weighted.add(answers, sent.counts)
        else:
            if self.options.sends_labels:
                answers = answers.astype(np.min_scalar_type(self.settings.num_classes))
            counts = np.asarray(sent.counts, np.float64)
            self._pool.add(answers, counts, sent.contrast, party)
        super().add(replace(reply, knowledge=None))

    def _combined_answers(self) -> tuple[Array, Metrics]:
        """Return the consensus, and how many parties were not counted, or not in full."""
        labels = self.options.sends_labels
        if self._pool is not None:
            scores = self._pool.result()
            self.outliers_ = self._pool.outliers
            shares = scores.argmax(axis=1) if labels else scipy.special.softmax(scores, axis=1)
            return np.asarray(shares), self._pool.report("FedMD")
        if num_capped := self._weighted.num_capped:
            logger.warning(
                "FedMD counts %s claims of parties for less, which are far from the others'.",
                num_capped,
            )
        metrics: Metrics = {keys.NUM_CAPPED: num_capped}
        if isinstance(self._weighted, VoteCounts):
            weighted, plain = self._weighted.counts, self._votes.counts
            # Where only parties vote that have no record of the class, all count the same.
            votes = np.where(weighted.any(axis=1, keepdims=True), weighted, plain)
            ties = derive_rng(self.seed, "server", "ties", self.round_)
            return plurality(votes, ties), metrics
        scores = self._weighted.result()
        scored = self.options.payload == "softmax"
        return to_probabilities(scores) if scored else scores, metrics

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Make the consensus of the round."""
        answers, metrics = self._combined_answers()
        arrays = self.settings.consensus.encode(answers)
        self.state.consensus = self.settings.consensus.decode(arrays)
        self.state.indices = public_rows(
            self.seed, self.round_, len(self.public), self.settings.num_public
        )
        self.state.delivery = Knowledge(CONSENSUS, arrays, {CONSENSUS_ROUND: self.round_})
        self._model = None
        metrics = {keys.VOTE_AGREEMENT: agreement(self._votes.counts), **metrics}
        self._gather()
        return encode_arrays(arrays), {**metrics, **self._privacy()}

    def enter_reported(self, replies: Sequence[PartyReply[PartyAnswers | None]]) -> None:
        """Let the ledger state the party whose samples promise least."""
        if self.state.samples is None or not replies:
            return
        worst = self.state.samples.worst()
        self.state.ledger = PrivacyLedger(
            "example",
            delta=worst.delta if worst.delta < 1 else self.options.delta,
            audience=self.plan.audience,
            num_records=worst.num_records,
        )
        self.ledger_.charge_all(worst.charges)

    def _privacy(self) -> Metrics:
        """Return what this round has cost, as far as parties do not say it themselves."""
        samples, replies = self.state.samples, self.replies
        if self.settings.noise is not None:
            return {NOISE_SCALE: self.settings.noise.scale}
        if samples is None:
            return {}
        own = {
            keys.EPSILON_EXAMPLE: self.ledger_.get_epsilon(),
            keys.DELTA_EXAMPLE: samples.worst().delta,
        }
        largest = aggregate_metrics([own, *(reply.metrics for reply in replies)])
        # Samples are entered under what a party calls itself: never too few of them.
        own_names = [self.members[reply.node_id][0] for reply in replies]
        theorem = [
            reply.metrics.get(EPSILON_THEOREM, np.inf) * len(samples.records[own_name])
            for reply, own_name in zip(replies, own_names, strict=True)
        ]
        return {
            NUM_RECORDS: samples.fewest_records(own_names),
            EPSILON_THEOREM: max(theorem),
            **{name: largest[name] for name in own},
        }

    @property
    def model_(self) -> Learner:
        """A model that has learned the last consensus, made when it is first asked for."""
        if self._model is None and self.consensus_ is not None and self.indices_ is not None:
            lesson = Lesson(self.round_, self.indices_, self.consensus_)
            rng = derive_rng(self.seed, "server", "final")
            x = self.public[self.indices_]
            self._model = teach(self.learner_fn(), x, lesson, self.options.lesson, rng)
        return super().model_


class Cronus(FedMD):
    """Parties of any kind learn from the robust mean of each other's scores.

    Chang, Shejwalkar, Shokri, Houmansadr: Cronus: Robust and Heterogeneous Collaborative
    Learning with Black-Box Knowledge Transfer (2019).

        round 1   party    trains on its records and sends class scores of the public rows
                  server   takes a robust mean of each row's scores
        round r   party    learns the means and its records, and sends new scores

    With at most a share `trim_fraction` of liars, and at most a quarter, the robust mean of a
    row is within O(sqrt(share)) deviations of the honest scores from their mean; see
    `aggregation.consensus`. It needs more than a handful of parties: with three, one of
    them is filtered wherever it stands alone. Where honest parties know different classes,
    those that know a row's class may be few, and are then filtered as liars would be.

    Leaves the party
        Class scores of the public rows in every round, float32.
    Guarantee
        None by default; with `release` those of `FedMD`.

    Notes
    -----
    All else is `FedMD` (``consensus="robust-mean"``), its privacy options included.
    Deviations from the paper: a party's passes over public rows come before those over its
    records, not in the same shuffled batches; the filter takes weight away in proportion
    instead of points beyond a drawn threshold, so that it draws nothing; and it finds by
    itself estimates the usual deviation, by the median distance; the paper is given it.
    """

    name: ClassVar[str] = "cronus"
    options_type = CronusOptions
    private_variants = ()
