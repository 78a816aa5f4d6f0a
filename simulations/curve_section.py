"""Sections of documentation, one for each set of curves, that the command keeps up to date."""

import os
from pathlib import Path
from typing import Final

from fl_strategies._util.files import SHARED, replace_file
from fl_strategies.errors import require
from simulations.curve import OWNER
from simulations.curve_table import CurveSummary, markdown

INTRODUCTION: Final = """\
# Accuracy against epsilon

What every private strategy reaches at a budget, beside strategies without privacy and the
answer that is always the larger class. Each section is written by the command in it, with
`--markdown`.
"""


def write_section(summary: CurveSummary, picture: Path, target: Path) -> None:
    """Put the section into a file: in the place of an older one of the same title, or last.

    What people write outside the marks stays.
    """
    begin, end = _marks(summary)
    text = target.read_text(encoding="utf-8") if target.exists() else INTRODUCTION
    section = "\n\n".join([begin, make_section(summary, picture, target), end])
    if begin in text:
        before, _, rest = text.partition(begin)
        require(end in rest, OWNER, "markdown", f"a file with {end}", str(target))
        text = before + section + rest.partition(end)[2]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, text.encode(), SHARED)


def make_section(summary: CurveSummary, picture: Path, target: Path) -> str:
    """Return heading, picture, table and the command that made them."""
    place = Path(os.path.relpath(picture, target.parent)).as_posix()
    return "\n".join(
        [
            f"## {summary.title}",
            "",
            f"![{summary.title}: {summary.figure} against epsilon]({place})",
            "",
            markdown(summary),
            "",
            "```sh",
            summary.command,
            "```",
        ]
    )


def _marks(summary: CurveSummary) -> tuple[str, str]:
    return f"<!-- {OWNER}: {summary.title} -->", f"<!-- end of {OWNER}: {summary.title} -->"
