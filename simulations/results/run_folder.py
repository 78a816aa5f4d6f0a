"""What a run leaves behind: a folder with its model, its result and a page to look at.

======================  ============================================================
``result.json``         everything that was measured, as standard JSON
``report.html``         the same for people: one file without script or network
``privacy.txt``         what is promised to whom, in plain words
``epsilon.csv``         what each party's releases cost, round by round
``model/``              the final model, which `clients.load_model` reads
======================  ============================================================
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.serverapp.strategy import Result

from clients.saved_model import (
    FOLDER,
    Committee,
    ModelCard,
    load_model,
    member_folder,
    save_committee,
    save_model,
)
from fl_strategies import KnowledgeStrategy, Learner, write_epsilon_csv
from fl_strategies._util import SHARED, replace_file
from fl_strategies.aggregation.ensembles import MeanEnsemble, SignedEnsemble, StackedEnsemble
from fl_strategies.errors import StrategyError, UnsupportedLearner
from fl_strategies.learners import require_portable
from fl_strategies.wire import keys
from simulations.federation import Federation
from simulations.models import ModelOptions
from simulations.results.files import write_json
from simulations.results.page import PAGE, RESULT, page
from simulations.results.report import Report, percent, rounds_of, versions

PRIVACY: Final = "privacy.txt"
EPSILON: Final = "epsilon.csv"
ROWS_TO_COMPARE: Final = 20


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @classmethod
    def new(cls, output_dir: str | Path) -> "RunFolder":
        """Return a folder of its own for a run that has ended, named for the time."""
        stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S-%f")
        path = Path(output_dir).resolve() / stamp
        path.mkdir(parents=True)
        return cls(path)

    def keep_model(self, federation: Federation, strategy: KnowledgeStrategy[Any]) -> Report:
        """Write the final model; return what a report says of it, or why there is none."""
        try:
            model = strategy.model_
            if isinstance(model, MeanEnsemble | SignedEnsemble | StackedEnsemble):
                return self._saved_committee(federation, model)
            return self._saved(federation, model, self.path / FOLDER)
        except StrategyError as error:
            shutil.rmtree(self.path / FOLDER, ignore_errors=True)
            return {"missing": str(error)}

    def _saved_committee(self, federation: Federation, model: Committee) -> Report:
        """Write every member under its own name, and how they are combined."""
        told = []
        for number, member in enumerate(model.members):
            folder = member_folder(self.path / FOLDER, number)
            told.append(self._saved(federation, member, folder))
        names = ", ".join(dict.fromkeys(one["learner"] for one in told))
        card = card_of(federation, federation.final_learner)
        files = save_committee(model, self.path / FOLDER, card)
        folders = f"{FOLDER}/member-0 to member-{len(told) - 1}"
        return {
            "learner": f"{len(told)} models together ({names})",
            "files": [*(f"{FOLDER}/{file}" for file in files), folders],
            "num-bytes": sum(one["num-bytes"] for one in told),
        }

    def _saved(self, federation: Federation, model: Learner, folder: Path) -> Report:
        """Write a model under the first name by which it is read as what it is."""
        names = dict.fromkeys([federation.final_learner, *federation.learner_names])
        rows = federation.dataset.x_public[:ROWS_TO_COMPARE]
        size = sum(array.nbytes for array in require_portable(model).to_arrays().values())
        scores = model.logits(rows)
        for name in names:
            files = save_model(model, folder, card_of(federation, name))
            with suppress(StrategyError):
                if np.array_equal(load_model(folder).logits(rows), scores):
                    told = [(folder / file).relative_to(self.path).as_posix() for file in files]
                    return {"learner": name, "files": told, "num-bytes": size}
        known = ", ".join(names)
        raise UnsupportedLearner(f"load_model: the model must be one of {known}, got another.")

    def write(self, report: Report) -> Path:
        """Write a report for programs, for people and for a data protection officer."""
        self.write_privacy(str(report["privacy-statement"]))
        replace_file(self.path / PAGE, page(report).encode(), SHARED)
        write_json(report, self.path / RESULT)
        return self.path / RESULT

    def write_epsilon(self, strategy: KnowledgeStrategy[Any]) -> None:
        """Write what each party's releases have cost, round by round."""
        write_epsilon_csv(strategy, self.path / EPSILON)

    def write_privacy(self, statement: str) -> None:
        """Write what is promised."""
        replace_file(self.path / PRIVACY, f"{statement}\n".encode(), SHARED)


def write_report(report: Report, output_dir: str | Path) -> Path:
    """Write a report into a folder of its own and return the path of its JSON."""
    return RunFolder.new(output_dir).write(report)


def card_of(federation: Federation, name: str) -> ModelCard:
    """Return what must be known of a federation to read its model."""
    data, settings = federation.dataset, federation.final_settings.to_config()
    return ModelCard(
        learner=name,
        row_shape=data.row_shape,
        classes=data.classes,
        task=data.task,
        settings={key: settings[key] for key in ModelOptions.settings()},
    )


def write_run(
    strategy: KnowledgeStrategy[Any],
    result: Result,
    folder: str | Path,
    *,
    card: ModelCard | None = None,
    accuracy: float | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write report, privacy statement, epsilons and model; return the path of the report.

    Raises `NotFitted`, with the reason, if the run has no model.

    Parameters
    ----------
    strategy : KnowledgeStrategy
        After its run.
    result : Result
        What the run returned.
    folder : str or Path
    card : ModelCard, optional
        What the model is; without it the model is not saved.
    accuracy : float, optional
        Of the final model, if you have tested it.
    settings : mapping, optional
        Whatever the report is to say of the run beside that.
    """
    run = RunFolder(Path(folder))
    run.path.mkdir(parents=True, exist_ok=True)
    report = {
        "strategy": type(strategy).__name__,
        "metric": keys.ACCURACY,
        keys.ACCURACY: accuracy,
        "verdict": _verdict(accuracy),
        "ledger": strategy.ledger_.state_dict(),
        "privacy-statement": strategy.ledger_.statement(),
        "rounds": rounds_of(result),
        "parties": [
            {keys.PARTITION_ID: number, keys.LEARNER: party.learner_name, "train": party.train}
            for number, party in sorted(strategy.parties_.items())
        ],
        "rejected": {str(node): reason for node, reason in strategy.rejected_.items()},
        "undelivered": {str(node): why for node, why in strategy.undelivered_.items()},
        "model": _saved(strategy, run.path, card),
        "settings": dict(settings or {}),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    run.write_epsilon(strategy)
    return run.write(report).with_name("report.html")


def _verdict(accuracy: float | None) -> str:
    if accuracy is None:
        return "not tested and compared with nothing"
    return f"accuracy {percent(accuracy)}, compared with nothing"


def _saved(
    strategy: KnowledgeStrategy[Any], folder: Path, card: ModelCard | None
) -> Report | None:
    model = strategy.model_
    if card is None:
        return None
    try:
        files = save_model(model, folder / FOLDER, card)
    except UnsupportedLearner as error:
        return {"missing": str(error)}
    size = sum(array.nbytes for array in require_portable(model).to_arrays().values())
    told = [f"{FOLDER}/{file}" for file in files]
    return {"learner": card.learner, "files": told, "num-bytes": size}
