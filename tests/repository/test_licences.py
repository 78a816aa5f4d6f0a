"""Whoever installs this package can read whose code comes along."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flwr
import pytest
from packaging.requirements import Requirement

import fl_strategies
from clients.app import client_app
from fl_strategies._compat import TESTED_FLOWER
from simulations.runtime.local import run_local
from tests.licences import direct_dependencies, is_installed, licence_of, listed_licences
from tests.toys import load_toy_party, toy_fedkt


def test_every_direct_dependency_is_listed_with_its_licence() -> None:
    packages, listed = direct_dependencies(), listed_licences()
    installed = [package for package in packages if is_installed(package)]

    assert {"flwr", "numpy", "scipy", "torch"} <= set(installed)
    assert set(listed) == set(packages)
    assert all(listed.values())
    for package in installed:
        assert listed[package] == licence_of(package), package


ROOT = Path(fl_strategies.__file__).parent.parent


def run_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-m", "simulations", "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_foreign_clients_package_is_named_with_what_to_do(tmp_path: Path) -> None:
    """Python finds the package in the current folder first, and `python -P` does not."""
    foreign = tmp_path / "clients"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("")

    done = run_in(tmp_path)

    assert done.returncode == 1
    sentence = f"the package 'clients' must be its own, got {foreign}, which Python finds first"
    assert sentence in done.stderr
    assert "`python -P`" in done.stderr
    assert run_in(tmp_path, "-P").returncode == 0


def test_a_folder_of_that_name_without_code_does_no_harm(tmp_path: Path) -> None:
    """Folders that are no packages come last."""
    (tmp_path / "clients").mkdir()

    assert run_in(tmp_path).returncode == 0


OLDEST, NEWEST = TESTED_FLOWER[0], TESTED_FLOWER[-1]
APPS = sorted((ROOT / "apps").glob("*/pyproject.toml"))
EXAMPLES = sorted((ROOT / "examples").rglob("pyproject.toml"))


def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def minor(version: str) -> str:
    """Return a version without its last part."""
    return ".".join(version.split(".")[:2])


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "is tested with flwr" in line]


@pytest.mark.parametrize("version", ["1.43.0", "1.50.1.dev20270101", "2.0.0"])
def test_a_run_on_an_untested_flower_warns_once(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the releases that are tested, and the run ends well."""
    app = client_app(load_toy_party)
    monkeypatch.setattr(flwr, "__version__", version)

    for _ in range(2):
        run_local(toy_fedkt(), app, 4)

    sentence = (
        f"fl-strategies is tested with flwr 1.41 and 1.42, got {version}, in which names it "
        "needs may have moved. If something fails, install one of these."
    )
    assert complaints(caplog) == [sentence]


def test_a_party_on_an_untested_flower_warns_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have another release than the server; its own log says so, once."""
    monkeypatch.setattr(flwr, "__version__", "1.44.0")

    for _ in range(2):
        client_app(load_toy_party)

    (line,) = complaints(caplog)
    assert "got 1.44.0" in line


@pytest.mark.parametrize("version", ["1.41.0", "1.42.0", "1.42.7", flwr.__version__])
def test_a_tested_flower_is_no_news(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Patch releases of a tested minor release count as tested."""
    monkeypatch.setattr(flwr, "__version__", version)

    run_local(toy_fedkt(), client_app(load_toy_party), 4)

    assert not complaints(caplog)


def requirements() -> Iterator[tuple[str, Requirement]]:
    """Yield every requirement of Flower in the repository, with the file that has it."""
    for path in (ROOT / "pyproject.toml", *APPS, *EXAMPLES):
        project = read(path)["project"]
        extras = project.get("optional-dependencies", {}).values()
        for text in (*project["dependencies"], *(text for extra in extras for text in extra)):
            if (requirement := Requirement(text)).name == "flwr":
                yield str(path.relative_to(ROOT)), requirement


def test_everything_allows_flower_from_the_oldest_tested_to_the_next_major_release() -> None:
    """The package, its extra, the apps and the examples."""
    found = dict.fromkeys(name for name, _ in requirements())

    assert len(found) == 1 + len(APPS) + len(EXAMPLES)
    for name, requirement in requirements():
        assert set(map(str, requirement.specifier)) == {f">={OLDEST}", "<2"}, name
        assert all(f"{version}.0" in requirement.specifier for version in TESTED_FLOWER)


@pytest.mark.parametrize("path", APPS, ids=lambda path: path.parent.name)
def test_apps_aim_at_the_newest_tested_flower(path: Path) -> None:
    """It is what Flower's hub shows."""
    target = read(path)["tool"]["flwr"]["app"]["flwr-version-target"]

    assert minor(target) == NEWEST


def test_both_ends_are_tested() -> None:
    """`make test` has the oldest release and `make test-flower` the newest."""
    pinned = re.search(r"^flwr==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    other = re.search(r"^NEWEST_FLOWER := (\S+)$", (ROOT / "Makefile").read_text(), re.M)

    assert pinned is not None
    assert other is not None
    assert (minor(pinned[1]), minor(other[1])) == (OLDEST, NEWEST)
    assert minor(flwr.__version__) in TESTED_FLOWER
