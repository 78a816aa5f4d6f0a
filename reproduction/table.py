"""Tables of the papers: one file of settings each, run once per row and seed.

A table is a file in `reproduction/tables`: `[settings]` for all rows, and for each row its
name, its own settings and, where a paper prints one, the published figure. `[scales.quick]`
and `[scales.paper]` may change seeds and settings, of all rows or, in a row, of that row; a row
with `scales` is of these only.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Self

from fl_strategies.errors import require
from fl_strategies.wire import keys
from simulations.config import Settings, Value, as_published
from simulations.experiments.engine import (
    Outcome,
    Runner,
    Say,
    Task,
    find,
    found,
    outcome_of,
    read_outcomes,
    run_missing,
)
from simulations.results.report import markdown_table, summarise
from simulations.runtime.local import cpu_seconds

OWNER: Final = "table"
FOLDER: Final = Path(__file__).parent / "tables"
MEASURES: Final = ("mean", "local")
QUICK: Final = "quick"
PAPER: Final = "paper"
ALL_CPU: Final = "all-cpu-seconds"
"""Processor time of a run with everything that it is compared with."""
COLUMNS: Final[Mapping[str, str]] = {
    "": "federation",
    "solo-": "parties alone",
    "best-solo-": "best party",
    "server-": "the server's model",
    "central-": "pooled data",
    "pate-": "PATE",
    "public-only-": "public labels alone",
    "majority-": "a constant",
}
"""Figures of a result, by the prefix of their names."""
WORDS: Final[Mapping[str, str]] = {
    "federation": "",
    "alone": "solo-",
    "pooled": "central-",
    "PATE": "pate-",
    "public-only": "public-only-",
}
"""Figures of the papers, as files call them, with the prefixes of reports."""
EPSILONS: Final = {
    keys.EPSILON_PARTY: "ε of a party",
    keys.EPSILON_EXAMPLE: "ε of an example",
}
SECONDS: Final = "CPU s a run"
SENT: Final = "MB sent"
MEGA: Final = 1_000_000
NOT_MEASURED: Final = "nothing yet"


@dataclass(frozen=True)
class Published:
    """Figures of a paper, in percent where they are shares.

    Parameters
    ----------
    figures : mapping of prefix to float
        See `WORDS`; the federation's own has an empty prefix.
    deviation : float, optional
        Of the federation's figure, as printed.
    epsilon : float, optional
        What the paper says its noise costs.
    note : str
        Words: what is not a number, or how the paper's row differs.

    Examples
    --------
    >>> row = Published.read({"federation": 82.2, "deviation": 0.6, "alone": 68.6})
    >>> str(row), row.figures["solo-"], str(Published.read(90.5)), str(Published.read("-"))
    ('82.2 ± 0.6, alone 68.6', 68.6, '90.5', '-')
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    deviation: float | None = None
    epsilon: float | None = None
    note: str = ""

    @classmethod
    def read(cls, told: Any) -> Self:
        """Read a number, a text, or a table of `WORDS`, deviation, epsilon and note."""
        if isinstance(told, str):
            return cls(note=told)
        if not isinstance(told, Mapping):
            return cls({"": float(told)})
        known = {*WORDS, "deviation", "epsilon", "note"}
        for key in told:
            require(key in known, "table", "published", f"of {', '.join(sorted(known))}", key)
        figures = {WORDS[word]: float(told[word]) for word in WORDS if word in told}
        return cls(figures, told.get("deviation"), told.get("epsilon"), told.get("note", ""))

    def __str__(self) -> str:
        """Return all of it in one cell."""
        parts = []
        for word, prefix in WORDS.items():
            if prefix in self.figures:
                deviated = "" if prefix or self.deviation is None else f" ± {self.deviation}"
                parts.append(
                    f"{word if prefix else ''} {self.figures[prefix]}{deviated}".strip()
                )
        if self.epsilon is not None:
            parts.append(f"ε {self.epsilon}")
        whole = ", ".join(parts)
        return f"{whole} ({self.note})" if parts and self.note else whole or self.note


