"""Options of FedMD, what both sides derive from them, and what a round releases.

An answer is one row of scores, or one label, for every public row of a round. Answers look
the same in both directions: from the parties to the server, and from the server, as the
consensus, back to them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final, Literal, Self, TypeAlias, get_args

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import Array, FloatArray, IntArray, derive_rng
from fl_strategies.aggregation.consensus import ROBUST_RULES
from fl_strategies.errors import (
    InvalidParameter,
    KnowledgeMismatch,
    between,
    require,
    require_data,
    require_known,
)
from fl_strategies.options import Options, option, variants
from fl_strategies.privacy import planning
from fl_strategies.privacy.bounds.theorems import nfdp_tight
from fl_strategies.privacy.events import OneVoteEvent, Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.mechanisms import Charges, GaussianScores, LaplaceScores, NoisyMax
from fl_strategies.privacy.noise import NoiseSpec, calibrate_scale
from fl_strategies.privacy.planning import Draft, Facts, advice
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.wire.knowledge import pack_labels, unpack_labels

Payload: TypeAlias = Literal["logits", "softmax", "argmax"]
AnswerNoiseKind: TypeAlias = Literal["gaussian", "laplace", "gumbel"]
AnswerNoiseChoice: TypeAlias = Literal["auto", "gaussian", "laplace", "gumbel"]
Consensus: TypeAlias = Literal[
    "auto", "mean", "class-weighted", "median", "trimmed-mean", "robust-mean", "evidence"
]

PAYLOADS: Final[tuple[str, ...]] = get_args(Payload)
RELEASES: Final = ("none", "nfdp", "ldp")
SCORES: Final = "scores"
LABELS: Final = "labels"

LOGIT_SPREAD: Final = 100.0
"""Largest spread of the logits of a row, and their largest magnitude."""
EVIDENCE_LIMIT: Final = 16.0
"""Largest evidence that travels: odds of nine million to one."""
UNPROTECTED: Final = "predictions on public rows left the party without noise"
EXACT_COUNTS: Final = "exact class counts left the party"

# A server cannot make a party train without end. A party's own records set a lower limit
# to its sample; this one only keeps the number plain.
MAX_EPOCHS: Final = 10_000
MAX_SAMPLES: Final = 2**31 - 1
MAX_PUBLIC: Final = 2**40
_USUAL_NUM_PUBLIC: Final = 5000

# Discrete noise is never larger, whatever its kind; see `privacy.mechanisms`.
_MOST_SCALES = 64
# What rounding to float32 may add to a probability.
_ROUNDING = 1e-6
_LEAST_SCALE = 2.0**-12
# Stronger noise does not fit into float32, as which scores travel.
_LARGEST_SCALE = 1e30


def public_rows(seed: int, server_round: int, num_rows: int, num_public: int) -> IntArray:
    """Return which public rows a round is about, in order; the same on every side.

    Examples
    --------
    >>> public_rows(0, 1, 4, 4)
    array([0, 1, 2, 3])
    """
    if num_public == num_rows:
        return np.arange(num_rows)
    rng = derive_rng(seed, "public", server_round)
    return np.sort(rng.choice(num_rows, size=num_public, replace=False))


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How answers travel: labels packed into bits, scores from `low` to `high` as float32."""

    payload: Payload
    num_rows: int
    num_classes: int
    low: float
    high: float

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays that travel."""
        return (LABELS,) if self.payload == "argmax" else (SCORES,)

    def encode(self, answers: Array) -> dict[str, Array]:
        """Return the arrays to send."""
        if self.payload == "argmax":
            return {LABELS: pack_labels(answers, self.num_classes)}
        return {SCORES: np.clip(answers, self.low, self.high).astype(np.float32)}

    def decode(self, arrays: Mapping[str, Array]) -> Array:
        """Read untrusted arrays; raise `KnowledgeMismatch` for any others."""
        if self.payload == "argmax":
            packed = arrays.get(LABELS, np.empty(0, np.uint8))
            return unpack_labels(packed, (self.num_rows,), self.num_classes)
        scores, shape = arrays.get(SCORES, np.empty(0)), (self.num_rows, self.num_classes)
        fits = scores.dtype == np.float32 and scores.shape == shape
        found = f"{scores.shape} of {scores.dtype}"
        require_known(fits, "FedMD", SCORES, f"of shape {shape} and float32", found)
        low, high = float(scores.min()), float(scores.max())
        # NaN compares as false, so it is refused as well.
        fits = self.low - _ROUNDING <= low and high <= self.high + _ROUNDING
        rule = f"from {self.low:g} to {self.high:g}"
        require_known(fits, "FedMD", SCORES, rule, f"{low:g} to {high:g}")
        return scores


def plain_limits(payload: Payload) -> tuple[float, float]:
    """Return between which scores without noise lie."""
    return (0.0, 1.0) if payload == "softmax" else (-LOGIT_SPREAD, LOGIT_SPREAD)


@dataclass(frozen=True, kw_only=True)
class GaussianProbabilities(GaussianScores):
    """Release rows of probabilities with discrete Gaussian noise.

    Two rows of probabilities are at most sqrt(2) apart, not 2 as any rows of norm 1.
    """

    def _sensitivity(self) -> float:
        rounding = super()._sensitivity() - 2 * self.bound
        return math.sqrt(2) + rounding

    def _checked(self, scores: Array) -> FloatArray:
        rows = super()._checked(scores)
        sums = bool((np.abs(rows.sum(axis=-1) - 1) < 1e-9).all() and (rows >= 0).all())
        require_data(sums, "GaussianProbabilities", "scores", "probabilities", "other rows")
        return rows


@dataclass(frozen=True, kw_only=True)
class AnswerNoise:
    """The noise on every answer of a party (FedMD-LDP).

    The unit is an example of the party. Replacing it may change the model in any way, so
    what bounds the change of an answer is its kind: labels change once, probabilities by
    sqrt(2) in L2 and 2 in L1 norm, logits by twice the norm to which they are clipped.

    Parameters
    ----------
    payload : "logits", "softmax" or "argmax"
    noise : "gaussian", "laplace" or "gumbel"
        The last for labels only: it is randomised response.
    scale : float
        Standard deviation of Gaussian noise, or scale of the others.
    clipping_norm : float
        For logits: longer rows are shrunk to it, in L2 norm for Gaussian noise and in L1
        norm for Laplace noise.
    num_classes : int
    """

    payload: Payload
    noise: AnswerNoiseKind
    scale: float
    num_classes: int
    clipping_norm: float = 1.0

    def __post_init__(self) -> None:
        """Check that noise and payload go together, and build the mechanism once."""
        known = get_args(AnswerNoiseKind)[: 3 if self.payload == "argmax" else 2]
        rule = f"one of {', '.join(known)} for {self.payload}"
        require(self.noise in known, "FedMD", "noise", rule, self.noise)
        fits, rule = self.scale <= _LARGEST_SCALE, f"at most {_LARGEST_SCALE:g}"
        require(fits, "FedMD", "scale of noise", rule, self.scale)
        _ = self.mechanism

    @property
    def mechanism(self) -> NoisyMax | GaussianScores | LaplaceScores:
        """What draws the noise and accounts for it."""
        if self.payload == "argmax":
            return NoisyMax(
                noise=self.noise,
                scale=self.scale,
                sensitivity=1,
                unit="example",
                num_classes=self.num_classes,
            )
        kind = LaplaceScores if self.noise == "laplace" else GaussianScores
        if self.payload == "softmax" and self.noise == "gaussian":
            kind = GaussianProbabilities
        return kind(
            bound=self.bound, scale=self.scale, num_values=self.num_classes, unit="example"
        )

    @property
    def bound(self) -> float:
        """The largest norm of a row before noise."""
        return self.clipping_norm if self.payload == "logits" else 1.0

    @property
    def limit(self) -> float:
        """The largest score after noise, in magnitude."""
        return self.bound + _MOST_SCALES * self.scale

    def charges(self, num_rows: int, *, seeded: bool) -> Charges:
        """Return what the answers to `num_rows` rows cost."""
        if self.payload != "argmax":
            return self.mechanism.charges(num_rows, seeded=seeded)
        event = OneVoteEvent(
            unit="example",
            noise=self.noise,
            scale=self.scale,
            num_classes=self.num_classes,
            seeded=seeded,
        )
        return ((event, num_rows),)

    def release(self, answers: Array, rng: np.random.Generator | None) -> Array:
        """Return answers that may leave; charge for them before."""
        if self.payload == "argmax":
            answers = np.eye(self.num_classes, dtype=np.int64)[answers]
        return self.mechanism.release(answers, rng).values


def least_scale(noise: AnswerNoise) -> float:
    """Return the least scale that noise of this kind can have, in any strength."""
    return max(_LEAST_SCALE, noise.bound * (noise.num_classes + 10) * 2.0**-26)


@dataclass(frozen=True, kw_only=True)
class Unprotected(Options):
    """Answers leave as they are; epsilon is infinite unless learners train privately."""

    name: ClassVar[str] = "none"
    seeded_noise: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class SampleOnce(Options):
    """Noise-free privacy: a sample, drawn once, is used in the clear, and no other record.

    Parameters
    ----------
    num_samples : int
        The paper's k.
    with_replacement : bool
        Whether a record may be drawn twice.
    seeded_noise : bool
        Draw the sample from the seed, for repeatable simulations. Epsilon is then infinite.
    """

    owner: ClassVar[str] = "FedMD"
    name: ClassVar[str] = "nfdp"

    num_samples: int = option(MISSING, "k: records that nfdp draws", least=1, most=MAX_SAMPLES)
    with_replacement: bool = option(True, "whether nfdp may draw a record twice")
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")


@dataclass(frozen=True, kw_only=True)
class LocalNoise(NoiseSpec):
    """Noise on every answer, composed over rows and rounds; see `NoiseSpec`.

    Parameters
    ----------
    noise : "auto", "gaussian", "laplace" or "gumbel"
        The last is for labels, and is randomised response. ``"auto"``: Gaussian with `sigma`;
        otherwise Gumbel noise on labels, and on scores Laplace noise with `gamma`, Gaussian
        with a target.
    clipping_norm : float, optional
        For logits, which must be clipped, and for nothing else.
    num_rounds_planned : int, optional
        With `target_epsilon`. Further rounds are possible and cost more than the target. If
        it is omitted, one round is planned, and there are no further ones.
    max_epsilon : float, optional
        The run ends before a round that would exceed it.
    seeded_noise : bool
        Draw noise from the seed, for repeatable simulations. Epsilon is then infinite.
    accept_noise : bool
        Continue although the noise is stronger than the consensus of all parties; refused
        otherwise, because epsilon would be spent on answers that are mostly noise.
    """

    owner: ClassVar[str] = "FedMD"
    name: ClassVar[str] = "ldp"

    noise: AnswerNoiseChoice = option("auto", "kind of noise on answers")
    clipping_norm: float | None = option(
        None, "of logits with noise; 0: not given", above=0, most=1e30
    )
    num_rounds_planned: int | None = option(
        None, "rounds of target-epsilon; 0: not given", least=1
    )
    max_epsilon: float | None = option(None, "the run ends before it; 0: none", above=0)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")
    accept_noise: bool = option(False, "continue although noise outweighs all answers")

    def __post_init__(self) -> None:
        """Check that rounds are planned only for a target."""
        super().__post_init__()
        fits = self.num_rounds_planned is None or self.target_epsilon is not None
        self.require("num_rounds_planned", fits, "omitted without target_epsilon")

    @property
    def is_gaussian(self) -> bool:
        """Whether the strength is a standard deviation."""
        undecided = self.sigma is not None or self.gamma is None
        return self.noise == "gaussian" or (self.noise == "auto" and undecided)

    def kind_for(self, payload: Payload) -> AnswerNoiseKind:
        """Return the kind that is meant, for what is sent."""
        if self.noise != "auto":
            return self.noise
        if payload == "argmax" and self.sigma is None:
            return "gumbel"
        return "gaussian" if self.is_gaussian else "laplace"

    @property
    def rounds_planned(self) -> int | None:
        """Rounds that share the target; None without one."""
        usual = None if self.target_epsilon is None else planning.USUAL_ROUNDS
        return self.num_rounds_planned or usual

    def of_scale(self, scale: float) -> "LocalNoise":
        """Return noise that is given by its scale instead of a target; never a smaller one."""
        strength = scale if self.is_gaussian else 1 / scale
        if not self.is_gaussian and 1 / strength < scale:
            strength = 1 / (scale * (1 + 2**-50))
        name = "sigma" if self.is_gaussian else "gamma"
        given = {name: strength, "target_epsilon": None, "num_rounds_planned": None}
        return replace(self, **given)  # type: ignore[arg-type]


Release: TypeAlias = Unprotected | SampleOnce | LocalNoise


@dataclass(frozen=True, kw_only=True)
class FedMDOptions(Options):
    """Options of `FedMD`.

    Parameters
    ----------
    release : Unprotected, SampleOnce or LocalNoise
        What protects the records behind an answer.
    payload : "logits", "softmax" or "argmax"
        The last is the default: smallest, recommended by the paper, and the only one that
        does not compare scores of models that differ in kind.
    num_public : int, optional
        Public rows of a round, drawn anew each time; by default all, but at most the paper's
        5000. With a target epsilon for labels the most for which parties that agree decide
        90 % of the consensus, but at least five a class (`privacy.planning.queries_for`).
    epochs_initial, epochs_digest, epochs_revisit : int
        The paper's T1, T2 and T3.
    consensus : "auto", "evidence", "mean", "class-weighted", "median", "trimmed-mean" or \
