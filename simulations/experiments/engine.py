"""Many runs of one experiment, each kept in a file as soon as it is finished.

A result is kept under all the settings it was made by, so what was stopped resumes, and what
has other settings runs anew.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

from fl_strategies import __version__
from fl_strategies._util import SHARED, replace_file
from fl_strategies.errors import InvalidParameter, StrategyError
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.data.sets import FILE_SUFFIXES
from simulations.experiments.entries import Entry, Given, shared
from simulations.federation import load_federation
from simulations.results.report import Report
from simulations.results.run_folder import finite
from simulations.results.verdict import PREFIXES, judge_baselines
from simulations.runtime.progress import duration, log_level

Runner: TypeAlias = Callable[[Settings], Report]
Outcome: TypeAlias = dict[str, Any]
Say: TypeAlias = Callable[[str], None]

BASELINES: Final = "baselines"
ELSEWHERE: Final = frozenset({"output-dir", "num-workers", "max-wait", "timeout"})
"""Settings that change no result: one that was made by others is not made again."""
FURTHER: Final = ("balanced-accuracy", "macro-f1")
"""Figures that a report may have besides the one of its task."""
PROMISES: Final[Mapping[str, tuple[str, str]]] = {
    "party": (keys.EPSILON_PARTY, keys.DELTA_PARTY),
    "example": (keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
}
"""Epsilon and delta of a result, by whom they protect."""


@dataclass(frozen=True)
class Task:
    """One run that is needed; without an entry it measures the baselines."""

    entry: Entry | None
    settings: Settings
    asked: Mapping[str, Any]
    """All that decides the result, which is kept under it."""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.entry.name if self.entry else BASELINES

    @property
    def told(self) -> str:
        """What tells it from other runs of the same name."""
        draw = f", draw {self.asked['draw']}" if "draw" in self.asked else ""
        return f"seed {self.settings.seed}{draw}"


@dataclass(frozen=True)
class Experiment:
    """What all runs have in common: the user's settings and the seeds."""

    given: Given
    seeds: tuple[int, ...]

    def settings(self, entry: Entry | None, seed: int) -> Settings:
        """Return the settings of one run; without an entry, those of the baselines."""
        return Settings.from_run_config(
            {**(entry.settings if entry else shared(self.given))}, seed=seed
        )

    def asked(self, entry: Entry | None, seed: int, draw: int | None = None) -> dict[str, Any]:
        """Return all that decides a result; runs with secret noise differ by their draw."""
        told = self.settings(entry, seed).to_run_config()
        return {
            **{key: value for key, value in told.items() if key not in ELSEWHERE},
            **self._data_mark,
            "measured": "strategy" if entry else BASELINES,
            "version": __version__,
            **({} if draw is None else {"draw": draw}),
        }

    def task(self, entry: Entry | None, seed: int, draw: int | None = None) -> Task:
        """Return one run."""
        return Task(entry, self.settings(entry, seed), self.asked(entry, seed, draw))

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
        content = finite({**summary, "outcomes": self.outcomes})
        text = json.dumps(content, indent=1, allow_nan=False)
        replace_file(self.kept, f"{text}\n".encode(), SHARED)


def run_missing(tasks: Sequence[Task], run: Runner, kept: Path, say: Say) -> Results:
    """Run what is missing, one after the other, and keep each result at once.

    An entry whose run fails is excluded, with its sentence, and not tried again.
    """
    results = Results(kept, read_outcomes(kept))
    missing = [task for task in tasks if not find(results.outcomes, task.asked)]
    say(f"{len(tasks)} runs, {len(tasks) - len(missing)} of them finished before.\n")
    spent: dict[str, list[float]] = {}
    # What ends a run, or excludes a party, is shown later.
    with log_level(logging.CRITICAL):
        for number, task in enumerate(missing, start=1):
            if task.name in results.failed:
                continue
            say(f"run {number} of {len(missing)}: {task.name}, {task.told}: ")
            start = time.perf_counter()
            say(_perform(task, run, results))
            spent.setdefault(task.name, []).append(time.perf_counter() - start)
            rest = [one for one in missing[number:] if one.name not in results.failed]
            say(f"; {_left(rest, spent)}\n")
    return results