@dataclass(frozen=True)
class Row:
    """One row of a table; in pictures, rows of the same panel share their axes.

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
        content = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
        told = content.get("scales", {})
        scales = (QUICK, PAPER) if PAPER in told else (QUICK,)
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
        """The command that repeats it."""
        scale = "" if self.scale == QUICK else f" --scale {self.scale}"
        return f"python -m reproduction table {self.name}{scale}"


def table_names(mark: str = "[[rows]]") -> list[str]:
    """Return the names of all tables with a mark in their files: by default, of runs."""
    return sorted(
        item.stem for item in FOLDER.glob("*.toml") if mark in item.read_text(encoding="utf-8")
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


def run_table(table: Table, run: Runner, kept: Path, say: Say) -> None:
    """Run what is missing; see `run_missing`.

    A run that another table has kept in the same folder, with the very same settings, is taken.
    """
    beside = [kept.with_name(f"{name}.json") for name in table_names()]
    others = [one for path in beside if path != kept for one in read_outcomes(path)]
    tasks = [
        Task(row.name, f"seed {key['seed']}", key, partial(_measure, key, run, others))
        for row in table.rows
        for key in keys_of(table, row)
    ]
    run_missing(tasks, kept, say, heading={"table": table.name}, excluding=())


def keys_of(table: Table, row: Row) -> list[dict[str, Value]]:
    """Return the settings under which a row's results are kept, by seed."""
    return [{**row.settings, "seed": seed} for seed in table.seeds]


def _measure(key: Mapping[str, Value], run: Runner, others: Sequence[Outcome]) -> Outcome:
    if outcome := find(others, key):
        return outcome
    used = cpu_seconds()
    outcome = outcome_of(key, run(Settings.from_run_config(as_published(key))))
    return {**outcome, ALL_CPU: round(cpu_seconds() - used, 1)}


