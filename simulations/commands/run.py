"""The commands ``run``, ``flower``, ``repeat``, ``report`` and ``config``.

The options, readers of options and messages that other commands share come first.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from fl_strategies import FLOWER_STRATEGIES, REGISTRY
from fl_strategies._util import SHARED, replace_file
from fl_strategies.errors import InvalidParameter, require
from fl_strategies.registry import DEFAULT_STRATEGY
from simulations.commands import STOPPED
from simulations.config import (
    PRESETS,
    TITLES,
    Settings,
    by_new_names,
    describe,
    paper_table,
    parse_assignments,
    preset,
    published_strategies,
)
from simulations.data.sets import LOADERS
from simulations.experiments.entries import Given, shared
from simulations.federation import load_federation
from simulations.models import LEARNERS
from simulations.results.page import COMPARISON, PAGE, RESULT
from simulations.results.report import Report, aligned, render, summarise
from simulations.results.run_folder import (
    RunFolder,
    page_of,
    require_files,
    require_folder,
    write_json,
)
from simulations.results.verdict import shown
from simulations.runtime import local
from simulations.runtime.flower import run_with_flower
from simulations.runtime.progress import watching

DATA_OPTIONS: Final = ("data", "label", "drop", "schema", "learner")
BLOCK: Final = "tool.flwr.app.config"
PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose data, models and any other setting."""
    parser.epilog = "All settings, with their defaults: fl-strategies run --help"
    parser.add_argument("--data", help=f"{', '.join(LOADERS)}, FILE.npz or FILE.csv")
    parser.add_argument("--label", metavar="COLUMN", help="label column of FILE.csv")
    parser.add_argument("--drop", metavar="COLUMNS", help="columns of FILE.csv to drop")
    parser.add_argument("--schema", metavar="SCHEMA", help="file that declares the columns")
    parser.add_argument(
        "--learner",
        metavar="NAMES",
        help=f"party models, comma-separated, of {', '.join(LEARNERS)}",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting"
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
    """Return the different names in a comma-separated text.

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
    known = [name for name in strategies if name in {**REGISTRY, **FLOWER_STRATEGIES}]
    return by_new_names({**_named(options), **parse_assignments(options.set, *known)})


def _named(options: argparse.Namespace, *more: str) -> Given:
    given = {key: getattr(options, key) for key in (*DATA_OPTIONS, *more)}
    return {key: value for key, value in given.items() if value is not None}


def default_path(given: Given, *words: str) -> Path:
    """Return the default file of results, named for the data and some words."""
    settings = Settings.from_run_config(shared(given))
    name = re.sub(r"[^a-z0-9]+", "-", Path(settings.data).name.lower()).strip("-")
    first, *others = words
    return Path(settings.output_dir) / ("-".join([first, name, *others]) + ".json")


def say(text: str) -> None:
    """Write progress to standard error, apart from the results."""
    sys.stderr.write(text)
    sys.stderr.flush()


def describe_file(settings: Settings) -> None:
    """Describe a user's own file as it was read, before anything is trained on it."""
    if settings.data not in LOADERS:
        say(f"{load_federation(settings).describe_data()}\n")


def say_stopped(kept: Path) -> int:
    """Report what a stopped experiment has kept; return the exit code."""
    rest = f"What is finished is in {kept}" if kept.exists() else "Nothing is finished"
    say(f"\nStopped. {rest}; the same command resumes.\n")
    return STOPPED


# run, flower and repeat


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
    parser.add_argument("--strategy", help=f"{known} (default: {DEFAULT_STRATEGY})")
    add_data(parser)
    parser.epilog = "Settings for --set, with their defaults:\n" + "\n".join(
        f"  {key:28} {meaning} ({default!r})" for key, default, meaning in describe()
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="settings of the published experiment"
    )
    parser.add_argument("--seed", type=int)


def _settings(options: argparse.Namespace) -> Settings:
    """Combine the sources of settings: preset, then options, then --set."""
    given = {**_named(options, "strategy", "seed")}
    usual = published_strategies()[0]  # of a preset
    strategy = given.get("strategy", usual if options.preset else None)
    given |= parse_assignments(options.set, *([str(strategy)] if strategy else []))
    if options.preset:
        chosen = (given.get("strategy", usual), given.get("data", Settings().data))
        given = {**preset(options.preset, *map(str, chosen)), **given}
    return Settings.from_run_config(given)


def _run(options: argparse.Namespace) -> int:
    settings, quiet, verbose = _settings(options), options.quiet, options.verbose
    require_files("run", json=options.json)
    if not quiet:
        describe_file(settings)
    stopped = False
    with watching(settings.num_rounds, quiet=quiet, verbose=verbose) as watch:
        try:
            finished = local.run_federation(settings, watch, verbose=verbose, output=True)
        except KeyboardInterrupt:
            kept = settings.checkpoint_dir
            resumes = f"What has arrived is in {kept}; --set resume=true resumes"
            say(f"\nStopped. {resumes if kept else 'Nothing is finished'}.\n")
            return STOPPED
        folder = RunFolder.new(settings.output_dir)
        model = folder.keep_model(finished.federation, finished.strategy)
        folder.write_epsilon(finished.strategy)
        try:
            report = finished.report(model)
        except KeyboardInterrupt:
            report, stopped = finished.alone().report(model), True
    folder.write(report)
    print(render(report))
    if options.json:
        write_json(report, options.json)
    if stopped:
        say("\nStopped while models were trained to compare with; the rest is kept.\n")
    print(f"report: {folder.path / PAGE}")
    return STOPPED if stopped else 0


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
    seeds = [int(parse_assignments([f"seed={s}"])["seed"]) for s in options.seeds.split(",")]
    describe_file(replace(settings, seed=seeds[0]))
    reports: list[Report] = []
    try:
        for number, seed in enumerate(seeds, start=1):
            say(f"run {number} of {len(seeds)}: seed {seed}\n")
            given = {**settings.to_run_config(), "seed": seed}
            reports.append(local.run_once(Settings.from_run_config(given)))
    except KeyboardInterrupt:
        say(f"\nStopped. Finished: {len(reports)} of {len(seeds)} runs.\n")
        if not reports:
            return STOPPED
    print(aligned(["", "mean", "deviation", "published"], _over_seeds(reports, options.preset)))
    if options.json:
        write_json({"runs": reports}, options.json)
    return 0 if len(reports) == len(seeds) else STOPPED


def _over_seeds(reports: Sequence[Report], preset_name: str | None) -> list[list[str]]:
    """Return means and deviations over seeds, beside what the paper prints."""
    first = reports[0]
    published = (
        paper_table(first["strategy"])[first["data"]]["published"] if preset_name else {}
    )
    rows = []
    for prefix in ("", "solo-", "best-solo-", "central-"):
        key = f"{prefix}{first['metric']}"
        values = [report[key] for report in reports if report[key] is not None]
        if values:
            known = [*summarise(values), published.get(key)]
            rows.append([key, *(shown(first["metric"], value) for value in known)])
    mean, deviation = summarise([report["cpu-seconds"] for report in reports])
    return [*rows, ["cpu-seconds", f"{mean:.0f}", f"{deviation:.0f}", "-"]]


# report


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
    page, folder = page_of(files), files[0].resolve().parent
    usual = folder / PAGE if len(files) == 1 else folder.parent / COMPARISON
    target = options.html or usual
    require_files("report", html=target)
    replace_file(target, page.encode(), SHARED)
    print(f"report: {target}")
    return 0


# config


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``config``."""
    parser.add_argument(
        "--write",
        nargs="?",
        type=Path,
        const=PROJECT,
        metavar="PYPROJECT",
        help="put the settings at the end of this file (default: the checkout's own)",
    )
    parser.set_defaults(command=_config)


def _config(options: argparse.Namespace) -> int:
    if options.write is None:
        sys.stdout.write(config_block())
    else:
        text = with_block(options.write.read_text(encoding="utf-8"))
        replace_file(options.write, text.encode(), SHARED)
    return 0


def with_block(text: str) -> str:
    """Return a project file whose last tables are the settings."""
    return text.partition(f"[{BLOCK}]\n")[0] + config_block()


def config_block() -> str:
    """Return every setting with its default and meaning, as `[tool.flwr.app.config]`."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield f"[{BLOCK}]"
    section = ""
    for key, default, meaning in describe():
        found, _, short = key.rpartition(".")
        if found != section:
            yield from ("", f"[{BLOCK}.{found}]")
            section = found
        elif key in TITLES:
            yield ""
        if key in TITLES:
            yield f"# {TITLES[key]}"
        yield f"{short} = {json.dumps(default)} # {meaning}"
