"""Experiments: entries x settings x seeds, run one after the other and kept as they finish.

A result is kept under all settings that decide it: a stopped experiment resumes, and other
settings run anew. `compare`, `curve` and the tables of papers differ in what they run, and in
what they make of the results.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

from fl_strategies import __version__
from fl_strategies.errors import InvalidParameter, StrategyError
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.data.sets import FILE_SUFFIXES
from simulations.experiments.entries import Entry, Given, shared
from simulations.federation import load_federation
from simulations.results.report import Report
from simulations.results.run_folder import finite, write_json
from simulations.results.verdict import BASELINES, PROMISES, evaluate_baselines, shown
from simulations.runtime.progress import duration, log_level

Runner: TypeAlias = Callable[[Settings], Report]
Outcome: TypeAlias = dict[str, Any]
Say: TypeAlias = Callable[[str], None]

BASELINE_RUNS: Final = "baselines"
NO_RESULT: Final = frozenset({"output-dir", "num-workers", "max-wait", "timeout"})
"""Settings that change no result."""
FURTHER: Final = (keys.BALANCED_ACCURACY, keys.MACRO_F1, keys.RMSE, keys.MAE)
"""Metrics that a report may have besides the one of its task."""
TRUSTED: Final = "except the server"
"""Part of the audience of a guarantee under which the server sees what others must not."""
PREFIXES: Final = tuple(one.prefix for one in BASELINES.values())
SLACK: Final = 1e-9
"""Relative rounding error of an epsilon that was calibrated to a budget."""


@dataclass(frozen=True)
class Task:
    """One run of an experiment, whose result is kept under a key."""

    name: str
    label: str
    """Distinguishes it from other runs of the same name."""
    key: Mapping[str, Any]
    perform: Callable[[], Outcome]


@dataclass
class Results:
    """The results that a file holds, and what failed in this call."""

    kept: Path
    outcomes: list[Outcome]
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, summary: Mapping[str, Any]) -> None:
        """Replace the file by all results and what was made of them."""
        write_json({**summary, "outcomes": self.outcomes}, self.kept)


def run_missing(
    tasks: Sequence[Task],
    kept: Path,
    say: Say,
    *,
    heading: Mapping[str, Any] | None = None,
    excluding: tuple[type[Exception], ...] = (StrategyError,),
) -> Results:
    """Run what is missing, one after the other, and keep each result at once.

    Parameters
    ----------
    tasks : sequence of Task
    kept : Path
        File of the results.
    say : callable
        Receives the progress.
    heading : mapping, optional
        Further content of the file.
    excluding : tuple of exceptions
        A run that fails with one of these excludes all runs of its name.
    """
    results = Results(kept, read_outcomes(kept))
    missing = [task for task in tasks if not find(results.outcomes, task.key)]
    say(f"{len(tasks)} runs, {len(tasks) - len(missing)} of them finished before.\n")
    spent: dict[str, list[float]] = {}
    for number, task in enumerate(missing, start=1):
        # Two rows of a paper's table may be the same run.
        if task.name in results.failed or find(results.outcomes, task.key):
            continue
        say(f"run {number} of {len(missing)}: {task.name}, {task.label}: ")
        start = time.perf_counter()
        try:
            outcome = task.perform()
        except excluding as error:
            results.failed[task.name] = str(error)
            say(f"excluded: {error}")
        else:
            results.outcomes.append(outcome)
            results.write(heading or {})
            say(_result_of(outcome))
        spent.setdefault(task.name, []).append(time.perf_counter() - start)
        rest = [one.name for one in missing[number:] if one.name not in results.failed]
        # Each may take as long as others of its name, or as all.
        usual = fmean(second for several in spent.values() for second in several)
        left = duration(sum(fmean(spent.get(name, [usual])) for name in rest))
        say(f"; about {left} left\n" if rest else "; all done\n")
    return results


def _result_of(outcome: Outcome) -> str:
    """Return the metric of a run, or of the baseline closest to what is possible."""
    metric, values = outcome["metric"], outcome["figures"]
    if "" in values:
        return shown(metric, values[""])
    prefix, name = ("majority-", "majority")
    if values["central-"] is not None:
        prefix, name = ("central-", "pooled")
    return f"{name} {shown(metric, values[prefix])}"


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


def find(outcomes: Iterable[Outcome], key: Mapping[str, Value]) -> Outcome | None:
    """Return the result with these very settings, whatever its run was called."""
    return next((outcome for outcome in outcomes if outcome["settings"] == key), None)


def found(outcomes: Iterable[Outcome], wanted: Iterable[Mapping[str, Value]]) -> list[Outcome]:
    """Return the results with these settings, as far as there are any."""
    return [one for one in (find(outcomes, key) for key in wanted) if one is not None]


@dataclass(frozen=True)
class Experiment:
    """The settings that a user gives for all runs, and the seeds."""

    given: Given
    seeds: tuple[int, ...]

    def settings(self, entry: Entry | None, seed: int) -> Settings:
        """Return the settings of one run; without an entry, those of the baselines."""
        return Settings.from_run_config(
            {**(entry.settings if entry else shared(self.given))}, seed=seed
        )

    def key(self, entry: Entry | None, seed: int, draw: int | None = None) -> dict[str, Any]:
        """Return all that decides a result; runs with secret noise differ by their draw."""
        settings = self.settings(entry, seed).to_run_config()
        return {
            **{key: value for key, value in settings.items() if key not in NO_RESULT},
            **self._data_mark,
            "measured": "strategy" if entry else BASELINE_RUNS,
            "version": __version__,
            **({} if draw is None else {"draw": draw}),
        }

    @cached_property
    def _data_mark(self) -> dict[str, str]:
        """Distinguish different contents of a user's own file."""
        data = str(self.given.get("data", ""))
        if not data.endswith(FILE_SUFFIXES):
            return {}
        return {"data-sha256": hashlib.sha256(Path(data).read_bytes()).hexdigest()}

    def cells(self) -> Iterator[tuple[Entry | None, int, int | None]]:
        """Yield entry, seed and draw of every run, in order; baselines are no entry."""
        raise NotImplementedError

    def run(self, run: Runner, kept: Path, say: Say) -> Results:
        """Run what is missing; see `run_missing`."""
        tasks = []
        for entry, seed, draw in self.cells():
            key, settings = self.key(entry, seed, draw), self.settings(entry, seed)
            label = f"seed {seed}" + ("" if draw is None else f", draw {draw}")
            perform = partial(measure_entry, run) if entry else measure_baselines
            name = entry.name if entry else BASELINE_RUNS
            tasks.append(Task(name, label, key, partial(perform, key, settings)))
        # Reasons for failures and exclusions are part of the results.
        with log_level(logging.CRITICAL):
            return run_missing(tasks, kept, say)

    def found(
        self, results: Results, entry: Entry | None, draws: Iterable[int | None] = (None,)
    ) -> list[Outcome]:
        """Return the results of an entry, by draw and seed, as far as there are any."""
        wanted = [self.key(entry, seed, draw) for draw in draws for seed in self.seeds]
        return found(results.outcomes, wanted)


