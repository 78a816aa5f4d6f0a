"""What the server of FedMD tells its parties: one description, checked on both sides."""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, cast, get_args

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.aggregation.consensus import CONSENSUS_RULES, ConsensusRule
from fl_strategies.exceptions import InvalidParameter, KnowledgeMismatch, require
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.fedmd.release import (
    NOISES,
    PAYLOADS,
    AnswerFormat,
    AnswerNoise,
    AnswerNoiseKind,
    Payload,
    calibrated,
    plain_limits,
)
from fl_strategies.strategies.fedmd.student import Epochs
from fl_strategies.wire import keys
from fl_strategies.wire.config import config_choice, config_float, config_int
from fl_strategies.wire.knowledge import Scalar

Release: TypeAlias = Literal["none", "nfdp", "ldp"]
Rule: TypeAlias = ConsensusRule | Literal["evidence"]
Counting: TypeAlias = Literal["none", "class-weighted", "evidence"]

RELEASES: Final[tuple[str, ...]] = get_args(Release)
RULES: Final[tuple[str, ...]] = (*CONSENSUS_RULES, "evidence")
COUNTINGS: Final[tuple[str, ...]] = get_args(Counting)
"""What a party's class counts are sent for."""
EVIDENCE_LIMIT: Final = 16.0
"""Largest evidence that travels: odds of nine million to one."""

# A server cannot make a party train without end. A party's own records set a lower limit
# to its sample; this one only keeps the number plain.
MAX_EPOCHS: Final = 10_000
MAX_SAMPLES: Final = 2**31 - 1
_MAX_NOISE: Final = 1e30
_ANY_SCALE: Final = 1e15

_RELEASE = "release"
_PAYLOAD = "payload"
_NUM_PUBLIC = "num-public"
_NUM_SAMPLES = "num-samples"
_WITH_REPLACEMENT = "with-replacement"
_COUNTING = "counting"
_SEEDED_NOISE = "seeded-noise"
_NOISE = "noise"
_SCALE = "scale"
_CLIPPING_NORM = "clipping-norm"
_DELTA = "delta"
_EPOCHS: Final = {
    "pretrain": "pretrain-epochs",
    "initial": "epochs-initial",
    "digest": "epochs-digest",
    "revisit": "epochs-revisit",
}


