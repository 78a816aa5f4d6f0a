"""Plan a private run from public facts, before anything is spent.

Rules
    How much to ask for under a given noise. Strategies take their defaults from the same
    functions that the planner uses, so that the two never disagree. Nothing depends on a
    record but their number.
Planner
    The best setting of every private strategy under some facts, the expected share of right
    labels, the cost, and what would have to change where nothing works.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import check_count, check_delta, check_positive, require
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import UNITS, Noise, Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA, LARGE_EPSILON, cost_of
from fl_strategies.privacy.noise import (
    VoteMechanism,
    chance_kept,
    chance_of_plurality,
    decided_by_votes,
)

RECORDS_PER_NOISE: Final = 7.0
"""Records of a cell, as deviations of their noise."""
ROWS_PER_CELL: Final = 5
FEWEST_CELLS: Final = 2

COMPONENTS_BY_NOISE: Final = 0.4
"""Number of components times the noise on one of them, as a share of the signal."""
USUAL_STRENGTH: Final = 0.2
"""Length of the mean of features times labels, as a share of the longest possible."""
ROWS_PER_COMPONENT: Final = 5
FEWEST_COMPONENTS: Final = 2

VOTES_PER_NOISE: Final = 4
"""Votes of a unanimous row, as scales of their noise."""
FEWEST_TEACHERS: Final = 5
MOST_TEACHERS: Final = 25
"""Bounds of the number of teachers at L2 unless it is given; 25 is the paper's."""

FEWEST_QUERIES_PER_CLASS: Final = 5
DECIDED_AT_SERVER: Final = 0.9
"""Least share of labels decided by unanimous votes where a model learns from them alone."""
DECIDED_AT_PARTY: Final = 0.6
"""The same where every party's student learns from its own labels: students average noise."""
USUAL_ROUNDS: Final = 1
"""Rounds of noisy labels: all rounds share one epsilon, and one can ask for as many rows."""
_COARSE: Final = 20


def usual_cells(num_public: int, num_records: int, noise: float) -> int:
    """Return the number of cells for so many public rows and records of all parties.

    `noise` is the deviation of the noise on a sum of counts.

    Examples
    --------
    >>> usual_cells(num_public=4000, num_records=24000, noise=24.0)
    142
    """
    enough = num_records / (RECORDS_PER_NOISE * max(noise, 1.0))
    return int(max(FEWEST_CELLS, min(enough, num_public / ROWS_PER_CELL)))


def usual_cells_of_parties(num_public: int, num_parties: int, noise: float) -> int:
    """Return the number of cells where all parties weigh the same.

    The counts of a party are a vector of length 1, so each of k cells has one over the root
    of k. `noise` is on the sum over parties.

    Examples
    --------
    >>> usual_cells_of_parties(num_public=4000, num_parties=500, noise=6.0)
    141
    """
    enough = (num_parties / (RECORDS_PER_NOISE * max(noise, 1e-9))) ** 2
    return int(max(FEWEST_CELLS, min(enough, num_public / ROWS_PER_CELL)))


def outweighed_cells(share: float, noise: float, whose: str = "records") -> str:
    """Describe noise that outweighs the average content of a cell, or return "".

    Examples
    --------
    >>> outweighed_cells(share=50.0, noise=60.0)
    '60 on 50 records of a cell'
    """
    return "" if share >= noise else f"{noise:.3g} on {share:.3g} {whose} of a cell"


