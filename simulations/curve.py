"""Curves of accuracy against epsilon: every private variant at every budget.

Noise comes from the operating system, so a draw is one more run of the same settings, which is
kept under its number. What does not depend on a budget runs once a seed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fl_strategies.errors import StrategyError, require
from simulations.config import Settings
from simulations.federation import Federation, load_federation
from simulations.fitting import Draft, Entry, Given, fit, refuse_settings, shared
from simulations.private_variants import VARIANTS, Unit, Variant
from simulations.reproduce import Runner
from simulations.resuming import Experiment, Results, Say, Task, run_missing

OWNER: Final = "curve"
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
