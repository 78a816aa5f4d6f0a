"""The commands ``fl-strategies compare`` and ``curve``."""

import argparse
import shlex
from pathlib import Path
from typing import Final

from fl_strategies import REGISTRY
from fl_strategies.errors import require
from fl_strategies.privacy.events import UNITS
from fl_strategies.registry import REFERENCES
from simulations.commands.run import (
    add_data,
    add_results,
    budgets_of,
    default_path,
    describe_file,
    given_of,
    names_of,
    say,
    say_stopped,
    seeds_of,
)
from simulations.experiments.compare import (
    plan_comparison,
    recommend,
    render,
    summarise_comparison,
)
from simulations.experiments.compare import to_json as comparison_json
from simulations.experiments.curve import (
    find_variants,
    markdown,
    plan_curves,
    summarise_curves,
    to_json,
    write_section,
)
from simulations.experiments.engine import Experiment, Results
from simulations.experiments.entries import VARIANTS
from simulations.experiments.plots import draw_comparison, draw_curves
from simulations.results.run_folder import require_files, write_json
from simulations.runtime import local

OF_COMPARE: Final = """\
Run every strategy that fits the data and the models, on the same splits and seeds, beside
each party alone, pooled data and the majority class. At the end: one table, one picture
(accuracy against bytes, and against epsilon with --epsilon) and a recommendation in words.
Where a strategy needs other models than were asked for, the nearest ones take their place
and the table says so. What is finished is kept: the same command resumes after a stop."""
OF_CURVE: Final = """\
Run every private strategy at every epsilon, over seeds and draws of the noise, beside
strategies without privacy and the majority class: a table of medians and quartiles, JSON and
a picture. A strategy that refuses an epsilon, because its noise leaves no signal, is shown
with its reason. What is finished is kept: the same command resumes after a stop, and more
draws, seeds or epsilons add to what is there."""
DECISIVE: Final = (
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
"""Options of ``curve`` that decide its results, in the order in which they are shown."""


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare``."""
    parser.description = OF_COMPARE
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
    parser.set_defaults(command=_compare, quiet=False)


def _compare(options: argparse.Namespace) -> int:
    strategies = names_of(options.strategy) or list(REGISTRY)
    comparison = plan_comparison(
        given_of(options, strategies),
        strategies=strategies,
        rounds=options.rounds,
        seeds=seeds_of("compare", options.seeds),
        budgets=budgets_of("compare", "epsilon", options.epsilon),
    )
    reasons = " ".join(f"{name}: {why}" for name, why in comparison.excluded.items())
    require(bool(comparison.entries), "compare", "strategy", "one that fits", reasons)
    kept = options.json or default_path(comparison.given, "compare")
    require_files("compare", json=kept, png=options.png)
    results = _run(comparison, kept, options)
    if results is None:
        return say_stopped(kept)
    summary = summarise_comparison(comparison, results)
    advice = recommend(summary)
    results.write(comparison_json(summary, advice))
    print("\n".join([render(summary), "", *advice, "", f"results: {kept}"]))
    picture = options.png or kept.with_suffix(".png")
    draw_comparison(summary, picture)
    print(f"picture: {picture}")
    return 0


def _run(experiment: Experiment, kept: Path, options: argparse.Namespace) -> Results | None:
    """Run what is missing, with progress unless it is to be quiet; None if it is stopped."""
    try:
        if not options.quiet:
            describe_file(experiment.settings(None, experiment.seeds[0]))
        return experiment.run(local.run_once, kept, (lambda _: None) if options.quiet else say)
    except KeyboardInterrupt:
        return None


def add_curve(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``curve``."""
    parser.description = OF_CURVE
    add_data(parser)
    parser.add_argument(
        "--epsilons", default="0.1,0.3,1,3", help="comma-separated (default: 0.1,0.3,1,3)"
    )
    parser.add_argument("--unit", choices=UNITS, default="example", help="whom to protect")
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
    parser.set_defaults(command=_curve)


def _curve(options: argparse.Namespace) -> int:
    names = names_of(options.strategy)
    strategies = dict.fromkeys(v.strategy for v in find_variants(options.unit, names))
    given = given_of(options, list(strategies))
    kept = options.json or default_path(given, "curve", options.unit)
    more = {name: getattr(options, name) for name in ("png", "markdown", "summary")}
    require_files("curve", json=kept, **more)
    curves = plan_curves(
        given,
        unit=options.unit,
        names=names,
        budgets=budgets_of("curve", "epsilons", options.epsilons),
        seeds=seeds_of("curve", options.seeds),
        draws=options.draws,
        compared=names_of(options.references) or REFERENCES,
    )
    results = _run(curves, kept, options)
    if results is None:
        return say_stopped(kept)
    summary = summarise_curves(curves, results, _command(options))
    results.write(to_json(summary))
    picture = options.png or kept.with_suffix(".png")
    draw_curves(summary, picture)
    if options.summary:
        write_json(to_json(summary), options.summary)
    if options.markdown:
        write_section(summary, picture, options.markdown)
    print(f"{markdown(summary)}\n\nresults: {kept}\npicture: {picture}")
    return 0


def _command(options: argparse.Namespace) -> str:
    """Return the command that gives these results again, whatever its defaults become."""
    chosen = {name: getattr(options, name) for name in DECISIVE}
    words = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    words += [f"--set={assignment}" for assignment in options.set]
    return shlex.join(["python", "-m", "simulations", "curve", *words])
