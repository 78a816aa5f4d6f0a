"""The command ``fl-strategies curve``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, get_args

from simulations.commands.arguments import (
    add_data,
    add_results,
    budgets_of,
    default_path,
    given_of,
    names_of,
    say,
    say_stopped,
    seeds_of,
    tell_data,
)
from simulations.config import Settings
from simulations.curve import OWNER, REFERENCES, Curves, find_variants, plan_curves, run_curves
from simulations.curve_figure import draw_curves
from simulations.curve_section import write_section
from simulations.curve_table import markdown, summarise_curves, to_json
from simulations.fitting import Given, shared
from simulations.outputs import require_files
from simulations.private_variants import VARIANTS, Unit
from simulations.reproduce import Runner
from simulations.runtime import running
from simulations.strict_json import write_json

TOLD: Final = (
    "data",
    "label",
    "drop",
    "learner",
    "epsilons",
    "unit",
    "strategy",
    "seeds",
    "draws",
    "references",
)
"""Options that decide figures, in the order in which they are told."""
DESCRIPTION: Final = """\
Run every private strategy at every epsilon, over seeds and draws of the noise, beside
strategies without privacy and the majority class: a table of medians and quartiles, JSON and
a picture. A strategy that refuses an epsilon, because noise would drown everything, is shown
with its reason. What is finished is kept: the same command resumes after a stop, and more
draws, seeds or epsilons add to what is there."""


def add_curve(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``curve``."""
    parser.description = DESCRIPTION
    add_data(parser)
    parser.add_argument(
        "--epsilons", default="0.1,0.3,1,3", help="comma-separated (default: 0.1,0.3,1,3)"
    )
    parser.add_argument(
        "--unit", choices=get_args(Unit), default="example", help="whom to protect"
    )
    names = ", ".join(dict.fromkeys(variant.name for variant in VARIANTS))
    parser.add_argument(
        "--strategy",
        metavar="NAMES",
        help=f"only these, comma-separated: strategies, or {names} (default: all of the unit)",
    )
    parser.add_argument(
        "--seeds", default="200,201,202", help="comma-separated (default: 200,201,202)"
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=3,
        metavar="N",
        help="runs of every seed and epsilon, each with new noise (default: 3)",
    )
    parser.add_argument(
        "--references",
        metavar="NAMES",
        help=f"without privacy, of {', '.join(REFERENCES)} (default: all)",
    )
    _add_outputs(parser)
    parser.set_defaults(command=partial(_curve, running.run_once))


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add_results(parser, "curve-<data>-<unit>")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="OUT",
        help="also put a section with picture, table and command into this file",
    )
    parser.add_argument(
        "--summary", type=Path, metavar="OUT", help="also write the table alone as JSON"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing while it runs")


def _curve(run: Runner, options: argparse.Namespace) -> int:
    names = names_of(options.strategy)
    strategies = dict.fromkeys(v.strategy for v in find_variants(options.unit, names))
    given = given_of(options, list(strategies))
    kept = options.json or default_path(given, OWNER, options.unit)
    more = {name: getattr(options, name) for name in ("png", "markdown", "summary")}
    require_files(OWNER, json=kept, **more)
    try:
        _run_and_show(run, _plan(options, given, names), kept, options)
    except KeyboardInterrupt:
        return say_stopped(kept)
    return 0


def _plan(options: argparse.Namespace, given: Given, names: Sequence[str]) -> Curves:
    return plan_curves(
        given,
        unit=options.unit,
        names=names,
        budgets=budgets_of(OWNER, "epsilons", options.epsilons),
        seeds=seeds_of(OWNER, options.seeds),
        draws=options.draws,
        compared=names_of(options.references) or REFERENCES,
    )


def _run_and_show(run: Runner, curves: Curves, kept: Path, options: argparse.Namespace) -> None:
    if not options.quiet:
        first = curves.seeds[0]
        tell_data(Settings.from_run_config(shared(curves.given), seed=first))
    results = run_curves(curves, run, kept, (lambda _: None) if options.quiet else say)
    summary = summarise_curves(curves, results, _command(options))
    results.write(to_json(summary))
    picture = options.png or kept.with_suffix(".png")
    draw_curves(summary, picture)
    if options.summary:
        write_json(to_json(summary), options.summary)
    if options.markdown:
        write_section(summary, picture, options.markdown)
    sys.stdout.write(f"{markdown(summary)}\n\nresults: {kept}\npicture: {picture}\n")


def _command(options: argparse.Namespace) -> str:
    """Return the command that gives these figures again, whatever its defaults become."""
    chosen = {name: getattr(options, name) for name in TOLD}
    words = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    words += [f"--set={assignment}" for assignment in options.set]
    return shlex.join(["python", "-m", "simulations", "curve", *words])
