"""The command ``fl-strategies describe``."""

import argparse
from pathlib import Path
from typing import Final

from fl_strategies._util import SHARED, replace_file
from fl_strategies.registry import DESCRIBING
from simulations.commands.run import default_path, say
from simulations.config import Settings, parse_assignments
from simulations.experiments.description import describe_table, pictures
from simulations.results.page import statistics_page
from simulations.results.run_folder import require_files, write_json

ABOUT: Final = """\
Deal the rows of a table to parties and describe them in one round: per column and class, how
many records there are, missing shares, means, deviations and quartiles, correlations, and
curves of survival. Every value is exact, or protected by noise whose epsilon is reported:
--set target-epsilon=1. Bounds of columns are those of a schema (--schema FILE), or of an
eighth of the rows, which then count as public."""


def add_describe(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``describe``."""
    parser.description = ABOUT
    parser.epilog = "All settings, with their defaults: fl-strategies run --help"
    parser.add_argument("--data", required=True, metavar="FILE", help="FILE.csv, FILE.parquet")
    parser.add_argument("--label", metavar="COLUMN", help="column of classes to describe by")
    parser.add_argument("--drop", metavar="COLUMNS", help="columns to leave out")
    parser.add_argument("--schema", metavar="FILE", help="file that declares the columns")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting"
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="default: runs/describe-<data>.json"
    )
    parser.add_argument(
        "--html", type=Path, metavar="OUT", help="page (default: as --json, ending in .html)"
    )
    parser.set_defaults(command=_describe)


def _describe(options: argparse.Namespace) -> int:
    own = {name: getattr(options, name) for name in ("data", "label", "drop", "schema")}
    given = {name: value for name, value in own.items() if value is not None}
    given |= {"strategy": DESCRIBING.name, **parse_assignments(options.set, DESCRIBING.name)}
    settings = Settings.from_run_config(given)
    kept = options.json or default_path({"data": settings.data}, "describe")
    target = options.html or kept.with_suffix(".html")
    require_files("describe", json=kept, html=target)
    found = describe_table(settings)
    records, statistics = found.records, found.statistics
    opening = f"{len(records.y)} rows of {found.num_parties} parties"
    if records.public:
        opening += f"; {records.public} others, taken as public, decided bounds and categories"
    say(f"{Path(settings.data).name}: {opening}\n")
    print(statistics.describe())
    print(f"\n{found.statement}\n")
    write_json(statistics.to_json(), kept)
    print(f"results: {kept}")
    page = statistics_page(
        statistics,
        title=f"What {Path(settings.data).name} says",
        opening=opening,
        statement=found.statement,
        pictures=pictures(statistics),
    )
    replace_file(target, page.encode(), SHARED)
    print(f"report: {target}")
    return 0
