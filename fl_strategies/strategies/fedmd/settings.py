"""Settings that server and party of FedMD both derive from the options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final, Literal, Self, TypeAlias

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import derive_rng
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, between, require
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.bounds.composition import nfdp_tight
from fl_strategies.privacy.events import OneVoteEvent, Unit
from fl_strategies.privacy.mechanisms import Charges
from fl_strategies.privacy.noise import calibrate_scale
from fl_strategies.privacy.planning import rules
from fl_strategies.privacy.planning.plans import Draft, Facts, advice
from fl_strategies.privacy.planning.rules import answer_queries, drowned_answers
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.strategies.fedmd.options import (
    AnswerFormat,
    AnswerNoise,
    FedMDOptions,
    LocalNoise,
    Payload,
    Rule,
    SampleOnce,
    Unprotected,
    least_scale,
    plain_limits,
)
from fl_strategies.strategies.fedmd.student import Epochs

Counting: TypeAlias = Literal["none", "class-weighted", "evidence"]

EVIDENCE_LIMIT: Final = 16.0
"""Largest evidence that travels: odds of nine million to one."""
_USUAL_NUM_PUBLIC: Final = 5000


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
        usual_rows = _usual_rows(options, num_rows, num_classes, num_parties)
        asked = options.num_public or usual_rows
        rule = f"{between(1, num_rows)}, the public rows"
        require(1 <= asked <= num_rows, "FedMD", "num_public", rule, asked)
        pretraining = pretrained or options.pretrain_epochs > 0
        plain = isinstance(options.release, Unprotected) and not pretraining
        usual: Rule = "evidence" if plain else "mean"
        chosen = usual if options.consensus == "auto" else options.consensus
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
        noise = options.release if isinstance(options.release, LocalNoise) else None
        open_ = options.consensus == "auto" or (noise is not None and not noise.given_scale)
        if not 1 <= (options.num_public or 0) <= num_public:
            raise KnowledgeMismatch(
                f"Server: num-public must be {between(1, num_public, 'a whole number')}, "
                f"got {options.num_public}."
            )
        if open_:
            raise KnowledgeMismatch(
                "Server: consensus and the scale of noise must be decided, "
                f"got {options.consensus!r} and {noise}."
            )
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
    def payload(self) -> Payload:
        """What an answer is."""
        return self.options.payload

    @property
    def release(self) -> str:
        """The paper's name for what protects records."""
        return self.options.release_name

    @property
    def rule(self) -> Rule:
        """How answers are combined."""
        return self.options.consensus  # type: ignore[return-value]

    @property
    def delta(self) -> float:
        """Delta of every figure."""
        return self.options.delta

    @property
    def seeded_noise(self) -> bool:
        """Whether noise or sample come from the seed."""
        return self.options.seeded_noise

    @property
    def epochs(self) -> Epochs:
        """How long parties train."""
        given = self.options
        return Epochs(
            pretrain=given.pretrain_epochs,
            initial=given.epochs_initial,
            digest=given.epochs_digest,
            revisit=given.epochs_revisit,
        )

    @property
    def sample(self) -> SampleOnce | None:
        """The sample that noise-free privacy draws."""
        return self.options.release if isinstance(self.options.release, SampleOnce) else None

    @property
    def noise(self) -> AnswerNoise | None:
        """The noise on every answer."""
        release = self.options.release
        if not isinstance(release, LocalNoise):
            return None
        return _noise_of(self.options, release, release.given_scale or 0.0, self.num_classes)

    @property
    def counting(self) -> Counting:
        """What class counts are sent for."""
        rule = self.rule
        return rule if rule in ("class-weighted", "evidence") else "none"

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
        source, sample = "seeded" if self.seeded_noise else "secret", self.sample
        if sample is None:
            return f"release {self.release}, {source}"
        how = "with" if sample.with_replacement else "without"
        return f"release nfdp, {source}, {sample.num_samples} samples {how} replacement"

    @property
    def is_private(self) -> bool:
        """Whether answers promise privacy by noise or by a secret sample."""
        return self.release != "none" and not self.seeded_noise

    def secret_rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise and samples: the operating system unless seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None


