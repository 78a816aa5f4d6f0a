"""The command line: ``python -m reproduction --help``, from a checkout."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_strategies.errors import MissingExtra, StrategyError, require
from reproduction.calculated import calculate, calculation_names
from reproduction.page import all_tables, facts, write_page
from reproduction.plots import draw_rounds, draw_rows
from reproduction.table import PAPER, QUICK, Table, markdown, run_table, summary_of
from reproduction.toy import TOY, toy
from simulations.commands.run import say, say_stopped, seeds_of
from simulations.config import Settings
from simulations.results.report import aligned
from simulations.results.run_folder import require_files, write_json
from simulations.runtime import local

SCALES = (QUICK, PAPER, TOY)
STAND_INS = "stand_ins"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except StrategyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reproduction",
        description="Repeat the tables and figures of the papers.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "table", help="run a table of experiments; what is finished is not run again"
    )
    one.add_argument("name", help="file in reproduction/tables, such as fedkd_cifar10")
    one.add_argument(
        "--scale",
        choices=SCALES,
        default=QUICK,
        help="the paper's size, one for a laptop, or seconds of random data (default: quick)",
    )
    one.add_argument("--seeds", help="comma-separated (default: the table's own)")
    one.add_argument(
        "--row",
        action="append",
        metavar="TEXT",
        help="run only the row of this name, or else those whose names hold this text; "
        "may be given several times",
    )
    one.add_argument(
        "--json", type=Path, metavar="OUT", help="results so far (default: runs/<name>.json)"
    )
    one.set_defaults(command=_table)
    every = commands.add_parser("tables", help="list all tables, with their expected minutes")
    every.add_argument(
        "--results", type=Path, default=Path("docs/results"), help="(default: docs/results)"
    )
    every.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="make this page anew from the results beside it",
    )
    every.set_defaults(command=_tables)
    figure = commands.add_parser(
        "figure", help="draw the accuracy of a table's federations after each round"
    )
    figure.add_argument("name", help="file in reproduction/tables, such as fedmd_letters")
    figure.add_argument(
        "--json", type=Path, metavar="RESULTS", help="results (default: runs/<name>.json)"
    )
    figure.add_argument(
        "--png", type=Path, metavar="OUT", help="picture (default: runs/<name>.png)"
    )
    figure.set_defaults(command=_figure)
    return parser


def _table(options: argparse.Namespace) -> int:
    if options.name in calculation_names():
        return _calculate(options.name)
    if options.scale == TOY:
        table = toy(Table.load(options.name), Path(Settings().output_dir) / STAND_INS)
    else:
        table = Table.load(options.name, options.scale)
    if options.seeds:
        table = table.but(seeds=seeds_of("table", options.seeds))
    # Results of random data must not be mistaken for others.
    word = f"_{TOY}" if options.scale == TOY else ""
    kept = options.json or _default_path(f"{options.name}{word}", "json")
    require_files("table", json=kept)
    try:
        run_table(_chosen(table, options.row), local.run_once, kept, say)
    except KeyboardInterrupt:
        return say_stopped(kept)
    print(markdown(table, kept))
    _write(table, kept)
    return 0


def _chosen(table: Table, texts: list[str] | None) -> Table:
    """Return the table with the rows that were asked for; all if none were."""
    if texts is None:
        return table
    named = {row.name for row in table.rows}.intersection(texts)
    parts = set(texts) - named
    rows = [
        row
        for row in table.rows
        if row.name in named or any(part in row.name for part in parts)
    ]
    known = ", ".join(repr(row.name) for row in table.rows)
    require(bool(rows), "table", "row", f"part of one of {known}", texts)
    return table.but(rows=rows)


def _calculate(name: str) -> int:
    """Show a table that needs no run."""
    found, text = calculate(name), _default_path(name, "md")
    require_files("table", text=text)
    text.write_text(found.markdown() + "\n", encoding="utf-8")
    print(found.markdown())
    found.draw(text.with_suffix(".png"))
    return 0


def _write(table: Table, kept: Path) -> None:
    """Write text, summary and picture beside the results; the picture needs an extra."""
    scale = "" if table.scale in (QUICK, TOY) else f"_{table.scale}"
    base = kept.with_name(f"{kept.stem}{scale}")
    text, summary = base.with_suffix(".md"), base.with_name(f"{base.name}_summary.json")
    text.write_text(markdown(table, kept) + "\n", encoding="utf-8")
    write_json(summary_of(table, kept), summary)
    picture = base.with_name(f"{base.name}_rows.png")
    try:
        draw_rows(table, kept, picture)
    except MissingExtra as error:
        say(f"No picture: {error}\n")
        return
    print(f"files: {text}, {summary}, {picture}")


def _tables(options: argparse.Namespace) -> int:
    if options.write:
        write_page(options.write)
        print(f"page: {options.write}")
        return 0
    header = ["table", "scale", "rows", "seeds", "CPU minutes", "measured"]
    found = all_tables()
    cells = [[one.name, *facts(one, options.results)] for one in found]
    sources = ["source", *(one.source for one in found)]
    for line, source in zip(aligned(header, cells).splitlines(), sources, strict=True):
        print(f"{line}  {source}")
    return 0


def _figure(options: argparse.Namespace) -> int:
    target = options.png or _default_path(options.name, "png")
    kept = options.json or _default_path(options.name, "json")
    draw_rounds(Table.load(options.name), kept, target)
    print(f"figure: {target}")
    return 0


def _default_path(name: str, ending: str) -> Path:
    return Path(Settings().output_dir) / f"{name}.{ending}"


if __name__ == "__main__":
    sys.exit(main())
