"""The apps for Flower's hub: each runs, and Flower builds a bundle of it."""

import logging
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from simulations.runtime.flower import SuperLink, flower_environment
from tests.examples.flower_apps import ROOT, load_app, read_project

APPS = {"quickstart-fedkt": 0.8, "fedmd-nfdp": 0.7, "private-histogram": 0.75}


def folder_of(name: str) -> Path:
    return ROOT / "apps" / name


def build(name: str, folder: Path) -> Path:
    """Return the bundle that `flwr build` makes."""
    done = subprocess.run(
        ["flwr", "build", "--app", str(folder_of(name))],
        cwd=folder,
        env=flower_environment(folder / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (bundle,) = folder.glob("*.fab")
    return bundle


@pytest.mark.parametrize("name", APPS)
def test_the_app_runs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the number of nodes that its settings name it ends in a good model."""
    app = load_app(folder_of(name))

    with caplog.at_level(logging.INFO, logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        try:
            app.run(app.run_config["num-parties"])
        finally:
            logging.getLogger("flwr").removeHandler(caplog.handler)

    told = re.search(r"Accuracy on \d+ other rows: (0\.\d+)", caplog.text)
    assert told is not None
    assert float(told[1]) > APPS[name]


@pytest.mark.parametrize("name", APPS)
def test_the_readme_says_how_many_supernodes_there_must_be(name: str) -> None:
    """A run with too few nodes waits for the others, so the number is told, and is right."""
    number = load_app(folder_of(name)).run_config["num-parties"]
    page = (folder_of(name) / "README.md").read_text()

    assert f"**{number} SuperNodes**" in page
    assert f"num-supernodes={number} " in page
    assert page.startswith("---\ntags: [")


@pytest.mark.parametrize("name", APPS)
def test_the_app_has_the_licence_and_extras_of_this_library(name: str) -> None:
    """A bundle of format 1 carries its licence as a file; the extras exist."""
    library, app = (read_project(one)["project"] for one in (ROOT, folder_of(name)))
    _, ours = app["dependencies"]
    extras = re.fullmatch(r"fl-strategies\[(.*)\]>=(\S+)", ours)

    assert (folder_of(name) / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert app["license"] == {"file": "LICENSE"}
    assert extras is not None
    assert {*extras[1].split(",")} <= library["optional-dependencies"].keys()
    assert library["version"].startswith(extras[2])


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.parametrize("name", APPS)
def test_flower_builds_a_bundle(name: str, tmp_path: Path) -> None:
    """`flwr build` accepts format 1 and packs the code, the page and the licence."""
    with zipfile.ZipFile(build(name, tmp_path)) as bundle:
        packed = set(bundle.namelist())

    package = name.replace("-", "_")
    modules = {f"{package}/{module}.py" for module in ("server_app", "client_app", "task")}
    assert modules | {"pyproject.toml", "README.md", "LICENSE"} <= packed
    assert not any(file.startswith(("tests", ".")) for file in packed - {".info/CONTENT"})


@pytest.mark.deployment
@pytest.mark.flower
@pytest.mark.parametrize("name", APPS)
def test_flower_runs_the_app(name: str) -> None:
    """`flwr run` on Flower's simulation engine ends well."""
    number = load_app(folder_of(name)).run_config["num-parties"]

    with SuperLink(simulation=True) as superlink:
        status = superlink.run_app(
            {"num-parties": number}, num_supernodes=number, app=folder_of(name), timeout=300
        )

    assert status.completed, status
