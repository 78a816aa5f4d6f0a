"""Tables of experiments: one file of settings each, run once a row and seed.

A table is a file in `simulations/tables`: `[settings]` for all rows, and for each row its
name, its own settings and, where a paper prints one, the published figure. `[scales.quick]`
and `[scales.paper]` may change seeds and settings, of all rows or, in a row, of that row; a row
with `scales` is of these only.
Results are kept in a file of their own as they come, so a stopped table resumes where it was.
"""

import json
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from fl_strategies.errors import InvalidParameter, require
from fl_strategies.wire import keys
from simulations.config import Settings, Value, as_published
from simulations.published import Published
from simulations.report import Report
from simulations.runtime.progress import duration
from simulations.runtime.running import cpu_seconds
from simulations.strict_json import write_json

Runner: TypeAlias = Callable[[Settings], Report]
Outcome: TypeAlias = dict[str, Any]

OWNER: Final = "table"
MEASURES: Final = ("mean", "local")
QUICK: Final = "quick"
PAPER: Final = "paper"
ALL_CPU: Final = "all-cpu-seconds"
"""Processor time of a run with everything that it is compared with."""
COLUMNS: Final = {
    "": "federation",
    "solo-": "parties alone",
    "best-solo-": "best party",
    "server-": "the server's model",
    "central-": "all data in one place",
    "pate-": "PATE",
    "public-only-": "public labels alone",
    "majority-": "a constant",
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
    published: Published = field(default_factory=Published)
    panel: str = ""
    measure: str = "mean"

    def __post_init__(self) -> None:
        """Check the measure."""
        known = ", ".join(MEASURES)
        require(self.measure in MEASURES, OWNER, "measure", f"one of {known}", self.measure)


@dataclass(frozen=True)
class Table:
    """Experiments that belong together, at one scale.

    Parameters
    ----------
    name : str
        Name of the file without its ending.
    title : str
    source : str
        The paper's table or figure.
    seeds : tuple of int
    rows : tuple of Row
    scale : "quick", "paper" or "toy"
    scales : tuple of str
        What its file knows: quick, and paper where it says so.
    minutes : float, optional
        Processor minutes that the file expects.
    remark : str
        Where its figures differ from the paper's, and why.
    chosen : str
        What was chosen after test rows had been seen.
    sizes : bool
        Whether its text says how many bytes all parties have sent.
    """

    name: str
    title: str
    source: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    scale: str = QUICK
    scales: tuple[str, ...] = (QUICK,)
    minutes: float | None = None
    remark: str = ""
    chosen: str = ""
    sizes: bool = False

    @classmethod
    def load(cls, name: str, scale: str = QUICK) -> Self:
        """Read a table of this package by name; every row must have valid settings."""
        require(
            name in table_names(), OWNER, "name", f"one of {', '.join(table_names())}", name
        )
        path = resources.files("simulations") / "tables" / f"{name}.toml"
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        told = content.get("scales", {})
        scales = (QUICK, *(PAPER for _ in [0] if PAPER in told))
        require(
            scale in scales, OWNER, "scale", f"one of {', '.join(scales)} for {name}", scale
        )
        own = told.get(scale, {})
        rows = tuple(
            _row(row, content["settings"], own, scale)
            for row in content["rows"]
            if scale in row.get("scales", scales)
        )
        for row in rows:
            Settings.from_run_config(as_published(row.settings))
        return cls(
            name=name,
            title=content["title"],
            source=content["source"],
            seeds=tuple(own.get("seeds", content["seeds"])),
            rows=rows,
            scale=scale,
            scales=scales,
            minutes=own.get("minutes", content.get("minutes")),
            remark=content.get("remark", ""),
            chosen=content.get("chosen", ""),
            sizes=content.get("sizes", False),
        )

    def but(self, *, seeds: Sequence[int] = (), rows: Sequence[Row] = ()) -> Self:
        """Return the same table with other seeds or rows."""
        return replace(self, seeds=tuple(seeds) or self.seeds, rows=tuple(rows) or self.rows)

    @property
    def command(self) -> str:
        """How it is repeated."""
        scale = "" if self.scale == QUICK else f" --scale {self.scale}"
        return f"python -m simulations table {self.name}{scale}"


def table_names() -> list[str]:
    """Return the names of all tables of this package whose rows are runs."""
    folder = resources.files("simulations") / "tables"
    return sorted(
        item.name.removesuffix(".toml")
        for item in folder.iterdir()
        if "_" in item.name and "[[rows]]" in item.read_text(encoding="utf-8")
    )


def _row(told: Mapping[str, Any], common: Mapping[str, Value], own: Any, scale: str) -> Row:
    """Return a row; what a scale says wins, and last what it says about this row."""
    settings = {
        **common,
        **told.get("settings", {}),
        **own.get("settings", {}),
        **told.get(scale, {}),
    }
    return Row(
        told["name"],
        settings,
        Published.read(told.get("published", "")),
        told.get("panel", ""),
        told.get("measure", "mean"),
    )


def run_table(table: Table, run: Runner, kept: Path, report: Callable[[str], None]) -> None:
    """Run what is missing, row by row and seed by seed, and keep each result at once.

    A run that another table has kept in the same folder, with the very same settings, is taken.
    """
    outcomes, start = read_outcomes(kept), time.perf_counter()
    wanted = [
        (row, {**row.settings, "seed": seed}) for row in table.rows for seed in table.seeds
    ]
    missing = [(row, asked) for row, asked in wanted if not find(outcomes, asked)]
    others = _kept_beside(kept) if missing else []
    for number, (row, asked) in enumerate(missing, start=1):
        if find(outcomes, asked):  # two rows may have the same settings
            continue
        outcome = find(others, asked) or _run(asked, run)
        outcomes = [*outcomes, outcome]
        write_json({"table": table.name, "outcomes": outcomes}, kept)
        each = (time.perf_counter() - start) / number
        left = f"about {duration(each * (len(missing) - number))} left"
        figure = f"{factor_of(outcome['metric']) * outcome['figures']['']:.1f}"
        where = f"run {number} of {len(missing)}"
        report(f"{where}: {row.name}, seed {asked['seed']}: {figure}; {left}")


def _run(asked: Mapping[str, Value], run: Runner) -> Outcome:
    used = cpu_seconds()
    outcome = outcome_of(asked, run(Settings.from_run_config(as_published(asked))))
    outcome[ALL_CPU] = round(cpu_seconds() - used, 1)
    return outcome


def _kept_beside(kept: Path) -> list[Outcome]:
    """Return the results of all tables in the folder of this one."""
    paths = [kept.with_name(f"{name}.json") for name in table_names()]
    return [outcome for path in paths if path != kept for outcome in read_outcomes(path)]


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


def factor_of(metric: str) -> float:
    """Return what turns a figure into what is shown: shares are percents, errors are not."""
    return 1.0 if metric == keys.MEAN_SQUARED_ERROR else 100.0


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
