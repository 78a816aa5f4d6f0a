"""One seed, three ways to run: in this process, on Ray, and deployed with TLS and keys."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from clients import load_model
from fl_strategies import REGISTRY
from simulations.config import Settings, Value, describe
from simulations.deploy.federation import Deployment, make_node_key, prepare, write_app
from simulations.runtime.flower import SuperLink, flower_environment, free_port
from simulations.runtime.local import InMemoryGrid
from tests.flower import bits_app

pytestmark = pytest.mark.flower

NUM_PARTIES = 3
PATIENCE = 900.0
SETTINGS: dict[str, Value] = {
    "num-parties": NUM_PARTIES,
    "train-rows": 300,
    "public-rows": 60,
    "test-rows": 60,
    "num-trees": 5,
    "boosting-rounds": 3,
    "epochs": 2,
    "learner": "random-forest,xgboost,mlp",
    "final-learner": "mlp",
    "seed": 4,
    "max-wait": 240.0,
    "fedkt.num-teachers": 2,
    "fedmd.epochs-initial": 2,
    "fedhistogram.num-records": 300,
    "fedregression.num-records": 300,
    "fedmoments.num-records": 300,
}
NETWORKS: dict[str, Value] = {"learner": "mlp"}
"""Models that travel and can learn from scores, as most strategies need them."""
QUICK = ("fedkd", "fedmd")
ONE_ROUND = ("fedkt", "fedkd", "fedhistogram", "fedregression", "fedmoments", "pfnm")


def settings_of(strategy: str, output: Path) -> Settings:
    rounds = 1 if strategy in ONE_ROUND else 2
    change: dict[str, Value] = {} if strategy in QUICK else NETWORKS
    given = {"strategy": strategy, "num-server-rounds": rounds, "output-dir": str(output)}
    return Settings.from_run_config({**SETTINGS, **change, **given})


# Three ways to run


def in_process(settings: Settings) -> Path:
    """Run in this process; return the folder of the models."""
    config = settings.to_run_config()
    grid = InMemoryGrid(bits_app.client, NUM_PARTIES, run_config=config)
    with closing(grid):
        bits_app.run(grid, settings)
    return Path(settings.output_dir)


@pytest.fixture(scope="module")
def engine() -> Iterator[SuperLink]:
    """Flower's simulation engine on Ray."""
    with SuperLink(simulation=True) as superlink:
        yield superlink


@pytest.fixture(scope="module")
def bits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the app that writes down models."""
    folder = write_app(tmp_path_factory.mktemp("bits"))
    file = folder / "pyproject.toml"
    config = {key: default for key, default, _ in describe()}
    text = re.sub(r'(?m)^serverapp = ".*"$', 'serverapp = "bits_app:server"', file.read_text())
    text = re.sub(r'(?m)^clientapp = ".*"$', 'clientapp = "bits_app:client"', text)
    head, _, _ = text.partition("[tool.flwr.app.config]\n")
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    file.write_text(head + "[tool.flwr.app.config]\n" + "\n".join(lines) + "\n")
    shutil.copy(bits_app.__file__, folder / "bits_app.py")
    return folder


def on_ray(engine: SuperLink, app: Path, settings: Settings) -> Path:
    """Run on the simulation engine; return the folder of the models."""
    status = engine.run_app(
        settings.to_run_config(), num_supernodes=NUM_PARTIES, timeout=PATIENCE, app=app
    )
    assert status.completed, status
    return Path(settings.output_dir)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three parties with other file formats and other models each."""
    folder = tmp_path_factory.mktemp("mixed") / "federation"
    with Deployment(prepare(Settings.from_run_config(SETTINGS), folder)) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three parties with the same kind of network."""
    folder = tmp_path_factory.mktemp("networks") / "federation"
    settings = Settings.from_run_config({**SETTINGS, **NETWORKS})
    with Deployment(prepare(settings, folder)) as deployment:
        yield deployment


def deployed(deployment: Deployment, settings: Settings) -> Path:
    """Run on the SuperNodes; return the folder of the models."""
    report = deployment.run(settings, timeout=PATIENCE)
    assert report["rejected"] == {}
    assert len(report["rounds"]) == settings.num_rounds
    folder = Path(report["folder"])
    if "missing" not in report["model"]:
        bits_app.write_final(load_model(folder / "model"), folder / "model.npz")
    for number, member in enumerate(deployment.prepared.members):
        kept = member.state / f"model-{report['run-id']}.npz"
        if kept.exists():
            shutil.copy(kept, folder / f"party-{number}.npz")
        journal = (member.state / "private-data.example.jsonl").read_text()
        assert str(report["run-id"]) in journal.split('"')
    return folder


# The comparison


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=[] if name == QUICK[0] else [pytest.mark.deployment])
        for name in sorted(REGISTRY)
    ],
)
def test_three_ways_to_run_end_in_the_same_bits(
    strategy: str,
    tmp_path: Path,
    engine: SuperLink,
    bits_folder: Path,
    request: pytest.FixtureRequest,
) -> None:
    """The server's model and every party's are equal to the last bit, for any strategy."""
    deployment = request.getfixturevalue("mixed" if strategy in QUICK else "networks")
    folders = {name: tmp_path / name for name in ("process", "ray", "deployment")}
    for folder in folders.values():
        folder.mkdir()

    expected = in_process(settings_of(strategy, folders["process"]))
    others = [
        on_ray(engine, bits_folder, settings_of(strategy, folders["ray"])),
        deployed(deployment, settings_of(strategy, folders["deployment"])),
    ]

    names = {path.name for path in expected.glob("*.npz")}
    own = {f"party-{number}.npz" for number in range(NUM_PARTIES)}
    assert own <= names or strategy == "fens"  # gives all the same committee
    assert "model.npz" in names or not REGISTRY[strategy].strategy.central
    for folder in others:
        assert {path.name for path in folder.glob("*.npz")} == names
        for name in names:
            assert bits(folder / name) == bits(expected / name), (folder, name)


def test_a_stranger_is_turned_away(mixed: Deployment, tmp_path: Path) -> None:
    """A SuperNode whose key nobody has registered ends with an error."""
    make_node_key(tmp_path / "stranger-key")
    command = ["flower-supernode", "--superlink", mixed.address, "--port", str(free_port())]
    command += ["--root-certificates", str(mixed.prepared.certificates.authority)]
    command += ["--auth-supernode-private-key", str(tmp_path / "stranger-key")]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            command,
            env=flower_environment(tmp_path / "home"),
            timeout=PATIENCE,
            check=False,
            cwd="/",
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    assert done.returncode != 0
    assert mixed.control.num_online() == NUM_PARTIES


def bits(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return all that tells one written model from another."""
    with np.load(path, allow_pickle=False) as arrays:
        return {
            name: (array.dtype.str, array.shape, array.tobytes())
            for name, array in arrays.items()
        }
