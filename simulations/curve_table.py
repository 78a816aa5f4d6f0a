"""What curves show: medians and quartiles over seeds and draws, by variant and budget."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from fl_strategies.wire import keys
from simulations.curve import Curves, Point
from simulations.fitting import Entry
from simulations.private_variants import Variant
from simulations.report import Report
from simulations.reproduce import Outcome, find
from simulations.resuming import PROMISES, Results

MAJORITY: Final = "majority class"
REFUSED: Final = "refused"
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
