"""FedMD: federated model distillation, with or without noise-free privacy, in many rounds.

Sun, Lyu: Federated Model Distillation with Noise-Free Differential Privacy (IJCAI 2021),
Algorithm 1, after Li, Wang: FedMD (2019).

    round 1   party    a model is trained on private records (with NFDP: on a sample of them,
                       drawn once), and says what it thinks of some public rows
              server   combines the answers of all parties to a consensus
    round r   party    digests the consensus of round r - 1 on the public rows it is about,
                       revisits its records and answers about the public rows of round r
              server   combines the answers to the next consensus
    each end  party    digests the consensus of the round and measures its model

Every party keeps its own model, of whatever kind. Which public rows a round is about follows
from seed and round on all sides, so their positions never travel.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.aggregation.consensus import ROBUST_RULES, VoteCounts, check_trim
from fl_strategies.aggregation.evidence_pool import ClassShare, read_class_share
from fl_strategies.aggregation.metrics import aggregate_metrics
from fl_strategies.aggregation.voting import agreement
from fl_strategies.arrays import Array, IntArray, content_hash
from fl_strategies.core.accounting import AUDIENCES
from fl_strategies.core.party import check_rows
from fl_strategies.core.protocols import Learner, LearnerFactory
from fl_strategies.core.strategy import FederationOptions, KnowledgeStrategy
from fl_strategies.exceptions import KnowledgeMismatch, PrivacyBudgetExceeded, require
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.strength import require_audible
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.fedmd.gathering import gathering, read_contrast, read_counts
from fl_strategies.strategies.fedmd.party import (
    ANSWERS,
    CLASS_COUNTS,
    CONSENSUS,
    CONSENSUS_ROUND,
    EPSILON_THEOREM,
    EXACT_COUNTS,
    MODEL,
    UNPROTECTED,
)
from fl_strategies.strategies.fedmd.release import AnswerNoiseKind, Payload, public_rows
from fl_strategies.strategies.fedmd.samples import NUM_RECORDS, SampleBook
from fl_strategies.strategies.fedmd.settings import (
    RULES,
    Counting,
    FedMDSettings,
    Release,
    Rule,
    drowned_answers,
    make_noise,
    noise_template,
)
from fl_strategies.strategies.fedmd.student import Epochs, Lesson, teach
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    Knowledge,
    Metrics,
    Scalar,
    encode_arrays,
    party_of,
    shown,
)
from fl_strategies.wire.replies import PartyReply

NOISE_SCALE: Final = "noise-scale"
_USUAL_NUM_PUBLIC: Final = 5000


class FedMD(KnowledgeStrategy[None]):
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
        Not covered: rows that parties only evaluate on; with ldp their accuracy is
        therefore kept at home, unless the noise is seeded. Records of one person at
        several parties add up.

    Parameters
    ----------
    public : (num_rows, ...)
        Unlabelled rows; every party holds the same.
    num_classes : int
        Length of the federation's class list.
    learner_fn, learner_name : factory, str
        What `model_` is made of, and what parties call it.
    release : "none", "nfdp" or "ldp"
    payload : "logits", "softmax" or "argmax"
        The last is the default: smallest, recommended by the paper, and the only one that
        does not compare scores of models that differ in kind.
    num_public : int, optional
        Public rows of a round, drawn anew each time; by default all, but at most the
        paper's 5000.
    epochs_initial, epochs_digest, epochs_revisit : int
        The paper's T1, T2 and T3.
    num_samples, with_replacement : int, bool
        With nfdp: the sample.
    consensus : "evidence", "mean", "class-weighted", "median" or "trimmed-mean"
        How answers are combined; by default "evidence" with ``release="none"`` and without
        pre-training, otherwise "mean". "evidence": parties take the class shares of what
        their models were trained on out of their answers before they send them; see
        `aggregation.evidence`. Logits and softmax are then the same: evidence goes up,
        probabilities come back. The others: see `aggregation.consensus`. Labels are
        counted, with equal or with class weights, and the majority wins.
    class_share : "auto", "pooled", "none" or numbers
        With evidence: which class shares the public rows have; see `EvidencePool`.
    exclude_outliers : bool (default: True)
        With evidence: parties that contradict most others are not counted in a round, for
        which their answers are kept until all are there; see `aggregation.outliers`.
    trim_fraction : float
        Share of parties that the trimmed mean leaves out at either end.
    noise, gamma, sigma, target_epsilon, clipping_norm
        With ldp: "gaussian" noise of deviation `sigma`, or "laplace" noise of scale
        1 / `gamma`, or for labels also "gumbel" noise, which is randomised response; or
        the least noise for `target_epsilon` in `num_rounds_planned` rounds. Logits must be
        clipped, to `clipping_norm`.
    num_rounds_planned : int, optional
        With `target_epsilon`. Further rounds are possible and cost more than the target.
    delta : float
    max_epsilon : float, optional
        With ldp: the run ends before a round that would exceed it.
    seeded_noise : bool (default: False)
        Draw noise and samples from the seed, for repeatable simulations. Epsilon is then
        infinite.
    accept_noise : bool (default: False)
        With ldp: go on although the noise is stronger than the consensus of all parties;
        refused otherwise, because epsilon would be spent on answers that are mostly noise.
    pretrain_epochs : int
        Passes over all public rows, with the labels that parties hold (`Party.public_y`),
        before a party's first training.
    pretrained : mapping of name to array, optional
        Instead: a model from which all parties start that call theirs `learner_name`. It
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

    Learners that cannot go on, or not be kept as arrays, are fitted anew each time to
    their records together with the public rows of the last consensus and its labels.

    Deviations from the paper: a consensus is digested on the rows that it is about, not on
    newly drawn ones. The sample is uniform over all records, as the theorems ask, not so
    many of each class. Logits have mean zero in each row and are learned by their absolute
    error, as in the code of FedMD; probabilities by cross-entropy.
    """

    name: ClassVar[str] = "fedmd"
    central: ClassVar[bool] = False
    reply_kind = ANSWERS
    kept = (*KnowledgeStrategy.kept, "consensus_", "indices_", "_samples")
    kept_kinds = (*KnowledgeStrategy.kept_kinds, SampleBook)

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        release: Release = "none",
        payload: Payload = "argmax",
        num_public: int | None = None,
        epochs_initial: int = 20,
        epochs_digest: int = 2,
        epochs_revisit: int = 1,
        num_samples: int | None = None,
        with_replacement: bool = True,
        consensus: Rule | None = None,
        class_share: ClassShare = "auto",
        exclude_outliers: bool = True,
        trim_fraction: float = 0.2,
        noise: AnswerNoiseKind = "gaussian",
        gamma: float | None = None,
        sigma: float | None = None,
        target_epsilon: float | None = None,
        clipping_norm: float | None = None,
        num_rounds_planned: int | None = None,
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        seeded_noise: bool = False,
        accept_noise: bool = False,
        pretrain_epochs: int = 0,
        pretrained: Mapping[str, Array] | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        check_rows("FedMD", "public", public)
        require(num_classes >= 2, "FedMD", "num_classes", "at least 2", num_classes)
        asked = min(len(public), _USUAL_NUM_PUBLIC) if num_public is None else num_public
        rule = f"from 1 to {len(public)}, the public rows"
        require(1 <= asked <= len(public), "FedMD", "num_public", rule, asked)
        pretraining = pretrain_epochs > 0 or pretrained is not None
        usual: Rule = "evidence" if release == "none" and not pretraining else "mean"
        self.rule: Rule = consensus or usual
        _check_rule(self.rule, payload, pretraining=pretraining)
        check_trim("FedMD", trim_fraction)
        once = pretrained is None or not pretrain_epochs
        require(once, "FedMD", "pretrain_epochs", "0 if pretrained is given", pretrain_epochs)
        limited = max_epsilon is None or release == "ldp"
        require(limited, "FedMD", "max_epsilon", "left out unless release='ldp'", max_epsilon)
        self.settings = FedMDSettings(
            release=release,
            payload=payload,
            num_public=asked,
            num_classes=num_classes,
            epochs=Epochs(
                pretrain=pretrain_epochs,
                initial=epochs_initial,
                digest=epochs_digest,
                revisit=epochs_revisit,
            ),
            num_samples=num_samples,
            with_replacement=with_replacement,
            noise=make_noise(
                noise_template(release, payload, noise, num_classes, clipping_norm),
                gamma=gamma,
                sigma=sigma,
                target_epsilon=target_epsilon,
                num_rounds_planned=num_rounds_planned,
                num_public=asked,
                delta=delta,
            ),
            counting=_counting(self.rule),
            delta=delta,
            seeded_noise=seeded_noise,
        )
        said = drowned_answers(self.settings.noise, self.num_parties)
        require_audible("FedMD", said, accepted=accept_noise)
        self.public = public
        self.learner_fn = learner_fn
        self.model_name = learner_name
        self.trim_fraction, self.exclude_outliers = trim_fraction, exclude_outliers
        self.outliers_: tuple[int, ...] = ()
        self.class_share = read_class_share("FedMD", class_share, num_classes, "single-label")
        self.consensus_: Array | None = None
        self.indices_: IntArray | None = None
        self.ledger_ = PrivacyLedger(
            "example",
            delta=delta,
            max_epsilon=max_epsilon,
            audience=AUDIENCES["L0" if release == "none" else "L2"],
        )
        self._public_hash = content_hash(public)
        self.start_model: Knowledge | None = None
        if pretrained is not None:
            self.start_model = Knowledge(MODEL, pretrained, {keys.LEARNER: learner_name})
        self._samples: SampleBook | None = None
        if num_samples is not None:
            self._samples = SampleBook(num_samples, with_replacement, seeded=seeded_noise)
        self._gather()

    def _gather(self) -> None:
        """Make room for the answers of a round."""
        shape = self.settings.num_public, self.settings.num_classes
        self._votes = VoteCounts(shape)
        self._gathered = gathering(
            self.settings,
            self.rule,
            trim_fraction=self.trim_fraction,
            share=self.class_share,
            exclude_outliers=self.exclude_outliers,
        )

    def party_config(self) -> dict[str, Scalar]:
        """Return the settings, and what identifies the public data."""
        own: dict[str, Scalar] = {keys.PUBLIC_HASH: self._public_hash}
        return {**self.settings.to_config(), **own, keys.NUM_PARTIES: self.num_parties}

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return the last consensus, or in round 1 the model to start from."""
        return self.start_model if self.round_ == 1 else self._delivery

    def prepare_round(self) -> bool:
        """Make room for the answers; ask nobody if they would cost too much."""
        self._gather()
        noise, settings = self.settings.noise, self.settings
        if noise is None:
            return True
        charges = noise.charges(settings.num_public, seeded=settings.seeded_noise)
        try:
            for _ in range(self.num_attempts):
                self.ledger_.charge_all(charges)
        except PrivacyBudgetExceeded as error:
            self._fail(str(error).rstrip("."))
            return False
        return True

    def read(self, knowledge: Knowledge) -> None:
        """Check one party's answers and add them to the others; nothing else is kept."""
        expected = {*self.settings.replies.names}
        if self.settings.counted:
            expected.add(CLASS_COUNTS)
        if set(knowledge.arrays) != expected:
            raise KnowledgeMismatch(
                f"FedMD: arrays must be named {sorted(expected)}, "
                f"got {shown(sorted(knowledge.arrays))}."
            )
        if self._samples is not None:
            self._samples.read(knowledge.meta, num_attempts=self.num_attempts)
        answers = self.settings.replies.decode(knowledge.arrays)
        counts = read_counts(knowledge.arrays, self.settings)
        contrast = read_contrast(knowledge.meta, self.settings)
        self._votes.add(answers if answers.ndim == 1 else answers.argmax(axis=1))
        self._gathered.add(answers, counts, contrast, party_of(knowledge))

    def aggregate(
        self, replies: Sequence[PartyReply[None]]
    ) -> tuple[ArrayRecord | None, Metrics]:
        """Make the consensus of the round from what `read` has gathered."""
        arrays = self.settings.consensus.encode(
            self._gathered.result(derive_rng(self.seed, "server", "ties", self.round_))
        )
        self.consensus_ = self.settings.consensus.decode(arrays)
        self.indices_ = public_rows(
            self.seed, self.round_, len(self.public), self.settings.num_public
        )
        self._delivery = Knowledge(CONSENSUS, arrays, {CONSENSUS_ROUND: self.round_})
        self._model = None
        metrics = {
            keys.VOTE_AGREEMENT: agreement(self._votes.counts),
            **self._gathered.report(),
        }
        self.outliers_ = self._gathered.outliers
        self._gather()
        return encode_arrays(arrays), {**metrics, **self._privacy(replies)}

    def record_releases(self, replies: Sequence[PartyReply[None]]) -> None:
        """Record the answers of a round that came to nothing."""
        if replies:
            self._privacy(replies)

    def _privacy(self, replies: Sequence[PartyReply[None]]) -> Metrics:
        """Record what left the parties in this round, where that was not done before."""
        settings = self.settings
        if settings.noise is not None:
            return {NOISE_SCALE: settings.noise.scale}
        if self._samples is None:
            reasons = [UNPROTECTED, *([EXACT_COUNTS] if settings.counted else [])]
            for reason in reasons:
                self.ledger_.charge(NonPrivateEvent(unit="example", reason=reason))
            return {}
        return self._privacy_of_samples(self._samples, replies)

    def _privacy_of_samples(
        self, samples: SampleBook, replies: Sequence[PartyReply[None]]
    ) -> Metrics:
        """Let ledger and metrics state the party whose samples promise least."""
        worst = samples.worst()
        self.ledger_ = PrivacyLedger(
            "example",
            delta=worst.delta if worst.delta < 1 else self.settings.delta,
            audience=AUDIENCES["L2"],
            num_records=worst.num_records,
        )
        self.ledger_.charge_all(worst.charges)
        own = {
            keys.EPSILON_EXAMPLE: self.ledger_.get_epsilon(),
            keys.DELTA_EXAMPLE: worst.delta,
        }
        largest = aggregate_metrics([own, *(reply.metrics for reply in replies)])
        # Samples are entered under what a party calls itself: never too few of them.
        own_names = [self._who_is_who[reply.node_id][0] for reply in replies]
        theorem = [
            reply.metrics.get(EPSILON_THEOREM, np.inf) * samples.count(own_name)
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
            self._model = teach(self.learner_fn(), x, lesson, self.settings.lesson, rng)
        return super().model_


def _counting(rule: Rule) -> Counting:
    """Return what a rule needs class counts for."""
    return rule if rule in ("class-weighted", "evidence") else "none"


def _check_rule(rule: Rule, payload: Payload, *, pretraining: bool) -> None:
    require(rule in RULES, "FedMD", "consensus", f"one of {', '.join(RULES)}", rule)
    fits = payload != "argmax" or rule not in ROBUST_RULES
    needed = "mean or class-weighted for labels, whose majority is robust by itself"
    require(fits, "FedMD", "consensus", needed, rule)
    fits = rule != "evidence" or not pretraining
    needed = "another one with pre-training, which teaches classes that no record counts for"
    require(fits, "FedMD", "consensus", needed, rule)
