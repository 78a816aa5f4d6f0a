"""The package as users get it: built, installed in an empty environment, tried elsewhere."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.repository.test_readme import README, on_a_package_index

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).parents[2]
PACKAGES = ("fl_strategies", "clients", "simulations")
CORE, EXTRAS = "", "[sklearn,simulation]"  # the README's own
RUN = "run --strategy fedkd --data breast-cancer --quiet"
PLAN = "plan --target-epsilon 1 --parties 8 --records 2000 --classes 2 --public 4000"


def run(*command: str | Path, folder: Path) -> str:
    """Return what a command prints; it sees nothing of this checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    rest = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=rest, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path, *requirements: str) -> Path:
    """Return the Python of a new environment that has these packages."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    run(*pip, "--constraint", "constraints.txt", *requirements, folder=ROOT)
    return python


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive, the wheel from that, and check what an index would show."""
    folder = tmp_path_factory.mktemp("archives")
    # Of their own, because they need other versions than Flower does.
    python = environment(folder / "tools", "--group", "wheel")
    run(python, "-m", "build", "--outdir", folder / "dist", ROOT, folder=folder)
    archives = sorted((folder / "dist").iterdir())
    run(python, "-m", "twine", "check", "--strict", *archives, folder=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    (found,) = archives.glob("*.whl")
    return found


@pytest.fixture(scope="module", params=[CORE, EXTRAS], ids=["core", "extras"])
def python(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Install the wheel in an environment that had nothing."""
    folder = tmp_path_factory.mktemp("user")
    return environment(folder / "environment", f"{wheel}{request.param}")


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    """Tables and marks of typing too, and nothing besides."""
    tracked = run("git", "ls-files", *PACKAGES, folder=ROOT).split()

    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if ".dist-info/" not in name]

    assert {f"{name}/py.typed" for name in PACKAGES} < set(found)
    assert sorted(found) == sorted(tracked)


def test_an_index_shows_the_readme(wheel: Path) -> None:
    """With links that do not need the repository."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()

    assert text.endswith(on_a_package_index())


def test_the_planner_needs_no_extra(python: Path, tmp_path: Path) -> None:
    """The core alone says what an epsilon can buy."""
    told = run(python, "-m", "fl_strategies.privacy", *PLAN.split(), folder=tmp_path)

    assert "take: fedregression L2" in told


@pytest.mark.parametrize("python", [EXTRAS], indirect=True, ids=["extras"])
def test_the_readme_runs_in_an_empty_folder(python: Path, tmp_path: Path) -> None:
    """Its Python prints what its comments say."""
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "example.py").write_text(example)

    accuracy, sent = run(python, "example.py", folder=tmp_path).split()

    assert [f"{float(accuracy):.2f}", sent] == re.findall(r"# ([\d.]+)$", example, re.MULTILINE)


@pytest.mark.parametrize("python", [EXTRAS], indirect=True, ids=["extras"])
def test_a_run_leaves_a_report_and_a_model(python: Path, tmp_path: Path) -> None:
    """From an empty folder, and the model is read by another process."""
    told = run(python, "-m", "simulations", *RUN.split(), folder=tmp_path)
    (kept,) = (tmp_path / "runs").iterdir()
    load = f"from clients import load_model; print(load_model({str(kept)!r}).num_classes)"

    assert "verdict: " in told
    assert (kept / "report.html").is_file()
    assert run(python, "-c", load, folder=tmp_path) == "2\n"


@pytest.mark.parametrize("python", [EXTRAS], indirect=True, ids=["extras"])
def test_presets_and_the_app_of_a_deployment_are_found(python: Path, tmp_path: Path) -> None:
    """What is read from files or written as one does not need the repository."""
    call = "preset('paper', 'fedkt', 'adult')['num-parties']"
    load = f"from simulations.config import preset; print({call})"

    assert run(python, "-c", load, folder=tmp_path) == "50\n"
    run(python, "-m", "simulations.deploy", "app", "app", folder=tmp_path)
    assert "simulations.deploy.client_app" in (tmp_path / "app" / "pyproject.toml").read_text()