def measure_entry(run: Runner, key: Mapping[str, Any], settings: Settings) -> Outcome:
    """Run a strategy; bytes are means per party."""
    report = run(settings)
    metrics, rounds = report["figures"]["federation"], report["rounds"]

    def num_bytes(key: str) -> float:
        """Return the bytes of all rounds, those of delivering the result included."""
        parts = (one[part] for one in rounds for part in ("train", "evaluate"))
        return float(sum(part.get(key, 0) for part in parts)) / settings.num_parties

    return {
        **outcome_of(key, report),
        **{key: finite(report[key]) for pair in PROMISES.values() for key in pair},
        "against": report.get("ledger", {}).get("audience", ""),
        "further": {k: metrics[k] for k in FURTHER if math.isfinite(metrics.get(k, math.nan))},
        "bytes-up": num_bytes(keys.NUM_BYTES_SENT),
        "bytes-down": num_bytes(keys.NUM_BYTES_RECEIVED),
        "num-rounds": rounds[-1]["round"],
        "num-rejected": len(report.get("rejected", ())),
    }


def measure_baselines(key: Mapping[str, Any], settings: Settings) -> Outcome:
    """Measure what needs no federation: the majority class, and what the settings ask for."""
    federation = load_federation(settings)
    baselines, metric = evaluate_baselines(federation, settings.workers), federation.metric
    values = baselines.top_level(metric)
    return {
        "settings": dict(key),
        "metric": metric,
        "figures": {prefix: values[f"{prefix}{metric}"] for prefix in PREFIXES},
        "solo-by-party": baselines.solo,
    }


def outcome_of(key: Mapping[str, Value], report: Report) -> Outcome:
    """Return the part of a report that experiments keep."""
    metric = report["metric"]
    return {
        "settings": dict(key),
        "metric": metric,
        "figures": {
            prefix: report.get(f"{prefix}{metric}") for prefix in ("", "server-", *PREFIXES)
        },
        "solo-by-party": [party.get(f"solo-{metric}") for party in report["parties"]],
        "rounds": [
            {
                "round": one["round"],
                "mean": one["evaluate"].get(metric),
                "by-party": one["evaluate"].get(f"{metric}-by-party"),
                "local": one.get("train", {}).get("local-figure"),
            }
            for one in report["rounds"]
        ],
        keys.EPSILON_PARTY: report[keys.EPSILON_PARTY],
        keys.EPSILON_EXAMPLE: report[keys.EPSILON_EXAMPLE],
        keys.NUM_BYTES_SENT: report[keys.NUM_BYTES_SENT],
        "cpu-seconds": report["cpu-seconds"],
        "date": report["date"],
        "commit": report["commit"],
    }


def weakest_promise(outcomes: Sequence[Outcome], unit: str) -> tuple[float, float]:
    """Return the largest epsilon and delta: neither is ever averaged."""
    values = [
        [math.inf if v is None else v for v in map(one.get, PROMISES[unit])] for one in outcomes
    ]
    epsilon, delta = map(max, zip(*values, strict=True))
    return epsilon, delta


def keeps_to(budget: float, most_delta: float, epsilon: float, delta: float) -> bool:
    """Return whether a guarantee is within a budget, but for rounding."""
    return epsilon <= budget * (1 + SLACK) and delta <= most_delta * (1 + SLACK)


def shared_notes(notes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return all names that a note is about, by the note; "" is no note.

    Examples
    --------
    >>> shared_notes([("fedkt", "one round"), ("fedmd", ""), ("fedkd", "one round")])
    {'one round': ['fedkt', 'fedkd']}
    """
    names: dict[str, list[str]] = {}
    for name, note in notes:
        if note:
            names.setdefault(note, []).append(name)
    return names
