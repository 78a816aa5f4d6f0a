"""Options of FedHistogram and FedRegression, what they release, and what parties receive."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np

from fl_strategies._util import derive_rng
from fl_strategies.errors import require
from fl_strategies.options import Options, group, option
from fl_strategies.privacy.counts import MOST_SUMS, GaussianSums, calibrated_sums
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.planning import rules
from fl_strategies.privacy.planning.plans import Draft, Facts, Planner, advice
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.strategies.sums.summary import MOST_DIVISIONS, Summary

Level: TypeAlias = Literal["L1", "L2", "central"]

LEVELS: Final = ("L0", *get_args(Level))
SUMS: Final = "sums"
TASK: Final = "task"
UNPROTECTED: Final = "exact sums over records left the party"
TRUSTED: Final = f"{UNPROTECTED}, to a server that is trusted to add the noise"


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
    delta: float = option(DEFAULT_DELTA, "delta of every privacy figure", above=0, below=1)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")
    accept_noise: bool = option(False, "allow noise that drowns the sums")

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
    """What `FedHistogram` and `FedRegression` have in common.

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


@dataclass(frozen=True, kw_only=True)
class FedHistogramOptions(SumOptions):
    """Options of `FedHistogram`; see `SumOptions`.

    Parameters
    ----------
    num_divisions : int
        How often the space is divided, each time from another start.
    num_cells, num_components : int, optional
        Into how many cells each time, by how many principal components of the
        public rows; by default what `usual_cells` says, and thirty.
    """

    owner: ClassVar[str] = "FedHistogram"

    num_divisions: int = option(
        8, "divisions of the space of rows", least=1, most=MOST_DIVISIONS
    )
    num_cells: int | None = option(
        None, "cells of the space of rows; 0: as many as stand out from noise", least=2
    )
    num_components: int | None = option(
        None, "principal components of public rows; 0: 30 at most", least=1
    )


@dataclass(frozen=True, kw_only=True)
class FedRegressionOptions(SumOptions):
    """Options of `FedRegression`; see `SumOptions`.

    Parameters
    ----------
    num_components : int, optional
        Principal components of the public rows that the regression sees; by default what
        `usual_components` says.
    """

    owner: ClassVar[str] = "FedRegression"

    num_components: int | None = option(
        None,
        "principal components of public rows; 0: as many as stand out from noise",
        least=1,
    )


NOT_PARTIES: Final = "noise on sums over records protects examples, not parties"


def release_plan(
    name: str,
    options: SumOptions,
    facts: ReleaseFacts,
    planner: Planner,
    *,
    summary: Summary | None = None,
    no_signal: Callable[[], str] | None = None,
    setting: str = "",
) -> ReleasePlan:
    """Return what the one round releases.

    Parameters
    ----------
    name : str
        Of the strategy.
    options, facts
    planner : Planner
        Of the strategy at this level.
    summary : Summary, optional
        How records are summed up, once that is known.
    no_signal : callable, optional
        How noise hides the sums, where that is known better than the planner does.
    setting : str
        What decides how detailed the sums are.
    """
    privacy, level = options.privacy, options.level
    own = level == "L2"
    seeded = privacy is not None and privacy.seeded_noise
    return ReleasePlan(
        name=f"{name} {level}",
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
        reason=NOT_PARTIES if own else _open_reason(options),
        price=lambda: _price(options, facts, summary),
        no_signal=no_signal or (lambda: _hidden(options, facts, planner) if own else ""),
        accepted=privacy is not None and privacy.accept_noise,
        advice=lambda: _advice(options, facts, planner, setting),
    )


def mechanism_of(privacy: SumPrivacy, facts: ReleaseFacts, summary: Summary) -> GaussianSums:
    """Return the noise on the sums, of a party or of the server."""
    by_record = summary.moved(facts.num_classes, facts.task)
    moved = summary.moved_by_party if privacy.unit == "party" else by_record
    return privacy.mechanism(moved, num_sums(facts, summary))


def num_sums(facts: ReleaseFacts, summary: Summary) -> int:
    """Return how many numbers a party sends."""
    return int(np.prod(summary.shape(facts.num_classes, facts.task)))


def _open_reason(options: SumOptions) -> str:
    return UNPROTECTED if options.privacy is None else TRUSTED


def _price(options: SumOptions, facts: ReleaseFacts, summary: Summary | None) -> Price:
    """Return the price: every example is in the sums of one party."""
    own = options.level == "L2"
    open_ = open_charges(_open_reason(options))
    if options.privacy is None:
        return Price(record=open_, unprotected=(UNPROTECTED,))
    if summary is None or not (own or facts.num_parties):
        return Price(record=open_)
    mechanism = mechanism_of(options.privacy, facts, summary)
    seeded = options.privacy.seeded_noise
    charges = mechanism.charges(num_sums(facts, summary), seeded=seeded)
    return Price(record=charges, answers=charges) if own else Price(published=charges)


