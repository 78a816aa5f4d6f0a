"""Curves of accuracy against epsilon: every private variant at every budget.

Noise comes from the operating system, so a draw is one more run of the same settings, which is
kept under its number. What does not depend on a budget runs once a seed.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import numpy as np

from fl_strategies._util import SHARED, replace_file
from fl_strategies.errors import StrategyError, require
from fl_strategies.wire import keys
from simulations.config import Settings
from simulations.experiments.engine import (
    PROMISES,
    Experiment,
    Outcome,
    Results,
    Runner,
    Say,
    Task,
    find,
    run_missing,
)
from simulations.experiments.entries import (
    VARIANTS,
    Draft,
    Entry,
    Given,
    Unit,
    Variant,
    fit,
    refuse_settings,
    shared,
)
from simulations.federation import Federation, load_federation
from simulations.results.report import Report

OWNER: Final = "curve"
MAJORITY: Final = "majority class"
REFUSED: Final = "refused"
REFERENCES: Final = ("fedhistogram", "fedregression", "fedkd")
"""Strategies that also run without privacy, to show what it costs."""
NOT_HERE: Final[Mapping[str, str]] = {
    "strategy": "--strategy",
    "seed": "--seeds",
    "target-epsilon": "--epsilons",
    "solo": "python -m simulations compare, which has these baselines",
    "pooled": "python -m simulations compare, which has these baselines",
    "pate": "python -m simulations run, which shows it",
    "public-only": "python -m simulations run, which shows it",
}
"""Settings that a curve decides itself, and where the user decides them instead."""
OF_NOISE: Final = ("accept-noise", "seeded-noise")
"""Settings that say nothing where there is no noise, and are refused there."""


@dataclass(frozen=True)
class Point:
    """A variant at a budget: how it runs, or why it does not."""

    variant: Variant
    budget: float
    entry: Entry | None
    refused: str = ""


@dataclass(frozen=True)
class Curves(Experiment):
    """What is drawn: points of private variants, and references without privacy.

    Parameters
    ----------
    given, seeds
        See `Experiment`.
    unit : "example" or "party"
        Whom all variants protect.
    draws : int
        Runs of every point and seed.
    points : tuple of Point
    references : tuple of Entry
    excluded : mapping
        By name, why a reference is not there.
    """

    unit: Unit
    draws: int
    points: tuple[Point, ...]
    references: tuple[Entry, ...]
    excluded: Mapping[str, str]

    @property
    def variants(self) -> list[Variant]:
        """All variants, in the order of their table."""
        return [v for v in VARIANTS if any(point.variant == v for point in self.points)]

    @property
    def budgets(self) -> list[float]:
        """All budgets, smallest first."""
        return sorted({point.budget for point in self.points})

    def tasks(self) -> Iterator[Task]:
        """Give all runs, draw by draw, so that a stop leaves whole draws behind."""
        for draw in range(1, self.draws + 1):
            for seed in self.seeds:
                if draw == 1:
                    for entry in (None, *self.references):
                        yield self.task(entry, seed)
                for point in self.points:
                    if point.entry is not None:
                        yield self.task(point.entry, seed, draw)


def plan_curves(
    given: Given,
    *,
    unit: Unit,
    names: Sequence[str],
    budgets: Sequence[float],
    seeds: Sequence[int],
    draws: int,
    compared: Sequence[str] = REFERENCES,
) -> Curves:
    """Find out what runs; a variant that refuses a budget is kept with its reason.

    Parameters
    ----------
    given : mapping
        Settings of all runs.
    unit : "example" or "party"
    names : sequence of str
        Strategies, or variants of them; none: all of this unit.
    budgets : sequence of float
        Epsilons.
    seeds : sequence of int
    draws : int
    compared : sequence of str
        Which of `REFERENCES` also run without privacy.
    """
    refuse_settings(OWNER, given, NOT_HERE)
    require(draws >= 1, OWNER, "draws", "at least 1", draws)
    require(bool(budgets), OWNER, "epsilons", "at least one number", list(budgets))
    variants = find_variants(unit, names)
    whole: Given = {**given, "solo": False, "pooled": False}
    first = Settings.from_run_config({**shared(whole), "seed": seeds[0]})
    federation = load_federation(first)
    points = [
        _point(variant, budget, whole, federation) for variant in variants for budget in budgets
    ]
    for name in compared:
        rule = f"one of {', '.join(REFERENCES)}"
        require(name in REFERENCES, OWNER, "references", rule, name)
    references, excluded = _references(whole, federation, compared)
    return Curves(whole, tuple(seeds), unit, draws, tuple(points), references, excluded)


def _point(variant: Variant, budget: float, given: Given, federation: Federation) -> Point:
    try:
        return Point(variant, budget, fit(variant.draft(budget, apart=True), given, federation))
    except StrategyError as error:
        return Point(variant, budget, None, str(error))


def _references(
    given: Given, federation: Federation, compared: Sequence[str]
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """Return the entries without privacy and, by name, why one of them does not fit."""
    plain = {k: value for k, value in given.items() if k.split(".")[-1] not in OF_NOISE}
    entries, excluded = [], {}
    for name in compared:
        draft = Draft(f"{name}, no privacy", {"strategy": name})
        try:
            entries.append(fit(draft, plain, federation))
        except StrategyError as error:
            excluded[draft.name] = str(error)
    return tuple(entries), excluded


def find_variants(unit: Unit, names: Sequence[str] = ()) -> list[Variant]:
    """Return the variants of a unit, or those of them that are named."""
    known = [variant for variant in VARIANTS if variant.unit == unit]
    words = {word: None for v in known for word in (v.strategy, v.name)}
    for name in names:
        rule = f"one of {', '.join(words)} for --unit {unit}"
        require(name in words, OWNER, "strategy", rule, name)
    return [v for v in known if not names or v.name in names or v.strategy in names]


def run_curves(curves: Curves, run: Runner, kept: Path, say: Say) -> Results:
    """Run what is missing; see `run_missing`."""
    return run_missing(list(curves.tasks()), run, kept, say)


SLACK: Final = 1e-9
"""What rounding may add to an epsilon that was calibrated to a budget."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some figures."""

    figures: tuple[float, ...]
    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Self:
        """Return those of at least one figure."""
        lower, median, upper = map(float, np.quantile(figures, [0.25, 0.5, 0.75]))
        return cls(tuple(figures), lower, median, upper)


