"""The command ``fl-strategies compare``."""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import Final

from fl_strategies import REGISTRY
from fl_strategies.errors import require
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
from simulations.compare import Comparison, run_comparison
from simulations.compare_advice import recommend
from simulations.compare_entries import OWNER, make_plan
from simulations.compare_figure import draw_comparison
from simulations.compare_table import render, summarise_comparison, to_json
from simulations.config import Settings
from simulations.fitting import shared
from simulations.outputs import require_files
from simulations.reproduce import Runner
from simulations.runtime import running

DESCRIPTION: Final = """\
Run every strategy that fits the data and the models, on the same splits and seeds, beside
each party alone, pooled data and the majority class. At the end: one table, one picture
(accuracy against bytes, and against epsilon with --epsilon) and a recommendation in words.
Where a strategy needs other models than were asked for, the nearest ones take their place
and the table says so. What is finished is kept: the same command resumes after a stop."""


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare``."""
    parser.description = DESCRIPTION
    add_data(parser)
    parser.add_argument(
        "--strategy",
        metavar="NAMES",
        help=f"only these, comma-separated, of {', '.join(REGISTRY)} (default: all)",
    )
    parser.add_argument(
        "--epsilon",
        metavar="E",
        help="also compare what can promise privacy, at this budget or these, comma-separated",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="rounds of strategies that have more than one (default: 5)",
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    add_results(parser, "compare-<data>")
    parser.set_defaults(command=partial(_compare, running.run_once))


def _compare(run: Runner, options: argparse.Namespace) -> int:
    comparison = _comparison(options)
    kept = options.json or default_path(comparison.given, "compare")
    require_files(OWNER, json=kept, png=options.png)
    try:
        tell_data(Settings.from_run_config(shared(comparison.given), seed=comparison.seeds[0]))
        results = run_comparison(comparison, run, kept, say)
    except KeyboardInterrupt:
        return say_stopped(kept)
    summary = summarise_comparison(comparison, results)
    advice = recommend(summary)
    results.write(to_json(summary, advice))
    sys.stdout.write("\n".join([render(summary), "", *advice, "", f"results: {kept}\n"]))
    picture = options.png or kept.with_suffix(".png")
    draw_comparison(summary, picture)
    sys.stdout.write(f"picture: {picture}\n")
    return 0


def _comparison(options: argparse.Namespace) -> Comparison:
    strategies = names_of(options.strategy) or list(REGISTRY)
    given, seeds = given_of(options, strategies), seeds_of(OWNER, options.seeds)
    plan = make_plan(
        given,
        strategies=strategies,
        rounds=options.rounds,
        seeds=seeds,
        budgets=budgets_of(OWNER, "epsilon", options.epsilon),
    )
    require(bool(plan.entries), OWNER, "strategy", "one that fits", _reasons(plan.excluded))
    return Comparison(given, seeds, plan)


def _reasons(excluded: Mapping[str, str]) -> str:
    return " ".join(f"{name}: {why}" for name, why in excluded.items())
