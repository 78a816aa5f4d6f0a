"""Curves of accuracy against epsilon: every private variant at every budget.

Noise comes from the operating system, so a draw is one more run of the same settings, which is
kept under its number. What does not depend on a budget runs once per seed.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import numpy as np

from fl_strategies._util import SHARED, replace_file
from fl_strategies.errors import StrategyError, require
from fl_strategies.privacy.events import Unit
from fl_strategies.registry import REFERENCES
from fl_strategies.release import PrivateVariant
from simulations.config import Settings
from simulations.experiments.engine import (
    Experiment,
    Outcome,
    Results,
    keeps_to,
    shared_notes,
    weakest_promise,
)
from simulations.experiments.entries import (
    VARIANTS,
    Draft,
    Entry,
    Given,
    draft_of,
    fit,
    refuse_settings,
    shared,
)
from simulations.federation import load_federation
from simulations.results.report import Report, markdown_table
from simulations.results.verdict import is_share

OWNER: Final = "curve"
MAJORITY: Final = "majority class"
REFUSED: Final = "refused"
COMPARE: Final = "python -m simulations compare, which has these baselines"
OF_NOISE: Final = ("accept-noise", "seeded-noise")
"""Settings that are refused where there is no noise."""


@dataclass(frozen=True)
class Point:
    """A variant at a budget: its entry, or the reason why it does not run."""

    variant: PrivateVariant
    budget: float
    entry: Entry | None
    refused: str = ""


@dataclass(frozen=True)
class Curves(Experiment):
    """Points of private variants of one unit, and references without privacy.

    Every point and seed runs `draws` times. `excluded` has the references that do not run.
    """

    unit: Unit
    draws: int
    points: tuple[Point, ...]
    references: tuple[Entry, ...]
    excluded: Mapping[str, str]

    def cells(self) -> Iterator[tuple[Entry | None, int, int | None]]:
        """Yield all runs, draw by draw, so that a stop leaves whole draws behind."""
        for draw in range(1, self.draws + 1):
            for seed in self.seeds:
                if draw == 1:
                    for entry in (None, *self.references):
                        yield entry, seed, None
                for point in self.points:
                    if point.entry is not None:
                        yield point.entry, seed, draw


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

    `names` are strategies, or variants of them, all of this unit if there are none; `compared`
    are the `REFERENCES` that also run without privacy.
    """
    refuse_settings(
        OWNER, given, {"target-epsilon": "--epsilons", "solo": COMPARE, "pooled": COMPARE}
    )
    require(draws >= 1, OWNER, "draws", "at least 1", draws)
    require(bool(budgets), OWNER, "epsilons", "at least one number", list(budgets))
    variants = find_variants(unit, names)
    whole: Given = {**given, "solo": False, "pooled": False}
    first = Settings.from_run_config({**shared(whole), "seed": seeds[0]})
    federation = load_federation(first)
    points = []
    for variant in variants:
        for budget in budgets:
            try:
                entry = fit(draft_of(variant, budget, apart=True), whole, federation)
                points.append(Point(variant, budget, entry))
            except StrategyError as error:
                points.append(Point(variant, budget, None, str(error)))
    plain = {k: value for k, value in whole.items() if k.split(".")[-1] not in OF_NOISE}
    references, excluded = [], {}
    for name in compared:
        rule = f"one of {', '.join(REFERENCES)}"
        require(name in REFERENCES, OWNER, "references", rule, name)
        draft = Draft(f"{name}, no privacy", {"strategy": name})
        try:
            references.append(fit(draft, plain, federation))
        except StrategyError as error:
            excluded[draft.name] = str(error)
    return Curves(whole, tuple(seeds), unit, draws, tuple(points), tuple(references), excluded)


def find_variants(unit: Unit, names: Sequence[str] = ()) -> list[PrivateVariant]:
    """Return the variants of a unit, or those of them that are named."""
    known = [variant for variant in VARIANTS if variant.unit == unit]
    words = {word: None for v in known for word in (v.strategy, v.name)}
    for name in names:
        rule = f"one of {', '.join(words)} for --unit {unit}"
        require(name in words, OWNER, "strategy", rule, name)
    return [v for v in known if not names or v.name in names or v.strategy in names]