@dataclass(frozen=True)
class Curve:
    """One variant: what it reaches at each budget, and why it does not run at others."""

    name: str
    strategy: str
    points: Mapping[float, Spread]
    refused: Mapping[float, str] = field(default_factory=dict)
    against: str = ""
    note: str = ""


@dataclass(frozen=True)
class CurveSummary:
    """Everything that a table or a picture of curves shows.

    Parameters
    ----------
    data, unit, metric : str
    num_parties : int
    delta : float
    budgets : tuple of float
    seeds : tuple of int
    draws : int
    curves : tuple of Curve
        All private variants, also those that run at no budget.
    references : mapping
        What strategies without privacy reach, and the majority class.
    excluded : mapping
        By name, why a reference is not there.
    command : str
    commits, dates : tuple of str
    """

    data: str
    unit: str
    metric: str
    num_parties: int
    delta: float
    budgets: tuple[float, ...]
    seeds: tuple[int, ...]
    draws: int
    curves: tuple[Curve, ...]
    references: Mapping[str, Spread]
    excluded: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    commits: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What is shown, in a few words."""
        return f"{self.data}, {self.num_parties} parties, {self.unit} level"

    @property
    def runs(self) -> str:
        """What the figures are of."""
        if len(self.seeds) * self.draws == 1:
            return f"one run, seed {self.seeds[0]}"
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        draws = f" with {self.draws} draws of the noise each" if self.draws > 1 else ""
        return f"median and quartiles over {seeds}{draws}"

    @property
    def told_delta(self) -> str:
        """Delta as people write it."""
        return f"{self.delta:g}".replace("e-0", "e-")

    @property
    def factor(self) -> int:
        """What figures are multiplied by for people: shares are told in percent."""
        return 1 if self.metric == keys.MEAN_SQUARED_ERROR else 100

    @property
    def figure(self) -> str:
        """Name of the figure, with its unit."""
        return self.metric.replace("-", " ") + (" (%)" if self.factor == 100 else "")


def summarise_curves(curves: Curves, results: Results, command: str = "") -> CurveSummary:
    """Combine seeds and draws of every point that has results for all of them."""
    measured = _found(curves, results, None, [None])
    references = {
        entry.name: _found(curves, results, entry, [None])
        for entry in curves.references
        if entry.name not in results.failed
    }
    private = {
        point.entry.name: _found(curves, results, point.entry, range(1, curves.draws + 1))
        for point in curves.points
        if point.entry is not None and point.entry.name not in results.failed
    }
    runs = [one for several in (*references.values(), *private.values()) for one in several]
    settings = curves.settings(None, curves.seeds[0])
    figures = {
        name: [one["figures"][""] for one in found] for name, found in references.items()
    }
    figures[MAJORITY] = [one["figures"]["majority-"] for one in measured]
    names = {entry.name for entry in curves.references}
    return CurveSummary(
        data=settings.data,
        unit=curves.unit,
        metric=measured[0]["metric"],
        num_parties=settings.num_parties,
        delta=settings.delta,
        budgets=tuple(curves.budgets),
        seeds=curves.seeds,
        draws=curves.draws,
        curves=tuple(_curve(curves, v, private, results.failed) for v in curves.variants),
        references={name: Spread.of(several) for name, several in figures.items()},
        excluded={
            **curves.excluded,
            **{name: why for name, why in results.failed.items() if name in names},
        },
        command=command,
        commits=_all_of("commit", runs),
        dates=_all_of("date", runs),
    )


def _found(
    curves: Curves, results: Results, entry: Entry | None, draws: Iterable[int | None]
) -> list[Outcome]:
    asked = [curves.asked(entry, seed, draw) for draw in draws for seed in curves.seeds]
    found = [find(results.outcomes, one) for one in asked]
    return [outcome for outcome in found if outcome is not None]


def _figures(outcomes: Sequence[Outcome]) -> list[float]:
    return [one["figures"][""] for one in outcomes]


def _all_of(key: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return all commits or days that results are from; of a commit ten digits tell enough."""
    return tuple(sorted({_short(str(one[key])) for one in outcomes if one[key]}))


