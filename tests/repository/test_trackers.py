"""Trackers with the libraries themselves, on this machine and without network."""

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.app import client_app
from fl_strategies import FedMD, MLflowTracker, TensorBoardTracker, WandbTracker
from fl_strategies.errors import InvalidParameter
from simulations.__main__ import main
from simulations.config import Settings
from simulations.runtime.local import run_local
from simulations.runtime.tracking import Tracking
from tests.kept import build
from tests.toys import load_toy_party

pytestmark = [
    pytest.mark.trackers,
    # MLflow uses what the newest SQLAlchemy will drop; W&B closes its files late.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
APP = client_app(load_toy_party)
FAST = [
    "--set=num-parties=3",
    "--set=num-trees=5",
    "--set=num-workers=1",
    "--learner=random-forest,logistic-regression",
    "--set=central=false",
    "--quiet",
]
Figures = dict[str, dict[int, float]]


def federation(tracker: Any) -> Figures:
    """Run three rounds; return all figures, as callbacks have them, by name and round."""
    told: Figures = {}

    def keep(number: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            told.setdefault(name, {})[number] = value

    strategy = build("fedmd", on_round=[tracker, keep])
    assert isinstance(strategy, FedMD)
    run_local(strategy, APP, 3, num_rounds=3)
    assert told["train/epsilon-example"][3] == math.inf
    return told


def require_same(read: Figures, told: Figures) -> None:
    """Every finite figure is there, in every round, and infinite ones are flags."""
    expected = {
        name if math.isfinite(values[1]) else f"{name}-unbounded": {
            number: value if math.isfinite(value) else 1.0 for number, value in values.items()
        }
        for name, values in told.items()
    }
    assert read.keys() == expected.keys()
    for name, values in expected.items():
        assert read[name] == pytest.approx(values, rel=1e-6), name


def tensorboard_figures(folder: Path) -> Figures:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def mlflow_run(uri: str, run_id: str) -> tuple[Any, Figures]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(run_id)
    histories = {name: client.get_metric_history(run_id, name) for name in run.data.metrics}
    return run, {name: {m.step: m.value for m in kept} for name, kept in histories.items()}


BLOCK, HEAD_OF_FILE, HEAD_OF_PIECE = 32_768, 7, 7


def wandb_records(file: Path) -> Iterator[bytes]:
    """Give the records of W&B's file, which is LevelDB's log behind seven bytes.

    A piece has a checksum, a length and a kind: whole, first, middle or last.
    """
    data, place, record = file.read_bytes(), HEAD_OF_FILE, b""
    assert data.startswith(b":W&B")
    while place + HEAD_OF_PIECE <= len(data):
        if BLOCK - place % BLOCK < HEAD_OF_PIECE:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += HEAD_OF_PIECE
        record += data[place : place + length]
        place += length
        if kind in (1, 4):
            yield record
            record = b""


def wandb_figures(folder: Path) -> Figures:
    """Read the file that `wandb sync` would upload."""
    from wandb.proto import wandb_internal_pb2

    found: Figures = {}
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for data in wandb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = record.history.item
        values = {item.key or "/".join(item.nested_key): item.value_json for item in items}
        for name, value in values.items():
            if not name.startswith("_"):
                found.setdefault(name, {})[int(values["_step"])] = json.loads(value)
    return found


def test_tensorboard_has_every_figure_of_every_round(tmp_path: Path) -> None:
    """Also before the tracker is closed."""
    tracker = TensorBoardTracker(tmp_path)
    told = federation(tracker)

    require_same(tensorboard_figures(tmp_path), told)
    tracker.close()
    tracker.close()


def test_mlflow_has_every_figure_of_every_round(tmp_path: Path) -> None:
    """In a database on disk, with settings as parameters, beside no other run."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with MLflowTracker(uri, experiment="hospitals", config={"seed": 7}) as tracker:
        told = federation(tracker)
    tracker.close(failed=True)

    run, read = mlflow_run(uri, tracker.run_id)
    require_same(read, told)
    assert run.data.params == {"seed": "7"}
    assert run.info.status == "FINISHED"
    with pytest.raises(RuntimeError), MLflowTracker(uri, experiment="hospitals") as second:
        raise RuntimeError("in the middle of a round")
    failed, _ = mlflow_run(uri, second.run_id)
    assert failed.info.status == "FAILED"
    assert failed.info.experiment_id == run.info.experiment_id


def test_mlflow_ends_a_run_that_nobody_closes(tmp_path: Path) -> None:
    """A script that has ended leaves no run that seems to go on, and tells nobody of itself."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    code = (
        "import os\n"
        "from fl_strategies import MLflowTracker\n"
        f"tracker = MLflowTracker({uri!r})\n"
        "tracker(1, {'seconds': 1.0})\n"
        "print(tracker.run_id, os.environ['MLFLOW_DISABLE_TELEMETRY'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    run_id, silent = done.stdout.split()

    run, read = mlflow_run(uri, run_id)
    assert run.info.status == "FINISHED"
    assert read == {"seconds": {1: 1.0}}
    assert silent == "true"


def test_wandb_has_every_figure_of_every_round(tmp_path: Path) -> None:
    """In an offline run, which holds nothing that the server printed."""
    import wandb

    with WandbTracker(config={"seed": 7}, dir=str(tmp_path)) as tracker:
        print("party 3 has no blood pressure")  # noqa: T201 - what must not be kept
        told = federation(tracker)
    tracker.close()
    wandb.teardown()  # its own process writes the file

    require_same(wandb_figures(tmp_path), told)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"evaluate/accuracy" in kept
    assert b"blood pressure" not in kept
    assert tracker.run.settings.mode == "offline"


def test_the_command_line_tracks_a_run(tmp_path: Path) -> None:
    """All three beside the run's folder, with the result at the end, and nothing said."""
    trackers = [f"--track={name}" for name in ("tensorboard", "mlflow", "wandb")]
    run = ["run", *FAST, f"--set=output-dir={tmp_path}", *trackers]

    done = subprocess.run(
        [sys.executable, "-m", "simulations", *run],
        env={name: value for name, value in os.environ.items() if name != "WANDB_MODE"},
        capture_output=True,
        text=True,
        check=True,
    )

    (result,) = tmp_path.glob("*/result.json")
    (events,) = (tmp_path / "tensorboard").iterdir()
    read, lines = tensorboard_figures(events), done.stdout.splitlines()
    assert done.stderr == ""
    assert f"tracked: tensorboard --logdir {tmp_path}/tensorboard" in lines
    assert f"tracked: mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db" in lines
    assert f"tracked: wandb sync {tmp_path}/wandb/offline-run-" in done.stdout
    assert read["train/num-parties"] == {1: 3.0}
    assert 0.5 < read["result/federation/accuracy"][1] <= 1
    assert wandb_figures(tmp_path).keys() == read.keys()
    assert (result.parent / "epsilon.csv").exists()


def test_a_stopped_run_is_tracked_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends MLflow's run as what it is."""
    from mlflow import MlflowClient

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulations.runtime.running.run_local", interrupted)

    assert main(["run", *FAST, f"--set=output-dir={tmp_path}", "--track=mlflow"]) == 130

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    known = client.get_experiment_by_name("fl-strategies")
    (run,) = client.search_runs([known.experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.params["strategy"] == "fedkd"


def test_a_tracker_that_is_opened_in_vain_is_closed(tmp_path: Path) -> None:
    """The second one of two has no such name."""
    settings = Settings.of(output_dir=str(tmp_path))

    with pytest.raises(InvalidParameter, match="got 'wandbs'"):
        Tracking(["tensorboard", "wandbs"], settings)

    assert len([*(tmp_path / "tensorboard").iterdir()]) == 1
