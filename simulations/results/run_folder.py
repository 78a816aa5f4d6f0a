"""The folder of a run, with its model, its result and a page to look at.

======================  ============================================================
``result.json``         everything that was measured, as standard JSON
``report.html``         the same for people: one file without script or network
``privacy.txt``         the privacy statement, in plain words
``epsilon.csv``         the charges of each party's releases, per round
``statistics.json``     statistics of columns, of a strategy that makes some
``model/``              the final model, which `clients.load_model` reads
======================  ============================================================

Standard JSON has no word for infinity: a number that is not finite becomes null, and where it
was infinite, such as an epsilon without a guarantee, a flag says so: ``"epsilon-party": null``
and ``"epsilon-party-unbounded": true``.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
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
from fl_strategies import KnowledgeStrategy, Learner, Statistics, write_epsilon_csv
from fl_strategies._util import SHARED, import_library, replace_file
from fl_strategies.aggregation.ensembles import MeanEnsemble, SignedEnsemble, StackedEnsemble
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    StrategyError,
    UnsupportedLearner,
    require,
    require_data,
)
from fl_strategies.learners import require_portable
from fl_strategies.wire import keys
from fl_strategies.wire.keys import UNBOUNDED
from simulations.federation import Federation
from simulations.models import ModelOptions
from simulations.results.page import PAGE, RESULT, comparison_page, page
from simulations.results.report import Report, describe_answers, describe_run
from simulations.results.verdict import percent

PRIVACY: Final = "privacy.txt"
EPSILON: Final = "epsilon.csv"
STATISTICS: Final = "statistics.json"
ROWS_TO_COMPARE: Final = 20
NEEDED: Final = (
    "strategy",
    "seed",
    "seconds",
    "rounds",
    "parties",
    "settings",
    "ledger",
    "privacy-statement",
)
SHAPES: Final = {"rounds": list, "parties": list, "settings": dict}
OUTPUT_HINT: Final = "Name another one: --set output-dir=FOLDER"


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
        """Write the final model; return its description, or why there is none.

        Statistics, where a strategy makes some, are written beside it.
        """
        statistics = getattr(strategy, "statistics_", None)
        if isinstance(statistics, Statistics):
            write_json(statistics.to_json(), self.path / STATISTICS)
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
        saved = []
        for number, member in enumerate(model.members):
            folder = member_folder(self.path / FOLDER, number)
            saved.append(self._saved(federation, member, folder))
        names = ", ".join(dict.fromkeys(one["learner"] for one in saved))
        card = _card_of(federation, federation.final_learner)
        files = save_committee(model, self.path / FOLDER, card)
        folders = f"{FOLDER}/member-0 to member-{len(saved) - 1}"
        return {
            "learner": f"{len(saved)} models together ({names})",
            "files": [*(f"{FOLDER}/{file}" for file in files), folders],
            "num-bytes": sum(one["num-bytes"] for one in saved),
        }

    def _saved(self, federation: Federation, model: Learner, folder: Path) -> Report:
        """Write a model under the first name by which it is read as what it is."""
        names = dict.fromkeys([federation.final_learner, *federation.learner_names])
        rows = federation.dataset.x_public[:ROWS_TO_COMPARE]
        size, scores = _size_of(model), model.logits(rows)
        for name in names:
            files = save_model(model, folder, _card_of(federation, name))
            with suppress(StrategyError):
                if np.array_equal(load_model(folder).logits(rows), scores):
                    own = [(folder / file).relative_to(self.path).as_posix() for file in files]
                    return {"learner": name, "files": own, "num-bytes": size}
        known = ", ".join(names)
        raise UnsupportedLearner(f"load_model: the model must be one of {known}, got another.")

    def write(self, report: Report) -> Path:
        """Write a report for programs, for people and for a data protection officer."""
        statement = f"{report['privacy-statement']}\n"
        replace_file(self.path / PRIVACY, statement.encode(), SHARED)
        replace_file(self.path / PAGE, page(report).encode(), SHARED)
        write_json(report, self.path / RESULT)
        return self.path / RESULT

    def write_epsilon(self, strategy: KnowledgeStrategy[Any]) -> None:
        """Write the charges of each party's releases, per round."""
        write_epsilon_csv(strategy, self.path / EPSILON)


def _card_of(federation: Federation, name: str) -> ModelCard:
    """Return what a reader of the federation's model must know."""
    data, settings = federation.dataset, federation.final_settings.to_config()
    return ModelCard(
        learner=name,
        row_shape=data.row_shape,
        classes=data.classes,
        task=data.task,
        settings={key: settings[key] for key in ModelOptions.settings()},
    )