def _short(text: str) -> str:
    """Return ten characters, and whether there were changes that no commit has."""
    return text[:10] + ("-dirty" if text.endswith("-dirty") else "")


def _curve(
    curves: Curves,
    variant: Variant,
    private: Mapping[str, Sequence[Outcome]],
    failed: Mapping[str, str],
) -> Curve:
    points, refused, against, note = {}, {}, "", variant.note
    for point in curves.points:
        if point.variant != variant:
            continue
        found = private.get(point.entry.name, ()) if point.entry else ()
        reason = _refusal(curves, point, found, failed)
        if reason:
            refused[point.budget] = reason
            continue
        points[point.budget] = Spread.of(_figures(found))
        against = found[0]["against"]
        note = point.entry.note if point.entry else note
    return Curve(variant.name, variant.strategy, points, refused, against, note)


def _refusal(
    curves: Curves, point: Point, found: Sequence[Outcome], failed: Mapping[str, str]
) -> str:
    """Return why a point is not shown: nothing is that promises less than its budget."""
    if point.entry is None:
        return point.refused
    if point.entry.name in failed:
        return failed[point.entry.name]
    epsilon, delta = PROMISES[curves.unit]
    worst = max(_told(one[epsilon]) for one in found)
    chance = max(_told(one[delta]) for one in found)
    most = curves.settings(point.entry, curves.seeds[0]).delta
    if worst <= point.budget * (1 + SLACK) and chance <= most * (1 + SLACK):
        return ""
    return f"It promised epsilon {worst:g} at delta {chance:g} only."


def _told(value: float | None) -> float:
    return math.inf if value is None else value


# For people.


def markdown(summary: CurveSummary) -> str:
    """Return the table and what must be known to read it."""
    header = [summary.figure, *(f"ε {budget:g}" for budget in summary.budgets), "without ε"]
    rows = [[curve.name, *_cells(summary, curve), ""] for curve in summary.curves]
    empty = [""] * len(summary.budgets)
    rows += [[name, *empty, _shown(summary, s)] for name, s in summary.references.items()]
    lines = [header, ["---"] * len(header), *rows]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*table, "", _caption(summary), *_notes(summary)])


def _cells(summary: CurveSummary, curve: Curve) -> list[str]:
    return [
        _shown(summary, curve.points[budget]) if budget in curve.points else REFUSED
        for budget in summary.budgets
    ]


def _shown(summary: CurveSummary, spread: Spread) -> str:
    figures = [summary.factor * one for one in (spread.median, spread.lower, spread.upper)]
    digits = 1 if summary.factor == 100 else 4
    median, lower, upper = (f"{figure:.{digits}f}" for figure in figures)
    return median if len(spread.figures) == 1 else f"{median} ({lower} to {upper})"


def _caption(summary: CurveSummary) -> str:
    commits = ", ".join(summary.commits) or "unknown"
    return (
        f"{summary.title}, δ {summary.told_delta}: {summary.runs}; "
        f"what has no ε ran once a seed. Commit {commits}; {', '.join(summary.dates)}."
    )


