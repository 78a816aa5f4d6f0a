"""The command ``fl-strategies config``: all settings as `[tool.flwr.app.config]` has them."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fl_strategies._util import SHARED, replace_file
from simulations.config import TITLES, describe

TABLE: Final = "tool.flwr.app.config"
PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"


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
    return text.partition(f"[{TABLE}]\n")[0] + config_block()


def config_block() -> str:
    """Return every setting with its default and meaning, in TOML."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield f"[{TABLE}]"
    section = ""
    for key, default, meaning in describe():
        found, _, short = key.rpartition(".")
        if found != section:
            yield from ("", f"[{TABLE}.{found}]")
            section = found
        elif key in TITLES:
            yield ""
        if key in TITLES:
            yield f"# {TITLES[key]}"
        yield f"{short} = {json.dumps(default)} # {meaning}"