"robust-mean"
        How answers are combined; by default "evidence" for unprotected answers without
        pre-training, otherwise "mean". "evidence": parties take the class shares of what
        their models were trained on out of their answers (`aggregation.evidence`); logits and
        softmax are then the same: evidence goes up, probabilities come back. The others: see
        `aggregation.consensus`. Of labels the majority wins, with equal or class weights.
    class_share : str
        With evidence: which class shares the public rows have; see `EvidencePool`.
    exclude_outliers : bool
        With evidence: do not count parties that contradict most others in a round, for which
        answers are kept until all are there (`aggregation.pool`).
    trim_fraction : float
        Share of parties that the trimmed mean drops at either end, or largest share of
        liars that the robust mean is to bear.
    delta : float
    pretrain_epochs : int
        Passes over all public rows, with the labels that parties hold (`Party.public_y`),
        before a party's first training.
    """

    owner: ClassVar[str] = "FedMD"

    release: Release = variants(
        "release",
        "privacy of answers: none, a secret sample, or noise",
        none=Unprotected,
        nfdp=SampleOnce,
        ldp=LocalNoise,
    )
    payload: Payload = option("argmax", "what parties send")
    num_public: int | None = option(
        None,
        "public rows of a round; 0: up to 5000, with target-epsilon the best number",
        least=1,
        most=MAX_PUBLIC,
    )
    epochs_initial: int = option(
        20, "T1: passes before the first answer", least=1, most=MAX_EPOCHS
    )
    epochs_digest: int = option(2, "T2: passes over the consensus", least=1, most=MAX_EPOCHS)
    epochs_revisit: int = option(1, "T3: passes over the own records", least=1, most=MAX_EPOCHS)
    consensus: Consensus = option("auto", "how answers are combined")
    class_share: str = option(
        "auto", "class shares of public rows: auto, pooled, none, or numbers"
    )
    exclude_outliers: bool = option(True, "no evidence of parties that contradict most others")
    trim_fraction: float = option(
        0.2, "share that trimmed-mean cuts off each side, or of liars", least=0, below=0.5
    )
    delta: float = option(DEFAULT_DELTA, "delta of every epsilon", above=0, below=1)
    pretrain_epochs: int = option(
        0, "passes over labelled public rows before all", least=0, most=MAX_EPOCHS
    )

    def __post_init__(self) -> None:
        """Check what goes together."""
        super().__post_init__()
        fits = not self.sends_labels or self.consensus not in ROBUST_RULES
        rule = "mean or class-weighted for labels, whose majority is robust by itself"
        self.require("consensus", fits, rule)
        if isinstance(self.release, LocalNoise):
            decided = replace(self.release, noise=self.release.kind_for(self.payload))
            object.__setattr__(self, "release", decided)
            rule = "another one for release='ldp', which does not hide class counts"
            self.require("consensus", not self.sends_counts, rule)
            clipped = self.payload == "logits"
            rule = "given for noisy logits" if clipped else "omitted unless logits get noise"
            norm = self.release.clipping_norm
            require(clipped == (norm is not None), "FedMD", "clipping_norm", rule, norm)

    @property
    def sample(self) -> SampleOnce | None:
        """The sample that noise-free privacy draws."""
        return self.release if isinstance(self.release, SampleOnce) else None

    @property
    def is_private(self) -> bool:
        """Whether answers promise privacy by noise or by a secret sample."""
        return not (isinstance(self.release, Unprotected) or self.release.seeded_noise)

    @property
    def sends_evidence(self) -> bool:
        """Whether parties take their own class shares out of what they answer."""
        return self.consensus == "evidence"

    @property
    def sends_labels(self) -> bool:
        """Whether parties name classes instead of scoring them."""
        return self.payload == "argmax"

    @property
    def sends_counts(self) -> bool:
        """Whether parties say how many records of each class they use."""
        return self.consensus in ("class-weighted", "evidence")

    @property
    def lesson(self) -> Payload:
        """What a consensus consists of; evidence becomes labels or probabilities."""
        scored = self.sends_evidence and not self.sends_labels
        return "softmax" if scored else self.payload

    @property
    def terms(self) -> str:
        """Everything that decides what answers and accuracies may reveal, in words."""
        source, sample = "seeded" if self.release.seeded_noise else "secret", self.sample
        if sample is None:
            return f"release {self.release.name}, {source}"
        how = "with" if sample.with_replacement else "without"
        return f"release nfdp, {source}, {sample.num_samples} samples {how} replacement"

    def secret_rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise and samples: the operating system unless seeded."""
        return derive_rng(seed, "noise", *path) if self.release.seeded_noise else None


