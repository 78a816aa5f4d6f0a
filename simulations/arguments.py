"""What commands that make many runs read from the command line, and say while they run."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from fl_strategies import FLOWER_STRATEGIES, REGISTRY
from fl_strategies.errors import InvalidParameter, require
from simulations.config import Settings, parse_assignments
from simulations.experiments.entries import Given, shared

AddData: TypeAlias = Callable[[argparse.ArgumentParser], None]
"""Adds the options that choose data and models."""

STOPPED: Final = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""


def add_command(
    commands: Any, add_data: AddData, name: str, help_line: str, description: str
) -> argparse.ArgumentParser:
    """Add a command that makes many runs on some data; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_line,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_data(parser)
    return parser


def add_results(parser: argparse.ArgumentParser, usual: str) -> None:
    """Add where results and a picture of them go; `usual` names the default file."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="OUT",
        help=f"results so far, and the table (default: runs/{usual}.json)",
    )
    parser.add_argument(
        "--png", type=Path, metavar="OUT", help="picture (default: as --json, ending in .png)"
    )


def names_of(text: str | None) -> list[str]:
    """Return what has commas between it, each once.

    Examples
    --------
    >>> names_of("fedkt, fedmd ldp,fedkt")
    ['fedkt', 'fedmd ldp']
    """
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def seeds_of(owner: str, text: str) -> tuple[int, ...]:
    """Return the seeds of an experiment."""
    seeds = [
        int(parse_assignments([f"seed={number}"])["seed"])
        for number in text.split(",")
        if number.strip()
    ]
    different = len({*seeds}) == len(seeds) > 0
    require(different, owner, "seeds", "different numbers, at least one", seeds)
    return tuple(seeds)


def budgets_of(owner: str, parameter: str, text: str | None) -> list[float]:
    """Return epsilons, smallest first."""
    try:
        budgets = sorted({float(number) for number in names_of(text)})
    except ValueError:
        rule = "numbers with commas between them"
        raise InvalidParameter(f"{owner}: {parameter} must be {rule}, got {text!r}.") from None
    for budget in budgets:
        require(0 < budget < float("inf"), owner, parameter, "finite and above 0", budget)
    return budgets


def given_of(options: argparse.Namespace, strategies: Sequence[str]) -> Given:
    """Return the settings that are given for all runs, by options and by --set."""
    named = {key: getattr(options, key) for key in ("data", "label", "drop", "learner")}
    known = [name for name in strategies if name in {**REGISTRY, **FLOWER_STRATEGIES}]
    return {
        **{key: value for key, value in named.items() if value is not None},
        **parse_assignments(options.set, *known),
    }


def default_path(given: Given, *words: str) -> Path:
    """Return where results are kept, named for the data and some words."""
    settings = Settings.from_run_config(shared(given))
    name = re.sub(r"[^a-z0-9]+", "-", Path(settings.data).name.lower()).strip("-")
    first, *others = words
    return Path(settings.output_dir) / ("-".join([first, name, *others]) + ".json")


def say(text: str) -> None:
    """Tell the progress where it does not mix with the table."""
    sys.stderr.write(text)
    sys.stderr.flush()


def say_stopped(kept: Path) -> int:
    """Tell what a stop leaves behind; return the exit code."""
    rest = f"What is finished is in {kept}" if kept.exists() else "Nothing is finished"
    say(f"\nStopped. {rest}; the same command resumes.\n")
    return STOPPED
