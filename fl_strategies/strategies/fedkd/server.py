"""The server's half of FedKD; see `fl_strategies.strategies.fedkd`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.aggregation.class_weights import (
    believed_counts,
    class_weights,
    heard_parts,
    noisy_weighted_mean,
    read_counts,
    weighted_mean,
)
from fl_strategies.aggregation.consensus import ROBUST_RULES, ConsensusRule, RobustConsensus
from fl_strategies.aggregation.evidence_pool import (
    ClassShare,
    EvidencePool,
    read_class_share,
)
from fl_strategies.arrays import Array, FloatArray, content_hash
from fl_strategies.core.accounting import privacy_metrics, unprotected
from fl_strategies.core.party import check_rows
from fl_strategies.core.protocols import (
    LearnerFactory,
    SoftLearner,
    link_scores,
    require_soft,
)
from fl_strategies.core.strategy import FederationOptions, KnowledgeStrategy, logger
from fl_strategies.core.tasks import Task, check_task
from fl_strategies.exceptions import (
    InvalidParameter,
    PrivacyBudgetExceeded,
    require,
)
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import LaplaceCounts
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.privacy.scores import ScoreMechanism, ScoreNoise, ScorePrivacy
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.fedkd import words
from fl_strategies.strategies.fedkd.augmentation import augmented, check_augmentation
from fl_strategies.strategies.fedkd.checks import (
    check_consensus,
    check_evidence,
    make_recipe,
    read_contrast,
    read_scale,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar, party_of
from fl_strategies.wire.quantization import Rounding, ScoreFormat, score_format
from fl_strategies.wire.replies import PartyReply

SHARPNESS: Final = 3.0
"""The mean of many careful answers is too careful: a consensus that is right on nine rows of
ten gives them seven tenths. How it was chosen: docs/consensus.md."""


@dataclass(frozen=True, eq=False)
class PartyScores:
    """What is kept of one party's reply until all are there.

    Levels or float32 logits (p * n, C), and class counts or None; neither of evidence, which
    is summed as it comes.
    """

    values: Array | None
    counts: FloatArray | None


class FedKD(KnowledgeStrategy[PartyScores | float]):
    """One round of distillation from the parties' logits on public rows.

    Leaves the party
        Its model's evidence, or logits, on the public rows at S levels (one byte each), how
        many records of each class it has unless weights are uniform, and with `contrast`
        whether the public rows are like its records. With ``scale="max"`` also its largest
        logit.
    Guarantee
        None without noise, with exact class counts, or with ``scale="max"``: epsilon is
        infinite and the ledger says why. With a public clip bound B and noise, the final
        model protects a party (``weights="uniform"``) or an example
        (``weights="noisy-counts"``), replaced by another, against everybody but the server,
        which sees the logits and is trusted to add the noise. The price is high, because
        all logits of all public rows are released: see `fl_strategies.privacy.scores`.
        Parties that train with DP-SGD protect their examples against the server too: their
        logits, and with ``weights="noisy-evidence"`` their evidence, follow from the model
        and from noisy counts. They make no contrast, which would be trained without noise.
        Not covered: rows that parties only evaluate on, the number of records, settings
        chosen on private data; and records of one person at several parties add up.

    Parameters
    ----------
    public : (num_public, ...)
        Rows that every party holds, also from another domain.
    num_classes : int
        Length of the federation's class list; in multi-label learning the number of labels.
    learner_fn : factory
        Makes the final model, which must be able to learn from scores. Its batch size,
        learning rate and augmentation of the rows are the learner's own settings.
    learner_name : str
        What parties call the final model when it is delivered to them.
    task : "single-label" or "multi-label"
    num_levels : int or None (default: 200)
        The paper's S; None sends float32 logits.
    rounding : "nearest" or "stochastic"
        See `Quantizer`.
    scale : "clip" or "max"
        ``"clip"``: logits are cut at `clip`, agreed before, and one round is enough.
        ``"max"``: the paper's largest logit of all parties, asked for in a first round;
        the scores follow in a second, so run two rounds.
    clip : float
    weights : "evidence", "noisy-evidence", "counts", "noisy-counts" or "uniform"
        ``"evidence"``: parties send what their models say beyond the class shares of their
        records, and are weighted by how well they can know a class: see
        `aggregation.evidence`. ``"counts"``: logits by Eq. 1 (the paper's), where a class
        that nobody holds is weighted uniformly. ``"uniform"``: logits by 1 / K. With
        ``"noisy-"`` the class counts cost an example `count_epsilon`.
    count_epsilon : float
    contrast : bool (default: True)
        With evidence: parties also learn to tell their records from public rows, which takes
        two more fits of at most 3,000 rows each: see `core.contrast`.
    class_share : "auto", "pooled", "none" or numbers
        With evidence: the class shares of public rows; see `EvidencePool`.
    exclude_outliers : bool (default: True)
        With evidence: parties that contradict most others are not counted, for which their
        scores are kept until all are there; see `aggregation.outliers`.
    consensus, trim_fraction : "mean", "median" or "trimmed-mean", float
        How scores are combined. The last two, of `RobustConsensus`, hold off parties that send
        wrong ones; they need ``weights="uniform"`` and no noise, which is made for means.
    noise, gamma, sigma, target_epsilon, delta, seeded_noise
        See `ScorePrivacy`. All left out: no noise. The paper's noise is Lap(1 / gamma).
    max_epsilon : float, optional
        The server refuses to make a model if epsilon would exceed it.
    loss : "kl", "l1", "l2" or "mse"
        How far the student's logits are from the scores. The authors' code uses ``"l1"``.
    temperature : float, optional
        For ``"kl"`` (default there: 1): both sides are divided by it before the softmax, or
        the sigmoid of multi-label learning (Eq. 5 and 6). Left out for the norms, where it
        is infinite (Eq. 7).
    distill_epochs : int, optional
        Passes over the public rows; the learner's own number if left out.
    num_predictions : int
        How often each party predicts every public row, each time but the first changed by
        `augmentation`. All predictions travel and are learned from (Table 2 of the paper).
    augmentation : "none", "crop" or "crop-flip"
    public_labels : bool
        Parties also train on the public rows, whose labels they hold (Table 4).
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    outliers_ : tuple of int
        Partition ids of parties that were not counted; their number is ``num-outliers``.

    Notes
    -----
    In single-label learning a party's logits are shifted to mean 0 in every row before they
    are cut: softmax does not see the shift, and the log-probabilities of trees come to the
    scale of a network's logits. Log-probabilities are cut at the logarithm of 1e-7.

    Deviations from the authors' code: there noise is drawn anew in every step of the
    distillation, so it averages out; the scale is that of a batch; a class that nobody
    holds gives NaN; and the model is chosen on test data.
    """

    name: ClassVar[str] = "fedkd"
    final_learner_needs = (SoftLearner,)
    kept = (*KnowledgeStrategy.kept, "bound_", "last_round")

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        task: Task = "single-label",
        num_levels: int | None = 200,
        rounding: Rounding = "nearest",
        scale: words.Scale = "clip",
        clip: float = 10.0,
        weights: words.Weights = "evidence",
        count_epsilon: float = 1.0,
        contrast: bool = True,
        class_share: ClassShare = "auto",
        exclude_outliers: bool = True,
        consensus: ConsensusRule = "mean",
        trim_fraction: float = 0.2,
        noise: ScoreNoise = "laplace",
        gamma: float | None = None,
        sigma: float | None = None,
        target_epsilon: float | None = None,
        delta: float = DEFAULT_DELTA,
        seeded_noise: bool = False,
        max_epsilon: float | None = None,
        loss: words.DistillationLoss = "kl",
        temperature: float | None = None,
        distill_epochs: int | None = None,
        num_predictions: int = 1,
        augmentation: str = "none",
        public_labels: bool = False,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        check_rows("FedKD", "public", public)
        require(len(public) > 0, "FedKD", "public", "at least one row", len(public))
        check_task("FedKD", task, num_classes)
        require(task != "regression", "FedKD", "task", "a classification", task)
        for name, value, known in (
            ("scale", scale, words.SCALES),
            ("weights", weights, words.WEIGHTS),
            ("loss", loss, words.LOSSES),
        ):
            require(value in known, "FedKD", name, f"one of {', '.join(known)}", value)
        require(
            0 < clip <= words.MAX_BOUND,
            "FedKD",
            "clip",
            f"above 0, at most {words.MAX_BOUND}",
            clip,
        )
        check_augmentation("FedKD", augmentation, public, num_predictions)
        noisy = (gamma, sigma, target_epsilon) != (None, None, None)
        check_consensus(consensus, trim_fraction, plain=weights == "uniform" and not noisy)
        if weights in words.EVIDENCE:
            check_evidence(scale, noisy=noisy)
        require_soft("FedKD", learner_fn())
        self.public = public
        self.num_classes = num_classes
        self.learner_fn = learner_fn
        self.model_name = learner_name
        self.task = task
        self.num_levels = num_levels
        self.rounding = rounding
        self.scale = scale
        self.clip = clip
        self.weights = weights
        self.count_epsilon = count_epsilon
        self.contrast = contrast and not public_labels
        self.class_share = read_class_share("FedKD", class_share, num_classes, task)
        self.exclude_outliers = exclude_outliers
        self.outliers_: tuple[int, ...] = ()
        self.consensus, self.trim_fraction = consensus, trim_fraction
        self.num_predictions = num_predictions
        self.augmentation = augmentation
        self.public_labels = public_labels
        self.bound_ = clip if scale == "clip" else math.nan
        self.last_round = 1 if scale == "clip" else None
        self.recipe = make_recipe(task, loss, temperature, distill_epochs)
        score_format(num_levels, 1.0, rounding)
        if weights in words.NOISY:
            self._count_mechanism()
            left = target_epsilon is None or count_epsilon < target_epsilon
            require(left, "FedKD", "count_epsilon", "below target_epsilon", count_epsilon)
        self._gather()
        self.privacy = None
        if noisy:
            self.privacy = ScorePrivacy(
                noise=noise,
                gamma=gamma,
                sigma=sigma,
                target_epsilon=target_epsilon,
                delta=delta,
                seeded_noise=seeded_noise,
            )
        self.ledger_ = PrivacyLedger(
            "party" if weights == "uniform" else "example",
            delta=delta,
            max_epsilon=max_epsilon,
            num_parties=self.num_parties,
            audience=words.AUDIENCE,
        )

    @property
    def _form(self) -> ScoreFormat:
        return score_format(self.num_levels, self.bound_, self.rounding)

    def _count_mechanism(self) -> LaplaceCounts:
        return words.count_mechanism(
            self.task, self.num_classes, self.count_epsilon, self.weights
        )

    def _gather(self) -> None:
        """Make room for the evidence of a round."""
        shape = (self.num_predictions * len(self.public), self.num_classes)
        self._pool = EvidencePool(
            shape,
            bound=self.clip,
            task=self.task,
            share=self.class_share,
            decode=lambda values, _: self._form.decode(values),
            exclude_outliers=self.exclude_outliers,
        )

    def prepare_round(self) -> bool:
        """Begin to add up evidence."""
        self._gather()
        return True

    @property
    def reply_kind(self) -> str:  # type: ignore[override]
        """The scale, while it is not known; then the scores."""
        return "scale" if math.isnan(self.bound_) else "scores"

    def party_config(self) -> dict[str, Scalar]:
        """Return how logits are to be sent and what identifies the public data."""
        seeded = self.privacy is not None and self.privacy.seeded_noise
        counts = {words.COUNT_EPSILON: self.count_epsilon, words.SEEDED_NOISE: seeded}
        bound = {} if math.isnan(self.bound_) else {words.BOUND: self.bound_}
        return {
            words.REQUEST: self.reply_kind,
            words.TASK: self.task,
            words.NUM_LEVELS: self.num_levels or 0,
            words.ROUNDING: self.rounding,
            words.WEIGHTING: self.weights,
            words.NUM_PREDICTIONS: self.num_predictions,
            words.AUGMENTATION: self.augmentation,
            words.PUBLIC_LABELS: self.public_labels,
            words.CONTRAST: self.contrast,
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: content_hash(self.public),
            **counts,
            **bound,
        }

    def read(self, knowledge: Knowledge) -> PartyScores | float:
        """Return one party's largest logit, or its scores and class counts; sum evidence."""
        if self.reply_kind == "scale":
            return read_scale(knowledge)
        shape = (self.num_predictions * len(self.public), self.num_classes)
        values = self._form.from_wire(knowledge.arrays.get("scores", np.empty(0)), shape)
        if self.weights == "uniform":
            return PartyScores(values, None)
        if self.weights not in words.EVIDENCE:
            return PartyScores(values, read_counts(knowledge.arrays, self.num_classes))
        both = (2,) if self.task == "multi-label" else ()
        counts = read_counts(knowledge.arrays, *both, self.num_classes)
        self._pool.add(values, counts, read_contrast(knowledge), party_of(knowledge))
        return PartyScores(None, None)

    def aggregate(
        self, replies: Sequence[PartyReply[PartyScores | float]]
    ) -> tuple[ArrayRecord | None, Metrics]:
        """Combine the parties' scores and distil the final model from them."""
        scales = [r.knowledge for r in replies if isinstance(r.knowledge, float)]
        sent = [r.knowledge for r in replies if isinstance(r.knowledge, PartyScores)]
        try:
            if scales:
                return None, self._settle_scale(scales)
            scores, metrics = self._ensemble(sent)
        except (PrivacyBudgetExceeded, InvalidParameter) as error:
            self._fail(str(error))
            return None, {}
        if self.scale == "max":
            self.last_round = 0  # the scores are here, whatever round it was
        rows = [
            augmented(self.public, self.augmentation, self.seed, number)
            for number in range(self.num_predictions)
        ]
        student = require_soft("FedKD", self.learner_fn())
        model = student.distill(
            np.concatenate(rows),
            link_scores(scores, self.recipe),
            rng=derive_rng(self.seed, "server", "final"),
            recipe=self.recipe,
        )
        return self._keep_model(model), metrics

    def _settle_scale(self, scales: Sequence[float]) -> Metrics:
        """Take the largest logit, but no more than some multiple of the middle one."""
        self._charge_unprotected(words.PRIVATE_SCALE)
        self.bound_ = min(max(scales), words.MAX_TIMES_MEDIAN * float(np.median(scales)))
        self._failure = "the scale is known and the scores are not; run a second round"
        return {words.BOUND: self.bound_}

    def _ensemble(self, sent: Sequence[PartyScores]) -> tuple[FloatArray, Metrics]:
        """Return the consensus of all parties, after recording what it costs."""
        mechanism = self._charge(len(sent))
        if self.weights in words.EVIDENCE:
            return self._evidence(len(sent))
        return self._weighted(sent, mechanism)

    def _evidence(self, num_parties: int) -> tuple[FloatArray, Metrics]:
        """Return what the parties' evidence comes to."""
        uncovered = self._pool.num_uncovered
        if 2 * uncovered > num_parties:
            logger.warning(
                "FedKD: %d of %d parties find the public rows unlike their records. Public "
                "rows of the same kind would teach more.",
                uncovered,
                num_parties,
            )
        pool = self._pool
        self._gather()
        scores = SHARPNESS * pool.result()
        self.outliers_ = pool.outliers
        return scores, {words.NUM_UNCOVERED: uncovered, **pool.report("FedKD")}

    def _weighted(
        self, sent: Sequence[PartyScores], mechanism: ScoreMechanism | None
    ) -> tuple[FloatArray, Metrics]:
        """Return the weighted mean of all parties' logits (Eq. 2)."""
        counts, capped = believed_counts([party.counts for party in sent])
        weights = class_weights(counts, self.num_classes)
        values = [party.values for party in sent if party.values is not None]
        form = self._form
        if self.consensus in ROBUST_RULES:
            robust = RobustConsensus(self.consensus, trim_fraction=self.trim_fraction)
            for scores in values:
                robust.add(form.decode(scores))
            return robust.result(), {}
        if mechanism is None or self.privacy is None:
            heard = heard_parts(values, form)
            capped += int((heard < 1).sum())
            if capped:
                logger.warning("FedKD counts %s claims for less, far from others'.", capped)
            mean = weighted_mean(values, weights * heard[:, None], form)
            return mean, {keys.NUM_CAPPED: capped}
        rng = self.privacy.rng(self.seed, "server")
        whole = self.ledger_ if self.ledger_.unit == "party" else unprotected(words.COUNTED)
        metrics = privacy_metrics(party=whole, example=self.ledger_)
        drawn = self.once(
            "noisy-scores",
            lambda: {"scores": noisy_weighted_mean(values, weights, form, mechanism, rng)},
        )
        return drawn["scores"], metrics

    def _charge(self, num_parties: int) -> ScoreMechanism | None:
        """Enter what is about to be released; return the noise, if there is any."""
        unit, rows = self.ledger_.unit, self.num_predictions * len(self.public)
        if self.privacy is None:
            self._charge_unprotected(words.UNPROTECTED)
        if self.weights in ("counts", "evidence"):
            self._charge_unprotected(words.EXACT_COUNTS)
        charges, mechanism = self._charges_of_counts(), None
        if self.privacy is not None:
            # Weights that parties' counts decide may give one party all of a class.
            largest = 1.0 if self.weights == "uniform" else float(num_parties)
            counted = self.weights == "noisy-counts"
            mechanism = self.privacy.mechanism(
                unit=unit,
                bound=self.bound_ * largest,
                num_values=self.num_classes,
                num_contributors=num_parties,
                num_rows=rows,
                besides=self._count_mechanism().charges() if counted else (),
            )
            charges += self.privacy.charges(mechanism, rows * self.num_classes)
        self.ledger_.charge_all(charges)
        return mechanism

    def record_releases(self, replies: Sequence[PartyReply[PartyScores | float]]) -> None:
        """Record what the server was told in a round that came to nothing."""
        if any(isinstance(reply.knowledge, float) for reply in replies):
            self._charge_unprotected(words.PRIVATE_SCALE)
            return
        if self.privacy is None:
            self._charge_unprotected(words.UNPROTECTED)
        if self.weights in ("counts", "evidence"):
            self._charge_unprotected(words.EXACT_COUNTS)
        self.ledger_.compose_all(self._charges_of_counts())

    def _charges_of_counts(self) -> list[Entry]:
        if self.weights not in words.NOISY:
            return []
        seeded = self.privacy is not None and self.privacy.seeded_noise
        return self.num_attempts * list(self._count_mechanism().charges(seeded=seeded))

    def _charge_unprotected(self, reason: str) -> None:
        self.ledger_.charge(NonPrivateEvent(unit=self.ledger_.unit, reason=reason))
