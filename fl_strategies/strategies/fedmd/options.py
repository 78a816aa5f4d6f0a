"""Options of FedMD: what leaves a party, and how answers are combined.

An answer is one row of scores, or one label, for every public row of a round. Answers look
the same in both directions: from the parties to the server, and from the server, as the
consensus, back to them.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from typing import ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray, IntArray, derive_rng
from fl_strategies.aggregation.consensus import ROBUST_RULES
from fl_strategies.aggregation.evidence import class_evidence, corrected_labels
from fl_strategies.errors import KnowledgeMismatch, require, require_data
from fl_strategies.learners import Learner
from fl_strategies.options import Options, option, variants
from fl_strategies.party.role import finite_logits, labels_of
from fl_strategies.privacy.events import OneVoteEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.mechanisms import Charges, GaussianScores, LaplaceScores, NoisyMax
from fl_strategies.privacy.noise import NoiseSpec
from fl_strategies.privacy.planning.rules import USUAL_ROUNDS
from fl_strategies.wire.knowledge import pack_labels, unpack_labels

Payload: TypeAlias = Literal["logits", "softmax", "argmax"]
AnswerNoiseKind: TypeAlias = Literal["gaussian", "laplace", "gumbel"]

PAYLOADS: Final[tuple[str, ...]] = get_args(Payload)
NOISES: Final[tuple[str, ...]] = get_args(AnswerNoiseKind)
SCORES: Final = "scores"
LABELS: Final = "labels"

LOGIT_SPREAD: Final = 100.0
"""Largest spread of the logits of a row, and their largest magnitude."""

# Discrete noise is never larger, whatever its kind; see `privacy.secure`.
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


def corrected_answer(
    logits: FloatArray, counts: IntArray, payload: Payload, log_ratio: FloatArray | None
) -> Array:
    """Return what a model says without the class shares of what it was trained on.

    Labels are those with most evidence, scores are evidence; see `aggregation.evidence`.
    """
    held = counts.astype(np.float64)
    if payload == "argmax":
        return corrected_labels(logits, held)
    return class_evidence(logits, held, log_ratio)


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How answers travel: labels packed into bits, scores as float32.

    Parameters
    ----------
    payload : "logits", "softmax" or "argmax"
    num_rows, num_classes : int
    low, high : float
        Between which scores lie.
    """

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
        scores, shape = arrays.get(SCORES), (self.num_rows, self.num_classes)
        if scores is None or scores.dtype != np.float32 or scores.shape != shape:
            found = "none" if scores is None else f"{scores.shape} of {scores.dtype}"
            raise KnowledgeMismatch(
                f"FedMD: {SCORES} must be of shape {shape} and float32, got {found}."
            )
        low, high = float(scores.min()), float(scores.max())
        # NaN compares as false, so it is refused as well.
        if not (self.low - _ROUNDING <= low and high <= self.high + _ROUNDING):
            raise KnowledgeMismatch(
                f"FedMD: {SCORES} must be from {self.low:g} to {self.high:g}, "
                f"got {low:g} to {high:g}."
            )
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
        known = NOISES if self.payload == "argmax" else NOISES[:2]
        rule = f"one of {', '.join(known)} for {self.payload}"
        require(self.noise in known, "FedMD", "noise", rule, self.noise)
        fits, rule = self.scale <= _LARGEST_SCALE, f"at most {_LARGEST_SCALE:g}"
        require(fits, "FedMD", "scale of noise", rule, self.scale)
        _ = self.mechanism

    @property
    def mechanism(self) -> NoisyMax | GaussianScores | LaplaceScores:
        """What draws the noise and says what it costs."""
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


Rule: TypeAlias = Literal[
    "mean", "class-weighted", "median", "trimmed-mean", "robust-mean", "evidence"
]
AnswerNoiseChoice: TypeAlias = Literal["auto", "gaussian", "laplace", "gumbel"]
Consensus: TypeAlias = Literal[
    "auto", "mean", "class-weighted", "median", "trimmed-mean", "robust-mean", "evidence"
]

RULES: Final[tuple[str, ...]] = get_args(Rule)
RELEASES: Final = ("none", "nfdp", "ldp")