def _notes(summary: CurveSummary) -> list[str]:
    """Return what is said of curves, each sentence once after the names it is about."""
    names: dict[str, list[str]] = {}
    for curve in (one for one in summary.curves if one.points):
        against = f"protected against {curve.against}" if curve.against else ""
        for note in filter(None, (against, curve.note)):
            names.setdefault(f"{note}.", []).append(curve.name)
    notes = [f"- {', '.join(several)}: {note}" for note, several in names.items()]
    notes += [_refusals(curve) for curve in summary.curves if curve.refused]
    notes += [f"- {name}, {REFUSED}: {reason}" for name, reason in summary.excluded.items()]
    return ["", *notes] if notes else []


def _refusals(curve: Curve) -> str:
    """Return where a variant does not run, and why not with the most that it may spend."""
    budgets = ", ".join(f"{budget:g}" for budget in sorted(curve.refused))
    largest = max(curve.refused)
    return f"- {curve.name}, {REFUSED} at {budgets}; at {largest:g}: {curve.refused[largest]}"


# For programs.


def to_json(summary: CurveSummary) -> Report:
    """Return the table for programs, with every figure."""
    return {
        "data": summary.data,
        "num-parties": summary.num_parties,
        "unit": summary.unit,
        "metric": summary.metric,
        "delta": summary.delta,
        "epsilons": list(summary.budgets),
        "seeds": list(summary.seeds),
        "draws": summary.draws,
        "curves": [_json_of(curve) for curve in summary.curves],
        "references": [{"name": n, **_quartiles(s)} for n, s in summary.references.items()],
        "excluded": dict(summary.excluded),
        "command": summary.command,
        "commits": list(summary.commits),
        "dates": list(summary.dates),
    }


def from_json(content: Report) -> CurveSummary:
    """Return what `to_json` was given."""
    return CurveSummary(
        data=content["data"],
        unit=content["unit"],
        metric=content["metric"],
        num_parties=content["num-parties"],
        delta=content["delta"],
        budgets=tuple(content["epsilons"]),
        seeds=tuple(content["seeds"]),
        draws=content["draws"],
        curves=tuple(map(_curve_of, content["curves"])),
        references={one["name"]: Spread.of(one["figures"]) for one in content["references"]},
        excluded=content["excluded"],
        command=content["command"],
        commits=tuple(content["commits"]),
        dates=tuple(content["dates"]),
    )


def _json_of(curve: Curve) -> Report:
    return {
        "name": curve.name,
        "strategy": curve.strategy,
        "protected-against": curve.against,
        "note": curve.note,
        "points": [{"epsilon": b, **_quartiles(s)} for b, s in curve.points.items()],
        "refused": [{"epsilon": b, "reason": why} for b, why in curve.refused.items()],
    }


def _curve_of(content: Report) -> Curve:
    return Curve(
        content["name"],
        content["strategy"],
        {one["epsilon"]: Spread.of(one["figures"]) for one in content["points"]},
        {one["epsilon"]: one["reason"] for one in content["refused"]},
        content["protected-against"],
        content["note"],
    )


def _quartiles(spread: Spread) -> Report:
    return {
        "median": spread.median,
        "lower-quartile": spread.lower,
        "upper-quartile": spread.upper,
        "figures": list(spread.figures),
    }


INTRODUCTION: Final = """\
# Accuracy against epsilon

What every private strategy reaches at a budget, beside strategies without privacy and the
answer that is always the larger class. Each section is written by the command in it, with
`--markdown`.
"""


def write_section(summary: CurveSummary, picture: Path, target: Path) -> None:
    """Put the section into a file: in the place of an older one of the same title, or last.

    What people write outside the marks stays.
    """
    begin, end = _marks(summary)
    text = target.read_text(encoding="utf-8") if target.exists() else INTRODUCTION
    section = "\n\n".join([begin, make_section(summary, picture, target), end])
    if begin in text:
        before, _, rest = text.partition(begin)
        require(end in rest, OWNER, "markdown", f"a file with {end}", str(target))
        text = before + section + rest.partition(end)[2]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, text.encode(), SHARED)


def make_section(summary: CurveSummary, picture: Path, target: Path) -> str:
    """Return heading, picture, table and the command that made them."""
    place = Path(os.path.relpath(picture, target.parent)).as_posix()
    return "\n".join(
        [
            f"## {summary.title}",
            "",
            f"![{summary.title}: {summary.figure} against epsilon]({place})",
            "",
            markdown(summary),
            "",
            "```sh",
            summary.command,
            "```",
        ]
    )


def _marks(summary: CurveSummary) -> tuple[str, str]:
    return f"<!-- {OWNER}: {summary.title} -->", f"<!-- end of {OWNER}: {summary.title} -->"