# The summary


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some values."""

    values: tuple[float, ...]
    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return those of at least one value."""
        lower, median, upper = map(float, np.quantile(values, [0.25, 0.5, 0.75]))
        return cls(tuple(values), lower, median, upper)


@dataclass(frozen=True)
class Curve:
    """One variant: its results by budget, and why it does not run at other budgets."""

    name: str
    strategy: str
    points: Mapping[float, Spread]
    refused: Mapping[float, str] = field(default_factory=dict)
    against: str = ""
    note: str = ""


@dataclass(frozen=True)
class CurveSummary:
    """The content of a table, a picture and a file of curves.

    `references` are strategies without privacy, and the majority class; `excluded` has the
    reasons why some of them are not there.
    """

    data: str
    num_parties: int
    unit: str
    metric: str
    delta: float
    epsilons: tuple[float, ...]
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
        """The setting in a few words."""
        return f"{self.data}, {self.num_parties} parties, {self.unit} level"

    @property
    def runs(self) -> str:
        """The runs that are combined."""
        if len(self.seeds) * self.draws == 1:
            return f"one run, seed {self.seeds[0]}"
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        draws = f" with {self.draws} draws of the noise each" if self.draws > 1 else ""
        return f"median and quartiles over {seeds}{draws}"

    @property
    def shown_delta(self) -> str:
        """Delta for people."""
        return f"{self.delta:g}".replace("e-0", "e-")

    @property
    def factor(self) -> int:
        """Factor of the metric for people: shares are in percent."""
        return 100 if is_share(self.metric) else 1

    @property
    def shown_metric(self) -> str:
        """Name of the metric, with its unit."""
        return self.metric.replace("-", " ") + (" (%)" if self.factor == 100 else "")


def summarise_curves(curves: Curves, results: Results, command: str = "") -> CurveSummary:
    """Combine seeds and draws of every point that has results for all of them."""
    failed = results.failed
    references = {
        entry.name: curves.found(results, entry)
        for entry in curves.references
        if entry.name not in failed
    }
    private = {
        point.entry.name: curves.found(results, point.entry, range(1, curves.draws + 1))
        for point in curves.points
        if point.entry is not None and point.entry.name not in failed
    }
    runs = [one for several in (*references.values(), *private.values()) for one in several]
    measured = curves.found(results, None)
    majority = [one["figures"]["majority-"] for one in measured]
    settings = curves.settings(None, curves.seeds[0])
    excluded = {e.name: failed[e.name] for e in curves.references if e.name in failed}
    variants = [v for v in VARIANTS if any(point.variant == v for point in curves.points)]
    return CurveSummary(
        data=settings.data,
        num_parties=settings.num_parties,
        unit=curves.unit,
        metric=measured[0]["metric"],
        delta=settings.delta,
        epsilons=tuple(sorted({point.budget for point in curves.points})),
        seeds=curves.seeds,
        draws=curves.draws,
        curves=tuple(_curve(curves, variant, private, failed) for variant in variants),
        references={
            **{name: _spread(several) for name, several in references.items()},
            MAJORITY: Spread.of(majority),
        },
        excluded={**curves.excluded, **excluded},
        command=command,
        commits=_different("commit", runs),
        dates=_different("date", runs),
    )


def _spread(outcomes: Sequence[Outcome]) -> Spread:
    return Spread.of([one["figures"][""] for one in outcomes])


