"""Flower's quickstarts before and after: both run, and the change is small."""

import difflib
from pathlib import Path

import numpy as np
import pytest

from simulations.runtime.flower import SuperLink
from tests.examples.flower_apps import ROOT, FlowerApp, load_app

NUM_NODES = 5
MOST_LINES = 10
QUICKSTARTS = {"sklearn": 0.9, "xgboost": 0.9, "pytorch": 0.9}


def folder_of(name: str, side: str) -> Path:
    return ROOT / "examples" / f"quickstart-{name}" / side


def written_lines(name: str, file: str) -> int:
    """Return how many lines of a file one has to write; deleting is free."""
    before, after = (folder_of(name, side) / file for side in ("before", "after"))
    lines = difflib.ndiff(before.read_text().splitlines(), after.read_text().splitlines())
    return sum(line.startswith("+ ") for line in lines)


def run_in(folder: Path, name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> FlowerApp:
    monkeypatch.chdir(folder)
    app = load_app(folder_of(name, side))
    app.run(NUM_NODES)
    return app


def accuracy(app: FlowerApp, name: str) -> float:
    """Return the accuracy of the saved model on rows that the server holds."""
    if name == "pytorch":
        import torch

        x, y = app.task.load_split("test")[300:]
        net = app.task.Net()
        net.load_state_dict(torch.load("final_model.pt"))
        return float((net(x).argmax(dim=1) == y).float().mean())
    x, y = app.task.load_split("test")
    if name == "xgboost":
        import xgboost

        booster = xgboost.Booster(model_file="final_model.json")
        return float(((booster.inplace_predict(x) > 0.5) == y).mean())
    with np.load("final_model.npz") as arrays:
        model = app.task.get_model().from_arrays(dict(arrays))
    return float((model.predict(x) == y).mean())


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_ten_lines_per_side_are_enough(name: str) -> None:
    """What both sides share counts for both; the table of the README shows all of it."""
    files = ("client_app.py", "server_app.py", "task.py")
    written = {file: written_lines(name, f"{name}example/{file}") for file in files}
    readme = (folder_of(name, "before").parent / "README.md").read_text()

    for side in ("client_app.py", "server_app.py"):
        assert 0 < written[side] + written["task.py"] <= MOST_LINES, side
    assert written_lines(name, "pyproject.toml") <= 2
    assert all(f"| `{file}` | {lines} | " in readme for file, lines in written.items())


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_the_federation_is_as_good_with_knowledge(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickstart after the change ends in a saved model that can be loaded and is good."""
    app = run_in(tmp_path, name, "after", monkeypatch)

    assert accuracy(app, name) > QUICKSTARTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICKSTARTS)
def test_the_quickstart_itself_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared with is a working app of Flower's own."""
    run_in(tmp_path, name, "before", monkeypatch)

    assert list(tmp_path.glob("final_model.*"))


@pytest.mark.deployment
@pytest.mark.flower
@pytest.mark.parametrize("name", QUICKSTARTS)
def test_flower_runs_the_changed_quickstart(name: str) -> None:
    """`flwr run` on Flower's simulation engine ends well."""
    with SuperLink(simulation=True) as superlink:
        status = superlink.run_app(
            {"num-server-rounds": 1},
            num_supernodes=NUM_NODES,
            app=folder_of(name, "after"),
            timeout=300,
        )

    assert status.completed, status
