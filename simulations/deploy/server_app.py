"""The server's side of a deployed federation: a public file, a strategy and a result."""

import hashlib
import json
import logging
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from fl_strategies import KnowledgeStrategy, Learner, PortableLearner
from fl_strategies._util import Array, content_hash
from fl_strategies.errors import InvalidData, UnsupportedLearner, require, require_data
from simulations.config import Settings, Value, describe
from simulations.data.encoded import Encoding
from simulations.data.schema import Schema
from simulations.data.splits import Dataset
from simulations.deploy.data import (
    LABEL,
    PublicData,
    check_classes,
    class_list,
    declared,
    read_labelled,
    read_public,
)
from simulations.federation import Federation
from simulations.results.report import describe_answers, describe_run
from simulations.results.run_folder import RunFolder, flagged, require_folder

logger = logging.getLogger("flwr.fl_strategies")

OWNER: Final = "run-config"
FILE_SETTINGS: Final[Mapping[str, str]] = {
    "public-file": "",
    "test-file": "",
    "classes": "",
    "label": LABEL,
    "drop": "",
    "members-file": "",
    "schema": "",
}
"""Settings of deployments only: files on the server, and the class list."""
SIMULATED: Final = frozenset(
    {
        *("data", "data-dir", "label", "drop", "public", "schema"),
        *("train-rows", "public-rows", "test-rows", "teacher", "state-dir"),
        *("partition", "beta", "balanced", "mixing", "shares", "min-records"),
        *("solo", "pooled", "central", "num-workers"),
    }
)
"""Settings by which a simulation deals data, which here are the parties' own affair."""

app = ServerApp()


class DeployedFederation(Federation):
    """The server's side: public and test rows, who is who, and the strategy's settings."""

    def _check_learners(self) -> None:
        """Check the server's model only; each party chooses and checks its own."""
        self._check_learner("final-learner", self.final_learner, self.needs[1])


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy and write what came of it."""
    federation = load(context.run_config)
    settings, strategy = federation.settings, federation.strategy()
    folder = RunFolder(result_folder(settings.output_dir, context.run_id))
    hint = 'Name another one: output-dir="/absolute/path" in --run-config'
    require_folder(OWNER, "output-dir", folder.path, hint)
    for line in federation.dataset.understood:
        logger.info("%s", line)
    start = time.perf_counter()
    result = strategy.start(
        grid, ArrayRecord(), num_rounds=settings.num_rounds, timeout=settings.timeout
    )
    report = make_report(federation, strategy, result, seconds=time.perf_counter() - start)
    report["model"] = folder.keep_model(federation, strategy)
    folder.write_epsilon(strategy)
    folder.write(report)
    logger.info("result: %s", json.dumps(flagged(report), allow_nan=False))
    logger.info("The result is in %s", folder.path)


def run_settings() -> dict[str, Value]:
    """Return key and default of every setting that a run may have."""
    own = {key: default for key, default, _ in describe() if key not in SIMULATED}
    return {**FILE_SETTINGS, **own}


def result_folder(output_dir: str, run_id: int | str) -> Path:
    """Return the folder of a run's result on the server."""
    return Path(output_dir).expanduser() / f"run-{run_id}"


def load(run_config: Mapping[str, Value]) -> Federation:
    """Read the server's files; there are no private rows."""
    files = {**FILE_SETTINGS, **run_config}
    if not files["schema"]:
        require(bool(files["public-file"]), OWNER, "public-file", "given", "")
    given = {key: value for key, value in run_config.items() if key not in FILE_SETTINGS}
    # Every party keeps its own journal; the folder here only says that there may be some.
    settings = Settings.from_run_config(given, state_dir="node-config")
    check_classes(OWNER, {**files, "task": settings.task})
    label, drop = str(files["label"]), str(files["drop"])
    classes = class_list(str(files["classes"])) if files["classes"] else ()
    if files["schema"]:
        require(
            not settings.encoder, OWNER, "encoder", "omitted with a schema", settings.encoder
        )
        schema = Schema.load(_file(files, "schema"))
        label = schema.label_name("" if label == LABEL else label)
        path = _file(files, "public-file") if files["public-file"] else None
        public = declared(path, schema, classes, drop)
    else:
        encoding = Encoding.of(settings.encoder, standardise=settings.standardise)
        numbers = settings.task == "numbers"
        path = _file(files, "public-file")
        public = read_public(path, classes, label, drop, encoding, numbers=numbers)
    held_out = None
    if files["test-file"]:
        held_out = read_labelled(_file(files, "test-file"), public, label, strict=True)
    members = read_members(_file(files, "members-file")) if files["members-file"] else None
    return DeployedFederation(settings, public_dataset(public, held_out), [], members)


def read_members(path: Path) -> dict[int, int]:
    """Return the number of each node: a line ``NUMBER = NODE_ID`` a party, in TOML.

    Flower gives a node its id when its key is registered, and keeps it as long as the key.
    """
    try:
        lines = tomllib.loads(path.read_text(encoding="utf-8"))
        members = {node: int(number) for number, node in lines.items()}
    except (OSError, ValueError, TypeError) as error:
        raise InvalidData(f"{OWNER}: {path} must be lines of TOML, got: {error}.") from error
    whole = all(type(node) is int for node in members) and len(members) == len(lines)
    rule = "NUMBER = NODE_ID, each node once"
    require_data(whole, OWNER, f"a line of {path}", rule, "others")
    return members


def make_report(
    federation: Federation, strategy: KnowledgeStrategy[Any], result: Result, *, seconds: float
) -> dict[str, Any]:
    """Describe a finished run; raise `NotFitted`, with the reason, if it has no model."""
    model, settings, data = strategy.model_, federation.settings, federation.dataset
    return {
        "strategy": settings.strategy,
        "seed": settings.seed,
        "metric": federation.metric,
        federation.metric: federation.quality(model) if len(data.y_test) else None,
        "model-sha256": model_hash(model),
        "parties": describe_answers(strategy),
        "seconds": seconds,
        "verdict": "each party compares the model with its own at home",
        "settings": {k: v for k, v in settings.to_report().items() if k not in SIMULATED},
        **describe_run(strategy, result),
    }


def model_hash(model: Learner) -> str | None:
    """Return what tells two models apart to the last bit, or None without an array form."""
    if not isinstance(model, PortableLearner):
        return None
    try:
        arrays = sorted(model.to_arrays().items())
    except UnsupportedLearner as error:
        logger.info("%s", error)
        return None
    lines = [f"{name} {content_hash(array)}" for name, array in arrays]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def public_dataset(public: PublicData, held_out: tuple[Array, Array] | None = None) -> Dataset:
    """Return what a server holds, or a party would on its behalf: no private rows."""
    numeric = public.targets is not None
    none = np.empty((0, 1)) if numeric else np.empty(0, np.int64)
    x_test, y_test = held_out or (public.x[:0], none)
    known = public.targets is not None and public.targets.low < public.targets.high
    return Dataset(
        name="deployment",
        x_train=public.x[:0],
        y_train=none,
        x_public=public.x,
        y_public=public.y,
        x_test=x_test,
        y_test=y_test,
        classes=public.classes,
        understood=tuple(public.describe()),
        encoding=public.encoding,
        schema=public.schema,
        task=public.task,
        target_range=(public.targets.low, public.targets.high)
        if public.targets is not None and known
        else None,
    )


def _file(files: Mapping[str, Value], key: str) -> Path:
    path = Path(str(files[key])).expanduser()
    rule = "the absolute path of a file on the server"
    require(path.is_absolute() and path.is_file(), OWNER, key, rule, str(path))
    return path
