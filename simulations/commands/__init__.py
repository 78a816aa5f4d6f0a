"""The command line ``fl-strategies``, whose subcommands are loaded when they are asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

PROGRAM: Final = "fl-strategies"
STOPPED: Final = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""
COMMANDS: Final = MappingProxyType(
    {
        "run": (
            "simulations.commands.run:add_run",
            "run one federation in this process, without Ray",
        ),
        "flower": (
            "simulations.commands.run:add_flower",
            "run one federation with `flwr run` on Flower's simulation engine",
        ),
        "repeat": (
            "simulations.commands.run:add_repeat",
            "run a federation once per seed; show means beside the published figure",
        ),
        "compare": (
            "simulations.compare_command:add_compare",
            "run all strategies that fit the data; say which to take",
        ),
        "curve": (
            "simulations.curve_command:add_curve",
            "accuracy against epsilon for all private strategies",
        ),
        "report": (
            "simulations.report_command:add_report",
            "make the page of a run again, or one that compares several runs",
        ),
        "table": (
            "simulations.tables_command:add_table",
            "run a table of experiments; what is finished is not run again",
        ),
        "tables": (
            "simulations.tables_command:add_tables",
            "list all tables, with their expected minutes",
        ),
        "figure": (
            "simulations.tables_command:add_figure",
            "draw how good a table's federations are after each round",
        ),
        "config": (
            "simulations.commands.config:add_config",
            "show all settings with their defaults, or write them into pyproject.toml",
        ),
        "deploy": (
            "simulations.commands.deploy:add_deploy",
            "federations with TLS, node authentication and a file for each party",
        ),
        "plan": ("", "what every private strategy can do for an epsilon, before any training"),
        "privacy": ("", "what releases of private knowledge cost, and audits of the noise"),
    }
)
"""Per command: where its options are added to a parser, and its summary."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; only what it needs is imported."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    chosen = given[0] if given else ""
    if chosen in ("plan", "privacy"):
        from fl_strategies.privacy.__main__ import main as answer

        return answer(given[1:] if chosen == "privacy" else given, f"{PROGRAM} privacy")
    options = _parser(chosen).parse_args(given)
    from fl_strategies.errors import StrategyError

    try:
        return int(options.command(options))
    except StrategyError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped. Nothing is finished, and nothing is left running.\n")
        return STOPPED


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return a parser of all commands, with the options of the chosen one."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Federations of different models that learn by knowledge transfer.",
        epilog="All settings, with their defaults: fl-strategies run --help. Commands other "
        'than plan and privacy need pip install "fl-strategies[simulation]".',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (place, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            module, _, add = place.partition(":")
            getattr(importlib.import_module(module), add)(command)
    return parser
