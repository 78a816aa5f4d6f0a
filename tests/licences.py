"""The licences of what this package needs, from the packages' own metadata.

``python -m tests.licences`` writes docs/licences.md.
"""

import re
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "licences.md"
SAME_PROJECT = {"xgboost": "xgboost-cpu"}
"""Packages of which `make install` takes another build."""
HEAD = """\
# Licences of dependencies

What `pip install fl-strategies` brings along, and what each extra adds, with the licence that
the package itself states. What these need in turn is not listed. `make licences` writes this
page, and `make audit` looks up known vulnerabilities of everything that is installed.

| package | needed by | licence |
| --- | --- | --- |
"""


def direct_dependencies() -> dict[str, list[str]]:
    """Return per package the parts of this one that name it: the core, or extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts = {"core": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {}
    for part, requirements in parts.items():
        for requirement in requirements:
            name = re.match(r"[\w.-]+", requirement)
            if name and name[0] != project["name"]:
                found.setdefault(name[0], []).append(part)
    return dict(sorted(found.items()))


def is_installed(package: str) -> bool:
    """Tell whether the package itself can be asked; not all extras are in every environment."""
    try:
        metadata.metadata(SAME_PROJECT.get(package, package))
    except metadata.PackageNotFoundError:
        return False
    return True


def listed_licences() -> dict[str, str]:
    """Return per package the licence that the page states now."""
    rows = [line.split("|") for line in PAGE.read_text("utf-8").splitlines() if "|" in line]
    return {cells[1].strip(): cells[3].strip() for cells in rows[2:]}


def licence_of(package: str) -> str:
    """Return the licence in the package's words: an expression, a class, or its first line."""
    about = metadata.metadata(SAME_PROJECT.get(package, package))
    classes = [line for line in about.get_all("Classifier", []) if line.startswith("License")]
    named = [line.rpartition(" :: ")[2] for line in classes if line.count("::") > 1]
    stated = about.get("License", "UNKNOWN")  # as old tools write for none
    text = stated if stated != "UNKNOWN" else _licence_file(package)
    return about.get("License-Expression") or ", ".join(named) or _first_line(text)


def _licence_file(package: str) -> str:
    files = metadata.files(SAME_PROJECT.get(package, package)) or []
    return next((file.read_text() for file in files if file.name.startswith("LICENSE")), "")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def page() -> str:
    """Return the whole document; a package that is not installed keeps its line."""
    listed = listed_licences()
    rows = [
        f"| {package} | {', '.join(parts)} | "
        f"{licence_of(package) if is_installed(package) else listed[package]} |"
        for package, parts in direct_dependencies().items()
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