@dataclass(frozen=True, kw_only=True)
class CronusOptions(FedMDOptions):
    """Options of `Cronus`: those of `FedMDOptions`, by default scores and their robust mean."""

    payload: Payload = option("softmax", "what parties send")
    consensus: Consensus = option("robust-mean", "how answers are combined")


@dataclass(frozen=True, kw_only=True)
class FedMDSettings:
    """Options with everything that follows from them; the same on both sides.

    Parameters
    ----------
    options : FedMDOptions
        Settled: with a number of public rows, a rule of consensus, and noise by its scale.
    num_classes : int
    """

    options: FedMDOptions
    num_classes: int

    @classmethod
    def settle(
        cls,
        options: FedMDOptions,
        *,
        num_rows: int,
        num_classes: int,
        num_parties: int,
        pretrained: bool,
    ) -> Self:
        """Return what the server decides where the options leave it open."""
        asked = options.num_public or _usual_rows(options, num_rows, num_classes, num_parties)
        rule = f"{between(1, num_rows)}, the public rows"
        require(1 <= asked <= num_rows, "FedMD", "num_public", rule, asked)
        pretraining = pretrained or options.pretrain_epochs > 0
        plain = isinstance(options.release, Unprotected) and not pretraining
        chosen = options.consensus
        if chosen == "auto":
            chosen = "evidence" if plain else "mean"
        fits = chosen != "evidence" or not pretraining
        rule = "another one with pre-training, which teaches classes that no record counts for"
        require(fits, "FedMD", "consensus", rule, chosen)
        settled = replace(options, num_public=asked, consensus=chosen)
        if isinstance(settled.release, LocalNoise):
            settled = replace(settled, release=_with_scale(settled, num_classes))
        return cls(options=settled, num_classes=num_classes)

    @classmethod
    def from_config(cls, config: ConfigRecord, *, num_public: int, num_classes: int) -> Self:
        """Read what a server sent; raise `KnowledgeMismatch` for anything unreasonable."""
        options = FedMDOptions.received(config)
        release, asked = options.release, options.num_public
        rule = between(1, num_public, "a whole number")
        require_known(1 <= (asked or 0) <= num_public, "Server", "num-public", rule, asked)
        scaled = not isinstance(release, LocalNoise) or release.given_scale is not None
        decided, found = options.consensus != "auto" and scaled, (options.consensus, release)
        require_known(decided, "Server", "consensus and the scale of noise", "decided", found)
        settings = cls(options=options, num_classes=num_classes)
        try:
            _ = settings.noise
        except InvalidParameter as error:
            raise KnowledgeMismatch(f"Server: {error}") from error
        return settings

    @property
    def num_public(self) -> int:
        """Public rows of a round."""
        return self.options.num_public or 0

    @property
    def noise(self) -> AnswerNoise | None:
        """The noise on every answer."""
        return _noise_of(self.options, self.num_classes)

    @property
    def replies(self) -> AnswerFormat:
        """How a party's answers travel; evidence has a form of its own."""
        if self.options.sends_evidence:
            return self._format(-EVIDENCE_LIMIT, EVIDENCE_LIMIT)
        if self.noise is None:
            return self._format(*plain_limits(self.options.payload))
        return self._format(-self.noise.limit, self.noise.limit)

    @property
    def consensus(self) -> AnswerFormat:
        """How a consensus travels."""
        if self.noise is None or self.options.payload == "softmax":
            return self._format(*plain_limits(self.options.lesson))
        return self._format(-self.noise.limit, self.noise.limit)

    def _format(self, low: float, high: float) -> AnswerFormat:
        return AnswerFormat(
            payload=self.options.payload,
            num_rows=self.num_public,
            num_classes=self.num_classes,
            low=low,
            high=high,
        )


