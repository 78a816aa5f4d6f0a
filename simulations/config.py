"""Every setting of a run: typed, validated, and with the same names everywhere.

A setting is `snake_case` in Python and `kebab-case` in `[tool.flwr.app.config]`, on the
command line and in result files. Flower passes text, whole numbers, numbers and truth
values only, so these are the four types a setting can have.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import Any, Final, Self, TypeAlias

from fl_strategies import REGISTRY
from fl_strategies.exceptions import InvalidParameter, require
from fl_strategies.privacy.votes import VOTE_NOISES
from fl_strategies.strategies.fedkd.augmentation import AUGMENTATIONS
from fl_strategies.strategies.fedkd.words import LOSSES, SCALES, WEIGHTS
from fl_strategies.strategies.fedkt.words import EXCHANGES, WEIGHTINGS
from fl_strategies.strategies.fedmd.release import PAYLOADS
from fl_strategies.strategies.fedmd.settings import RULES
from fl_strategies.wire.quantization import ROUNDINGS
from simulations.datasets import check_dataset_name, check_joint_classes, check_public_name
from simulations.models import check_learner_name
from simulations.partition import SCHEMES

Value: TypeAlias = str | int | float | bool

OWNER: Final = "Settings"
PRESETS: Final = ("paper",)
KERNELS: Final = ("linear", "rbf", "polynomial", "laplace")
TYPE_NAMES: Final[Mapping[type, str]] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _setting(
    default: Value,
    meaning: str,
    *,
    least: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    optional: bool = False,
) -> Any:
    """Describe one setting; an optional one is left out by 0, for want of another way."""
    rules = {"least": 0 if optional else least, "above": above, "choices": tuple(choices)}
    return field(default=default, metadata={"meaning": meaning, "optional": optional, **rules})


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

    strategy: str = _setting("fedkd", "name of the strategy")
    data: str = _setting("digits", "a data set by its name, FILE.npz or FILE.csv")
    data_dir: str = _setting("", "folder with data files; empty: $FL_STRATEGIES_DATA")
    label: str = _setting("", "label column of FILE.csv")
    public: str = _setting("", "image set that gives the public rows; empty: the data's own")
    joint_classes: bool = _setting(False, "public images of another set keep their classes")
    train_rows: int = _setting(0, "most private rows of all parties; 0: all", least=0)
    public_rows: int = _setting(0, "most public rows; 0: all", least=0)
    test_rows: int = _setting(0, "most test rows; 0: all", least=0)
    learner: str = _setting(
        "random-forest,xgboost,logistic-regression,mlp", "party models, taken in turn"
    )
    teacher: str = _setting("", "model of FedKT's teachers; empty: the party's own")
    final_learner: str = _setting("extra-trees", "model that the server trains")
    num_parties: int = _setting(6, "parties in the federation", least=1)
    num_server_rounds: int = _setting(1, "rounds; FedKT and FedKD need one", least=1)
    partition: str = _setting(
        "dirichlet", "how rows are dealt: " + " ".join(SCHEMES), choices=SCHEMES
    )
    beta: float = _setting(0.5, "Dirichlet concentration; smaller: parties less alike", above=0)
    balanced: bool = _setting(True, "Dirichlet parties of about the same size")
    mixing: float = _setting(0.0, "share of rows that pooled-halves deals anew", least=0)
    shares: str = _setting("", "parties' shares of the rows, such as 0.7,0.3; empty: equal")
    min_records: int = _setting(10, "fewest records of a party", least=0)
    num_splits: int = _setting(
        0, "FedKT's s: partitions, and so students, of a party; 0: one", optional=True
    )
    num_teachers: int = _setting(
        0, "FedKT's t: teachers of a partition; 0: one, at L2 as the noise needs", optional=True
    )
    corrected: bool = _setting(True, "FedKT votes without the teacher's own class shares")
    vote_weights: str = _setting(
        "auto", f"weights of FedKT's votes: {' '.join(WEIGHTINGS)}", choices=WEIGHTINGS
    )
    privacy_level: str = _setting("L0", "L0, L1 or L2", choices=("L0", "L1", "L2"))
    exchange: str = _setting("votes", "sent in FedKT: votes or models", choices=EXCHANGES)
    vote_trim: float = _setting(0.0, "most liars that FedKT leaves out, as a share", least=0)
    private_diagnostics: bool = _setting(False, "report figures of private votes at L1")
    num_levels: int = _setting(200, "FedKD's S: levels of a logit; 0: float32", optional=True)
    rounding: str = _setting("nearest", "to levels: nearest or stochastic", choices=ROUNDINGS)
    scale: str = _setting("clip", "bound of levels: clip or max", choices=SCALES)
    clip: float = _setting(10.0, "largest logit that counts", above=0)
    weights: str = _setting("evidence", f"of FedKD: {' '.join(WEIGHTS)}", choices=WEIGHTS)
    contrast: bool = _setting(True, "FedKD parties tell their records from public rows")
    class_share: str = _setting(
        "auto", "class shares of public rows: auto, pooled, none, or numbers"
    )
    exclude_outliers: bool = _setting(True, "evidence and weighted votes without liars")
    count_epsilon: float = _setting(1.0, "what noisy counts cost an example", above=0)
    loss: str = _setting("kl", "distance of logits: l1, l2, mse or kl", choices=LOSSES)
    temperature: float = _setting(0.0, "of the kl loss; 0: 1", optional=True)
    distill_epochs: int = _setting(0, "passes of distillation; 0: the model's", optional=True)
    num_predictions: int = _setting(1, "FedKD predictions of each public row", least=1)
    augmentation: str = _setting(
        "none",
        "change between these predictions: none, crop or crop-flip",
        choices=("none", *AUGMENTATIONS),
    )
    public_labels: bool = _setting(False, "FedKD parties also train on public labels")
    target_loss: str = _setting(
        "mse", "of co-distillation: mse or cross-entropy", choices=("mse", "cross-entropy")
    )
    release: str = _setting(
        "none", "privacy of FedMD: none, nfdp or ldp", choices=("none", "nfdp", "ldp")
    )
    payload: str = _setting("argmax", "FedMD sends logits, softmax or argmax", choices=PAYLOADS)
    num_public: int = _setting(0, "public rows of a FedMD round; 0: up to 5000", optional=True)
    epochs_initial: int = _setting(20, "FedMD's T1: passes before the first answer", least=1)
    epochs_digest: int = _setting(2, "FedMD's T2: passes over the consensus", least=1)
    epochs_revisit: int = _setting(1, "FedMD's T3: passes over the own records", least=1)
    num_samples: int = _setting(0, "k: records that nfdp draws; 0: not given", optional=True)
    with_replacement: bool = _setting(True, "whether it may draw a record twice")
    consensus: str = _setting(
        "auto", f"auto: the strategy's own, or {' '.join(RULES)}", choices=("auto", *RULES)
    )
    trim_fraction: float = _setting(0.2, "share that trimmed-mean cuts off each side", least=0)
    clipping_norm: float = _setting(0.0, "of logits under ldp; 0: not given", optional=True)
    num_rounds_planned: int = _setting(0, "rounds of target-epsilon; 0: all", optional=True)
    pretrain_epochs: int = _setting(0, "passes over labelled public rows before all", least=0)
    pretrain_once: bool = _setting(False, "for all FedMD parties, which get the same model")
    local_epochs: int = _setting(1, "passes of a FedAvg party in a round", least=1)
    noise: str = _setting(
        "gumbel", "gumbel, laplace, gaussian or confident-gaussian", choices=VOTE_NOISES
    )
    gamma: float = _setting(
        0.0, "inverse scale of gumbel or laplace noise; 0: not given", optional=True
    )
    sigma: float = _setting(0.0, "deviation of gaussian noise; 0: not given", optional=True)
    target_epsilon: float = _setting(
        0.0, "calibrate the noise to it; 0: not given", optional=True
    )
    delta: float = _setting(0.00001, "delta of every privacy figure", above=0)
    threshold: float = _setting(
        0.0, "votes a confident answer needs; 0: not given", optional=True
    )
    threshold_sigma: float = _setting(0.0, "noise on these votes; 0: not given", optional=True)
    num_queries: int = _setting(
        0, "public rows labelled with noise; 0: by the share", optional=True
    )
    fraction_query: float = _setting(1.0, "share of public rows labelled with noise", above=0)
    seeded_noise: bool = _setting(False, "repeatable noise, which protects nobody")
    accept_noise: bool = _setting(False, "go on although noise drowns all answers")
    max_epsilon: float = _setting(0.0, "budget of server and parties; 0: none", optional=True)
    state_dir: str = _setting("", "folder where parties keep their ledgers; empty: none")
    seed: int = _setting(0, "decides every random choice of the experiment", least=0)
    max_wait: float = _setting(120.0, "seconds to wait for the parties to come", above=0)
    timeout: float = _setting(3600.0, "seconds to wait for their answers", above=0)
    min_parties: int = _setting(0, "fewest parties to go on with; 0: two", least=0)
    checkpoint_dir: str = _setting("", "folder that keeps a run to go on after a kill")
    resume: bool = _setting(False, "go on with the run in checkpoint-dir")
    num_trees: int = _setting(100, "trees of a forest", least=1)
    max_depth: int = _setting(0, "depth of trees; 0: unlimited, and 6 in boosting", least=0)
    boosting_rounds: int = _setting(100, "rounds of gradient boosting", least=1)
    boosting_learning_rate: float = _setting(0.3, "shrinkage of a boosting round", above=0)
    boosting_gamma: float = _setting(0.0, "least gain of a split in XGBoost", least=0)
    kernel: str = _setting(
        "rbf", "of kernel-ridge: linear, rbf, polynomial or laplace", choices=KERNELS
    )
    ridge: float = _setting(0.001, "penalty of kernel-ridge and ridge, per row", least=0)
    reveal_rows: bool = _setting(
        False, "kernel-ridge models may travel with their training rows"
    )
    epochs: int = _setting(30, "passes of a network over its data", least=1)
    batch_size: int = _setting(32, "rows in a step of a network", least=1)
    optimizer: str = _setting("adam", "adam or sgd", choices=("adam", "sgd"))
    momentum: float = _setting(0.9, "of sgd", least=0)
    learning_rate: float = _setting(0.001, "step size of the optimizer", above=0)
    end_learning_rate: float = _setting(0.0, "last of a cosine; 0: a hundredth", least=0)
    schedule: str = _setting(
        "constant", "of the step size: constant or cosine", choices=("constant", "cosine")
    )
    weight_decay: float = _setting(0.00001, "L2 penalty of the optimizer", least=0)
    augment: bool = _setting(False, "networks see images shifted and mirrored")
    final_learner_epochs: int = _setting(0, "epochs of the final model; 0: the same", least=0)
    final_learner_batch_size: int = _setting(0, "rows in its step; 0: the same", least=0)
    final_learner_rate: float = _setting(0.0, "its step size; 0: the same", least=0)
    output_dir: str = _setting("runs", "folder that gets one folder of results a run")
    solo: bool = _setting(True, "also train each party alone, to compare")
    central: bool = _setting(True, "also train on the pooled data, to compare")
    num_workers: int = _setting(0, "processes of the in-process runner; 0: one a core", least=0)

    def __post_init__(self) -> None:
        """Check types first, then each rule."""
        for item in fields(self):
            object.__setattr__(self, item.name, _typed(item.name, getattr(self, item.name)))
        for item in fields(self):
            _check_rules(_key(item.name), getattr(self, item.name), item.metadata)
        self._check_names()

    def _check_names(self) -> None:
        known = ", ".join(REGISTRY)
        require(self.strategy in REGISTRY, OWNER, "strategy", f"one of {known}", self.strategy)
        require(bool(self.output_dir), OWNER, "output-dir", "a folder", self.output_dir)
        guarded = bool(self.state_dir) or self.privacy_level == "L1" or not self.max_epsilon
        require(guarded, OWNER, "state-dir", "given with max-epsilon", self.state_dir)
        kept = bool(self.checkpoint_dir) or not self.resume
        require(kept, OWNER, "checkpoint-dir", "given with resume", self.checkpoint_dir)
        check_dataset_name(OWNER, self.data)
        check_public_name(OWNER, self.data, self.public)
        check_joint_classes(OWNER, self.public, self.joint_classes)
        _ = self.party_shares
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
    def party_shares(self) -> tuple[float, ...]:
        """Numbers in `shares`; none if all parties get the same."""
        try:
            return tuple(float(share) for share in self.shares.split(",") if self.shares)
        except ValueError:
            rule = "numbers with commas between them"
            raise InvalidParameter(
                f"{OWNER}: shares must be {rule}, got {self.shares!r}."
            ) from None

    def for_final_learner(self) -> Self:
        """Return the settings by which the server's model is made."""
        return replace(
            self,
            epochs=self.final_learner_epochs or self.epochs,
            batch_size=self.final_learner_batch_size or self.batch_size,
            learning_rate=self.final_learner_rate or self.learning_rate,
        )

    @property
    def longest_run(self) -> float:
        """Seconds after which a run must have ended: each round waits, trains and delivers."""
        return self.num_server_rounds * (self.max_wait + 2 * self.timeout)

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


def optional_settings() -> list[str]:
    """Return the names of the settings that 0 leaves out."""
    return [item.name for item in fields(Settings) if item.metadata["optional"]]


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
    names = sorted(item.name.removesuffix(".toml") for item in folder.iterdir())
    known = [name for name in names if "_" not in name]
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


def _check_rules(key: str, value: Any, rules: Mapping[str, Any]) -> None:
    least, above, choices = rules["least"], rules["above"], rules["choices"]
    if choices:
        require(value in choices, OWNER, key, f"one of {', '.join(choices)}", value)
    if least is not None:
        require(value >= least, OWNER, key, f"at least {least}", value)
    if above is not None:
        require(value > above, OWNER, key, f"greater than {above}", value)


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
