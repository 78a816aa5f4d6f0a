import logging
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]*)\)")


def test_the_python_example_runs(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The example does what its comments say, and nobody is warned of anything."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    promised = re.findall(r"# ([\d.]+)$", example, flags=re.MULTILINE)

    exec(compile(example, "README.md", "exec"), {})  # noqa: S102 - our own text

    logger.removeHandler(caplog.handler)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    accuracy, sent = capsys.readouterr().out.split()
    assert [f"{float(accuracy):.2f}", sent] == promised


def test_the_two_commands_are_make_targets() -> None:
    """What the README says to type exists."""
    makefile = (ROOT / "Makefile").read_text()

    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def on_a_package_index() -> str:
    """Return the README as the build writes it into the package's metadata."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    text = README
    for rule in build["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def test_links_work_on_a_package_index() -> None:
    """They name the same files as in the repository, pictures as pictures, code untouched."""
    shown = on_a_package_index()
    homes = {
        "!": "https://raw.githubusercontent.com/fl-strategies/fl-strategies/main/",
        "": "https://github.com/fl-strategies/fl-strategies/blob/main/",
    }
    inside = [link for link in LINK.findall(CODE.sub("", README)) if "://" not in link[1]]

    assert {mark for mark, _ in inside} == set(homes)
    absolute = [(mark, homes[mark] + target) for mark, target in inside]
    found = LINK.findall(CODE.sub("", shown))
    assert [link for link in found if "/fl-strategies/fl-strategies/" in link[1]] == absolute
    assert all(target.startswith("https://") for _, target in found)
    assert CODE.findall(shown) == CODE.findall(README)
