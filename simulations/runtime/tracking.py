"""Trackers of a run as the command line names them: ``--track tensorboard``."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

from fl_strategies._util.naming import nearest
from fl_strategies.errors import InvalidParameter
from fl_strategies.trackers import MLflowTracker, TensorBoardTracker, Tracker, WandbTracker
from simulations.config import Settings
from simulations.results.files import require_folder
from simulations.results.report import Report

OWNER: Final = "run"
OPTION: Final = "--track"


def add_tracking(parser: argparse.ArgumentParser) -> None:
    """Add the option, which may be given several times."""
    parser.add_argument(
        OPTION,
        action="append",
        default=[],
        metavar="NAME[=PLACE]",
        help="also write each round for tensorboard, mlflow or wandb; PLACE is a folder, or "
        "MLflow's URI (default: in output-dir)",
    )


class Tracking:
    """The trackers of one run; a ``with`` block closes them.

    Parameters
    ----------
    texts : sequence of str
        Names, each with its place behind an equals sign or without.
    settings : Settings
        Of the run.
    """

    def __init__(self, texts: Sequence[str], settings: Settings) -> None:
        self.trackers: list[Tracker] = []
        self.hints: list[str] = []
        """How to look at what was written."""
        self._open = ExitStack()
        with self._open:
            for text in texts:
                name, _, place = text.partition("=")
                if name not in _OPENERS:
                    known, hint = ", ".join(_OPENERS), nearest(name, _OPENERS)
                    raise InvalidParameter(
                        f"{OWNER}: {OPTION} must be one of {known}, got {name!r}. {hint}"
                    )
                tracker, look = _OPENERS[name](place, settings)
                self.trackers.append(self._open.enter_context(tracker))
                self.hints.append(look)
            self._open = self._open.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: Any) -> None:
        self._open.__exit__(*reason)

    def fail(self) -> None:
        """Close all of them as those of a run that was stopped."""
        for tracker in self.trackers:
            tracker.close(failed=True)

    def tell_result(self, number: int, report: Report) -> None:
        """Write how good the federation and its comparisons are, after the last round."""
        figures: Mapping[str, Mapping[str, float]] = report["figures"]
        told = {
            f"result/{who}/{name}": value
            for who, found in figures.items()
            for name, value in found.items()
        }
        for tracker in self.trackers:
            tracker(number, told)


def _folder(place: str, settings: Settings) -> Path:
    """Return the folder that was named, or that of results, if it can be written."""
    folder = Path(place or settings.output_dir).resolve()
    hint = f"Name another one: {OPTION} NAME=FOLDER"
    require_folder(OWNER, f"the folder of {OPTION}", folder, hint)
    return folder


def _tensorboard(place: str, settings: Settings) -> tuple[Tracker, str]:
    """Give each run a folder of its own, as TensorBoard compares them."""
    parent = _folder(place, settings)
    parent = parent if place else parent / "tensorboard"
    run = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S-%f")
    return TensorBoardTracker(parent / run), f"tensorboard --logdir {parent}"


def _mlflow(place: str, settings: Settings) -> tuple[Tracker, str]:
    uri = place if "://" in place else f"sqlite:///{_folder(place, settings) / 'mlflow.db'}"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # a new database is told in lines
    tracker = MLflowTracker(uri, config=settings.to_report())
    return tracker, f"mlflow ui --backend-store-uri {uri}"


def _wandb(place: str, settings: Settings) -> tuple[Tracker, str]:
    """Stay offline unless the environment says otherwise, as W&B's own users do."""
    folder = _folder(place, settings)
    tracker = WandbTracker(
        config=settings.to_report(),
        mode=os.environ.get("WANDB_MODE", "offline"),
        dir=str(folder),
        settings={"silent": True},
    )
    return tracker, f"wandb sync {Path(tracker.run.dir).parent}"


_OPENERS: Final[Mapping[str, Callable[[str, Settings], tuple[Tracker, str]]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
