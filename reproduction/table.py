"""Tables of experiments: one file of settings each, run once a row and seed.

A table is a file in `reproduction/tables`: `[settings]` for all rows, and for each row its
name, its own settings and, where a paper prints one, the published figure. `[scales.quick]`
and `[scales.paper]` may change seeds and settings, of all rows or, in a row, of that row; a row
with `scales` is of these only.
Results are kept in a file of their own as they come, so a stopped table resumes where it was.
"""

import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Self

from fl_strategies.errors import require
from fl_strategies.wire import keys
from simulations.config import Settings, Value, as_published
from simulations.experiments.engine import Outcome, Runner, find, outcome_of, read_outcomes
from simulations.results.report import summarise
from simulations.results.run_folder import write_json
from simulations.runtime.local import cpu_seconds
from simulations.runtime.progress import duration

OWNER: Final = "table"
FOLDER: Final = Path(__file__).parent / "tables"
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


WORDS: Final[Mapping[str, str]] = {
    "federation": "",
    "alone": "solo-",
    "pooled": "central-",
    "PATE": "pate-",
    "public-only": "public-only-",
}
"""What a file calls a figure, and the prefix that reports give it."""


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
        parts = [self._told(word) for word in WORDS if WORDS[word] in self.figures]
        if self.epsilon is not None:
            parts.append(f"ε {self.epsilon}")
        if self.note:
            whole = ", ".join(parts)
            return f"{whole} ({self.note})" if parts else self.note
        return ", ".join(parts)

    def _told(self, word: str) -> str:
        figure = f"{self.figures[WORDS[word]]}"
        if word != "federation":
            return f"{word} {figure}"
        return figure if self.deviation is None else f"{figure} ± {self.deviation}"


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
        content = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
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
        return f"python -m reproduction table {self.name}{scale}"


def table_names() -> list[str]:
    """Return the names of all tables of this package whose rows are runs."""
    return sorted(
        item.stem
        for item in FOLDER.glob("*.toml")
        if "[[rows]]" in item.read_text(encoding="utf-8")
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


EPSILONS: Final = {
    keys.EPSILON_PARTY: "ε of a party",
    keys.EPSILON_EXAMPLE: "ε of an example",
}
SECONDS: Final = "CPU s a run"
SENT: Final = "MB sent"
MEGA: Final = 1_000_000
NOT_MEASURED: Final = "nothing yet"


@dataclass(frozen=True)
class Cell:
    """One figure of a row: mean and deviation over seeds, and what the paper prints."""

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
    """A row and what was measured of it."""

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
    """Return every row with what results there are."""
    return [_line(row, outcomes_of(table, row, outcomes)) for row in table.rows]


def _line(row: Row, found: Sequence[Outcome]) -> Line:
    cells = {prefix: cell for prefix in COLUMNS if (cell := _cell(row, found, prefix))}
    epsilons = {
        key: max(one[key] for one in found)
        for key in EPSILONS
        if found and all(_is_finite(one.get(key)) for one in found)
    }
    seconds = [one.get(ALL_CPU) or one.get("cpu-seconds") for one in found]
    known = [second for second in seconds if second is not None]
    seeds = tuple(one["settings"]["seed"] for one in found)
    sent = [one[keys.NUM_BYTES_SENT] / MEGA for one in found if one.get(keys.NUM_BYTES_SENT)]
    means = (fmean(numbers) if numbers else None for numbers in (known, sent))
    return Line(row, cells, epsilons, seeds, *means)


def _is_finite(epsilon: float | None) -> bool:
    return epsilon is not None and math.isfinite(epsilon)


def _cell(row: Row, found: Sequence[Outcome], prefix: str) -> Cell | None:
    figures = [figure_of(row, one, prefix) for one in found]
    known = [figure for figure in figures if figure is not None]
    if not known:
        return None
    factor = factor_of(found[0]["metric"])
    mean, deviation = summarise(known)
    decimals = 1 if factor > 1 else 4
    published = row.published.figures.get(prefix)
    return Cell(factor * mean, factor * deviation, decimals, published)


def markdown(table: Table, kept: Path) -> str:
    """Return the table for documentation: mean and deviation over seeds, in percent."""
    outcomes = read_outcomes(kept)
    lines = lines_of(table, outcomes)
    columns = _columns(lines, table.sizes)
    header = ["", *columns]
    rows = [[_name(table, line), *(show(line) for show in columns.values())] for line in lines]
    cells = ["| " + " | ".join(one) + " |" for one in [header, ["---"] * len(header), *rows]]
    return "\n".join([*cells, "", _caption(table, outcomes)])


def _name(table: Table, line: Line) -> str:
    """Return a row's name, with the number of its seeds where some are missing."""
    found, all_seeds = len(line.seeds), len(table.seeds)
    part = 0 < found < all_seeds
    return f"{line.row.name} ({found} of {all_seeds} seeds)" if part else line.row.name


def _columns(lines: Sequence[Line], sizes: bool) -> dict[str, Callable[[Line], str]]:
    """Return how to show each column that has anything to show."""
    known: dict[str, Callable[[Line], str]] = {
        name: partial(_shown_cell, prefix) for prefix, name in COLUMNS.items()
    }
    known |= {name: partial(_shown_epsilon, key) for key, name in EPSILONS.items()}
    known["paper"] = lambda line: str(line.row.published)
    known["difference"] = lambda line: line.differences
    if sizes:
        known[SENT] = _shown_megabytes
    known[SECONDS] = _shown_seconds
    return {name: show for name, show in known.items() if any(map(show, lines))}


def _shown_cell(prefix: str, line: Line) -> str:
    return str(line.cells.get(prefix, ""))


def _shown_epsilon(key: str, line: Line) -> str:
    return f"{line.epsilons[key]:.3g}" if key in line.epsilons else ""


def _shown_seconds(line: Line) -> str:
    return "" if line.cpu_seconds is None else f"{line.cpu_seconds:.0f}"


def _shown_megabytes(line: Line) -> str:
    return "" if line.megabytes is None else f"{line.megabytes:.3g}"


def _caption(table: Table, outcomes: Sequence[Outcome]) -> str:
    shown = [one for row in table.rows for one in outcomes_of(table, row, outcomes)]
    commits = ", ".join(sorted({str(one["commit"])[:10] for one in shown})) or NOT_MEASURED
    dates = ", ".join(sorted({str(one["date"])[:10] for one in shown})) or NOT_MEASURED
    found = {one["settings"]["seed"] for one in shown}
    seeds = ", ".join(str(seed) for seed in table.seeds if seed in found or not found)
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


def write_table(table: Table, kept: Path, text: Path, summary: Path) -> None:
    """Write what is shown as Markdown and as JSON."""
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(markdown(table, kept) + "\n", encoding="utf-8")
    write_json(summary_of(table, kept), summary)
