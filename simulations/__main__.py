"""The command line: ``python -m simulations --help``."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fl_strategies import FLOWER_STRATEGIES, REGISTRY
from fl_strategies.errors import InvalidParameter, StrategyError
from simulations.arguments import STOPPED, say
from simulations.config import Settings, describe, parse_assignments
from simulations.data.sets import LOADERS
from simulations.experiments.commands import add_compare, add_curve
from simulations.models import LEARNERS
from simulations.presets import PRESETS, paper_table, preset
from simulations.results.files import require_files, require_folder, write_json
from simulations.results.page import PAGE, add_report
from simulations.results.report import Report, percent, render, summarise, table
from simulations.results.run_folder import RunFolder
from simulations.runtime.flower import run_with_flower
from simulations.runtime.progress import watching
from simulations.runtime.running import Finished, run_federation, run_once
from simulations.runtime.tracking import Tracking, add_tracking
from simulations.understood import tell_data

MOVED = ("table", "tables", "figure")
NOTHING = "Nothing is finished"
PRESET_STRATEGY = "fedkt"
"""Whose published settings a preset means unless another strategy is named."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    try:
        if words[:1] and words[0] in MOVED:
            return _reproduce(words)
        options = _parser().parse_args(words)
        return int(options.command(options))
    except StrategyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"\nStopped. {NOTHING}.\n")
        return STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulations",
        description="Run federations of different models that learn by knowledge transfer.",
        epilog="Settings for --set, with their defaults:\n" + _list_settings(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run one federation in this process, without Ray")
    _add_settings(run)
    run.add_argument("--json", type=Path, metavar="OUT", help="also write the result here")
    add_tracking(run)
    _add_loudness(run)
    run.set_defaults(command=_run)
    flower = commands.add_parser(
        "flower", help="run one federation with `flwr run` on Flower's simulation engine"
    )
    _add_settings(flower)
    _add_loudness(flower)
    flower.set_defaults(command=_flower)
    repeat = commands.add_parser(
        "repeat", help="run a federation once a seed; show means beside the published figure"
    )
    _add_settings(repeat)
    repeat.add_argument("--seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    repeat.add_argument("--json", type=Path, metavar="OUT", help="also write the results here")
    repeat.set_defaults(command=_repeat)
    add_compare(commands, _add_data, run_once)
    add_curve(commands, _add_data, run_once)
    add_report(commands)
    return parser


def _reproduce(words: list[str]) -> int:
    """Run a command that has moved to `reproduction`, which no wheel contains."""
    command = f"python -m reproduction {words[0]}"
    if not (Path(__file__).parents[1] / "reproduction").is_dir():
        raise InvalidParameter(
            f"simulations: {words[0]} must be run from a checkout of the repository, "
            f"as {command}, got an installed package."
        )
    say(f"warning: this command is now {command}; its old name goes in the next release.\n")
    return int(importlib.import_module("reproduction.__main__").main(words))


def _add_loudness(parser: argparse.ArgumentParser) -> None:
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("--quiet", action="store_true", help="print the result only")
    loudness.add_argument("--verbose", action="store_true", help="show Flower's log")


def _list_settings() -> str:
    return "\n".join(
        f"  {key:28} {meaning} ({default!r})" for key, default, meaning in describe()
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    known = ", ".join([*REGISTRY, *FLOWER_STRATEGIES])
    parser.add_argument("--strategy", help=f"{known} (default: fedkd)")
    _add_data(parser)
    parser.add_argument(
        "--preset", choices=PRESETS, help="settings of the published experiment"
    )
    parser.add_argument("--seed", type=int)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "All settings, with their defaults: python -m simulations --help"
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


def _settings(options: argparse.Namespace) -> Settings:
    """Combine the sources of settings: preset, then options, then --set."""
    named = ("strategy", "data", "label", "drop", "learner", "seed")
    given = {key: getattr(options, key) for key in named if getattr(options, key) is not None}
    usual = PRESET_STRATEGY if options.preset else None
    given |= parse_assignments(options.set, *filter(None, [given.get("strategy", usual)]))
    if options.preset:
        chosen = (given.get("strategy", PRESET_STRATEGY), given.get("data", Settings().data))
        given = {**preset(options.preset, *map(str, chosen)), **given}
    return Settings.from_run_config(given)


def _run(options: argparse.Namespace) -> int:
    settings, quiet, verbose = _settings(options), options.quiet, options.verbose
    require_files("run", json=options.json)
    if not quiet:
        tell_data(settings)
    with (
        watching(settings.num_rounds, quiet=quiet, verbose=verbose) as watch,
        Tracking(options.track, settings) as tracked,
    ):
        try:
            finished = run_federation(
                settings, watch, verbose=verbose, output=True, on_round=tracked.trackers
            )
        except KeyboardInterrupt:
            tracked.fail()
            return _say_unfinished(settings)
        folder = RunFolder.new(settings.output_dir)
        report, stopped = _compared(finished, folder)
        tracked.tell_result(finished.strategy.round_, report)
    folder.write(report)
    print(render(report))
    if options.json:
        write_json(report, options.json)
    if stopped:
        say("\nStopped while models were trained to compare with; the rest is kept.\n")
    for hint in tracked.hints:
        print(f"tracked: {hint}")
    print(f"report: {folder.path / PAGE}")
    return STOPPED if stopped else 0


def _say_unfinished(settings: Settings) -> int:
    """Tell what a stop in the middle of a federation leaves behind; return the exit code."""
    kept = settings.checkpoint_dir
    rest = f"What has arrived is in {kept}; --set resume=true resumes" if kept else NOTHING
    say(f"\nStopped. {rest}.\n")
    return STOPPED


def _compared(finished: Finished, folder: RunFolder) -> tuple[Report, bool]:
    """Return the report of a run, and whether the comparisons were stopped."""
    model = folder.keep_model(finished.federation, finished.strategy)
    folder.write_epsilon(finished.strategy)
    try:
        return finished.report(model), False
    except KeyboardInterrupt:
        return finished.alone().report(model), True


def _flower(options: argparse.Namespace) -> int:
    settings = _settings(options)
    require_folder("flower", "output-dir", Path(settings.output_dir))
    if not options.quiet and not options.verbose:
        say(f"{settings.strategy} on {settings.data}, by Flower's simulation engine ...\n")
    report, folder = run_with_flower(settings, show_log=options.verbose)
    print(render(report))
    print(f"report: {folder / PAGE}")
    return 0


def _repeat(options: argparse.Namespace) -> int:
    settings = _settings(options)
    require_files("repeat", json=options.json)
    seeds = [parse_assignments([f"seed={seed}"])["seed"] for seed in options.seeds.split(",")]
    tell_data(replace(settings, seed=int(seeds[0])))
    reports: list[Report] = []
    try:
        for number, seed in enumerate(seeds, start=1):
            say(f"run {number} of {len(seeds)}: seed {seed}\n")
            told = {**settings.to_run_config(), "seed": seed}
            reports.append(run_once(Settings.from_run_config(told)))
    except KeyboardInterrupt:
        say(f"\nStopped. Finished: {len(reports)} of {len(seeds)} runs.\n")
        if not reports:
            return STOPPED
    print(table(["", "mean", "deviation", "published"], _compare(reports, options.preset)))
    if options.json:
        write_json({"runs": reports}, options.json)
    return 0 if len(reports) == len(seeds) else STOPPED


def _compare(reports: Sequence[Report], preset_name: str | None) -> list[list[str]]:
    """Return mean and deviation over seeds, beside what the paper prints."""
    first = reports[0]
    published = (
        paper_table(first["strategy"])[first["data"]]["published"] if preset_name else {}
    )
    rows = []
    for prefix in ("", "solo-", "best-solo-", "central-"):
        key = f"{prefix}{first['metric']}"
        values = [report[key] for report in reports if report[key] is not None]
        if values:
            rows.append([key, *map(percent, summarise(values)), percent(published.get(key))])
    mean, deviation = summarise([report["cpu-seconds"] for report in reports])
    return [*rows, ["cpu-seconds", f"{mean:.0f}", f"{deviation:.0f}", "-"]]


if __name__ == "__main__":
    sys.exit(main())