@dataclass(frozen=True, kw_only=True)
class FedMDSettings:
    """What a party must know to take part; see `FedMD` for the meaning.

    `noise` is given for ``release="ldp"`` only and `num_samples` for "nfdp" only.
    """

    release: Release
    payload: Payload
    num_public: int
    num_classes: int
    epochs: Epochs
    num_samples: int | None
    with_replacement: bool
    noise: AnswerNoise | None
    counting: Counting
    delta: float
    seeded_noise: bool

    def __post_init__(self) -> None:
        """Check everything that is not checked elsewhere."""
        owner = "FedMD"
        for name, value, known in (
            ("release", self.release, RELEASES),
            ("payload", self.payload, PAYLOADS),
        ):
            require(value in known, owner, name, f"one of {', '.join(known)}", value)
        require(0 < self.delta < 1, owner, "delta", "between 0 and 1", self.delta)
        for field, key in _EPOCHS.items():
            value, least = getattr(self.epochs, field), int(field != "pretrain")
            fits, rule = least <= value <= MAX_EPOCHS, f"from {least} to {MAX_EPOCHS}"
            require(fits, owner, key.replace("-", "_"), rule, value)
        if self.release == "nfdp":
            drawn = self.num_samples is not None and 1 <= self.num_samples <= MAX_SAMPLES
            rule = "at least 1 and given for release='nfdp'"
            require(drawn, owner, "num_samples", rule, self.num_samples)
        else:
            rule = "left out unless release='nfdp'"
            require(self.num_samples is None, owner, "num_samples", rule, self.num_samples)
        hidden = not (self.counted and self.release == "ldp")
        rule = "another one for release='ldp', which does not hide class counts"
        require(hidden, owner, "consensus", rule, self.counting)

    @property
    def counted(self) -> bool:
        """Whether parties say how many records of each class they use."""
        return self.counting != "none"

    @property
    def evidence(self) -> bool:
        """Whether parties take their own class shares out of what they answer."""
        return self.counting == "evidence"

    @property
    def replies(self) -> AnswerFormat:
        """How a party's answers travel; evidence has a form of its own."""
        if self.evidence:
            return self._format(-EVIDENCE_LIMIT, EVIDENCE_LIMIT)
        if self.noise is None:
            return self._format(*plain_limits(self.payload))
        return self._format(-self.noise.limit, self.noise.limit)

    @property
    def lesson(self) -> Payload:
        """What a consensus consists of; evidence becomes labels or probabilities."""
        return "softmax" if self.evidence and self.payload != "argmax" else self.payload

    @property
    def consensus(self) -> AnswerFormat:
        """How a consensus travels."""
        if self.noise is None or self.payload == "softmax":
            return self._format(*plain_limits(self.lesson))
        return self._format(-self.noise.limit, self.noise.limit)

    def _format(self, low: float, high: float) -> AnswerFormat:
        return AnswerFormat(
            payload=self.payload,
            num_rows=self.num_public,
            num_classes=self.num_classes,
            low=low,
            high=high,
        )

    @property
    def terms(self) -> str:
        """Everything that decides what answers and accuracies may tell, in words."""
        source = "seeded" if self.seeded_noise else "secret"
        if self.num_samples is None:
            return f"release {self.release}, {source}"
        how = "with" if self.with_replacement else "without"
        return f"release nfdp, {source}, {self.num_samples} samples {how} replacement"

    @property
    def is_private(self) -> bool:
        """Whether answers promise privacy by noise or by a secret sample."""
        return self.release != "none" and not self.seeded_noise

    def secret_rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise and samples: the operating system unless seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None

    def to_config(self) -> dict[str, Scalar]:
        """Return what travels to a party."""
        config: dict[str, Scalar] = {
            _RELEASE: self.release,
            _PAYLOAD: self.payload,
            _NUM_PUBLIC: self.num_public,
            keys.NUM_CLASSES: self.num_classes,
            _COUNTING: self.counting,
            _SEEDED_NOISE: self.seeded_noise,
            _DELTA: self.delta,
        }
        config |= {key: getattr(self.epochs, field) for field, key in _EPOCHS.items()}
        if self.num_samples is not None:
            config |= {_NUM_SAMPLES: self.num_samples, _WITH_REPLACEMENT: self.with_replacement}
        if self.noise is not None:
            config |= {
                _NOISE: self.noise.noise,
                _SCALE: self.noise.scale,
                _CLIPPING_NORM: self.noise.clipping_norm,
            }
        return config

    @classmethod
    def from_config(
        cls, config: ConfigRecord, *, num_public: int, num_classes: int
    ) -> "FedMDSettings":
        """Read what a server sent; raise `KnowledgeMismatch` for anything unreasonable."""
        payload = cast(Payload, config_choice(config, _PAYLOAD, PAYLOADS))
        release = cast(Release, config_choice(config, _RELEASE, RELEASES))
        try:
            return cls(
                release=release,
                payload=payload,
                num_public=config_int(config, _NUM_PUBLIC, minimum=1, maximum=num_public),
                num_classes=num_classes,
                epochs=Epochs(
                    **{
                        field: config_int(config, key, minimum=0, maximum=MAX_EPOCHS)
                        for field, key in _EPOCHS.items()
                    }
                ),
                num_samples=(
                    config_int(config, _NUM_SAMPLES, minimum=1, maximum=MAX_SAMPLES)
                    if release == "nfdp"
                    else None
                ),
                with_replacement=config.get(_WITH_REPLACEMENT) is True,
                noise=(_read_noise(config, payload, num_classes) if release == "ldp" else None),
                counting=cast(Counting, config_choice(config, _COUNTING, COUNTINGS)),
                delta=config_float(config, _DELTA, minimum=1e-300, maximum=1 - 1e-9),
                seeded_noise=config.get(_SEEDED_NOISE) is True,
            )
        except InvalidParameter as error:
            raise KnowledgeMismatch(f"Server: {error}") from error