def usual_components(num_public: int, num_values: int, noise: float) -> int:
    """Return the number of components, for noise on one as a share of the whole signal.

    Examples
    --------
    >>> [usual_components(4000, 123, noise) for noise in (0.2, 0.02, 0.002)]
    [2, 20, 123]
    """
    most = min(num_values, num_public // ROWS_PER_COMPONENT)
    enough = math.ceil(COMPONENTS_BY_NOISE / max(noise, 1e-9))
    return max(1, min(most, max(FEWEST_COMPONENTS, enough)))


def outweighed_components(noise: float) -> str:
    """Describe noise that outweighs even one component, or return "".

    Examples
    --------
    >>> outweighed_components(0.5)
    '50% of the sums, where 40% is the most'
    """
    if noise <= COMPONENTS_BY_NOISE:
        return ""
    return f"{noise:.0%} of the sums, where {COMPONENTS_BY_NOISE:.0%} is the most"


def teachers_for(noise_scale: float) -> int:
    """Return the number of teachers whose votes stand out from noise of this scale.

    Examples
    --------
    >>> [teachers_for(scale) for scale in (0.1, 3.2, 100.0)]
    [5, 13, 25]
    """
    enough = math.ceil(VOTES_PER_NOISE * noise_scale)
    return min(max(enough, FEWEST_TEACHERS), MOST_TEACHERS)


def fewest_queries(num_classes: int, num_public: int) -> int:
    """Return the fewest labels from which anything can be learned, five of each class."""
    return min(FEWEST_QUERIES_PER_CLASS * num_classes, num_public)


def queries_for(
    decided: Callable[[int], float], share: float, num_classes: int, num_public: int
) -> int:
    """Return the number of labels to ask for under noise that is calibrated to it.

    The most for which unanimous votes decide a share of the labels, which `decided` computes
    from their number: fewer teach less, more are mostly noise. At least five of each class.

    Examples
    --------
    >>> queries_for(lambda number: 1 / number**0.5, share=0.1, num_classes=2, num_public=4000)
    100
    """
    low = high = fewest_queries(num_classes, num_public)
    # Noise grows with about the root of the number, so quadrupling ends soon.
    while decided(high) >= share:
        if high == num_public:
            return num_public
        low, high = high, min(4 * high, num_public)
    while high - low > max(1, low // _COARSE):
        middle = (low + high) // 2
        low, high = (middle, high) if decided(middle) >= share else (low, middle)
    return low


def vote_queries(
    mechanism_of: Callable[[int], VoteMechanism], num_votes: int, share: float, num_public: int
) -> int:
    """Return the number of queries, by the noise of a mechanism for a number of labels."""

    def decided(number: int) -> float:
        return decided_by_votes(mechanism_of(number), num_votes)

    num_classes = mechanism_of(1).event.num_classes
    return queries_for(decided, share, num_classes, num_public)


def answer_queries(
    scale_of: Callable[[int], float], num_parties: int, num_classes: int, num_public: int
) -> int:
    """Return the number of queries to parties that each add Gumbel noise to their labels."""

    def decided(number: int) -> float:
        kept = answer_kept(scale_of(number), num_classes)
        won, blind = chance_of_plurality([num_parties], kept, num_classes), 1 / num_classes
        return (won - blind) / (1 - blind)

    return queries_for(decided, DECIDED_AT_SERVER, num_classes, num_public)


def answer_kept(scale: float, num_classes: int) -> float:
    """Return the chance that a label with Gumbel noise is the voter's own.

    Examples
    --------
    >>> round(answer_kept(1.0, 2), 3)
    0.731
    """
    (kept,) = chance_kept("gumbel", np.ones((1, 1)), scale, np.array([num_classes - 1]))
    return float(kept)


def outweighed_answers(scale: float, bound: float, num_parties: int) -> str:
    """Describe noise that outweighs a consensus of parties that all agree, or return "".

    Noise of parties is independent, so that of their mean falls with the root of their
    number; the largest answer is `bound`.

    Examples
    --------
    >>> outweighed_answers(scale=12.0, bound=1.0, num_parties=100)
    'scale 12 against answers up to 1 of 100 parties'
    """
    if scale <= bound * math.sqrt(num_parties):
        return ""
    return f"scale {scale:.3g} against answers up to {bound:g} of {num_parties} parties"


Margins: TypeAlias = Sequence[float] | Sequence[Sequence[float]]

DEFAULT_MARGINS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Leads of the leading class over the second, equally likely, as shares of all votes."""
_OWNER: Final = "plan"
_MOST_MARGINS: Final = 1_000_000
_LARGEST_MARGIN: Final = 1000.0
_BISECTIONS: Final = 50
# All classes beyond are taken for as near as this one, which few votes ever are for.
_MOST_RANKS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public facts about a federation, and its budget.

    Parameters
    ----------
    target_epsilon, delta : float
    num_parties : int
    num_records : int
        Records of one party.
    num_classes, num_public : int
    num_columns : int, optional
        Values of a row; unknown if omitted.
    unit : "party" or "example"
    margins : sequence of float
        Leads of the leading class over the second, all equally likely, as shares of the votes
        on a row; for histograms as shares of the records of an average cell, so that
        a cell with more than others may have a lead above 1. Of further classes each has
        the same fraction of the votes of the one before it. Or, instead of a number, the
        leads over every other class.
    """

    target_epsilon: float
    num_parties: int
    num_records: int
    num_classes: int
    num_public: int
    unit: Unit = "example"
    num_columns: int | None = None
    delta: float = DEFAULT_DELTA
    margins: Margins = DEFAULT_MARGINS

    def __post_init__(self) -> None:
        """Check the facts."""
        check_positive(_OWNER, "target_epsilon", self.target_epsilon)
        check_delta(_OWNER, self.delta)
        check_count(_OWNER, "num_classes", self.num_classes, least=2)
        for name in ("num_parties", "num_records", "num_public"):
            check_count(_OWNER, name, getattr(self, name), least=1)
        if self.num_columns is not None:
            check_count(_OWNER, "num_columns", self.num_columns, least=1)
        require(self.unit in UNITS, _OWNER, "unit", " or ".join(UNITS), self.unit)
        object.__setattr__(self, "margins", self._checked_margins())

    def _checked_margins(self) -> Margins:
        some, rule = 0 < len(self.margins) <= _MOST_MARGINS, "from 1 to a million"
        require(some, _OWNER, "margins", rule, len(self.margins))
        leads = np.asarray(self.margins, dtype=np.float64)
        shaped = leads.ndim == 1 or leads.shape[1:] == (self.num_classes - 1,)
        rule = "numbers, or one number for every class but the first"
        require(shaped, _OWNER, "margins", rule, leads.shape)
        inside = bool(((leads >= 0) & (leads <= _LARGEST_MARGIN)).all())
        rule = f"from 0 to {_LARGEST_MARGIN:g}"
        require(inside, _OWNER, "margins", rule, (leads.min(), leads.max()))
        kept = leads.tolist()
        return tuple(kept) if leads.ndim == 1 else tuple(map(tuple, kept))

    def _gaps(self) -> tuple[FloatArray, FloatArray, Array]:
        """Return distinct leads over other classes, for how many classes, and how often."""
        leads, counts = np.unique(np.asarray(self.margins), axis=0, return_counts=True)
        if leads.ndim == 1:
            return (*spread_gaps(leads, self.num_classes), counts)
        return leads, np.ones(leads.shape[1]), counts

    @property
    def all_records(self) -> int:
        """Records of all parties."""
        return self.num_parties * self.num_records

    def right_labels(self, noise: Noise, scale: float, num_votes: float) -> float:
        """Return the share of so many votes' labels that noise does not change."""
        gaps, times, counts = self._gaps()
        kept = chance_kept(noise, num_votes * gaps, scale, times)
        return float(np.average(kept, weights=counts))

    def right_pluralities(self, kept: float) -> float:
        """Return the same share where noise keeps the vote of each party with a chance."""
        gaps, _, counts = self._gaps()
        gaps = np.minimum(gaps, 1)
        chances = [
            chance_of_plurality(_whole_votes(row, self.num_parties), kept, self.num_classes)
            for row in gaps
        ]
        return float(np.average(chances, weights=counts))

    def worth(self, num_labels: int, right: float) -> float:
        """Return the number of labels without noise that are worth as much as noisy ones.

        A label that is right beyond chance in a share s of all cases is worth as much to a
        linear model as s squared of a label without noise.
        """
        beyond = (right - 1 / self.num_classes) / (1 - 1 / self.num_classes)
        return num_labels * max(beyond, 0.0) ** 2


def spread_gaps(margins: Array, num_classes: int) -> tuple[FloatArray, FloatArray]:
    """Return the leads over other classes, (n, num_gaps), and for how many classes each is.

    Shares of classes fall by the same factor from each to the next, by the one that gives
    the second its margin; where the margin is all votes or more, no other class has any.

    Examples
    --------
    >>> gaps, times = spread_gaps(np.array([0.2]), 4)
    >>> gaps.round(2), times
    (array([[0.2 , 0.32, 0.38]]), array([1., 1., 1.]))
    """
    leads = np.asarray(margins, dtype=np.float64)[:, None]
    low, high = np.zeros_like(leads), np.ones_like(leads)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        first = 1 / (middle ** np.arange(num_classes)).sum(axis=1, keepdims=True)
        larger = first * (1 - middle) > leads
        low, high = np.where(larger, middle, low), np.where(larger, high, middle)
    ranks = np.arange(1, min(num_classes, _MOST_RANKS))
    first = 1 / (low ** np.arange(num_classes)).sum(axis=1, keepdims=True)
    times = np.ones(len(ranks))
    times[-1] = num_classes - len(ranks)
    return np.where(leads < 1, first * (1 - low**ranks), leads), times


def _whole_votes(gaps: FloatArray, num_votes: int) -> Sequence[int]:
    """Return whole votes of the first classes, nearest to shares with such gaps."""
    behind = np.concatenate([[0.0], gaps])
    shares = np.maximum((1 + behind.sum()) / len(behind) - behind, 0.0)
    wanted = num_votes * shares / shares.sum()
    whole = np.floor(wanted).astype(int)
    nearest = np.argsort(whole - wanted, kind="stable")[: num_votes - int(whole.sum())]
    whole[nearest] += 1
    return [int(number) for number in whole]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The setting that a strategy would choose under some facts.

    Parameters
    ----------
    noise : "gumbel", "laplace" or "gaussian"
    scale : float
        Scale of Laplace or Gumbel noise, standard deviation of Gaussian noise, where it is
        drawn.
    asked, num_asked : str, int
        Unit that gets a label, queries or cells, and their number.
    voters : str
        Whose votes or records decide a label, in words.
    right : float
        Expected share of labels that noise does not change.
    batches : sequence of sequence of (event, count)
        Releases of one run, batch after batch.
    settings : str
        Settings that repeat it on the command line.
    worth : float, optional
        Equivalent number of labels without noise, if not by `Facts.worth`.
    """

    noise: Noise
    scale: float
    asked: str
    num_asked: int
    voters: str
    right: float
    batches: Sequence[Sequence[Entry]]
    settings: str
    worth: float | None = None


class Planner(Protocol):
    """The plan of a strategy."""

    @property
    def name(self) -> str:
        """Name of the strategy and of its privacy level."""

    @property
    def unit(self) -> Unit:
        """Who is protected."""

    @property
    def trusts_server(self) -> bool:
        """Whether the server sees what is protected."""

    @property
    def knobs(self) -> Sequence[str]:
        """Facts that may be changed where nothing works."""

    def problem(self, facts: Facts) -> str:
        """Return why no setting can work, or "" if one can."""

    def draft(self, facts: Facts) -> Draft:
        """Return the best setting."""


@runtime_checkable
class Adjustable(Planner, Protocol):
    """A planner with knobs of its own."""

    def with_knob(self, facts: Facts, knob: str, value: float) -> tuple[Planner, Facts]:
        """Return planner and facts with another value of a knob of its own."""


# The furthest value tried of each knob, and its name. Fewer classes or public rows help,
# and more of everything else.
_KNOBS: Final[Mapping[str, tuple[float, str]]] = {
    "num_parties": (10**6, "parties"),
    "num_records": (10**9, "records of a party"),
    "most_teachers": (10**5, "teachers of a party (num-teachers)"),
    "num_classes": (2, "classes"),
    "num_public": (10, "public rows"),
    "target_epsilon": (LARGE_EPSILON, "epsilon"),
}
_FALLING: Final = ("num_classes", "num_public")
_FINE: Final = 1.005


@dataclass(frozen=True)
class Remedy:
    """The nearest value of one fact with which a strategy works, all others unchanged."""

    knob: str
    value: float

    def __str__(self) -> str:
        """Return it in words."""
        bound = "at most" if self.knob in _FALLING else "at least"
        if self.knob == "target_epsilon":
            return f"epsilon of {bound} {self.value:.3g}"
        return f"{bound} {self.value:.0f} {_KNOBS[self.knob][1]}"


def remedies(planner: Planner, facts: Facts) -> tuple[Remedy, ...]:
    """Return the changes that would work, each alone."""
    found = ((knob, _nearest(planner, facts, knob)) for knob in planner.knobs)
    return tuple(Remedy(knob, value) for knob, value in found if value is not None)


def advice(planner: Planner, facts: Facts, setting: str) -> str:
    """Return what to do about refused settings: leave one open, or change a fact."""
    if not planner.problem(facts):
        draft = planner.draft(facts)
        return f"Leave {setting} open, which gives {draft.num_asked} {draft.asked}"
    found = "; or ".join(map(str, remedies(planner, facts)))
    return f"What would work: {found}" if found else "No number of parties or epsilon would do"


def with_knob(planner: Planner, facts: Facts, knob: str, value: float) -> tuple[Planner, Facts]:
    """Return planner and facts with another value of one of the planner's knobs."""
    if not hasattr(facts, knob) and isinstance(planner, Adjustable):
        return planner.with_knob(facts, knob, value)
    changes: dict[str, Any] = {knob: value}
    if knob == "num_classes":
        # Of stated leads over every class, those of the classes that are left.
        changes["margins"] = [
            lead if isinstance(lead, float) else lead[: int(value) - 1]
            for lead in facts.margins
        ]
    return planner, replace(facts, **changes)


def _nearest(planner: Planner, facts: Facts, knob: str) -> float | None:
    def works(value: float) -> bool:
        changed, other = with_knob(planner, facts, knob, value)
        return not changed.problem(other)

    start = float(getattr(facts, knob, 0) or getattr(planner, knob, 1))
    furthest, _ = _KNOBS[knob]
    if knob == "target_epsilon":
        return _larger(works, start, furthest)
    return _whole(works, int(start), int(furthest))


def _whole(works: Callable[[int], bool], start: int, end: int) -> int | None:
    """Return the whole number nearest to the start that works, in the direction of an end."""
    bad, good, step = start, start, 1 if end > start else -1
    while good != end:
        good = min(2 * good, end) if step > 0 else max(good // 2, end)
        if works(good):
            break
        bad = good
    if good == bad:
        return None
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        bad, good = (bad, middle) if works(middle) else (middle, good)
    return good


def _larger(works: Callable[[float], bool], start: float, most: float) -> float | None:
    """Return the least number above the start that works, rounded up to three digits."""
    if start >= most or not works(most):
        return None
    low, high = start, most
    while high / low > _FINE:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if works(middle) else (middle, high)
    rounded = float(f"{high * _FINE:.3g}")
    return rounded if works(rounded) else high


SEVERAL_RUNS: Final = 10
SPREAD: Final = (
    "margin: lead of the first class over the second as a share of the votes on a row, or of "
    "the records of an average cell; of further classes each has the same fraction of the "
    "votes of the one before it"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best setting of one strategy; see `Draft` for the first of its fields.

    Parameters
    ----------
    strategy : str
    epsilon, epsilon_ten_runs : float
        Cost of one run, and of ten on the same records.
    worth : float
        Equivalent number of labels without noise; see `Facts.worth`.
    trusts_server : bool
        Whether the server, which adds the noise, sees what is protected.
    problem : str
        Why this cannot work; empty if it can.
    remedies : tuple of Remedy
        Changes that would work, each alone.
    cautions : tuple of str
    """

    strategy: str
    noise: Noise
    scale: float
    asked: str
    num_asked: int
    voters: str
    right: float
    settings: str
    epsilon: float
    epsilon_ten_runs: float
    worth: float
    trusts_server: bool
    problem: str = ""
    remedies: tuple[Remedy, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether noise leaves any signal."""
        return not self.problem


@dataclass(frozen=True)
class Plans:
    """Plans of all strategies that protect a unit."""

    facts: Facts
    plans: tuple[Plan, ...]

    @property
    def best(self) -> Plan | None:
        """The plan of largest worth, if possible without trusting the server."""
        working = [plan for plan in self.plans if plan.works]
        return max(working, key=lambda p: (not p.trusts_server, p.worth), default=None)

    def __getitem__(self, strategy: str) -> Plan:
        """Return the plan of a strategy by its name."""
        return next(plan for plan in self.plans if plan.strategy == strategy)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain strings and numbers, fit for JSON."""
        best = self.best
        return {
            "facts": {**asdict(self.facts), "records_mean": "records of one party"},
            "margins_mean": SPREAD,
            "plans": [_plain(found) for found in self.plans],
            "take": None if best is None else best.strategy,
        }

    def lines(self) -> Iterator[str]:
        """Yield everything in words."""
        facts = self.facts
        whom = {"party": "one party", "example": "one record of one party"}[facts.unit]
        yield (
            f"epsilon {facts.target_epsilon:g} at delta {facts.delta:g} for {whom}, replaced "
            f"by another; {facts.num_parties} parties of {facts.num_records} records each, "
            f"{facts.num_classes} classes, {facts.num_public} public rows"
        )
        yield f"{SPREAD}; equally likely: {_shown(facts.margins)}"
        yield ""
        yield (
            f"{'strategy':21} {'noise':>14} {'asked':>14} {'right':>6} {'worth':>6} "
            f"{'eps':>6} {'10 runs':>7}  voters"
        )
        yield from map(_row, self.plans)
        yield ""
        yield from self._advice()

    def _advice(self) -> Iterator[str]:
        best = self.best
        if best is None:
            yield "take: nothing, no strategy can work"
        else:
            name, _, _ = best.strategy.partition(" ")
            target = f"target-epsilon={self.facts.target_epsilon:g}"
            settings = "".join(f" --set {item}" for item in [*best.settings.split(), target])
            yield f"take: {best.strategy} (--strategy {name}{settings})"
        for plan in self.plans:
            if plan.problem:
                instead = "; or ".join(map(str, plan.remedies)) or "nothing that was tried"
                refused = f"{plan.strategy} cannot work: noise of {plan.problem}"
                yield f"warning: {refused}. What would: {instead}."
            for caution in plan.cautions:
                yield f"warning: {plan.strategy}: {caution}"


def plan(
    *,
    target_epsilon: float,
    num_parties: int,
    num_records: int,
    num_classes: int,
    num_public: int,
    num_columns: int | None = None,
    unit: Unit = "example",
    delta: float = DEFAULT_DELTA,
    margins: Margins = DEFAULT_MARGINS,
    planners: Sequence[Planner] | None = None,
) -> Plans:
    """Return the best setting of every private strategy, before anything is spent.

    Parameters are those of `Facts`; `num_records` are the records of one party. `planners`
    are of the strategies to compare, all of the registry by default.

    Examples
    --------
    >>> plans = plan(
    ...     target_epsilon=1.0, num_parties=8, num_records=2000, num_classes=2, num_public=4000
    ... )
    >>> plans.best.strategy, plans.best.num_asked
    ('fedregression L2', 61)
    """
    facts = Facts(
        target_epsilon=target_epsilon,
        num_parties=num_parties,
        num_records=num_records,
        num_classes=num_classes,
        num_public=num_public,
        num_columns=num_columns,
        unit=unit,
        delta=delta,
        margins=margins,
    )
    if planners is None:
        # Found when it is asked for: this package knows no strategy.
        planners = import_module("fl_strategies.registry").PLANNERS
    return Plans(facts, tuple(plan_of(p, facts) for p in planners if p.unit == unit))


def plan_of(planner: Planner, facts: Facts) -> Plan:
    """Return the plan of one strategy."""
    draft, problem = planner.draft(facts), planner.problem(facts)
    worth = facts.worth(draft.num_asked, draft.right) if draft.worth is None else draft.worth
    return Plan(
        strategy=planner.name,
        noise=draft.noise,
        scale=draft.scale,
        asked=draft.asked,
        num_asked=draft.num_asked,
        voters=draft.voters,
        right=draft.right,
        settings=draft.settings,
        epsilon=cost_of(draft.batches, facts.delta),
        epsilon_ten_runs=cost_of([*draft.batches] * SEVERAL_RUNS, facts.delta),
        worth=worth,
        trusts_server=planner.trusts_server,
        problem=problem,
        remedies=remedies(planner, facts) if problem else (),
        cautions=() if problem else tuple(_cautions(facts.num_classes, draft, worth)),
    )


def _cautions(classes: int, draft: Draft, worth: float) -> Iterator[str]:
    if draft.num_asked < classes:
        yield f"{draft.num_asked} {draft.asked} are fewer than the {classes} classes."
    elif worth < FEWEST_QUERIES_PER_CLASS * classes:
        yield f"its labels are worth {worth:.2g} without noise, few to learn {classes} classes."


def _row(plan: Plan) -> str:
    mark = "" if plan.works else "  CANNOT WORK"
    trust = ", server trusted" if plan.trusts_server else ""
    return (
        f"{plan.strategy:21} {f'{plan.noise} {plan.scale:.4g}':>14} "
        f"{f'{plan.num_asked} {plan.asked}':>14} {plan.right:6.1%} {plan.worth:6.0f} "
        f"{_cost(plan.epsilon):>6} {_cost(plan.epsilon_ten_runs):>7}  "
        f"{plan.voters}{trust}{mark}"
    )


def _cost(epsilon: float) -> str:
    return f"{epsilon:.3f}" if math.isfinite(epsilon) else "inf"


def _shown(margins: Margins) -> str:
    leads = np.asarray(margins)
    if leads.ndim == 1 and len(leads) <= 12:
        return ", ".join(f"{value:g}" for value in leads)
    return f"{len(leads)} values, {leads.mean():.3g} on average"


def _plain(plan: Plan) -> dict[str, Any]:
    # JSON has no infinity: where nothing is promised there is no number.
    costs = {
        name: cost if math.isfinite(cost := getattr(plan, name)) else None
        for name in ("epsilon", "epsilon_ten_runs")
    }
    advice = [str(remedy) for remedy in plan.remedies]
    return {**asdict(plan), **costs, "works": plan.works, "advice": advice}
