"""Where people look at their runs: TensorBoard, MLflow, and Weights & Biases.

A tracker is a function for `on_round` of a strategy, and writes what it is given and nothing
else. Its library is imported when it is made. Unless a tracker is told another machine, all of
it stays on this one; what libraries report to their makers is off unless the environment says
otherwise. Use a tracker in a ``with`` block, or `close` it after the run.
"""

import math
import os
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any, Final, Self

from fl_strategies._util.extras import import_library
from fl_strategies.wire.keys import UNBOUNDED

__all__ = ["MLflowTracker", "TensorBoardTracker", "Tracker", "WandbTracker"]

PROJECT: Final = "fl-strategies"


class Tracker(ABC):
    """Base of all trackers; one of your own says how to `write` and how to `close`."""

    def __call__(self, number: int, metrics: Mapping[str, float]) -> None:
        """Write the figures of a round."""
        self.write(number, writable(metrics))

    @abstractmethod
    def write(self, number: int, figures: Mapping[str, float]) -> None:
        """Write finite figures whose names have letters, digits, ``_``, ``-`` and ``/``."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """End the run; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


def writable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return figures that every tracker takes: an infinite one becomes a flag.

    Names may come from parties, and some trackers refuse a whole round for one odd name.

    Examples
    --------
    >>> writable({"train/epsilon-example": math.inf, "seconds": 2, "evaluate/../x": 1})
    {'train/epsilon-example-unbounded': 1.0, 'seconds': 2.0, 'evaluate/__/x': 1.0}
    """
    told = {}
    for name, value in metrics.items():
        plain = "/".join(re.sub(r"[^\w-]", "_", part) or "_" for part in name.split("/"))
        if math.isinf(value):
            told[f"{plain}{UNBOUNDED}"] = 1.0
        elif not math.isnan(value):
            told[plain] = float(value)
    return told


class TensorBoardTracker(Tracker):
    """Writes event files for ``tensorboard --logdir``; needs the extra ``tensorboard``.

    Parameters
    ----------
    folder : str or Path
        Of this run; TensorBoard shows the folders beside it as other runs.
    """

    def __init__(self, folder: str | Path) -> None:
        owner, extra = type(self).__name__, "tensorboard"
        files = import_library(owner, "tensorboard.summary.writer.event_file_writer", extra)
        self._event = import_library(owner, "tensorboard.compat.proto.event_pb2", extra).Event
        self._summary = import_library(owner, "tensorboard.compat.proto.summary_pb2", extra)
        self._file = files.EventFileWriter(str(folder))

    def write(self, number: int, figures: Mapping[str, float]) -> None:
        """Write one event that holds all figures."""
        values = [
            self._summary.Summary.Value(tag=name, simple_value=figure)
            for name, figure in figures.items()
        ]
        summary = self._summary.Summary(value=values)
        self._file.add_event(self._event(wall_time=time(), step=number, summary=summary))
        self._file.flush()

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - it has no such word
        """Close the file."""
        self._file.close()


class MLflowTracker(Tracker):
    """Writes a run of MLflow, beside any that is active; needs the extra ``mlflow``.

    Parameters
    ----------
    uri : str, optional
        Of the tracking server or store; MLflow's own choice by default.
    experiment : str
        Is made if it is not there.
    config : mapping, optional
        Settings, which become the run's parameters.
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        experiment: str = PROJECT,
        config: Mapping[str, object] | None = None,
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        library = import_library(type(self).__name__, "mlflow", "mlflow")
        self._entities = library.entities
        self._client = library.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        self.run_id: str = self._client.create_run(number).info.run_id
        params = [self._entities.Param(key, str(v)) for key, v in (config or {}).items()]
        self._client.log_batch(self.run_id, params=params)
        # A script that forgets to close would leave a run that seems to go on for ever.
        self._end = weakref.finalize(self, self._client.set_terminated, self.run_id)

    def write(self, number: int, figures: Mapping[str, float]) -> None:
        """Write all figures in one request."""
        now = int(1000 * time())
        metrics = [self._entities.Metric(n, f, now, number) for n, f in figures.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, *, failed: bool = False) -> None:
        """Say how the run ended."""
        if self._end.detach():
            status = "FAILED" if failed else "FINISHED"
            self._client.set_terminated(self.run_id, status)


class WandbTracker(Tracker):
    """Writes a run of Weights & Biases; needs the extra ``wandb``.

    Parameters
    ----------
    project : str
    config : mapping, optional
        Settings to show beside the run.
    mode : "offline" or "online"
        Offline, `wandb sync` uploads the run when that is wanted.
    settings : mapping, optional
        Of `wandb.Settings`. By default neither code nor what the server prints is kept, which
        may name parties.
    **more
        Whatever else `wandb.init` takes, such as `dir`, `name` or `entity`.
    """

    def __init__(
        self,
        project: str = PROJECT,
        *,
        config: Mapping[str, object] | None = None,
        mode: str = "offline",
        settings: Mapping[str, object] | None = None,
        **more: Any,
    ) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        library = import_library(type(self).__name__, "wandb", "wandb")
        quiet = {"console": "off", "disable_code": True, "disable_git": True}
        told = {"project": project, "config": dict(config or {}), "mode": mode, **more}
        self.run = library.init(**told, settings=quiet | dict(settings or {}))
        self._open = True

    def write(self, number: int, figures: Mapping[str, float]) -> None:
        """Log all figures as one step."""
        self.run.log(dict(figures), step=number)

    def close(self, *, failed: bool = False) -> None:
        """Finish the run."""
        if self._open:
            self._open = False
            self.run.finish(exit_code=int(failed))
