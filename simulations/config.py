"""Every setting of a run: typed, validated, and with the same names everywhere.

A setting is `snake_case` in Python and `kebab-case` in `[tool.flwr.app.config]`, on the
command line and in result files. Flower passes text, whole numbers, numbers and truth
values only, so these are the four types a setting can have.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any, Final, Self, TypeAlias

from fl_strategies import REGISTRY
from fl_strategies.exceptions import InvalidParameter, require
from fl_strategies.privacy.votes import VOTE_NOISES
from simulations.datasets import check_dataset_name
from simulations.models import check_learner_name
from simulations.partition import SCHEMES

Value: TypeAlias = str | int | float | bool

OWNER: Final = "Settings"
PRESETS: Final = ("paper",)
OPTIONAL: Final = (
    "gamma", "sigma", "target_epsilon", "threshold", "threshold_sigma", "num_queries",
    "max_epsilon",
)  # fmt: skip
"""Settings that may be left out, which Flower's configuration can only say as 0."""
TYPE_NAMES: Final[Mapping[type, str]] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "partition": SCHEMES,
    "privacy_level": ("L0", "L1", "L2"),
    "exchange": ("votes", "models"),
    "noise": VOTE_NOISES,
}
LOWEST: Final[Mapping[str, int]] = {
    "num_parties": 1,
    "min_records": 0,
    "num_splits": 1,
    "num_teachers": 1,
    "seed": 0,
    "num_trees": 1,
    "max_depth": 0,
    "boosting_rounds": 1,
    "boosting_gamma": 0,
    "epochs": 1,
    "batch_size": 1,
    "weight_decay": 0,
    "num_workers": 0,
    **dict.fromkeys(OPTIONAL, 0),
}
POSITIVE: Final = (
    "beta",
    "delta",
    "fraction_query",
    "max_wait",
    "timeout",
    "boosting_learning_rate",
    "learning_rate",
)


