"""The command that makes pages of results: one run again, or several side by side."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fl_strategies._util.files import SHARED, replace_file
from fl_strategies.errors import InvalidData, StrategyError, require, require_data
from simulations.outputs import require_files
from simulations.report import Report
from simulations.report_compare import comparison_page
from simulations.report_page import page
from simulations.run_folder import PAGE, RESULT
from simulations.strict_json import read_json

OWNER: Final = "report"
COMPARISON: Final = "comparison.html"
NEEDED: Final = (
    "strategy",
    "seed",
    "seconds",
    "rounds",
    "parties",
    "settings",
    "ledger",
    "privacy-statement",
)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its result.json"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help=f"page (default: RUN/{PAGE}; of several runs {COMPARISON} beside the first)",
    )
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    files = [path / RESULT if path.is_dir() else path for path in options.runs]
    require(len({*files}) == len(files), OWNER, "runs", "different", [*map(str, files)])
    reports = [read_run(path) for path in files]
    first = files[0].resolve().parent
    usual = first / PAGE if len(files) == 1 else first.parent / COMPARISON
    target = options.html or usual
    require_files(OWNER, html=target)
    try:
        made = _made(files, reports)
    except StrategyError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise InvalidData(f"{OWNER}: runs must be results of runs, got {got:.200}.") from error
    replace_file(target, made.encode(), SHARED)
    sys.stdout.write(f"report: {target}\n")
    return 0


def _made(files: Sequence[Path], reports: Sequence[Report]) -> str:
    if len(files) == 1:
        return page(reports[0])
    return comparison_page({_name(path): one for path, one in zip(files, reports, strict=True)})


def _name(path: Path) -> str:
    folder = path.resolve().parent
    return folder.name if path.name == RESULT else path.stem


def read_run(path: Path) -> Report:
    """Read the result of a run; say what is missing if it is something else."""
    found = read_json(OWNER, path)
    missing = [key for key in NEEDED if key not in found]
    rule = f"the result of a run, with {', '.join(NEEDED)}"
    require_data(not missing, OWNER, str(path), rule, f"none of {', '.join(missing)}")
    shapes = {"rounds": list, "parties": list, "settings": dict}
    for key, kind in shapes.items():
        if not isinstance(found[key], kind):
            got = type(found[key]).__name__
            raise InvalidData(f"{OWNER}: {key} of {path} must be a {kind.__name__}, got {got}.")
    return found
