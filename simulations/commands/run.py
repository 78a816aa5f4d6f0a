"""The commands ``run``, ``flower`` and ``repeat``: one federation, once or once per seed."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fl_strategies import FLOWER_STRATEGIES, REGISTRY
from simulations.commands import STOPPED
from simulations.commands.arguments import add_data, list_settings, say, tell_data
from simulations.config import PRESETS, Settings, paper_table, parse_assignments, preset
from simulations.results.files import require_files, require_folder, write_json
from simulations.results.page import PAGE
from simulations.results.report import Report, percent, render, summarise, table
from simulations.results.run_folder import RunFolder
from simulations.runtime import local
from simulations.runtime.flower import run_with_flower
from simulations.runtime.local import Finished, run_federation
from simulations.runtime.progress import watching

NOTHING = "Nothing is finished"
PRESET_STRATEGY = "fedkt"
"""Whose published settings a preset means unless another strategy is named."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    _add_settings(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result here")
    _add_loudness(parser)
    parser.set_defaults(command=_run)


def add_flower(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flower``."""
    _add_settings(parser)
    _add_loudness(parser)
    parser.set_defaults(command=_flower)


def add_repeat(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``repeat``."""
    _add_settings(parser)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results here")
    parser.set_defaults(command=_repeat)


def _add_loudness(parser: argparse.ArgumentParser) -> None:
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("--quiet", action="store_true", help="print the result only")
    loudness.add_argument("--verbose", action="store_true", help="show Flower's log")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    known = ", ".join([*REGISTRY, *FLOWER_STRATEGIES])
    parser.add_argument("--strategy", help=f"{known} (default: fedkd)")
    add_data(parser)
    parser.epilog = list_settings()
    parser.add_argument(
        "--preset", choices=PRESETS, help="settings of the published experiment"
    )
    parser.add_argument("--seed", type=int)


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
    with watching(settings.num_rounds, quiet=quiet, verbose=verbose) as watch:
        try:
            finished = run_federation(settings, watch, verbose=verbose, output=True)
        except KeyboardInterrupt:
            return _say_unfinished(settings)
        folder = RunFolder.new(settings.output_dir)
        report, stopped = _compared(finished, folder)
    folder.write(report)
    print(render(report))
    if options.json:
        write_json(report, options.json)
    if stopped:
        say("\nStopped while models were trained to compare with; the rest is kept.\n")
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
            reports.append(local.run_once(Settings.from_run_config(told)))
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