def outcomes_of(table: Table, row: Row, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the results of one row, by seed, as far as there are any."""
    return found(outcomes, keys_of(table, row))


def figure_of(row: Row, outcome: Outcome, prefix: str = "") -> float | None:
    """Return a figure of a result; of local models there is one, that of the last round."""
    if row.measure == "mean":
        figure: float | None = outcome["figures"].get(prefix)
        return figure
    return rounds_of(row, outcome)[-1][1] if prefix == "" else None


def rounds_of(row: Row, outcome: Outcome) -> list[tuple[int, float | None]]:
    """Return the number and the figure of each round."""
    return [(one["round"], one.get(row.measure)) for one in outcome["rounds"]]


def cpu_seconds_of(outcome: Outcome) -> float | None:
    """Return the processor time of a run with everything that it is compared with."""
    seconds: float | None = outcome.get(ALL_CPU) or outcome.get("cpu-seconds")
    return seconds


@dataclass(frozen=True)
class Cell:
    """One figure of a row: mean and deviation over seeds, and the paper's."""

    mean: float
    deviation: float
    decimals: int
    published: float | None = None

    @property
    def difference(self) -> float | None:
        """Measured minus published; None where nothing is published."""
        return None if self.published is None else self.mean - self.published

    def __str__(self) -> str:
        """Return mean and deviation."""
        return f"{self.mean:.{self.decimals}f} ± {self.deviation:.{self.decimals}f}"


@dataclass(frozen=True)
class Line:
    """A row and its results over all seeds."""

    row: Row
    cells: Mapping[str, Cell]
    epsilons: Mapping[str, float]
    seeds: tuple[int, ...]
    cpu_seconds: float | None
    megabytes: float | None = None

    @property
    def differences(self) -> str:
        """Measured minus published, in the words of the column `paper`."""
        told = []
        for word, prefix in WORDS.items():
            gap = self.cells[prefix].difference if prefix in self.cells else None
            if gap is not None:
                told.append(f"{word} {gap:+.1f}" if prefix else f"{gap:+.1f}")
        return ", ".join(told).replace("-", "−")  # noqa: RUF001 - a minus, as tables have it


def lines_of(table: Table, outcomes: Sequence[Outcome]) -> list[Line]:
    """Return every row with its results."""
    return [_line(row, outcomes_of(table, row, outcomes)) for row in table.rows]


def _line(row: Row, results: Sequence[Outcome]) -> Line:
    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    # Without a guarantee an epsilon is null; in old files it is infinite or missing.
    epsilons = {
        key: [e for e in (one.get(key) for one in results) if e is not None and e < math.inf]
        for key in EPSILONS
    }
    sent = [one.get(keys.NUM_BYTES_SENT) for one in results]
    return Line(
        row=row,
        cells={prefix: cell for prefix in COLUMNS if (cell := _cell(row, results, prefix))},
        epsilons={
            key: max(values)
            for key, values in epsilons.items()
            if len(values) == len(results) > 0
        },
        seeds=tuple(one["settings"]["seed"] for one in results),
        cpu_seconds=mean(map(cpu_seconds_of, results)),
        megabytes=mean(num_bytes / MEGA if num_bytes else None for num_bytes in sent),
    )


def _cell(row: Row, results: Sequence[Outcome], prefix: str) -> Cell | None:
    figures = [figure_of(row, one, prefix) for one in results]
    known = [figure for figure in figures if figure is not None]
    if not known:
        return None
    factor, decimals = 100, 1
    if results[0]["metric"] == keys.MEAN_SQUARED_ERROR:
        factor, decimals = 1, 4
    mean, deviation = summarise(known)
    published = row.published.figures.get(prefix)
    return Cell(factor * mean, factor * deviation, decimals, published)


def markdown(table: Table, kept: Path) -> str:
    """Return the table for documentation: mean and deviation over seeds, in percent."""
    outcomes = read_outcomes(kept)
    lines = lines_of(table, outcomes)
    columns = {
        name: [str(line.cells.get(prefix, "")) for line in lines]
        for prefix, name in COLUMNS.items()
    }
    columns |= {
        name: [_rounded(line.epsilons.get(key), ".3g") for line in lines]
        for key, name in EPSILONS.items()
    }
    columns["paper"] = [str(line.row.published) for line in lines]
    columns["difference"] = [line.differences for line in lines]
    if table.sizes:
        columns[SENT] = [_rounded(line.megabytes, ".3g") for line in lines]
    columns[SECONDS] = [_rounded(line.cpu_seconds, ".0f") for line in lines]
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = list(zip([_name(table, line) for line in lines], *shown.values(), strict=True))
    return "\n".join([markdown_table(["", *shown], rows), "", _caption(table, outcomes)])


def _rounded(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _name(table: Table, line: Line) -> str:
    """Return a row's name, with the number of its seeds where some are missing."""
    measured, wanted = len(line.seeds), len(table.seeds)
    part = f" ({measured} of {wanted} seeds)" if 0 < measured < wanted else ""
    return f"{line.row.name}{part}"


def _caption(table: Table, outcomes: Sequence[Outcome]) -> str:
    shown = [one for row in table.rows for one in outcomes_of(table, row, outcomes)]
    commits, dates = (
        ", ".join(sorted({str(one[key])[:10] for one in shown})) or NOT_MEASURED
        for key in ("commit", "date")
    )
    measured = {one["settings"]["seed"] for one in shown}
    seeds = ", ".join(str(seed) for seed in table.seeds if seed in measured or not measured)
    return (
        f"{table.title} Paper: {table.source}. Seeds {seeds}; commit {commits}; {dates}; "
        f"`{table.command}`."
    )


def summary_of(table: Table, kept: Path) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "table": table.name,
        "scale": table.scale,
        "source": table.source,
        "rows": [
            {
                "name": line.row.name,
                "seeds": list(line.seeds),
                "cpu-seconds": line.cpu_seconds,
                "published": str(line.row.published),
                **line.epsilons,
                "figures": {
                    COLUMNS[prefix]: {
                        "mean": cell.mean,
                        "deviation": cell.deviation,
                        "published": cell.published,
                        "difference": cell.difference,
                    }
                    for prefix, cell in line.cells.items()
                },
            }
            for line in lines_of(table, read_outcomes(kept))
        ],
    }
