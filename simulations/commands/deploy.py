"""The command ``fl-strategies deploy``: app, check, split and demo."""

import argparse
import logging
import signal
import sys
import tomllib
from datetime import datetime
from logging.handlers import BufferingHandler
from pathlib import Path

from fl_strategies import find_algorithm
from fl_strategies.errors import InvalidData
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies.registry import DEMO_STRATEGY
from simulations.config import Settings, Value, parse_assignments
from simulations.deploy.checking import ask, describe
from simulations.deploy.client_app import build_party, checked, party_public, understood
from simulations.deploy.federation import FORMATS, Deployment, prepare, write_app, write_split
from simulations.results.verdict import shown

logger = logging.getLogger("flwr.fl_strategies")


def add_deploy(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``deploy``."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    app = commands.add_parser("app", help="write the app folder that `flwr run` submits")
    app.add_argument("folder", type=Path)
    app.set_defaults(command=_app)
    check = commands.add_parser(
        "check", help="read a party's node-config and files, as a run would"
    )
    check.add_argument("node_config", type=Path, metavar="NODE.toml")
    check.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="settings of a run: would this party take part?",
    )
    check.set_defaults(command=_check)
    split = commands.add_parser("split", help="write a data set as one file for each party")
    _add_settings(split)
    split.add_argument("folder", type=Path)
    split.set_defaults(command=_split)
    demo = commands.add_parser("demo", help="start, run and stop a federation on loopback")
    _add_settings(demo)
    usual = f"default: {DEMO_STRATEGY}"
    demo.add_argument("--strategy", default=DEMO_STRATEGY, help=usual)
    demo.add_argument("--rounds", type=int, help="default: 1, or 2 if several are usual")
    demo.add_argument(
        "--max-epsilon", type=float, default=0.0, help="budget of each party (0: a record only)"
    )
    demo.add_argument(
        "--work", type=Path, help="new folder for all files (default: runs/deploy-<time>)"
    )
    demo.set_defaults(command=_demo)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parties", type=int, default=3, help="default: 3")
    parser.add_argument("--data", default="digits", help="default: digits")
    parser.add_argument("--label", default="", metavar="COLUMN", help="label column of a table")
    parser.add_argument("--drop", default="", metavar="COLUMNS", help="columns to drop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--formats", default=",".join(FORMATS), help="of parties' files, round-robin"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting of `fl-strategies run --help`",
    )


def _settings(options: argparse.Namespace) -> Settings:
    given: dict[str, Value] = {
        "num-parties": options.parties,
        **{key: getattr(options, key) for key in ("data", "label", "drop", "seed")},
    }
    strategies = [options.strategy] if hasattr(options, "strategy") else []
    for strategy in strategies:
        rounds = options.rounds or min(2, find_algorithm(strategy).strategy.usual_rounds)
        given |= {"strategy": strategy, "num-server-rounds": rounds}
    return Settings.from_run_config({**given, **parse_assignments(options.set, *strategies)})


def _app(options: argparse.Namespace) -> int:
    print(f"app: {write_app(options.folder)}")
    return 0


def _check(options: argparse.Namespace) -> int:
    try:
        config = tomllib.loads(options.node_config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidData(
            f"check: {options.node_config} must be a file in TOML, got: {error}."
        ) from error
    # The readers of a party's files warn in its log, which a check shows as well.
    warnings = BufferingHandler(sys.maxsize)
    warnings.setLevel(logging.WARNING)
    logger.addHandler(warnings)
    try:
        party = build_party(config, run="check")
    finally:
        logger.removeHandler(warnings)
    party.learner_fn()
    for line in understood(config):
        print(line)
    print(f"{party.owner}: {len(party.y)} records of shape {party.x.shape[1:]}")
    public = party_public(checked(config))
    numeric = party.task == "regression"
    kind = f"number: {public.classes[0]}" if numeric else f"classes: {party.num_classes}"
    print(f"public rows: {len(party.public)}, {kind}")
    print(f"learner: {party.learner_name}")
    for line in describe(party, public):
        print(line)
    for record in warnings.buffer:
        print(f"LOOK AT THIS: {record.getMessage()}")
    _print_spent(party.journal)
    if options.set:
        ask(party, public, options.set)
        print("this run: the party takes part, as far as its budget goes")
    return 0


def _print_spent(journal: PartyJournal | None) -> None:
    if journal is None:
        print("privacy: nothing is kept; set state-dir to keep a journal and a budget")
        return
    limit = "without a limit" if journal.max_epsilon is None else f"of {journal.max_epsilon:g}"
    print(f"privacy: epsilon {journal.epsilon():.4g} of an example is spent, {limit},")
    print(f"at delta {journal.delta:g}, in {len(journal.entries())} releases")


def _split(options: argparse.Namespace) -> int:
    split = write_split(_settings(options), options.folder, options.formats.split(","))
    for path in (*split.parties, split.public, split.test):
        print(str(path))
    for key, value in split.labels.items():
        print(f'{key} = "{value}"')
    return 0


def _demo(options: argparse.Namespace) -> int:
    # A TERM ends like Ctrl-C, so that the processes are stopped as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = _settings(options)
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    work = options.work or Path(Settings().output_dir) / f"deploy-{stamp}"
    prepared = prepare(
        settings, work, formats=options.formats.split(","), max_epsilon=options.max_epsilon
    )
    print(f"Starting a SuperLink and {settings.num_parties} SuperNodes.", flush=True)
    print(f"folder: {prepared.folder}", flush=True)
    with Deployment(prepared) as deployment:
        print("All parties are online.", flush=True)
        report = deployment.run(settings, show_log=True)
    metric = report["metric"]
    tested = shown(metric, report.get(metric))
    print(f"{report['strategy']}, seed {report['seed']}: {tested}")
    for party in report["parties"]:
        print(f"party {party['partition-id']}: {party['learner']}")
    for node, reason in report["rejected"].items():
        print(f"excluded: node {node}: {reason}")
    for node, reason in report["undelivered"].items():
        print(f"without the model: node {node}: {reason}")
    print(f"result: {report['folder']}")
    return 0
