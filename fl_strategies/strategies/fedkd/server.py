"""The server side of FedKD; see `fl_strategies.strategies.fedkd`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeAlias, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies._util import Array, FloatArray, content_hash, derive_rng
from fl_strategies.aggregation.consensus import (
    MAX_WEIGHT,
    ROBUST_RULES,
    ClassWeightedConsensus,
    MeanConsensus,
    RobustConsensus,
)
from fl_strategies.aggregation.evidence import (
    SHARPNESS,
    capped_claims,
    class_weights,
    noisy_weighted_mean,
    read_counts,
    scale_factors,
    weighted_mean,
)
from fl_strategies.aggregation.pool import (
    Contrast,
    EvidencePool,
    read_class_share,
    read_contrast,
)
from fl_strategies.errors import KnowledgeMismatch, require, require_known
from fl_strategies.learners import (
    LearnerFactory,
    SoftLearner,
    Task,
    check_task,
    link_scores,
    require_soft,
)
from fl_strategies.party.role import privacy_metrics, unprotected
from fl_strategies.release import PrivateVariant, ReleaseFacts, ReleasePlan
from fl_strategies.server.replies import PartyReply
from fl_strategies.server.run import State
from fl_strategies.server.strategy import (
    FederationOptions,
    KnowledgeStrategy,
    check_factories,
    logger,
    public_array,
)
from fl_strategies.strategies.fedkd.options import (
    BOUND,
    COUNTED,
    ERROR,
    MAX_BOUND,
    NUM_UNCOVERED,
    PHASE,
    TASK,
    FedKDOptions,
    Phase,
    augmented,
    check_augmentation,
    release_plan,
    score_mechanism,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar, ScoreFormat, score_format

MAX_TIMES_MEDIAN: Final = 10.0
"""A party that states a larger scale than this many medians is not believed: its scale would
make everybody's steps too wide."""


@dataclass(frozen=True, eq=False)
class PartyScores:
    """What is kept of one party's reply until all are there.

    Levels or float32 logits (p * n, C), and class counts or None; neither of evidence, which
    is summed as it comes. With evidence also how the party's records relate to public rows.
    """

    values: Array | None = None
    counts: FloatArray | None = None
    contrast: Contrast = "none"


Answer: TypeAlias = PartyScores | float


def read_scale(knowledge: Knowledge) -> float:
    """Return a party's largest logit."""
    scale = knowledge.arrays.get("scale", np.empty(0))
    one = scale.dtype == np.float64 and scale.shape == (1,)
    rule = f"one number above 0, at most {MAX_BOUND:g}"
    found = f"{scale.ravel()[:4]} of {scale.dtype}"
    fits = one and bool(0 < scale[0] <= MAX_BOUND)
    require_known(fits, "scale", "the largest logit", rule, found)
    return float(scale[0])


def read_predictions(knowledge: Knowledge, shape: tuple[int, int]) -> PartyScores:
    """Return a party's predictions of numeric targets, and its mean squared error."""
    values = knowledge.arrays.get("scores", np.empty(0))
    error = knowledge.arrays.get(ERROR, np.empty(0))
    fits = values.dtype == np.float64 and values.shape == shape
    finite = fits and bool(np.isfinite(values).all())
    require_known(finite, "Reply", "scores", f"finite numbers of shape {shape}", values.shape)
    one = error.dtype == np.float64 and error.shape == (1,)
    known = one and bool(0 <= error[0] < np.inf)
    require_known(known, "Reply", ERROR, "one number, at least 0", error.shape)
    return PartyScores(values, error)


def precise_mean(sent: Sequence[PartyScores]) -> FloatArray:
    """Return the mean of predictions, each weighted by one over its squared error.

    Nobody is believed to be more exact than with a quarter of the median party's error.
    """
    known = [(one.values, one.counts) for one in sent]
    pairs = [(v, float(e[0])) for v, e in known if v is not None and e is not None]
    errors = np.array([error for _, error in pairs])
    weights = 1 / np.maximum(errors, max(float(np.median(errors)) / 4, 1e-30))
    values = [value for value, _ in pairs]
    return np.asarray(np.tensordot(weights / weights.sum(), np.stack(values), axes=1))


