"""One small class for every private strategy: its noise, what it asks for, what that gives.

To add a strategy, write a class with the methods of `Planner` and name it in `PLANNERS`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar, Final

from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import GaussianSums, calibrated_sums
from fl_strategies.privacy.events import OneVoteEvent, Unit
from fl_strategies.privacy.noise import ScoreMechanism, ScorePrivacy, calibrate_scale
from fl_strategies.privacy.planning import rules
from fl_strategies.privacy.planning.facts import Draft, Facts, Planner
from fl_strategies.privacy.votes import VoteMechanism, VotePrivacy, drowned_votes

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
        """Say if noise drowns even one component."""
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


_LOGIT_BOUND: Final = 10.0
_LEAST_ANSWER_SCALE: Final = 2.0**-12


@dataclass(frozen=True, kw_only=True)
class Votes:
    """`FedKT`: labels by noisy votes, of parties at the server (L1) or of teachers (L2).

    Parameters
    ----------
    most_teachers : int
        How many teachers of a party may vote, at L2.
    """

    unit: Unit
    most_teachers: int = rules.MOST_TEACHERS

    @property
    def level(self) -> str:
        """The paper's name for where the noise is."""
        return "L1" if self.unit == "party" else "L2"

    @property
    def name(self) -> str:
        """Name of strategy and level."""
        return f"fedkt {self.level}"

    @property
    def trusts_server(self) -> bool:
        """At L1 the server adds the noise."""
        return self.level == "L1"

    @property
    def knobs(self) -> Sequence[str]:
        """What may be changed if nothing works."""
        voters = "num_parties" if self.level == "L1" else "most_teachers"
        return (voters, "num_classes", "target_epsilon")

    def _mechanism(self, facts: Facts, num_queries: int) -> VoteMechanism:
        privacy = VotePrivacy(
            level="L1" if self.unit == "party" else "L2",
            target_epsilon=facts.target_epsilon,
            delta=facts.delta,
        )
        return privacy.mechanism(
            unit=self.unit,
            sensitivity=1,
            num_classes=facts.num_classes,
            num_queries=num_queries,
        )

    def _most_votes(self, facts: Facts) -> int:
        if self.level == "L1":
            return facts.num_parties
        return min(self.most_teachers, facts.num_records)

    def problem(self, facts: Facts) -> str:
        """Say if the fewest labels of unanimous votes are mostly noise."""
        fewest = rules.fewest_queries(facts.num_classes, facts.num_public)
        return drowned_votes(self._mechanism(facts, fewest), self._most_votes(facts))

    def draft(self, facts: Facts) -> Draft:
        """Return the queries, and at L2 the teachers, that the strategy has by default."""
        most = self._most_votes(facts)
        share = rules.DECIDED_AT_SERVER if self.level == "L1" else rules.DECIDED_AT_PARTY
        queries = rules.vote_queries(
            lambda number: self._mechanism(facts, number), most, share, facts.num_public
        )
        mechanism = self._mechanism(facts, queries)
        votes = most if self.level == "L1" else min(rules.teachers_for(mechanism.scale), most)
        voters = f"{votes} parties" if self.level == "L1" else f"{votes} teachers of a party"
        return Draft(
            noise=mechanism.event.noise,
            scale=mechanism.scale,
            asked="queries",
            num_asked=queries,
            voters=voters,
            right=facts.right_labels(mechanism.event.noise, mechanism.scale, votes),
            batches=[mechanism.charges(queries)],
            settings=f"privacy-level={self.level}",
        )


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
        return rules.drowned_answers(self._scale(facts, fewest), 1.0, facts.num_parties)

    def draft(self, facts: Facts) -> Draft:
        """Return the rows of a round that the strategy asks for by default."""
        rows = rules.answer_queries(
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


@dataclass(frozen=True, kw_only=True)
class Scores:
    """`FedKD` with Gaussian noise on the mean scores of all public rows, at the server.

    A party moves every score of every row, and so may one of its records: with equal weights
    the two promises are one. The lead of a class is its margin times the bound of a row.
    """

    unit: Unit
    trusts_server: ClassVar[bool] = True
    knobs: ClassVar[Sequence[str]] = ("num_parties", "num_public", "target_epsilon")

    name: ClassVar[str] = "fedkd noise"

    def _mechanism(self, facts: Facts) -> tuple[ScorePrivacy, ScoreMechanism]:
        privacy = ScorePrivacy(
            noise="gaussian", target_epsilon=facts.target_epsilon, delta=facts.delta
        )
        mechanism = privacy.mechanism(
            unit=self.unit,
            bound=_LOGIT_BOUND,
            num_values=facts.num_classes,
            num_contributors=facts.num_parties,
            num_rows=facts.num_public,
        )
        return privacy, mechanism

    def problem(self, facts: Facts) -> str:
        """Say if noise is more than the largest mean score."""
        _, mechanism = self._mechanism(facts)
        if mechanism.scale <= _LOGIT_BOUND:
            return ""
        return f"deviation {mechanism.scale:.3g} on scores up to {_LOGIT_BOUND:g}"

    def draft(self, facts: Facts) -> Draft:
        """Return the noise on the scores of all public rows."""
        privacy, mechanism = self._mechanism(facts)
        entries = facts.num_public * facts.num_classes
        return Draft(
            noise="gaussian",
            scale=mechanism.scale,
            asked="queries",
            num_asked=facts.num_public,
            voters=f"{facts.num_parties} parties' mean, up to {_LOGIT_BOUND:g}",
            right=facts.right_labels("gaussian", mechanism.scale, _LOGIT_BOUND),
            batches=[privacy.charges(mechanism, entries)],
            settings="weights=uniform noise=gaussian",
        )


PLANNERS: Final[Sequence[Planner]] = (
    Histogram(level="L2"),
    Regression(level="L2"),
    Histogram(level="central"),
    Regression(level="central"),
    Votes(unit="example"),
    Answers(),
    Answers(num_rounds=5),
    Histogram(level="L1"),
    Regression(level="L1"),
    Votes(unit="party"),
    Scores(unit="example"),
    Scores(unit="party"),
)
"""Every private strategy there is."""


def with_knob(planner: Planner, facts: Facts, knob: str, value: float) -> tuple[Planner, Facts]:
    """Return planner and facts with another value of one of the planner's knobs."""
    if isinstance(planner, Votes) and knob == "most_teachers":
        # So many teachers need at least as many records.
        records = max(facts.num_records, int(value))
        return replace(planner, most_teachers=int(value)), replace(facts, num_records=records)
    kept = {item.name: getattr(facts, item.name) for item in fields(facts)}
    if knob == "num_classes":
        # Of stated leads over every class, those of the classes that are left.
        kept["margins"] = [
            lead if isinstance(lead, float) else lead[: int(value) - 1]
            for lead in facts.margins
        ]
    return planner, Facts(**{**kept, knob: value})
