"""Settings of all heads on sums of records, what they release, and what plans them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np

from fl_strategies._util import derive_rng
from fl_strategies.errors import require
from fl_strategies.options import Options, group, option
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.mechanisms import MOST_SUMS, GaussianSums
from fl_strategies.privacy.noise import calibrated_sums
from fl_strategies.privacy.planning import Draft, Facts, advice
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.strategies.sums.summary import Summary

Level: TypeAlias = Literal["L1", "L2", "central"]

LEVELS: Final = ("L0", *get_args(Level))
SUMS: Final = "sums"
TASK: Final = "task"
UNPROTECTED: Final = "exact sums over records left the party"
TRUSTED: Final = f"{UNPROTECTED}, to a server that is trusted to add the noise"
NOT_PARTIES: Final = "noise on sums over records protects examples, not parties"


@dataclass(frozen=True, kw_only=True)
class SumPrivacy(Options):
    """The noise on sums, just strong enough for a promise.

    Parameters
    ----------
    privacy_level : "L1", "L2" or "central"
        ``"L2"``: every party adds noise by itself, which protects an example against the
        server and everybody else. ``"central"``: the server is trusted to add noise once,
        which is as much less as there are parties, and protects an example against all
        who see the result only. ``"L1"``: the same for a whole party; every party has the
        same weight, whatever it holds.
    target_epsilon, delta : float
    seeded_noise : bool
        Draw noise from the experiment's seed, for repeatable simulations. Nothing is
        promised then: epsilon is infinite.
    accept_noise : bool
        Run even if the noise exceeds the signal.
    """

    privacy_level: Level = option("L2", "whose noise: of each party, or of a trusted server")
    target_epsilon: float | None = option(
        None, "what the sums cost an example, at L1 a party; 0: no noise", least=1e-3
    )
    delta: float = option(DEFAULT_DELTA, "delta of every epsilon", above=0, below=1)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")
    accept_noise: bool = option(False, "run even if noise exceeds the sums")

    def __post_init__(self) -> None:
        """Check that the price is named."""
        super().__post_init__()
        given, rule = self.target_epsilon is not None, "given with the other settings of noise"
        require(given, self._owner(), "target_epsilon", rule, self.target_epsilon)

    @property
    def unit(self) -> Unit:
        """Who is protected."""
        return "party" if self.privacy_level == "L1" else "example"

    def mechanism(self, moved: float, num_sums: int = MOST_SUMS) -> GaussianSums:
        """Return the noise for the most by which one unit can move so many sums.

        Their number hardly matters: each is drawn with a chance of error of its own.
        """
        return calibrated_sums(
            float(self.target_epsilon or 0),
            self.delta,
            l2_sensitivity=moved,
            unit=self.unit,
            num_sums=num_sums,
        )

    def rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise: the operating system unless noise is seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None


@dataclass(frozen=True, kw_only=True)
class SumOptions(Options):
    """Options of every head on sums.

    Parameters
    ----------
    privacy : SumPrivacy, optional
        None: exact sums leave the parties, and epsilon is infinite.
    num_records : int, optional
        Records of all parties together, as announced; as many as there are public rows if
        omitted. It decides how much detail there is and nothing about privacy. Parties that
        claim more together are cut; see `aggregation.evidence.believed_sizes`.
    exclude_outliers : bool
        Parties whose sums contradict most others' are not counted: without noise, or with
        that of parties; see `aggregation.pool`.
    """

    privacy: SumPrivacy | None = group(SumPrivacy)
    num_records: int | None = option(
        None, "records of all parties, as announced; 0: as many as public rows", least=1
    )
    exclude_outliers: bool = option(
        True, "no sums of parties that contradict most, unless the noise is the server's"
    )

    @property
    def level(self) -> str:
        """Where the noise is."""
        return "L0" if self.privacy is None else self.privacy.privacy_level

    @property
    def delta(self) -> float:
        """Of every privacy figure."""
        return DEFAULT_DELTA if self.privacy is None else self.privacy.delta


def release_plan(
    options: SumOptions,
    facts: ReleaseFacts,
    planner: "SumPlanner",
    *,
    summary: Summary | None = None,
    no_signal: Callable[[], str] | None = None,
    setting: str = "",
) -> ReleasePlan:
    """Return what the one round releases, for a planner of this head at its level.

    The summary decides the price, so there is none before it is known. The server knows better
    than the planner how noise hides the sums (`no_signal`), and which `setting` decides how
    detailed they are.
    """
    privacy, level = options.privacy, options.level
    own = level == "L2"
    seeded = privacy is not None and privacy.seeded_noise
    open_ = UNPROTECTED if privacy is None else TRUSTED

    def price() -> Price:
        # Every example is in the sums of one party.
        record = open_charges(open_)
        if privacy is None:
            return Price(record=record, unprotected=(UNPROTECTED,))
        if summary is None or not (own or facts.num_parties):
            return Price(record=record)
        mechanism = mechanism_of(privacy, facts, summary)
        charges = mechanism.charges(num_sums(facts, summary), seeded=seeded)
        return Price(record=charges, answers=charges) if own else Price(published=charges)

    def planned(ask: Callable[[Facts], str]) -> str:
        return "" if privacy is None else ask(_announced(privacy, options, facts))

    return ReleasePlan(
        name=f"{planner.strategy} {level}",
        trainer=facts.trainer,
        models=False,
        protected=own,
        trusted=level in ("L1", "central") and not seeded,
        seeded=own and seeded,
        fits=0,
        unit="party" if level == "L1" else "example",
        delta=options.delta,
        record_delta=options.delta,
        audience=AUDIENCES[level],
        reason=NOT_PARTIES if own else open_,
        price=price,
        no_signal=no_signal or (lambda: planned(planner.problem) if own else ""),
        accepted=privacy is not None and privacy.accept_noise,
        advice=lambda: planned(lambda found: advice(planner, found, setting)),
    )


def mechanism_of(privacy: SumPrivacy, facts: ReleaseFacts, summary: Summary) -> GaussianSums:
    """Return the noise on the sums, of a party or of the server."""
    by_record = summary.moved(facts.num_classes, facts.task)
    moved = summary.moved_by_party if privacy.unit == "party" else by_record
    return privacy.mechanism(moved, num_sums(facts, summary))


def num_sums(facts: ReleaseFacts, summary: Summary) -> int:
    """Return how many numbers a party sends."""
    return int(np.prod(summary.shape(facts.num_classes, facts.task)))


def _announced(privacy: SumPrivacy, options: SumOptions, facts: ReleaseFacts) -> Facts:
    """Return the federation that the server has announced, as planners need it."""
    num_parties = max(1, facts.num_parties)
    num_records = options.num_records or max(1, facts.num_public)
    return Facts(
        target_epsilon=float(privacy.target_epsilon or 0),
        delta=privacy.delta,
        num_parties=num_parties,
        num_records=max(1, num_records // num_parties),
        num_classes=max(2, facts.num_classes),
        num_public=max(1, facts.num_public),
    )


@dataclass(frozen=True, kw_only=True)
class SumPlanner(ABC):
    """Base of the planners of heads: one vector per party, at one of three levels.

    `num_labels` is that of one record, in multi-label learning.
    """

    level: str
    num_labels: int = 1

    strategy: ClassVar[str]
    moved_squared: ClassVar[int]
    """How far one record of one label moves the vector, squared, if a record has length 1."""
    moved_by_party: ClassVar[float]
    """How far one party moves the sum, if its vector has length 1."""

    @property
    def name(self) -> str:
        """Name of strategy and level."""
        return f"{self.strategy} {self.level}"

    @property
    def unit(self) -> Unit:
        """Who is protected."""
        return "party" if self.level == "L1" else "example"

    @property
    def whose(self) -> str:
        """What is summed, in words."""
        return "parties" if self.level == "L1" else "records"

    @property
    def trusts_server(self) -> bool:
        """Whether the server adds the noise."""
        return self.level != "L2"

    @property
    def knobs(self) -> Sequence[str]:
        """What may be changed if nothing works."""
        records = () if self.level == "L1" else ("num_records",)
        return ("num_parties", *records, "target_epsilon")

    @property
    def settings(self) -> str:
        """What repeats it on the command line."""
        return "" if self.level == "L2" else f"privacy-level={self.level}"

    @property
    def moved(self) -> float:
        """How far one unit moves the sum, if its own vector has length 1."""
        by_record = math.sqrt(self.moved_squared * self.num_labels)
        return self.moved_by_party if self.level == "L1" else by_record

    def noise(self, facts: Facts) -> tuple[GaussianSums, float]:
        """Return the mechanism, and the deviation of the noise on the sum of all parties."""
        sums = calibrated_sums(
            facts.target_epsilon, facts.delta, l2_sensitivity=self.moved, unit=self.unit
        )
        draws = facts.num_parties if self.level == "L2" else 1
        return sums, sums.drawn_scale * math.sqrt(draws)

    @abstractmethod
    def problem(self, facts: Facts) -> str:
        """Describe noise that leaves no signal, or return ""."""

    @abstractmethod
    def draft(self, facts: Facts) -> Draft:
        """Return what the strategy does by default."""
