"""The pages: their examples run, their links lead somewhere, and they build as a site."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

import clients
import fl_strategies
import fl_strategies.options
import fl_strategies.privacy
from fl_strategies.registry import REGISTRY

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
FENCED = re.compile(r"```.*?```", re.DOTALL)
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROMISED = re.compile(r"^print\(.*\)  # (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FOREIGN = re.compile(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]+>")
# Their examples need a run or a deployment, or have a test of their own.
ELSEWHERE = {"deployment", "own_data", "reliability", "report"}
WITH_EXAMPLES = [
    page
    for page in PAGES
    if page.stem not in ELSEWHERE and EXAMPLE.search(page.read_text("utf-8"))
]
MOST_WORDS = 750
LAST_LINE_BEFORE_CODE = 36


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after another, and print what stands behind them; what they register goes again."""
    example = "\n".join(EXAMPLE.findall(page.read_text("utf-8")))

    with mock.patch.dict(REGISTRY):
        exec(compile(example, page.name, "exec"), {"__name__": page.stem})  # noqa: S102 - our text

    printed = capsys.readouterr().out.splitlines()
    promised = PROMISED.findall(example)
    assert [line for line in printed if line in promised] == promised


def test_the_odds_of_an_attacker_are_what_the_example_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Row by row, in the table of docs/reading_epsilon.md."""
    page = (DOCS / "reading_epsilon.md").read_text("utf-8")

    exec(compile("\n".join(EXAMPLE.findall(page)), "reading_epsilon.md", "exec"), {})  # noqa: S102

    printed = capsys.readouterr().out
    assert printed in page
    assert printed.count("\n") == 6


def prose(document: Path) -> str:
    """Return a document without its code."""
    return FENCED.sub("", document.read_text("utf-8"))


def anchors(document: Path) -> set[str]:
    """Return what GitHub and the site call the headings of a document."""
    named = (re.sub(r"[^\w\s-]", "", heading) for heading in HEADING.findall(prose(document)))
    return {re.sub(r"\s", "-", name.strip().lower()) for name in named}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    """From the folder of the document, as on GitHub."""
    links = LINK.findall(prose(document))
    local = [(document.parent / file, part) for file, part in links if "://" not in file]

    assert not [file for file, _ in local if not file.exists()]
    assert not [(file, part) for file, part in local if part and part not in anchors(file)]


def test_all_that_is_public_is_on_its_page() -> None:
    """Each name of each `__all__` once, and nothing else."""
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)

    public = (fl_strategies, clients, fl_strategies.privacy, fl_strategies.options)
    names = [f"{module.__name__}.{name}" for module in public for name in module.__all__]
    names.remove("fl_strategies.__version__")
    # `privacy.bounds` is also a folder, which the site would show.
    shown = [name.replace("accountant.bounds", "bounds") for name in listed]
    assert sorted(shown) == sorted(names)


def test_the_readme_is_short() -> None:
    """In words beside code, and in lines before the first code."""
    readme = (ROOT / "README.md").read_text("utf-8")

    assert len(prose(ROOT / "README.md").split()) <= MOST_WORDS
    assert readme[: readme.index("```")].count("\n") <= LAST_LINE_BEFORE_CODE


@pytest.mark.slow
def test_the_site_builds_and_needs_no_other_machine(tmp_path: Path) -> None:
    """Without a warning, and without letters, scripts or pictures from elsewhere."""
    if find_spec("material") is None or find_spec("mkdocstrings") is None:
        pytest.skip("The site needs the dependency group docs: `make docs` installs it.")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]

    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert built.returncode == 0, built.stderr
    built_pages = tmp_path.rglob("*.html")
    pages = {page.relative_to(tmp_path): page.read_text("utf-8") for page in built_pages}
    assert {page.relative_to(DOCS).with_suffix(".html") for page in PAGES} <= set(pages)
    assert not FOREIGN.findall("".join(pages.values()))
    assert not [name for name, text in pages.items() if "```" in text], "fences left as text"
