"""Every test that a document names exists, so a claim cannot outlive what holds it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"\btest_[a-z0-9_]+\b(?!\.py)")
DEFINED = re.compile(r"^def (test_[a-z0-9_]+)", re.MULTILINE)
FILES = re.compile(r"\btests/[a-z_/]+\.py\b")


def defined() -> set[str]:
    """Return the names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in DEFINED.findall(file.read_text("utf-8"))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_is_named_exists(document: Path) -> None:
    """By its name, and by its file."""
    text = document.read_text("utf-8")

    assert not set(NAMED.findall(text)) - defined()
    assert not {name for name in FILES.findall(text) if not (ROOT / name).exists()}


def test_the_list_of_claims_names_what_holds_them() -> None:
    """Each line of docs/claims.md has a test."""
    lines = (ROOT / "docs" / "claims.md").read_text("utf-8").splitlines()
    claims = [line for line in lines if line.startswith("|") and "---" not in line]

    assert all(NAMED.search(line) for line in claims if not line.startswith("| claim "))