def _planned(options: SumOptions, facts: ReleaseFacts) -> Facts | None:
    privacy = options.privacy
    if privacy is None or privacy.target_epsilon is None:
        return None
    num_parties = max(1, facts.num_parties)
    num_records = options.num_records or max(1, facts.num_public)
    return Facts(
        target_epsilon=privacy.target_epsilon,
        delta=privacy.delta,
        num_parties=num_parties,
        num_records=max(1, num_records // num_parties),
        num_classes=max(2, facts.num_classes),
        num_public=max(1, facts.num_public),
    )


def _hidden(options: SumOptions, facts: ReleaseFacts, planner: Planner) -> str:
    """Return how one party's noise hides all records that the server has announced."""
    planned = _planned(options, facts)
    return "" if planned is None else planner.problem(planned)


def _advice(options: SumOptions, facts: ReleaseFacts, planner: Planner, setting: str) -> str:
    """Return what would work instead of what is refused."""
    planned = _planned(options, facts)
    return "" if planned is None else advice(planner, planned, setting)


_SCORE_NOISE: Final = 1.4
"""Noise on the score of a public row, by that on one mean and one feature: 1.2 to 1.8 on Adult,
cod-rna, digits and breast-cancer from four components on."""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """One vector of each party, at one of three levels.

    Parameters
    ----------
    level : "L1", "L2" or "central"
        Whose noise protects whom: that of a trusted server a party, that of each party an
        example, that of a trusted server an example.
    num_labels : int
        Labels of a record, if several.
    """

    level: str
    num_labels: int = 1

    strategy: ClassVar[str]
    moved_by_record: ClassVar[float]
    """How far one record of one label moves the vector, where a record is 1 long."""
    moved_by_party: ClassVar[float]
    """How far one party moves the sum, where its vector is 1 long."""

    @property
    def name(self) -> str:
        """Name of strategy and level."""
        return f"{self.strategy} {self.level}"

    @property
    def unit(self) -> Unit:
        """Who is protected."""
        return "party" if self.level == "L1" else "example"

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

    def noise(self, facts: Facts) -> tuple[GaussianSums, float]:
        """Return the mechanism, and the deviation of the noise on the sum of all parties."""
        by_record = self.moved_by_record * math.sqrt(self.num_labels)
        sums = calibrated_sums(
            facts.target_epsilon,
            facts.delta,
            l2_sensitivity=self.moved_by_party if self.level == "L1" else by_record,
            unit=self.unit,
        )
        draws = facts.num_parties if self.level == "L2" else 1
        return sums, sums.drawn_scale * math.sqrt(draws)


@dataclass(frozen=True, kw_only=True)
class Histogram(_Sums):
    """`FedHistogram`: counts of records by cell and class."""

    strategy: ClassVar[str] = "fedhistogram"
    moved_by_record: ClassVar[float] = math.sqrt(2)
    moved_by_party: ClassVar[float] = math.sqrt(2)

    def _cells(self, facts: Facts) -> tuple[int, float]:
        """Return how many cells there are, and what each has on average."""
        _, noise = self.noise(facts)
        if self.level == "L1":
            parties = facts.num_parties
            cells = rules.usual_cells_of_parties(facts.num_public, parties, noise)
            return cells, parties / math.sqrt(cells)
        cells = rules.usual_cells(facts.num_public, facts.all_records, noise)
        return cells, facts.all_records / cells

    @property
    def _whose(self) -> str:
        return "parties" if self.level == "L1" else "records"

    def problem(self, facts: Facts) -> str:
        """Say if noise is more than what a cell has."""
        _, noise = self.noise(facts)
        return rules.drowned_cells(self._cells(facts)[1], noise, self._whose)

    def draft(self, facts: Facts) -> Draft:
        """Return the histogram that the strategy makes by default."""
        (sums, noise), (cells, heard) = self.noise(facts), self._cells(facts)
        return Draft(
            noise="gaussian",
            scale=sums.drawn_scale,
            asked="cells",
            num_asked=cells,
            voters=f"{heard:.0f} {self._whose} of a cell",
            right=facts.right_labels("gaussian", noise, heard),
            batches=[sums.charges(cells * facts.num_classes)],
            settings=self.settings,
        )


@dataclass(frozen=True, kw_only=True)
class Regression(_Sums):
    """`FedRegression`: sums of components by class.

    A margin is the lead of the first class at a row; noise on the sums becomes noise on the
    regression's score of the row.
    """

    strategy: ClassVar[str] = "fedregression"
    moved_by_record: ClassVar[float] = 2.0
    moved_by_party: ClassVar[float] = 2.0

    def noise_share(self, facts: Facts) -> float:
        """Return the noise on one sum as a share of what all sums usually are together."""
        _, noise = self.noise(facts)
        if self.level == "L1":
            return noise / facts.num_parties
        return noise / (rules.USUAL_STRENGTH * facts.all_records)

    def problem(self, facts: Facts) -> str:
        """Describe noise that leaves no signal in even one component, or return ""."""
        return rules.drowned_components(self.noise_share(facts))

    def draft(self, facts: Facts) -> Draft:
        """Return the regression that the strategy makes by default."""
        sums, share = self.noise(facts)[0], self.noise_share(facts)
        columns = facts.num_columns or facts.num_public
        components = rules.usual_components(facts.num_public, columns, share)
        score = _SCORE_NOISE * rules.USUAL_STRENGTH * share * (components + 1)
        # With two classes one score has the noise, with more the score of each class.
        binary = facts.num_classes == 2
        each, classes = (score / math.sqrt(2), 1) if binary else (score, facts.num_classes)
        return Draft(
            noise="gaussian",
            scale=sums.drawn_scale,
            asked="components",
            num_asked=components,
            voters=f"all {'parties' if self.level == 'L1' else 'records'}, a linear model",
            right=facts.right_labels("gaussian", each, 1.0),
            batches=[sums.charges((components + 1) * classes)],
            settings=self.settings,
            # From so many labels least squares would learn two classes as well.
            worth=(components + 1) / score**2 if binary else None,
        )