def _perform(task: Task, run: Runner, results: Results) -> str:
    """Run one task and keep its result; return what to say about it."""
    if task.entry is None:
        outcome = {"settings": dict(task.asked), **measure_baselines(task.settings)}
        results.add(outcome)
        return _best_known(outcome["figures"])
    try:
        outcome = _kept_of(task.asked, run(task.settings), task.settings.num_parties)
    except StrategyError as error:
        results.failed[task.name] = str(error)
        return f"excluded: {error}"
    results.add(outcome)
    return f"{100 * outcome['figures']['']:.1f} %"


def _best_known(figures: Mapping[str, float | None]) -> str:
    """Return the baseline that comes closest to what is possible."""
    pooled = figures["central-"]
    told = ("majority", figures["majority-"]) if pooled is None else ("pooled", pooled)
    return f"{told[0]} {100 * (told[1] or 0):.1f} %"


def _kept_of(asked: Mapping[str, Any], report: Report, num_parties: int) -> Outcome:
    """Return what is kept of a strategy's run; bytes are those of a party, in the mean."""
    told = report["figures"]["federation"]
    rounds = report["rounds"]
    promises = {key: finite(report[key]) for pair in PROMISES.values() for key in pair}
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


def _is_figure(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _total(rounds: Sequence[Report], key: str) -> float:
    """Add up the bytes of all rounds, those of delivering the result included."""
    return float(sum(one[part].get(key, 0) for one in rounds for part in ("train", "evaluate")))


def measure_baselines(settings: Settings) -> Outcome:
    """Measure what needs no federation: the majority class, and what the settings ask for.

    These are each party alone and pooled data.
    """
    federation = load_federation(settings)
    baselines, metric = judge_baselines(federation, settings.workers), federation.metric
    figures = baselines.top_level(metric)
    return {
        "metric": metric,
        "figures": {prefix: figures[f"{prefix}{metric}"] for prefix in PREFIXES.values()},
        "solo-by-party": baselines.solo,
    }


def _left(tasks: Sequence[Task], spent: Mapping[str, Sequence[float]]) -> str:
    """Say how long the rest will take if each takes as long as before, or as the others."""
    usual = fmean(second for several in spent.values() for second in several)
    seconds = sum(fmean(spent.get(task.name, [usual])) for task in tasks)
    return f"about {duration(seconds)} left" if tasks else "all done"


def read_outcomes(kept: Path) -> list[Outcome]:
    """Return the results that a file holds; none if there is no file."""
    if not kept.exists():
        return []
    try:
        outcomes: list[Outcome] = json.loads(kept.read_text(encoding="utf-8"))["outcomes"]
    except (ValueError, KeyError) as error:
        raise InvalidParameter(
            f"results: {kept} must hold the outcomes of runs, got something else. "
            "Name another file."
        ) from error
    return outcomes


def find(outcomes: Sequence[Outcome], asked: Mapping[str, Value]) -> Outcome | None:
    """Return the result for the very same settings, whatever the row was called."""
    return next((outcome for outcome in outcomes if outcome["settings"] == asked), None)


def outcome_of(asked: Mapping[str, Value], report: Report) -> Outcome:
    """Return what is kept of a run, by the settings that were asked for."""
    metric = report["metric"]
    return {
        "settings": dict(asked),
        "metric": metric,
        "figures": {
            prefix: report.get(f"{prefix}{metric}")
            for prefix in ("", "server-", *PREFIXES.values())
        },
        "solo-by-party": [party.get(f"solo-{metric}") for party in report["parties"]],
        "rounds": [_figures_of(one, metric) for one in report["rounds"]],
        keys.EPSILON_PARTY: report[keys.EPSILON_PARTY],
        keys.EPSILON_EXAMPLE: report[keys.EPSILON_EXAMPLE],
        keys.NUM_BYTES_SENT: report[keys.NUM_BYTES_SENT],
        "cpu-seconds": report["cpu-seconds"],
        "date": report["date"],
        "commit": report["commit"],
    }


def _figures_of(one: Report, metric: str) -> Outcome:
    train, evaluate = one.get("train", {}), one["evaluate"]
    return {
        "round": one["round"],
        "mean": evaluate.get(metric),
        "by-party": evaluate.get(f"{metric}-by-party"),
        "local": train.get("local-figure"),
    }