MOST_KEPT: Final = 1000
"""Scores of more parties are summed as they come, so that memory does not grow with them."""


class SummedScores:
    """The weighted mean of parties' scores, kept as sums.

    Claims that are far from the others' are cut in groups a factor of two wide; see
    `aggregation.consensus`. Nobody counts for more than `MAX_WEIGHT` records of a class.
    """

    def __init__(
        self, shape: tuple[int, int], form: ScoreFormat, options: FedKDOptions
    ) -> None:
        uniform = options.weights == "uniform"
        kind = MeanConsensus if uniform else ClassWeightedConsensus
        self._form = form
        self._sums = kind(shape, bound=form.bound, capped=True)

    def taken(self, reply: PartyReply[Answer]) -> PartyReply[Answer]:
        """Add the scores of a reply, and return it without them."""
        sent = reply.knowledge
        if not isinstance(sent, PartyScores) or sent.values is None:
            return reply
        weights = None
        if sent.counts is not None:
            weights = np.minimum(np.rint(sent.counts), MAX_WEIGHT).astype(np.int64)
        self._sums.add(self._form.decode(sent.values), weights)
        return replace(reply, knowledge=PartyScores())

    def result(self) -> tuple[FloatArray, int]:
        """Return the mean, and how many claims were cut."""
        return self._sums.result(), self._sums.num_capped


def combined_scores(
    sent: Sequence[PartyScores], form: ScoreFormat, options: FedKDOptions, num_classes: int
) -> tuple[FloatArray, int]:
    """Return the consensus of scores that were kept, and how many claims were cut."""
    values = [party.values for party in sent if party.values is not None]
    if options.consensus in ROBUST_RULES:
        robust = RobustConsensus(
            options.consensus, trim_fraction=options.trim_fraction, decode=form.decode
        )
        for scores in values:
            robust.add(scores)
        return robust.result(), 0
    counts, capped = capped_claims([party.counts for party in sent])
    weights, factors = class_weights(counts, num_classes), scale_factors(values, form)
    mean = weighted_mean(values, weights * factors[:, None], form)
    return mean, capped + int((factors < 1).sum())


@dataclass(kw_only=True)
class FedKDState(State):
    """Also the bound of logits, once it is known, and whether the scores have come."""

    bound: float | None
    ended: bool = False


