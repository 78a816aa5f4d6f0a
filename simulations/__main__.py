"""The command line: ``python -m simulations --help``."""

import argparse
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_strategies.exceptions import StrategyError
from simulations.client_app import app
from simulations.config import (
    PRESETS,
    Settings,
    describe,
    paper_table,
    parse_assignment,
    preset,
)
from simulations.experiment import load_federation
from simulations.flower import run_with_flower
from simulations.local import run_local
from simulations.report import (
    Report,
    make_report,
    percent,
    render,
    summarise,
    table,
    write_json,
    write_report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except StrategyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


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
    run.set_defaults(command=_run)
    flower = commands.add_parser(
        "flower", help="run one federation with `flwr run` on Flower's simulation engine"
    )
    _add_settings(flower)
    flower.set_defaults(command=_flower)
    reproduce = commands.add_parser(
        "reproduce", help="repeat a published experiment over seeds and compare"
    )
    reproduce.add_argument("--strategy", default="fedkt")
    reproduce.add_argument("--data", action="append", help="data set; may be repeated")
    reproduce.add_argument("--seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    reproduce.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    reproduce.add_argument(
        "--json", type=Path, metavar="OUT", help="also write the results here"
    )
    reproduce.set_defaults(command=_reproduce)
    return parser


def _list_settings() -> str:
    return "\n".join(
        f"  {key:24} {meaning} ({default!r})" for key, default, meaning in describe()
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", help="strategy to run (default: fedkt)")
    parser.add_argument(
        "--data", help="digits, breast-cancer, adult, cod-rna, mnist, FILE.npz or FILE.csv"
    )
    parser.add_argument("--label", metavar="COLUMN", help="label column of FILE.csv")
    parser.add_argument("--learner", metavar="NAMES", help="party models, comma-separated")
    parser.add_argument(
        "--preset", choices=PRESETS, help="settings of the published experiment"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting"
    )


def _settings(options: argparse.Namespace) -> Settings:
    """Combine the sources of settings: preset, then options, then --set."""
    named = ("strategy", "data", "label", "learner", "seed")
    given = {key: getattr(options, key) for key in named if getattr(options, key) is not None}
    given |= dict(parse_assignment(text) for text in options.set)
    if options.preset:
        defaults = Settings()
        chosen = (given.get("strategy", defaults.strategy), given.get("data", defaults.data))
        given = {**preset(options.preset, *map(str, chosen)), **given}
    return Settings.from_run_config(given)


def _run(options: argparse.Namespace) -> int:
    settings = _settings(options)
    report = _run_once(settings)
    print(render(report))
    print(f"result: {write_report(report, settings.output_dir)}")
    if options.json:
        write_json(report, options.json)
    return 0


def _run_once(settings: Settings) -> Report:
    federation = load_federation(settings)
    strategy = federation.strategy()
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    result = run_local(
        strategy,
        app,
        settings.num_parties,
        run_config=settings.to_run_config(),
        num_workers=settings.workers,
    )
    seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu_start
    return make_report(
        federation, strategy, result,
        seconds=seconds, cpu_seconds=cpu_seconds, num_workers=settings.workers,
    )  # fmt: skip


def _cpu_seconds() -> float:
    """Return the processor time of this process and of its finished workers."""
    usages = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _flower(options: argparse.Namespace) -> int:
    report = run_with_flower(_settings(options))
    print(render(report))
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    paper = paper_table(options.strategy)
    seeds = [parse_assignment(f"seed={seed}") for seed in options.seeds.split(",")]
    changes = dict(parse_assignment(text) for text in options.set)
    rows, reports = [], []
    for data in options.data or list(paper):
        base = preset("paper", options.strategy, data)
        runs = [
            _run_once(Settings.from_run_config({**base, **changes, key: seed}))
            for key, seed in seeds
        ]
        reports += runs
        rows.append(_compare(data, runs, paper[data]["published"]))
    print(table(["data", "seeds", "measured", "alone", "published", "alone", "CPU s"], rows))
    if options.json:
        write_json({"runs": reports}, options.json)
    return 0


def _compare(data: str, runs: Sequence[Report], published: Mapping[str, float]) -> list[str]:
    measured = summarise([run["accuracy"] for run in runs])
    alone = [run["solo-accuracy"] for run in runs if run["solo-accuracy"] is not None]
    return [
        data,
        str(len(runs)),
        f"{percent(measured['mean'])} ± {100 * measured['deviation']:.1f}",
        percent(summarise(alone)["mean"] if alone else None),
        f"{percent(published['accuracy'])} ± {100 * published['deviation']:.1f}",
        percent(published["solo-accuracy"]),
        f"{summarise([run['cpu-seconds'] for run in runs])['mean']:.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
