"""Tables of experiments: one file of settings each, run once a row and seed.

A table is a file in `simulations/tables`: `[settings]` for all rows, and for each row its
name, its own settings and, where a paper prints one, the published figure. Results are kept
in a file of their own as they come, so a stopped table resumes where it was.
"""

import json
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self, TypeAlias

from fl_strategies.exceptions import InvalidParameter, require
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.progress import duration
from simulations.report import Report, summarise
from simulations.strict_json import write_json

Runner: TypeAlias = Callable[[Settings], Report]
Outcome: TypeAlias = dict[str, Any]

OWNER = "table"
MEASURES = ("mean", "local")
BEST_PARTY = "best-solo-"
COLUMNS = {
    "": "federation",
    "solo-": "parties alone",
    BEST_PARTY: "best party",
    "server-": "the server's model",
    "central-": "all data in one place",
}
"""Figures of a result, by the prefix of their names."""


@dataclass(frozen=True)
class Row:
    """One line of a table; in figures, rows of the same panel share their axes.

    The measure of a round is "mean", of the models that a federation delivers, or "local", of
    the models that the parties of FedAvg have trained before these are averaged.
    """

    name: str
    settings: Mapping[str, Value]
    published: str = ""
    panel: str = ""
    measure: str = "mean"

    def __post_init__(self) -> None:
        """Check the measure."""
        known = ", ".join(MEASURES)
        require(self.measure in MEASURES, OWNER, "measure", f"one of {known}", self.measure)


@dataclass(frozen=True)
class Table:
    """Experiments that belong together.

    Parameters
    ----------
    name : str
        Name of the file without its ending.
    title : str
    source : str
        The paper's table or figure.
    seeds : tuple of int
    rows : tuple of Row
    """

    name: str
    title: str
    source: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]

    @classmethod
    def load(cls, name: str) -> Self:
        """Read a table of this package by name; every row must have valid settings."""
        folder = resources.files("simulations") / "tables"
        known = sorted(
            item.name.removesuffix(".toml") for item in folder.iterdir() if "_" in item.name
        )
        require(name in known, OWNER, "name", f"one of {', '.join(known)}", name)
        content = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        common = content["settings"]
        rows = tuple(
            Row(
                row["name"],
                {**common, **row.get("settings", {})},
                row.get("published", ""),
                row.get("panel", ""),
                row.get("measure", "mean"),
            )
            for row in content["rows"]
        )
        for row in rows:
            Settings.from_run_config(row.settings)
        return cls(name, content["title"], content["source"], tuple(content["seeds"]), rows)


def run_table(table: Table, run: Runner, kept: Path, report: Callable[[str], None]) -> None:
    """Run what is missing, row by row and seed by seed, and keep each result at once."""
    outcomes, start = read_outcomes(kept), time.perf_counter()
    wanted = [
        (row, {**row.settings, "seed": seed}) for row in table.rows for seed in table.seeds
    ]
    missing = [(row, asked) for row, asked in wanted if not find(outcomes, asked)]
    for number, (row, asked) in enumerate(missing, start=1):
        if find(outcomes, asked):  # two rows may have the same settings
            continue
        outcome = outcome_of(asked, run(Settings.from_run_config(asked)))
        outcomes = [*outcomes, outcome]
        write_json({"table": table.name, "outcomes": outcomes}, kept)
        each = (time.perf_counter() - start) / number
        left = f"about {duration(each * (len(missing) - number))} left"
        figure = f"{100 * outcome['figures']['']:.1f}"
        where = f"run {number} of {len(missing)}"
        report(f"{where}: {row.name}, seed {asked['seed']}: {figure}; {left}")


def read_outcomes(kept: Path) -> list[Outcome]:
    """Return the results that a file holds; none if there is no file."""
    if not kept.exists():
        return []
    try:
        outcomes: list[Outcome] = json.loads(kept.read_text(encoding="utf-8"))["outcomes"]
    except (ValueError, KeyError) as error:
        raise InvalidParameter(
            f"{OWNER}: {kept} must hold the results of a table, got something else. "
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
        "figures": {prefix: report.get(f"{prefix}{metric}") for prefix in COLUMNS},
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


def markdown(table: Table, kept: Path) -> str:
    """Return the table for documentation: mean and deviation over seeds, in percent."""
    outcomes = read_outcomes(kept)
    found = {row.name: outcomes_of(table, row, outcomes) for row in table.rows}
    shown = [outcome for several in found.values() for outcome in several]
    # Older results do not name the best party.
    named = not shown or any(BEST_PARTY in one["figures"] for one in shown)
    columns = [prefix for prefix in COLUMNS if named or prefix != BEST_PARTY]
    rows = [[r.name, *_spreads(r, found[r.name], columns), r.published] for r in table.rows]
    header = ["", *(COLUMNS[prefix] for prefix in columns), "paper"]
    lines = [header, ["---"] * len(header), *rows]
    commits = ", ".join(sorted({str(outcome["commit"])[:10] for outcome in shown}))
    dates = ", ".join(sorted({str(outcome["date"])[:10] for outcome in shown}))
    seeds = ", ".join(map(str, table.seeds))
    caption = (
        f"{table.title} Paper: {table.source}. Seeds {seeds}; commit {commits}; {dates}; "
        f"`python -m simulations table {table.name}`."
    )
    cells = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*cells, "", caption])


def outcomes_of(table: Table, row: Row, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the results of one row, by seed, as far as there are any."""
    found = [find(outcomes, {**row.settings, "seed": seed}) for seed in table.seeds]
    return [outcome for outcome in found if outcome is not None]


def figure_of(row: Row, outcome: Outcome, prefix: str = "") -> float | None:
    """Return a figure of a result; of local models there is one, that of the last round."""
    if row.measure == "mean":
        figure: float | None = outcome["figures"].get(prefix)
        return figure
    return rounds_of(row, outcome)[-1][1] if prefix == "" else None


def rounds_of(row: Row, outcome: Outcome) -> list[tuple[int, float | None]]:
    """Return the number of each round and what was measured in it."""
    return [(one["round"], one.get(row.measure)) for one in outcome["rounds"]]


def _spreads(row: Row, outcomes: Sequence[Outcome], prefixes: Sequence[str]) -> list[str]:
    """Return mean and deviation of each column; nothing where nothing was measured."""
    columns = []
    for prefix in prefixes:
        found = [figure_of(row, outcome, prefix) for outcome in outcomes]
        figures = [figure for figure in found if figure is not None]
        mean, deviation = summarise(figures) if figures else (0.0, 0.0)
        columns.append(f"{100 * mean:.1f} ± {100 * deviation:.1f}" if figures else "")
    return columns
