"""The folder of a run that was written in Python, with strategies and parties of one's own."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Result

from clients.saved_model import FOLDER, ModelCard, save_model
from fl_strategies import KnowledgeStrategy
from fl_strategies.errors import UnsupportedLearner
from fl_strategies.learners import require_portable
from fl_strategies.wire import keys
from simulations.results.report import Report, percent, rounds_of, versions
from simulations.results.run_folder import RunFolder


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