def _usual_rows(
    options: FedMDOptions, num_rows: int, num_classes: int, num_parties: int
) -> int:
    """Return all rows, or with a target for labels as many as its noise leaves readable."""
    most, release = min(num_rows, _USUAL_NUM_PUBLIC), options.release
    if not isinstance(release, LocalNoise) or release.noise != "gumbel":
        return most
    target, rounds = release.target_epsilon, release.rounds_planned
    if options.num_public is not None or target is None or rounds is None:
        return most
    return answer_queries(
        lambda rows: answer_scale(target, options.delta, num_classes, rows, rounds),
        num_parties,
        num_classes,
        most,
    )


def _noise_of(
    options: FedMDOptions, release: LocalNoise, scale: float, num_classes: int
) -> AnswerNoise:
    return AnswerNoise(
        payload=options.payload,
        noise=release.kind_for(options.payload),
        scale=scale,
        num_classes=num_classes,
        clipping_norm=release.clipping_norm or 1.0,
    )


def _with_scale(options: FedMDOptions, num_classes: int) -> LocalNoise:
    """Return noise by its scale: the least that keeps the target in the rounds planned.

    From the second round on a party has seen answers to earlier questions, so only bounds
    that allow for that are used.
    """
    release: LocalNoise = options.release  # type: ignore[assignment]
    if release.given_scale is not None:
        _noise_of(options, release, release.given_scale, num_classes)
        return release
    rows, planned = options.num_public or 0, release.rounds_planned
    if release.num_rounds_planned is None and not release.seeded_noise:
        limit = release.max_epsilon or release.target_epsilon
        release = replace(release, max_epsilon=limit)
    least = least_scale(_noise_of(options, release, 1.0, num_classes))
    scale = calibrate_scale(
        lambda scale: _noise_of(options, release, scale, num_classes).charges(
            rows, seeded=False
        ),
        release.target_epsilon or 0.0,
        options.delta,
        num_batches=planned or 1,
        least=least,
    )
    return release.of_scale(scale)


