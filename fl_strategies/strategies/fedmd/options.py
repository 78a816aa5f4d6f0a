"""What can be set about FedMD."""

from dataclasses import MISSING, dataclass, replace
from typing import ClassVar, Final, Literal, TypeAlias, get_args

from fl_strategies.aggregation.consensus import ROBUST_RULES
from fl_strategies.exceptions import require
from fl_strategies.options import Options, option, variants
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.noise_spec import NoiseSpec
from fl_strategies.privacy.planning.rules import USUAL_ROUNDS
from fl_strategies.strategies.fedmd.release import AnswerNoiseKind, Payload

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
        which their answers are kept until all are there; see `aggregation.outliers`.
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