def _usual_rows(
    options: FedMDOptions, num_rows: int, num_classes: int, num_parties: int
) -> int:
    """Return all rows, or with a target for labels as many as its noise leaves readable."""
    most = min(num_rows, _USUAL_NUM_PUBLIC)
    facts = ReleaseFacts(num_classes=num_classes, num_public=most, num_parties=num_parties)
    planned = _planned(options, facts) if most else None
    return most if planned is None else planned[0].num_rows(planned[1])


def _noise_of(options: FedMDOptions, num_classes: int) -> AnswerNoise | None:
    """Return the noise, of scale 1 while that follows from a target."""
    release = options.release
    if not isinstance(release, LocalNoise):
        return None
    return AnswerNoise(
        payload=options.payload,
        noise=release.kind_for(options.payload),
        scale=release.given_scale or 1.0,
        num_classes=num_classes,
        clipping_norm=release.clipping_norm or 1.0,
    )


def _with_scale(options: FedMDOptions, num_classes: int) -> LocalNoise:
    """Return noise by its scale: the least that keeps the target in the rounds planned.

    From the second round on a party has seen answers to earlier questions, so only bounds
    that allow for that are used.
    """
    release: LocalNoise = options.release  # type: ignore[assignment]
    noise: AnswerNoise = _noise_of(options, num_classes)  # type: ignore[assignment]
    if release.target_epsilon is None:
        return release
    rows = options.num_public or 0
    scale = calibrate_scale(
        lambda scale: replace(noise, scale=scale).charges(rows, seeded=False),
        release.target_epsilon,
        options.delta,
        num_batches=release.rounds_planned or 1,
        least=least_scale(noise),
    )
    if release.num_rounds_planned is None and not release.seeded_noise:
        limit = release.max_epsilon or release.target_epsilon
        release = replace(release, max_epsilon=limit)
    return release.of_scale(scale)


