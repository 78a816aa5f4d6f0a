"""Options that commands share, how they are read, and what is said while runs are made."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_strategies import FLOWER_STRATEGIES, REGISTRY
from fl_strategies.errors import InvalidParameter, require
from simulations.commands import STOPPED
from simulations.config import Settings, by_new_names, describe, parse_assignments
from simulations.data.sets import LOADERS
from simulations.experiments.entries import Given, shared
from simulations.federation import load_federation
from simulations.models import LEARNERS


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose data, models and any other setting."""
    parser.epilog = "All settings, with their defaults: fl-strategies run --help"
    parser.add_argument("--data", help=f"{', '.join(LOADERS)}, FILE.npz or FILE.csv")
    parser.add_argument("--label", metavar="COLUMN", help="label column of FILE.csv")
    parser.add_argument("--drop", metavar="COLUMNS", help="columns of FILE.csv to drop")
    parser.add_argument(
        "--learner",
        metavar="NAMES",
        help=f"party models, comma-separated, of {', '.join(LEARNERS)}",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting"
    )


def list_settings() -> str:
    """Return all settings with their meanings and defaults, one per line."""
    return "Settings for --set, with their defaults:\n" + "\n".join(
        f"  {key:28} {meaning} ({default!r})" for key, default, meaning in describe()
    )


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
    given = {key: value for key, value in named.items() if value is not None}
    return by_new_names({**given, **parse_assignments(options.set, *known)})


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


def tell_data(settings: Settings) -> None:
    """Say what was made of a file, before anything is trained on it."""
    if settings.data not in LOADERS:
        say(f"{load_federation(settings).describe_data()}\n")


def say_stopped(kept: Path) -> int:
    """Tell what a stop leaves behind; return the exit code."""
    rest = f"What is finished is in {kept}" if kept.exists() else "Nothing is finished"
    say(f"\nStopped. {rest}; the same command resumes.\n")
    return STOPPED
