"""A comparison: all strategies that fit some data, on the same splits and seeds.

Every run is kept in a file as soon as it is finished, under all the settings it was made by,
so a comparison that was stopped resumes, and one with other settings runs anew.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from fl_strategies import __version__
from fl_strategies.exceptions import StrategyError
from fl_strategies.runtime.atomic_files import replace_file
from fl_strategies.wire import keys
from simulations.baselines import PREFIXES, judge_baselines
from simulations.compare_entries import Entry, Given, Plan, shared
from simulations.config import Settings
from simulations.datasets import FILE_SUFFIXES
from simulations.experiment import load_federation
from simulations.report import Report
from simulations.reproduce import Outcome, Runner, find, outcome_of, read_outcomes

Say = Callable[[str], None]

BASELINES: Final = "baselines"
ELSEWHERE: Final = frozenset({"output-dir", "num-workers", "max-wait", "timeout"})
"""Settings that change no result: one that was made by others is not made again."""
FURTHER: Final = ("balanced-accuracy", "macro-f1")
"""Figures that a report may have besides the one of its task."""


@dataclass(frozen=True)
class Comparison:
    """What is compared: the settings of all entries, the seeds, and the entries."""

    given: Given
    seeds: tuple[int, ...]
    plan: Plan

    def settings(self, entry: Entry | None, seed: int) -> Settings:
        """Return the settings of one run; without an entry, those of the baselines."""
        return Settings.from_run_config(
            {**(entry.settings if entry else shared(self.given))}, seed=seed
        )

    def asked(self, entry: Entry | None, seed: int) -> dict[str, Any]:
        """Return all that decides a result, which is kept under it."""
        told = self.settings(entry, seed).to_run_config()
        return {
            **{key: value for key, value in told.items() if key not in ELSEWHERE},
            **self._data_mark,
            "measured": "strategy" if entry else BASELINES,
            "version": __version__,
        }

    @cached_property
    def _data_mark(self) -> dict[str, str]:
        """What tells one content of a user's own file from another."""
        data = str(self.given.get("data", ""))
        if not data.endswith(FILE_SUFFIXES):
            return {}
        return {"data-sha256": hashlib.sha256(Path(data).read_bytes()).hexdigest()}


@dataclass
class Results:
    """Everything that a file holds, and what failed in this call."""

    kept: Path
    outcomes: list[Outcome]
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Keep one more result, at once and whole."""
        self.outcomes.append(outcome)
        self.write({})

    def write(self, summary: Mapping[str, Any]) -> None:
        """Write all results, and what was made of them, in place of the old file."""
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        content = {**summary, "outcomes": self.outcomes}
        replace_file(self.kept, (json.dumps(content, indent=1) + "\n").encode())


@dataclass(frozen=True)
class _Task:
    """One run that a comparison needs; without an entry it measures the baselines."""

    entry: Entry | None
    settings: Settings
    asked: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.entry.name if self.entry else BASELINES


def run_comparison(comparison: Comparison, run: Runner, kept: Path, say: Say) -> Results:
    """Run what is missing, seed by seed, and keep each result at once.

    An entry whose run fails is excluded, with its sentence, and not tried on other seeds.
    """
    results = Results(kept, read_outcomes(kept))
    tasks = list(_tasks(comparison))
    missing = [task for task in tasks if not find(results.outcomes, task.asked)]
    say(f"{len(tasks)} runs, {len(tasks) - len(missing)} of them finished before.\n")
    spent: dict[str, list[float]] = {}
    with _quiet():
        for number, task in enumerate(missing):
            if task.name in results.failed:
                continue
            say(f"[{number + 1}/{len(missing)}] {task.name}, seed {task.settings.seed}: ")
            start = time.perf_counter()
            say(_perform(task, run, results))
            spent.setdefault(task.name, []).append(time.perf_counter() - start)
            say(f"; {_left(missing[number + 1 :], spent)}\n")
    return results


def _tasks(comparison: Comparison) -> Iterator[_Task]:
    for seed in comparison.seeds:
        for entry in (None, *comparison.plan.entries):
            yield _Task(entry, comparison.settings(entry, seed), comparison.asked(entry, seed))


def _perform(task: _Task, run: Runner, results: Results) -> str:
    """Run one task and keep its result; return what to say about it."""
    if task.entry is None:
        outcome = {"settings": dict(task.asked), **measure_baselines(task.settings)}
        results.add(outcome)
        return f"pooled {100 * outcome['figures']['central-']:.1f} %"
    try:
        outcome = _kept_of(task.asked, run(task.settings), task.settings.num_parties)
    except StrategyError as error:
        results.failed[task.name] = str(error)
        return f"excluded: {error}"
    results.add(outcome)
    return f"{100 * outcome['figures']['']:.1f} %"


def _kept_of(asked: Mapping[str, Any], report: Report, num_parties: int) -> Outcome:
    """Return what is kept of a strategy's run; bytes are those of a party, in the mean."""
    told = report["figures"]["federation"]
    rounds = report["rounds"]
    promises = {
        key: _finite(report[key])
        for key in (
            keys.EPSILON_PARTY,
            keys.DELTA_PARTY,
            keys.EPSILON_EXAMPLE,
            keys.DELTA_EXAMPLE,
        )
    }
    return {
        **outcome_of(asked, report),
        **promises,
        "against": report.get("ledger", {}).get("audience", ""),
        "further": {k: told[k] for k in FURTHER if _is_figure(told.get(k))},
        "bytes-up": _total(rounds, keys.NUM_BYTES_SENT) / num_parties,
        "bytes-down": _total(rounds, keys.NUM_BYTES_RECEIVED) / num_parties,
        "num-rounds": rounds[-1]["round"],
        "num-rejected": len(report.get("rejected", ())),
    }


def _finite(value: float) -> float | None:
    """Return None for infinity, which standard JSON has no word for."""
    return value if math.isfinite(value) else None


def _is_figure(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _total(rounds: Sequence[Report], key: str) -> float:
    """Add up the bytes of all rounds, those of delivering the result included."""
    return float(sum(one[part].get(key, 0) for one in rounds for part in ("train", "evaluate")))


def measure_baselines(settings: Settings) -> Outcome:
    """Measure what needs no federation: each party alone, pooled data, the majority class."""
    federation = load_federation(settings.but(solo=True, central=True))
    baselines, metric = judge_baselines(federation, settings.workers), federation.metric
    figures = baselines.top_level(metric)
    return {
        "metric": metric,
        "figures": {prefix: figures[f"{prefix}{metric}"] for prefix in PREFIXES.values()},
        "solo-by-party": baselines.solo,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep every run's log to itself: what ends a run, or excludes a party, is shown later."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _left(tasks: Sequence[_Task], spent: Mapping[str, Sequence[float]]) -> str:
    """Say how long the rest will take if each takes as long as before, or as the others."""
    usual = fmean(second for several in spent.values() for second in several)
    seconds = sum(fmean(spent.get(task.name, [usual])) for task in tasks)
    return f"about {duration(seconds)} left" if tasks else "all done"


def duration(seconds: float) -> str:
    """Return a time as people say it.

    Examples
    --------
    >>> duration(42), duration(300), duration(9000)
    ('42 s', '5 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
