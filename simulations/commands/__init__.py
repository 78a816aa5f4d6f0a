"""The command line ``fl-strategies``, whose subcommands are loaded when they are asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

PROGRAM: Final = "fl-strategies"
STOPPED: Final = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""
COMMANDS: Final = MappingProxyType(
    {
        "run": ("run", "run one federation in this process, without Ray"),
        "flower": ("run", "run one federation with `flwr run` on Flower's simulation engine"),
        "repeat": (
            "run",
            "run a federation once per seed; show means beside the published result",
        ),
        "compare": ("experiments", "run all strategies that fit the data; say which to take"),
        "curve": ("experiments", "accuracy against epsilon for all private strategies"),
        "describe": (
            "describe",
            "statistics of a table whose rows are dealt to parties, before any model",
        ),
        "report": ("run", "make the page of a run again, or one that compares several runs"),
        "config": (
            "run",
            "show all settings with their defaults, or write them into pyproject.toml",
        ),
        "schema": (
            "schema",
            "write what columns may hold, by a public file or a data dictionary",
        ),
        "deploy": (
            "deploy",
            "federations with TLS, node authentication and a file for each party",
        ),
        "plan": ("", "what every private strategy can do for an epsilon, before any training"),
        "privacy": ("", "what releases of private knowledge cost, and audits of the noise"),
    }
)
"""Per command: the module of this package that adds its options, and its summary."""
MOVED: Final = ("table", "tables", "figure")
"""Commands of `reproduction`, which no wheel contains; their old names go in a release."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; only what it needs is imported."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    chosen = given[0] if given else ""
    if chosen in ("plan", "privacy"):
        from fl_strategies.privacy.__main__ import main as answer

        return answer(given[1:] if chosen == "privacy" else given, f"{PROGRAM} privacy")
    if chosen in MOVED:
        return _reproduce(given)
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


def _reproduce(given: Sequence[str]) -> int:
    command = f"python -m reproduction {given[0]}"
    if not (Path(__file__).parents[2] / "reproduction").is_dir():
        sys.stderr.write(
            f"error: {PROGRAM}: {given[0]} must be run from a checkout of the repository, "
            f"as {command}, got an installed package.\n"
        )
        return 1
    sys.stderr.write(f"warning: this command is now {command}.\n")
    return int(importlib.import_module("reproduction.__main__").main(given))


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return a parser of all commands, with the options of the chosen one."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Federations of different models that learn by knowledge transfer.",
        epilog="All settings, with their defaults: fl-strategies run --help. Commands other "
        'than plan and privacy need pip install "fl-strategies[simulation]".',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            getattr(importlib.import_module(f"{__name__}.{module}"), f"add_{name}")(command)
    return parser