def release_plan(
    strategy: str,
    settings: FedMDSettings,
    facts: ReleaseFacts,
    *,
    asked: FedMDOptions | None = None,
    server_round: int = 0,
    training: Charges = (),
) -> ReleasePlan:
    """Return what one round releases.

    `asked` are the options before they were settled, for advice; `training` is what the
    party's learner spends in this round by itself. A secret sample is charged when it is drawn,
    once for all rounds, and so has no price here.
    """
    options = settings.options
    release = options.release
    open_ = isinstance(release, Unprotected)
    passes = options.epochs_initial + options.epochs_digest + options.epochs_revisit
    return ReleasePlan(
        name=f"{strategy} {release.name}",
        purpose=f"fedmd {release.name}, round {server_round}",
        trainer=facts.trainer,
        models=False,
        protected=not open_,
        sample_delta=_sample_delta(options.sample, facts.num_records),
        seeded=release.seeded_noise,
        epochs=options.pretrain_epochs + passes,
        predictions=settings.num_public,
        delta=options.delta,
        record_delta=options.delta,
        audience=AUDIENCES["L0" if open_ else "L2"],
        reported=options.sample is not None,
        price=lambda: _price(settings, training),
        no_signal=lambda: _no_signal(settings.noise, max(facts.num_parties, 1)),
        accepted=isinstance(release, LocalNoise) and release.accept_noise,
        advice=lambda: "" if asked is None else _advice(asked, facts),
    )