UNPROTECTED: Final = "predictions on public rows left the party without noise"
EXACT_COUNTS: Final = "exact class counts left the party"


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

    Parameters
    ----------
    strategy : str
    settings, facts
    asked : FedMDOptions, optional
        The options before they were settled, for advice.
    server_round : int
    training : charges
        What the party's learner spends in this round by itself. A secret sample is charged
        when it is drawn, once for all rounds, and so has no price here.
    """
    epochs, release, noise = settings.epochs, settings.options.release, settings.noise
    return ReleasePlan(
        name=f"{strategy} {settings.release}",
        purpose=f"fedmd {settings.release}, round {server_round}",
        trainer=facts.trainer,
        models=False,
        protected=settings.release != "none",
        sample_delta=_sample_delta(settings, facts.num_records),
        seeded=settings.seeded_noise,
        epochs=epochs.pretrain + epochs.initial + epochs.digest + epochs.revisit,
        predictions=settings.num_public,
        delta=settings.delta,
        record_delta=settings.delta,
        audience=AUDIENCES["L0" if settings.release == "none" else "L2"],
        reported=settings.sample is not None,
        price=lambda: _price(settings, training),
        no_signal=lambda: drowned_consensus(noise, max(facts.num_parties, 1)),
        accepted=isinstance(release, LocalNoise) and release.accept_noise,
        advice=lambda: "" if asked is None else _advice(asked, facts),
    )


def _price(settings: FedMDSettings, training: Charges) -> Price:
    """Return the price; what privately trained learners cost is their training."""
    if settings.noise is not None:
        noisy = settings.noise.charges(settings.num_public, seeded=settings.seeded_noise)
        return Price(record=noisy, answers=noisy)
    reasons = [] if training else [UNPROTECTED]
    if settings.counted and not (training and settings.evidence):
        reasons.append(EXACT_COUNTS)
    return Price(
        record=(*training, *open_charges(*reasons)),
        training=training,
        unprotected=(UNPROTECTED, EXACT_COUNTS) if settings.counted else (UNPROTECTED,),
    )


def _sample_delta(settings: FedMDSettings, records: int) -> float:
    sample = settings.sample
    if sample is None or not records:
        return 0.0
    if not sample.with_replacement and sample.num_samples >= records:
        return 1.0
    return nfdp_tight(records, sample.num_samples, replacement=sample.with_replacement).delta


def drowned_consensus(noise: AnswerNoise | None, num_parties: int) -> str:
    """Describe noise that hides the consensus of unanimous parties, or return ""."""
    return "" if noise is None else drowned_answers(noise.scale, noise.bound, num_parties)


def _advice(options: FedMDOptions, facts: ReleaseFacts) -> str:
    """Return what would work for a target for labels; nothing for other noise."""
    release = options.release
    if not isinstance(release, LocalNoise) or release.noise != "gumbel":
        return ""
    if release.target_epsilon is None:
        return ""
    planned = Facts(
        target_epsilon=release.target_epsilon,
        delta=options.delta,
        num_parties=facts.num_parties,
        num_records=1,  # how many there are does not matter to randomised response
        num_classes=facts.num_classes,
        num_public=facts.num_public,
    )
    return advice(Answers(num_rounds=release.rounds_planned or 1), planned, "num_public")


_LEAST_ANSWER_SCALE: Final = 2.0**-12


@dataclass(frozen=True, kw_only=True)
class Answers:
    """`FedMD` with noise on labels: randomised response of every party, then a plurality."""

    num_rounds: int = rules.USUAL_ROUNDS
    unit: Unit = "example"
    trusts_server: ClassVar[bool] = False
    knobs: ClassVar[Sequence[str]] = ("num_parties", "num_classes", "target_epsilon")

    @property
    def name(self) -> str:
        """Name of strategy and rounds."""
        rounds = f", {self.num_rounds} rounds" if self.num_rounds > 1 else ""
        return f"fedmd ldp{rounds}"

    def _scale(self, facts: Facts, num_rows: int) -> float:
        return answer_scale(
            facts.target_epsilon, facts.delta, facts.num_classes, num_rows, self.num_rounds
        )

    def problem(self, facts: Facts) -> str:
        """Say if the fewest labels of parties that agree are mostly noise."""
        fewest = rules.fewest_queries(facts.num_classes, facts.num_public)
        return drowned_answers(self._scale(facts, fewest), 1.0, facts.num_parties)

    def draft(self, facts: Facts) -> Draft:
        """Return the rows of a round that the strategy asks for by default."""
        rows = answer_queries(
            lambda number: self._scale(facts, number),
            facts.num_parties,
            facts.num_classes,
            facts.num_public,
        )
        scale = self._scale(facts, rows)
        kept = rules.answer_kept(scale, facts.num_classes)
        planned = f" num-rounds-planned={self.num_rounds}" if self.num_rounds > 1 else ""
        return Draft(
            noise="gumbel",
            scale=scale,
            asked="queries",
            num_asked=rows,
            voters=f"{facts.num_parties} parties",
            right=facts.right_pluralities(kept),
            batches=[answer_charges(scale, facts.num_classes, rows)] * self.num_rounds,
            settings=f"release=ldp{planned}",
        )


@lru_cache(maxsize=256)
def answer_scale(
    target_epsilon: float, delta: float, num_classes: int, num_rows: int, num_rounds: int
) -> float:
    """Return the scale of Gumbel noise on a party's labels that keeps a target."""
    return calibrate_scale(
        lambda scale: answer_charges(scale, num_classes, num_rows),
        target_epsilon,
        delta,
        num_batches=num_rounds,
        least=_LEAST_ANSWER_SCALE,
    )


def answer_charges(scale: float, num_classes: int, num_rows: int) -> Sequence[Entry]:
    """Return what a party's labels of so many rows cost."""
    event = OneVoteEvent(unit="example", noise="gumbel", scale=scale, num_classes=num_classes)
    return [(event, num_rows)]