def _read_noise(config: ConfigRecord, payload: Payload, num_classes: int) -> AnswerNoise:
    norm = config_float(config, _CLIPPING_NORM, minimum=1e-30, maximum=_MAX_NOISE)
    return AnswerNoise(
        payload=payload,
        noise=cast(AnswerNoiseKind, config_choice(config, _NOISE, NOISES)),
        scale=config_float(config, _SCALE, minimum=1e-30, maximum=_MAX_NOISE),
        num_classes=num_classes,
        clipping_norm=norm,
    )


def make_noise(
    template: AnswerNoise | None,
    *,
    gamma: float | None,
    sigma: float | None,
    target_epsilon: float | None,
    num_rounds_planned: int | None,
    num_public: int,
    delta: float,
) -> AnswerNoise | None:
    """Return noise of the strength that was asked for, in exactly one way.

    `template` says everything else about the noise; without it nothing may be asked for.
    """
    owner, given = "FedMD", (gamma, sigma, target_epsilon, num_rounds_planned)
    if template is None:
        names, rule = "gamma, sigma, target_epsilon and num_rounds_planned", "left out"
        silent = all(value is None for value in given)
        require(silent, owner, names, f"{rule} unless release='ldp'", given)
        return None
    right, wrong = ("sigma", "gamma") if template.noise == "gaussian" else ("gamma", "sigma")
    strength, other = (sigma, gamma) if right == "sigma" else (gamma, sigma)
    require(other is None, owner, wrong, f"left out for {template.noise} noise", other)
    once = (strength is None) != (target_epsilon is None)
    both = (strength, target_epsilon)
    require(once, owner, f"{right} or target_epsilon", "given, one of the two", both)
    if strength is not None:
        planned, rule = num_rounds_planned is None, "left out without target_epsilon"
        require(planned, owner, "num_rounds_planned", rule, num_rounds_planned)
        require(0 < strength < math.inf, owner, right, "finite and above 0", strength)
        return replace(template, scale=strength if right == "sigma" else 1 / strength)
    target, rounds = target_epsilon or 0.0, num_rounds_planned or 0
    require(0 < target < math.inf, owner, "target_epsilon", "finite and above 0", target)
    rule = "at least 1 with target_epsilon"
    require(rounds >= 1, owner, "num_rounds_planned", rule, num_rounds_planned)
    return calibrated(
        template, num_rows=num_public, num_rounds=rounds, target_epsilon=target, delta=delta
    )


def drowned_answers(noise: AnswerNoise | None, num_parties: int) -> str:
    """Say how noise drowns a consensus of so many parties that all agree, or nothing.

    Noise of parties is independent, so that of their mean falls with the root of their
    number; the largest answer is `AnswerNoise.bound`.
    """
    if noise is None or noise.scale <= noise.bound * math.sqrt(num_parties):
        return ""
    what = f"answers up to {noise.bound:g} of {num_parties} parties"
    return f"scale {noise.scale:.3g} against {what}"


def noise_template(
    release: Release,
    payload: Payload,
    noise: AnswerNoiseKind,
    num_classes: int,
    clipping_norm: float | None,
) -> AnswerNoise | None:
    """Return which noise is meant, at a strength of no meaning; None for no noise."""
    clipped = release == "ldp" and payload == "logits"
    norm, rule = clipping_norm, "left out unless logits are released with noise"
    if not clipped:
        require(norm is None, "FedMD", "clipping_norm", rule, norm)
    elif norm is None or not 0 < norm < math.inf:
        raise InvalidParameter(
            f"FedMD: clipping_norm must be finite and above 0 for noisy logits, got {norm}."
        )
    if release != "ldp":
        return None
    return AnswerNoise(
        payload=payload,
        noise=noise,
        scale=_ANY_SCALE,
        num_classes=num_classes,
        clipping_norm=norm or 1.0,
    )