def _price(settings: FedMDSettings, training: Charges) -> Price:
    """Return the price; what privately trained learners cost is their training."""
    options, noise = settings.options, settings.noise
    if noise is not None:
        noisy = noise.charges(settings.num_public, seeded=options.release.seeded_noise)
        return Price(record=noisy, answers=noisy)
    reasons = [] if training else [UNPROTECTED]
    if options.sends_counts and not (training and options.sends_evidence):
        reasons.append(EXACT_COUNTS)
    return Price(
        record=(*training, *open_charges(*reasons)),
        training=training,
        unprotected=(UNPROTECTED, EXACT_COUNTS) if options.sends_counts else (UNPROTECTED,),
    )


def _sample_delta(sample: SampleOnce | None, records: int) -> float:
    if sample is None or not records:
        return 0.0
    if not sample.with_replacement and sample.num_samples >= records:
        return 1.0
    return nfdp_tight(records, sample.num_samples, replacement=sample.with_replacement).delta


def _no_signal(noise: AnswerNoise | None, num_parties: int) -> str:
    """Describe noise that hides the consensus of unanimous parties, or return ""."""
    if noise is None:
        return ""
    return planning.outweighed_answers(noise.scale, noise.bound, num_parties)


def _planned(options: FedMDOptions, facts: ReleaseFacts) -> "tuple[Answers, Facts] | None":
    """Return how a target for labels is planned; None for other noise."""
    release = options.release
    if not isinstance(release, LocalNoise) or release.noise != "gumbel":
        return None
    if release.target_epsilon is None:
        return None
    planned = Facts(
        target_epsilon=release.target_epsilon,
        delta=options.delta,
        num_parties=facts.num_parties,
        num_records=1,  # how many there are does not matter to randomised response
        num_classes=facts.num_classes,
        num_public=facts.num_public,
    )
    return Answers(num_rounds=release.rounds_planned or 1), planned