def _setting(default: Value, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one run; `describe()` tells what each means.

    Examples
    --------
    >>> Settings(num_parties=0)
    Traceback (most recent call last):
    fl_strategies.exceptions.InvalidParameter: Settings: num-parties must be at least 1, got 0.
    >>> Settings.from_run_config({"num-partys": 8})
    Traceback (most recent call last):
    fl_strategies.exceptions.InvalidParameter: Settings: key must be a known setting, \
got 'num-partys'. Did you mean 'num-parties'?
    """

    strategy: str = _setting("fedkt", "name of the strategy")
    data: str = _setting(
        "digits", "digits, breast-cancer, adult, cod-rna, mnist, FILE.npz or FILE.csv"
    )
    data_dir: str = _setting("", "folder with data files; empty: $FL_STRATEGIES_DATA")
    label: str = _setting("", "label column of FILE.csv")
    learner: str = _setting(
        "random-forest,xgboost,logistic-regression,mlp", "party models, taken in turn"
    )
    teacher: str = _setting("", "model of FedKT's teachers; empty: the party's own")
    final_learner: str = _setting("random-forest", "model that the server trains")
    num_parties: int = _setting(6, "parties in the federation")
    partition: str = _setting("dirichlet", "dirichlet, iid or by-label")
    beta: float = _setting(0.5, "Dirichlet concentration; smaller: parties less alike")
    min_records: int = _setting(10, "fewest records of a party")
    num_splits: int = _setting(2, "FedKT's s: partitions, and so students, of a party")
    num_teachers: int = _setting(5, "FedKT's t: teachers of a partition")
    privacy_level: str = _setting("L0", "L0, L1 or L2")
    exchange: str = _setting("votes", "what travels: votes or models")
    noise: str = _setting("gumbel", "gumbel, laplace, gaussian or confident-gaussian")
    gamma: float = _setting(0.0, "inverse scale of gumbel or laplace noise; 0: not given")
    sigma: float = _setting(0.0, "deviation of gaussian noise; 0: not given")
    target_epsilon: float = _setting(0.0, "calibrate the noise to it; 0: not given")
    delta: float = _setting(0.00001, "delta of every privacy figure")
    threshold: float = _setting(0.0, "votes a confident answer needs; 0: not given")
    threshold_sigma: float = _setting(0.0, "noise on these votes; 0: not given")
    num_queries: int = _setting(0, "public rows labelled with noise; 0: by the share")
    fraction_query: float = _setting(1.0, "share of public rows labelled with noise")
    seeded_noise: bool = _setting(False, "repeatable noise, which protects nobody")
    max_epsilon: float = _setting(0.0, "budget of server and parties; 0: none")
    state_dir: str = _setting("", "folder where parties keep their ledgers; empty: none")
    seed: int = _setting(0, "decides every random choice of the experiment")
    max_wait: float = _setting(120.0, "seconds to wait for the parties to come")
    timeout: float = _setting(3600.0, "seconds to wait for their answers")
    num_trees: int = _setting(100, "trees of a forest")
    max_depth: int = _setting(0, "depth of trees; 0: unlimited, and 6 in boosting")
    boosting_rounds: int = _setting(100, "rounds of gradient boosting")
    boosting_learning_rate: float = _setting(0.3, "shrinkage of a boosting round")
    boosting_gamma: float = _setting(0.0, "least gain of a split in XGBoost")
    epochs: int = _setting(30, "passes of a network over its data")
    batch_size: int = _setting(32, "rows in a step of a network")
    learning_rate: float = _setting(0.001, "Adam's step size")
    weight_decay: float = _setting(0.00001, "Adam's L2 penalty")
    output_dir: str = _setting("runs", "folder that gets one folder of results a run")
    solo: bool = _setting(True, "also train each party alone, to compare")
    central: bool = _setting(True, "also train on the pooled data, to compare")
    num_workers: int = _setting(0, "processes of the in-process runner; 0: one a core")

    def __post_init__(self) -> None:
        """Check types first, then each rule."""
        for item in fields(self):
            object.__setattr__(self, item.name, _typed(item.name, getattr(self, item.name)))
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            require(value in choices, OWNER, _key(name), f"one of {', '.join(choices)}", value)
        for name, lowest in LOWEST.items():
            value = getattr(self, name)
            require(value >= lowest, OWNER, _key(name), f"at least {lowest}", value)
        for name in POSITIVE:
            value = getattr(self, name)
            require(value > 0, OWNER, _key(name), "greater than 0", value)
        self._check_names()

    def _check_names(self) -> None:
        known = ", ".join(REGISTRY)
        require(self.strategy in REGISTRY, OWNER, "strategy", f"one of {known}", self.strategy)
        require(bool(self.output_dir), OWNER, "output-dir", "a folder", self.output_dir)
        guarded = bool(self.state_dir) or self.privacy_level == "L1" or not self.max_epsilon
        require(guarded, OWNER, "state-dir", "given with max-epsilon", self.state_dir)
        check_dataset_name(OWNER, self.data)
        for name in self.learner_names:
            check_learner_name(OWNER, "learner", name)
        if self.teacher:
            check_learner_name(OWNER, "teacher", self.teacher)
        check_learner_name(OWNER, "final-learner", self.final_learner)

    @property
    def learner_names(self) -> tuple[str, ...]:
        """Names in `learner`, which parties take in turn."""
        return tuple(name.strip() for name in self.learner.split(","))

    @property
    def workers(self) -> int:
        """Processes to use on this machine."""
        return self.num_workers or os.cpu_count() or 1

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Value], **overrides: Value) -> Self:
        """Return settings from kebab-case keys; what is left out keeps its default.

        Parameters
        ----------
        run_config : mapping
            Kebab-case keys, as in `Context.run_config`.
        **overrides
            Snake-case settings that win over `run_config`.
        """
        for key in run_config:
            _require_known(key)
        for name in overrides:
            _require_known(_key(name))
        given = {key.replace("-", "_"): value for key, value in run_config.items()}
        settings: dict[str, Any] = {**given, **overrides}
        return cls(**settings)

    def to_run_config(self) -> dict[str, Value]:
        """Return all settings under their kebab-case keys."""
        return {_key(item.name): getattr(self, item.name) for item in fields(self)}


def describe() -> list[tuple[str, Value, str]]:
    """Return key, default and meaning of every setting."""
    defaults = Settings().to_run_config()
    meanings = {_key(item.name): str(item.metadata["meaning"]) for item in fields(Settings)}
    return [(key, default, meanings[key]) for key, default in defaults.items()]


def parse_assignment(text: str) -> tuple[str, Value]:
    """Read one `key=value` of the command line; the setting decides the type.

    Examples
    --------
    >>> parse_assignment("beta=1")
    ('beta', 1.0)
    """
    key, equals, value = text.partition("=")
    require(bool(equals), OWNER, "an assignment", "of the form key=value", text)
    key, value = key.strip(), value.strip()
    _require_known(key)
    kind = _types()[key.replace("-", "_")]
    try:
        return key, _READERS[kind](value)
    except (ValueError, KeyError):
        message = f"{OWNER}: {key} must be {TYPE_NAMES[kind]}, got {value!r}."
    raise InvalidParameter(message)


_READERS: Final[Mapping[type, Any]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
}


def paper_table(strategy: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what a paper says about a strategy, by data set.

    Each data set has the tables `settings` (kebab-case keys), `published` (the paper's
    figures) and `expected` (what our own runs must reach).
    """
    folder = resources.files("simulations") / "tables"
    known = sorted(item.name.removesuffix(".toml") for item in folder.iterdir())
    require(strategy in known, "preset", "strategy", f"one of {', '.join(known)}", strategy)
    return tomllib.loads((folder / f"{strategy}.toml").read_text(encoding="utf-8"))


def preset(name: str, strategy: str, data: str) -> dict[str, Value]:
    """Return the settings of a published experiment under their kebab-case keys.

    Examples
    --------
    >>> preset("paper", "fedkt", "adult")["num-parties"]
    50
    """
    require(name in PRESETS, "preset", "name", f"one of {', '.join(PRESETS)}", name)
    table = paper_table(strategy)
    require(data in table, "preset", "data", f"one of {', '.join(table)}", data)
    return {"strategy": strategy, "data": data, **table[data]["settings"]}


def _key(name: str) -> str:
    return name.replace("_", "-")


def _types() -> dict[str, type]:
    return {item.name: type(item.default) for item in fields(Settings)}


def _require_known(key: str) -> None:
    known = [_key(item.name) for item in fields(Settings)]
    if key in known:
        return
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(known)}."
    raise InvalidParameter(f"{OWNER}: key must be a known setting, got {key!r}. {hint}")


def _typed(name: str, value: object) -> object:
    """Return the value as its setting's type; a whole number may stand for a number."""
    kind = _types()[name]
    if kind is float and type(value) is int:
        value = float(value)
    require(type(value) is kind, OWNER, _key(name), TYPE_NAMES[kind], value)
    if isinstance(value, float):
        require(math.isfinite(value), OWNER, _key(name), "finite", value)
    return value
