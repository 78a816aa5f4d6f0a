"""Our packages have common names; a user's own one of the same name is told apart."""

import os
import subprocess
import sys
from pathlib import Path

import fl_strategies

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