def _advice(options: FedMDOptions, facts: ReleaseFacts) -> str:
    """Return what would work for a target for labels; nothing for other noise."""
    planned = _planned(options, facts)
    return "" if planned is None else advice(*planned, "num_public")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """`FedMD` with noise on labels: randomised response of every party, then a plurality."""

    num_rounds: int = planning.USUAL_ROUNDS
    unit: Unit = "example"
    trusts_server: ClassVar[bool] = False
    knobs: ClassVar[Sequence[str]] = ("num_parties", "num_classes", "target_epsilon")

    @property
    def name(self) -> str:
        """Name of strategy and rounds."""
        rounds = f", {self.num_rounds} rounds" if self.num_rounds > 1 else ""
        return f"fedmd ldp{rounds}"

    def _scale(self, facts: Facts, num_rows: int) -> float:
        return _label_scale(
            facts.target_epsilon, facts.delta, facts.num_classes, num_rows, self.num_rounds
        )

    def problem(self, facts: Facts) -> str:
        """Say if the fewest labels of parties that agree are mostly noise."""
        fewest = planning.fewest_queries(facts.num_classes, facts.num_public)
        return planning.outweighed_answers(self._scale(facts, fewest), 1.0, facts.num_parties)

    def num_rows(self, facts: Facts) -> int:
        """Return the most rows of a round that leave most of the consensus right."""
        return planning.answer_queries(
            lambda number: self._scale(facts, number),
            facts.num_parties,
            facts.num_classes,
            facts.num_public,
        )

    def draft(self, facts: Facts) -> Draft:
        """Return the rows of a round that the strategy asks for by default."""
        rows = self.num_rows(facts)
        scale = self._scale(facts, rows)
        kept = planning.answer_kept(scale, facts.num_classes)
        planned = f" num-rounds-planned={self.num_rounds}" if self.num_rounds > 1 else ""
        charges = _label_noise(scale, facts.num_classes).charges(rows, seeded=False)
        return Draft(
            noise="gumbel",
            scale=scale,
            asked="queries",
            num_asked=rows,
            voters=f"{facts.num_parties} parties",
            right=facts.right_pluralities(kept),
            batches=[charges] * self.num_rounds,
            settings=f"release=ldp{planned}",
        )


def _label_noise(scale: float, num_classes: int) -> AnswerNoise:
    return AnswerNoise(payload="argmax", noise="gumbel", scale=scale, num_classes=num_classes)


@lru_cache(maxsize=256)
def _label_scale(
    target_epsilon: float, delta: float, num_classes: int, num_rows: int, num_rounds: int
) -> float:
    """Return the scale of Gumbel noise on a party's labels that keeps a target."""
    return calibrate_scale(
        lambda scale: _label_noise(scale, num_classes).charges(num_rows, seeded=False),
        target_epsilon,
        delta,
        num_batches=num_rounds,
        least=_LEAST_SCALE,
    )