def _size_of(model: Learner) -> int:
    return sum(array.nbytes for array in require_portable(model).to_arrays().values())


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
        Description of the model; without it the model is not saved.
    accuracy : float, optional
        Of the final model, if you have tested it.
    settings : mapping, optional
        Further settings for the report to show.
    """
    run = RunFolder(Path(folder))
    run.path.mkdir(parents=True, exist_ok=True)
    tested = "not tested and" if accuracy is None else f"accuracy {percent(accuracy)},"
    report = {
        "strategy": type(strategy).__name__,
        "metric": keys.ACCURACY,
        keys.ACCURACY: accuracy,
        "verdict": f"{tested} compared with nothing",
        "parties": describe_answers(strategy),
        "model": _saved_model(strategy.model_, run.path, card),
        "settings": dict(settings or {}),
        **describe_run(strategy, result),
    }
    run.write_epsilon(strategy)
    return run.write(report).with_name(PAGE)


def _saved_model(model: Learner, folder: Path, card: ModelCard | None) -> Report | None:
    if card is None:
        return None
    try:
        files = save_model(model, folder / FOLDER, card)
    except UnsupportedLearner as error:
        return {"missing": str(error)}
    names = [f"{FOLDER}/{file}" for file in files]
    return {"learner": card.learner, "files": names, "num-bytes": _size_of(model)}


def page_of(files: Sequence[Path]) -> str:
    """Return the page of a run's ``result.json``, or one that compares several runs."""
    require(len({*files}) == len(files), "report", "runs", "different", [*map(str, files)])
    reports = [read_run(path) for path in files]
    names = [path.resolve().parent.name if path.name == RESULT else path.stem for path in files]
    jinja2 = import_library("report", "jinja2", "simulation")
    try:
        if len(files) == 1:
            return page(reports[0])
        return comparison_page(dict(zip(names, reports, strict=True)))
    except StrategyError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, jinja2.TemplateError) as error:
        got = f"{type(error).__name__}: {error}"
        raise InvalidData(f"report: runs must be results of runs, got {got:.200}.") from error


def read_run(path: Path) -> Report:
    """Read the result of a run; raise `InvalidData` that names what is missing."""
    found = read_json("report", path)
    missing = [key for key in NEEDED if key not in found]
    rule = f"the result of a run, with {', '.join(NEEDED)}"
    require_data(not missing, "report", str(path), rule, f"none of {', '.join(missing)}")
    for key, kind in SHAPES.items():
        if not isinstance(found[key], kind):
            got = type(found[key]).__name__
            raise InvalidData(f"report: {key} of {path} must be a {kind.__name__}, got {got}.")
    return found


# Files


def finite(content: Any) -> Any:
    """Return None in place of every number that is not finite."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [*map(finite, content)] if isinstance(content, list | tuple) else content


def flagged(content: Any) -> Any:
    """Return content with a flag beside every infinite number, which becomes None.

    Examples
    --------
    >>> flagged({"epsilon": math.inf, "accuracy": math.nan, "seed": 0})
    {'epsilon': None, 'epsilon-unbounded': True, 'accuracy': None, 'seed': 0}
    """
    if isinstance(content, Mapping):
        plain: dict[str, Any] = {}
        for key, value in content.items():
            plain[key] = flagged(value)
            if isinstance(value, float) and math.isinf(value):
                plain[f"{key}{UNBOUNDED}"] = True
        return plain
    return [*map(flagged, content)] if isinstance(content, list | tuple) else finite(content)


def unflagged(content: Any) -> Any:
    """Undo `flagged`; what was not a number stays None."""
    if isinstance(content, Mapping):
        plain = {key: unflagged(value) for key, value in content.items()}
        for flag in [key for key in content if key.endswith(UNBOUNDED)]:
            key = flag.removesuffix(UNBOUNDED)
            if key in content:
                if content[flag] is True and content[key] is None:
                    plain[key] = math.inf
                del plain[flag]
        return plain
    return [*map(unflagged, content)] if isinstance(content, list) else content


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write results for programs, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(flagged(content), indent=2, allow_nan=False)
    replace_file(path, f"{text}\n".encode(), SHARED)


def read_json(owner: str, path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote, infinities included."""
    try:
        content = unflagged(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{path} must be a result of a run, got: {error}."
        raise InvalidData(f"{owner}: {reason}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise InvalidData(f"{owner}: {path} must be an object of JSON, got {kind}.")
    return content


def require_folder(owner: str, parameter: str, folder: Path, hint: str = OUTPUT_HINT) -> None:
    """Make a folder; raise `InvalidParameter` with a hint if no file can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidParameter(
            f"{owner}: {parameter} must be writable, got {str(folder)!r} "
            f"({error.strerror}). {hint}."
        ) from error


def require_files(owner: str, **paths: Path | None) -> None:
    """Raise unless each file, named by the option that gives it, can be written."""
    for name, path in paths.items():
        if path is None:
            continue
        if path.is_dir():
            raise InvalidParameter(
                f"{owner}: --{name} must be a file, got the folder {str(path)!r}."
            )
        hint = f"Name another file: --{name} OUT"
        require_folder(owner, f"the folder of --{name}", path.parent, hint)