# A server cannot make a party train without end. A party's own records set a lower limit
# to its sample; this one only keeps the number plain.
MAX_EPOCHS: Final = 10_000
MAX_SAMPLES: Final = 2**31 - 1
MAX_PUBLIC: Final = 2**40


@dataclass(frozen=True, kw_only=True)
class Unprotected(Options):
    """Answers leave as they are; epsilon is infinite unless learners train privately."""


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

    noise: AnswerNoiseChoice = option("auto", "kind of noise on answers")
    clipping_norm: float | None = option(
        None, "of logits with noise; 0: not given", above=0, most=1e30
    )
    num_rounds_planned: int | None = option(
        None, "rounds of target-epsilon; 0: not given", least=1
    )
    max_epsilon: float | None = option(None, "the run ends before it; 0: none", above=0)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")
    accept_noise: bool = option(False, "continue although noise drowns all answers")

    def __post_init__(self) -> None:
        """Check that rounds are planned only for a target."""
        super().__post_init__()
        fits = self.num_rounds_planned is None or self.target_epsilon is not None
        rule = "omitted without target_epsilon"
        require(fits, "FedMD", "num_rounds_planned", rule, self.num_rounds_planned)

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
        return None if self.target_epsilon is None else self.num_rounds_planned or USUAL_ROUNDS

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
        Public rows of a round, drawn anew each time; by default all, but at most the
        paper's 5000. With a target epsilon for labels the most for which parties that agree
        decide 90 % of the consensus, but at least five a class: see
        `privacy.planning.rules.queries_for`.
    epochs_initial, epochs_digest, epochs_revisit : int
        The paper's T1, T2 and T3.
    consensus : "auto", "evidence", "mean", "class-weighted", "median", "trimmed-mean" or \
"robust-mean"
        How answers are combined; by default "evidence" for unprotected answers without
        pre-training, otherwise "mean". "evidence": parties take the class shares of what
        their models were trained on out of their answers before they send them; see
        `aggregation.evidence`. Logits and softmax are then the same: evidence goes up,
        probabilities come back. The others: see `aggregation.consensus`. Labels are
        counted, with equal or with class weights, and the majority wins.
    class_share : str
        With evidence: which class shares the public rows have; see `EvidencePool`.
    exclude_outliers : bool
        With evidence: parties that contradict most others are not counted in a round, for
        which their answers are kept until all are there; see `aggregation.pool`.
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
    delta: float = option(DEFAULT_DELTA, "delta of every privacy figure", above=0, below=1)
    pretrain_epochs: int = option(
        0, "passes over labelled public rows before all", least=0, most=MAX_EPOCHS
    )

    def __post_init__(self) -> None:
        """Check what goes together."""
        super().__post_init__()
        fits = self.payload != "argmax" or self.consensus not in ROBUST_RULES
        rule = "mean or class-weighted for labels, whose majority is robust by itself"
        require(fits, "FedMD", "consensus", rule, self.consensus)
        if isinstance(self.release, LocalNoise):
            decided = replace(self.release, noise=self.release.kind_for(self.payload))
            object.__setattr__(self, "release", decided)
            counted = self.consensus in ("class-weighted", "evidence")
            rule = "another one for release='ldp', which does not hide class counts"
            require(not counted, "FedMD", "consensus", rule, self.consensus)
            clipped = self.payload == "logits"
            rule = "given for noisy logits" if clipped else "omitted unless logits get noise"
            norm = self.release.clipping_norm
            require(clipped == (norm is not None), "FedMD", "clipping_norm", rule, norm)

    @property
    def release_name(self) -> str:
        """The paper's name for what protects records."""
        kinds = dict(zip((Unprotected, SampleOnce, LocalNoise), RELEASES, strict=True))
        return kinds[type(self.release)]

    @property
    def seeded_noise(self) -> bool:
        """Whether noise or sample come from the seed and protect nobody."""
        return not isinstance(self.release, Unprotected) and self.release.seeded_noise


@dataclass(frozen=True, kw_only=True)
class CronusOptions(FedMDOptions):
    """Options of `Cronus`: those of `FedMDOptions`, by default scores and their robust mean."""

    payload: Payload = option("softmax", "what parties send")
    consensus: Consensus = option("robust-mean", "how answers are combined")
