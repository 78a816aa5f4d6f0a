"""The containers are not built here, but what they are told is what the programs understand."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from simulations.deploy.federation import write_app
from simulations.runtime.flower import flower_environment
from tests.examples.flower_apps import ROOT, flat, read_project

FOLDER = ROOT / "examples" / "hospital"


def services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    return found


def test_each_hospital_is_a_service_with_folders_of_its_own() -> None:
    """No hospital sees the files of another, or writes where it reads its settings."""
    hospitals = {name: one for name, one in services().items() if name != "superlink"}

    assert hospitals.keys() == {folder.parent.name for folder in FOLDER.glob("*/node.toml")}
    for name, hospital in hospitals.items():
        assert hospital["volumes"] == [f"./{name}:/hospital:ro", f"./{name}-state:/state"]
        assert hospital["read_only"]
        assert hospital["build"]["target"] == "supernode"


def test_every_hospital_has_a_number_and_a_budget() -> None:
    """Numbers differ, and nothing leaves without noise of the hospital's own."""
    nodes = [tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("*/node.toml"))]

    assert [node["partition-id"] for node in nodes] == [0, 1]
    assert all(node["max-epsilon"] > 0 and "allow-unprotected" not in node for node in nodes)


def test_what_is_copied_into_the_image_is_there() -> None:
    """And is let through by the list of what the builder may see."""
    text = (FOLDER / "Dockerfile").read_text()
    seen = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source
        for line in re.findall(r"^COPY (.*)$", text, re.M)
        for source in line.split()[:-1]
    ]

    assert len(copied) >= 7
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in seen


def test_the_image_installs_extras_that_exist() -> None:
    """The targets of compose are stages of the Dockerfile."""
    text = (FOLDER / "Dockerfile").read_text()
    (extras,) = re.findall(r'"\.\[(.*)\]"', text)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.M))

    assert {*extras.split(",")} <= read_project(ROOT)["project"]["optional-dependencies"].keys()
    assert {service["build"]["target"] for service in services().values()} < stages


def test_the_run_of_the_page_has_known_settings(tmp_path: Path) -> None:
    """A key that the app does not know would be an error of `flwr run`."""
    (told,) = re.findall(r"--run-config '(.*)'", (FOLDER / "README.md").read_text())
    known = flat(read_project(write_app(tmp_path))["tool"]["flwr"]["app"]["config"])

    given = flat(tomllib.loads("\n".join(told.split())))
    assert given["num-parties"] == 2
    assert given.keys() <= known.keys()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["superlink", "supernode"])
def test_flower_knows_every_option(program: str, tmp_path: Path) -> None:
    """Options of the commands are in the help of Flower's programs."""
    shown = subprocess.run(
        [f"flower-{program}", "--help"],
        env=flower_environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    name = "superlink" if program == "superlink" else "hospital-0"

    for option in services()[name]["command"]:
        assert option.partition("=")[0] in shown
