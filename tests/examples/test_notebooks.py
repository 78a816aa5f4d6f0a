"""The notebooks as they are stored; `make notebooks` runs them."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import NOTEBOOKS

MOST_BYTES = 250_000
PLACES = re.compile(r"/(?:home|root|tmp|Users|usr|opt|var|work|mnt)/|\b[A-Z]:\\|\x1b\[")
LINK = re.compile(r"\]\(([^)#\s]+)\)")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the cells of a notebook that are code, or text."""
    content = json.loads(path.read_text("utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in cells(path, "code") for output in cell["outputs"]]


def texts(content: Any) -> Iterator[str]:
    """Yield every text in what JSON can hold."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | dict):
        for part in content.values() if isinstance(content, dict) else content:
            yield from texts(part)


def test_it_is_a_notebook(path: Path) -> None:
    """Of the fourth format, by the format's own rules, and small enough to be looked at."""
    nbformat = pytest.importorskip("nbformat", reason="`make notebooks` installs it.")

    nbformat.validate(nbformat.read(path, as_version=nbformat.NO_CONVERT))

    assert json.loads(path.read_text("utf-8"))["nbformat"] == 4


def test_its_code_can_be_read_and_ran_in_order(path: Path) -> None:
    """Plain Python without commands of Jupyter, from the first cell to the last."""
    code = cells(path, "code")

    for cell in code:
        ast.parse("".join(cell["source"]))
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))


def test_it_shows_what_came_out_and_nothing_that_went_wrong(path: Path) -> None:
    """Pictures and text, no error, and nothing that was written to the standard error."""
    found = outputs(path)
    kinds = {kind for output in found for kind in output.get("data", {})}

    assert {"image/png", "text/plain"} <= kinds
    assert any(output.get("name") == "stdout" for output in found)
    assert not [one for one in found if one["output_type"] == "error"]
    assert not [one for one in found if one.get("name") == "stderr"]
    assert path.stat().st_size <= MOST_BYTES


def test_it_says_nothing_of_the_machine(path: Path) -> None:
    """No folder of whoever ran it and no colours of a terminal, in code, text or outputs."""
    content = json.loads(path.read_text("utf-8"))
    for cell in content["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)

    assert not PLACES.findall("\n".join(texts(content)))


def test_its_links_lead_to_files(path: Path) -> None:
    """From the folder of the notebook, as on GitHub."""
    text = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    local = [path.parent / link for link in LINK.findall(text) if "://" not in link]

    assert local
    assert not [target for target in local if not target.exists()]