def _different(key: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return all commits or days of results, in ten characters; uncommitted changes show."""
    texts = {str(one[key]) for one in outcomes if one[key]}
    return tuple(sorted({text[:10] + "-dirty" * text.endswith("-dirty") for text in texts}))


def _curve(
    curves: Curves,
    variant: PrivateVariant,
    private: Mapping[str, Sequence[Outcome]],
    failed: Mapping[str, str],
) -> Curve:
    points, refused, against, note = {}, {}, "", variant.note
    for point in (one for one in curves.points if one.variant == variant):
        if point.entry is None:
            refused[point.budget] = point.refused
        elif point.entry.name in failed:
            refused[point.budget] = failed[point.entry.name]
        else:
            found = private[point.entry.name]
            promise = weakest_promise(found, curves.unit)
            most_delta = curves.settings(point.entry, curves.seeds[0]).delta
            # Nothing is shown that promises less than its budget.
            if not keeps_to(point.budget, most_delta, *promise):
                reason = "It promised epsilon {:g} at delta {:g} only."
                refused[point.budget] = reason.format(*promise)
                continue
            points[point.budget] = _spread(found)
            against, note = found[0]["against"], point.entry.note
    return Curve(variant.name, variant.strategy, points, refused, against, note)


# The table


def markdown(summary: CurveSummary) -> str:
    """Return the table and what must be known to read it."""
    budgets = summary.epsilons
    header = [summary.shown_metric, *(f"ε {budget:g}" for budget in budgets), "without ε"]
    rows = [
        [
            curve.name,
            *(
                _shown(summary, curve.points[b]) if b in curve.points else REFUSED
                for b in budgets
            ),
            "",
        ]
        for curve in summary.curves
    ]
    empty = [""] * len(budgets)
    rows += [[name, *empty, _shown(summary, s)] for name, s in summary.references.items()]
    caption = (
        f"{summary.title}, δ {summary.shown_delta}: {summary.runs}; "
        f"what has no ε ran once a seed. Commit {', '.join(summary.commits) or 'unknown'}; "
        f"{', '.join(summary.dates)}."
    )
    return "\n".join([markdown_table(header, rows), "", caption, *_notes(summary)])


def _shown(summary: CurveSummary, spread: Spread) -> str:
    values = [summary.factor * one for one in (spread.median, spread.lower, spread.upper)]
    digits = 1 if summary.factor == 100 else 4
    median, lower, upper = (f"{value:.{digits}f}" for value in values)
    return median if len(spread.values) == 1 else f"{median} ({lower} to {upper})"


def _notes(summary: CurveSummary) -> list[str]:
    """Return the notes on curves, each once, and why some do not run."""
    pairs = []
    for curve in (one for one in summary.curves if one.points):
        against = f"protected against {curve.against}" if curve.against else ""
        pairs += [(curve.name, against), (curve.name, curve.note)]
    notes = [f"- {', '.join(names)}: {note}." for note, names in shared_notes(pairs).items()]
    for curve in (one for one in summary.curves if one.refused):
        budgets = ", ".join(f"{budget:g}" for budget in sorted(curve.refused))
        largest = max(curve.refused)
        why = f"at {budgets}; at {largest:g}: {curve.refused[largest]}"
        notes.append(f"- {curve.name}, {REFUSED} {why}")
    notes += [f"- {name}, {REFUSED}: {reason}" for name, reason in summary.excluded.items()]
    return ["", *notes] if notes else []


# The file


def to_json(summary: CurveSummary) -> Report:
    """Return the table for programs, with every value."""
    curves = [
        {
            "name": curve.name,
            "strategy": curve.strategy,
            "protected-against": curve.against,
            "note": curve.note,
            "points": [{"epsilon": b, **_quartiles(s)} for b, s in curve.points.items()],
            "refused": [{"epsilon": b, "reason": why} for b, why in curve.refused.items()],
        }
        for curve in summary.curves
    ]
    references = [{"name": n, **_quartiles(s)} for n, s in summary.references.items()]
    plain = {name.replace("_", "-"): value for name, value in vars(summary).items()}
    return {**plain, "curves": curves, "references": references}


def _quartiles(spread: Spread) -> Report:
    return {
        "median": spread.median,
        "lower-quartile": spread.lower,
        "upper-quartile": spread.upper,
        "figures": list(spread.values),
    }


# The document


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
    begin, end = (f"<!-- {word}{OWNER}: {summary.title} -->" for word in ("", "end of "))
    text = target.read_text(encoding="utf-8") if target.exists() else INTRODUCTION
    place = Path(os.path.relpath(picture, target.parent)).as_posix()
    section = f"""\
{begin}

## {summary.title}

![{summary.title}: {summary.shown_metric} against epsilon]({place})

{markdown(summary)}

```sh
{summary.command}
```

{end}"""
    if begin in text:
        before, _, rest = text.partition(begin)
        require(end in rest, OWNER, "markdown", f"a file with {end}", str(target))
        text = before + section + rest.partition(end)[2]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, text.encode(), SHARED)
