"""What a party of FedMD answers about public rows, and the noise that may hide it.

An answer is one row of scores, or one label, for every public row of a round. Answers look
the same in both directions: from the parties to the server, and from the server, as the
consensus, back to them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import scipy

from fl_strategies.aggregation.evidence import class_evidence, corrected_labels
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.protocols import Learner
from fl_strategies.core.training import finite_logits, labels_of
from fl_strategies.exceptions import KnowledgeMismatch, require, require_data
from fl_strategies.privacy.events import OneVoteEvent
from fl_strategies.privacy.mechanisms import Charges, GaussianScores, LaplaceScores, NoisyMax
from fl_strategies.randomness import derive_rng
from fl_strategies.wire.packing import pack_labels, unpack_labels

Payload: TypeAlias = Literal["logits", "softmax", "argmax"]
AnswerNoiseKind: TypeAlias = Literal["gaussian", "laplace", "gumbel"]

PAYLOADS: Final[tuple[str, ...]] = get_args(Payload)
NOISES: Final[tuple[str, ...]] = get_args(AnswerNoiseKind)
SCORES: Final = "scores"
LABELS: Final = "labels"

LOGIT_SPREAD: Final = 100.0
"""How far the logits of a row may lie apart, and how large each may be."""

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