class FedKD(KnowledgeStrategy[Answer]):
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
        all logits of all public rows are released: see `fl_strategies.privacy.noise`.
        Parties that train with DP-SGD protect their examples against the server too: their
        logits, and with ``weights="noisy-evidence"`` their evidence, follow from the model
        and from noisy counts. They make no contrast, which would be trained without noise.
        Not covered: rows that parties only evaluate on, of which no metric leaves where
        anything is promised, the number of records, settings chosen on private data; and
        records of one person at several parties add up.

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
    task : "single-label", "multi-label" or "regression"
        Of numbers parties send predictions and how exact they are, and the server distils
        the mean of predictions, weighted by one over the squared error.
    options : FedKDOptions, optional
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
    options_type = FedKDOptions
    tasks = ("single-label", "multi-label", "regression")
    identified_by = (*KnowledgeStrategy.identified_by, "class_share")
    final_learner_needs = (SoftLearner,)
    private_variants = (
        PrivateVariant(
            name="fedkd noise, noisy counts",
            unit="example",
            decided={"strategy": "fedkd", "weights": "noisy-counts"},
            usual={"noise": "gaussian"},
            shares={"count-epsilon": 0.5},
        ),
        PrivateVariant(
            name="fedkd noise",
            unit="party",
            decided={"strategy": "fedkd", "weights": "uniform"},
            usual={"noise": "gaussian"},
        ),
    )
    state_type = FedKDState

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        task: Task = "single-label",
        options: FedKDOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        public = public_array("FedKD", public)
        require(len(public) > 0, "FedKD", "public", "at least one row", len(public))
        check_task("FedKD", task, num_classes)
        check_factories("FedKD", learner_fn, num_classes)
        require_soft("FedKD", learner_fn())
        self.public = public
        self.num_classes = num_classes
        self.learner_fn = learner_fn
        self.model_name = learner_name
        self.task = task
        self.options = options or FedKDOptions()
        self.options.check_task("FedKD", task)
        times = self.options.num_predictions
        check_augmentation("FedKD", self.options.augmentation, public, times)
        if self.options.counts_noisily:
            self.options.count_mechanism(task, num_classes)
        self.class_share = read_class_share(
            "FedKD",
            self.options.class_share,
            num_classes,
            "single-label" if task == "regression" else task,
        )
        self.outliers_: tuple[int, ...] = ()
        self.begin_round()
        public_bound = self.options.clip if self.options.scale == "clip" else None
        plan = release_plan(self.options, self._facts, "scores")
        ledger = self.new_ledger(plan, max_epsilon=self.options.max_epsilon)
        self.state: FedKDState = FedKDState(ledger=ledger, bound=public_bound)

    @property
    def plan(self) -> ReleasePlan:
        """What the round releases, after as many answers as have come."""
        return release_plan(self.options, self._facts, self.reply_kind, self.bound_)

    @property
    def _facts(self) -> ReleaseFacts:
        return ReleaseFacts(
            num_classes=self.num_classes,
            num_public=len(self.public),
            task=self.task,
            num_parties=len(self._kept),
        )

    @property
    def last_round(self) -> int | None:  # type: ignore[override]
        """The first round, or whichever brings the scores once the scale is known."""
        if self.options.scale == "clip":
            return 1
        return 0 if self.state.ended else None

    @property
    def bound_(self) -> float | None:
        """The bound of logits; None while the largest of all is not known."""
        return self.state.bound

    @property
    def _bound(self) -> float:
        """The bound of logits, where it must be known by now."""
        if self.bound_ is None:
            raise KnowledgeMismatch("FedKD: the scale must be known before scores, got none.")
        return self.bound_

    @property
    def _form(self) -> ScoreFormat:
        levels, rounding = self.options.num_levels, self.options.rounding
        return score_format(levels, self._bound, rounding)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.options.num_predictions * len(self.public), self.num_classes

    @property
    def most_score_bytes(self) -> int:
        """Bytes of a party's scores; 0 with noise, which is not on them yet."""
        known = self.bound_ is not None and self.task != "regression"
        public = known and not self.plan.trusted
        return self._form.num_bytes(self._shape) if public else 0

    def begin_round(self) -> bool:
        """Make room for the evidence, or the scores, of a round."""
        self._summed: SummedScores | None = None
        if self.task == "regression":
            return True
        self._pool = EvidencePool(
            self._shape,
            bound=self.options.clip,
            task=self.task,
            share=self.class_share,
            decode=lambda values, _: self._form.decode(values),
            exclude_outliers=self.options.exclude_outliers,
            limited=True,
        )
        return True

    @property
    def reply_kind(self) -> Phase:  # type: ignore[override]
        """The scale, while it is not known; then the scores."""
        return "scale" if self.bound_ is None else "scores"

    def party_config(self) -> dict[str, Scalar]:
        """Return how logits are to be sent and what identifies the public data."""
        bound = {} if self.bound_ is None else {BOUND: self.bound_}
        return {
            **self.options.to_config(),
            PHASE: self.reply_kind,
            TASK: self.task,
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: content_hash(self.public),
            **bound,
        }

    def check(self, knowledge: Knowledge) -> Answer:
        """Return one party's largest logit, or its scores, class counts and contrast."""
        if self.reply_kind == "scale":
            return read_scale(knowledge)
        if self.task == "regression":
            return read_predictions(knowledge, self._shape)
        values = self._form.from_wire(knowledge.arrays.get("scores", np.empty(0)), self._shape)
        if self.options.weights == "uniform":
            return PartyScores(values)
        if not self.options.sends_evidence:
            return PartyScores(values, read_counts(knowledge.arrays, self.num_classes))
        both = (2,) if self.task == "multi-label" else ()
        counts = read_counts(knowledge.arrays, *both, self.num_classes)
        return PartyScores(values, counts, read_contrast("scores", knowledge.meta))

    def add(self, reply: PartyReply[Answer]) -> None:
        """Sum evidence as it comes; keep anything else, of many parties its sums alone."""
        sent, options = reply.knowledge, self.options
        if isinstance(sent, float) or self.task == "regression":
            super().add(reply)
            return
        if options.sends_evidence and sent.values is not None and sent.counts is not None:
            self._pool.add(sent.values, sent.counts, sent.contrast, reply.partition_id)
            reply = replace(reply, knowledge=PartyScores())
        super().add(reply if self._summed is None else self._summed.taken(reply))
        # There are no sums of what a median is sought of, or noise is added to.
        plain = options.consensus not in ROBUST_RULES and not self.plan.trusted
        summable = plain and not options.sends_evidence
        if self._summed is None and summable and len(self._kept) > MOST_KEPT:
            self._summed = SummedScores(self._shape, self._form, options)
            self._kept = [self._summed.taken(kept) for kept in self._kept]

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Combine the parties' scores and distil the final model from them."""
        answers = [reply.knowledge for reply in self.replies]
        scales = [each for each in answers if isinstance(each, float)]
        sent = [each for each in answers if isinstance(each, PartyScores)]
        if scales:
            return None, self._settle_scale(scales)
        if self.task == "regression":
            return self._distilled(precise_mean(sent)), {}
        if self.options.sends_evidence:
            scores, metrics = self._evidence(len(sent))
        else:
            scores, metrics = self._weighted(sent)
        return self._distilled(scores), metrics

    def _distilled(self, scores: FloatArray) -> ArrayRecord | None:
        """Train the final model on public rows; return it as it is delivered."""
        self.state.ended = True
        options, numbers = self.options, range(self.options.num_predictions)
        rows = np.concatenate(
            [augmented(self.public, options.augmentation, self.seed, n) for n in numbers]
        )
        student = require_soft("FedKD", self.learner_fn())
        rng = derive_rng(self.seed, "server", "final")
        if self.task == "regression":
            targets: Array = scores
            return self.keep_model(student.fit(rows, targets, rng=rng))
        recipe = options.recipe(self.task)
        targets = link_scores(scores, recipe)
        return self.keep_model(student.distill(rows, targets, rng=rng, recipe=recipe))

    def _settle_scale(self, scales: Sequence[float]) -> Metrics:
        """Take the largest logit, but no more than some multiple of the middle one."""
        self.state.bound = min(max(scales), MAX_TIMES_MEDIAN * float(np.median(scales)))
        self.failure_ = "the scale is known and the scores are not; run a second round"
        return {BOUND: self._bound}

    def _evidence(self, num_parties: int) -> tuple[FloatArray, Metrics]:
        """Return what the parties' evidence comes to."""
        pool = self._pool
        if 2 * pool.num_uncovered > num_parties:
            logger.warning(
                "FedKD: %d of %d parties find the public rows unlike their records.",
                pool.num_uncovered,
                num_parties,
            )
        scores = SHARPNESS * pool.result()
        self.outliers_ = pool.outliers
        return scores, {NUM_UNCOVERED: pool.num_uncovered, **pool.report("FedKD")}

    def _weighted(self, sent: Sequence[PartyScores]) -> tuple[FloatArray, Metrics]:
        """Return the weighted mean of all parties' logits (Eq. 2)."""
        form, options = self._form, self.options
        if not (privacy := options.privacy):
            mean, capped = (
                combined_scores(sent, form, options, self.num_classes)
                if self._summed is None
                else self._summed.result()
            )
            if capped:
                logger.warning("FedKD counts %s claims for less, far from others'.", capped)
            return mean, {keys.NUM_CAPPED: capped} if options.consensus == "mean" else {}
        counts, _ = capped_claims([party.counts for party in sent])
        weights = class_weights(counts, self.num_classes)
        values = [party.values for party in sent if party.values is not None]
        rng = privacy.rng(self.seed, "server")
        mechanism = score_mechanism(options, privacy, self._facts, self._bound)
        whole = self.ledger_ if self.ledger_.unit == "party" else unprotected(COUNTED)
        metrics = privacy_metrics(party=whole, example=self.ledger_)
        drawn = self.run.draw_once(
            "noisy-scores",
            lambda: {"scores": noisy_weighted_mean(values, weights, form, mechanism, rng)},
        )
        return drawn["scores"], metrics
