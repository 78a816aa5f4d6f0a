"""Every setting of a run: typed, validated, and with the same names everywhere.

A setting is `snake_case` in Python and `kebab-case` in `[tool.flwr.app.config]`, on the
command line and in result files. What is set about a strategy is defined by its options. In a
run configuration they have a section of their own (``fedmd.release``); elsewhere the short
name means the chosen strategy's own (``release``).
"""

import functools
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, ClassVar, Final, Self, TypeAlias

from fl_strategies import FLOWER_STRATEGIES, REGISTRY, LocalNoise, find_algorithm
from fl_strategies._util import nearest_name
from fl_strategies.errors import InvalidParameter, require
from fl_strategies.options import Options, Setting, key_of, option, require_setting
from fl_strategies.registry import DEFAULT_STRATEGY
from simulations.data.sets import check_dataset_name, check_encoder, check_public, check_schema
from simulations.data.splits import Scheme
from simulations.data.targets import LabelKind
from simulations.models import ModelOptions, check_learner_name

Value: TypeAlias = str | int | float | bool

OWNER: Final = "Settings"
FINAL: Final = "final."
"""Prefix of the settings of the server's model."""
TITLES: Final[Mapping[str, str]] = {
    "strategy": "The federation",
    "data": "Data",
    "partition": "How rows are dealt to parties",
    "learner": "Models by name",
    "delta": "Privacy",
    "max-wait": "Rounds and messages",
    "output-dir": "Results, checkpoints, processes",
    "solo": "Baselines",
    "num-trees": "Models of the parties",
    "final-learner-epochs": "Old names, for one release",
    "final.num-trees": "Model of the server; unset: the parties' if it is one of theirs",
}
"""Titles of groups of settings, by the first key of each."""
RENAMED: Final[Mapping[str, tuple[str, Value]]] = {
    "final-learner-epochs": ("final.epochs", 0),
    "final-learner-batch-size": ("final.batch-size", 0),
    "final-learner-rate": ("final.learning-rate", 0.0),
    "central": ("pooled", True),
    "central-learner": ("pooled-learner", ""),
}
"""Old names that work for one release: the new name, and the value that means nothing."""

logger = logging.getLogger("flwr.fl_strategies")


@dataclass(frozen=True, kw_only=True)
class FinalOptions(ModelOptions):
    """Hyper-parameters of the server's model, in the section ``final``."""

    owner: ClassVar[str] = "Settings.final"
    names_keys: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Settings(ModelOptions):
    """All settings of one run; `describe()` tells what each means.

    Examples
    --------
    >>> Settings.of(num_parties=0)
    Traceback (most recent call last):
    fl_strategies.errors.InvalidParameter: Settings: num-parties must be at least 1, got 0.
    >>> Settings.from_run_config({"num-partys": 8})
    Traceback (most recent call last):
    fl_strategies.errors.InvalidParameter: Settings: key must be a known setting, \
got 'num-partys'. Did you mean 'num-parties'?
    >>> Settings.of(strategy="fedmd", num_splits=2)
    Traceback (most recent call last):
    fl_strategies.errors.InvalidParameter: Settings: key must be a setting of fedmd, \
got 'num-splits', which fedkt has.
    """

    owner: ClassVar[str] = OWNER
    names_keys: ClassVar[bool] = True

    strategy: str = option(DEFAULT_STRATEGY, "name of the strategy")
    num_parties: int = option(6, "parties in the federation", least=1)
    num_server_rounds: int = option(0, "rounds; 0: the strategy's usual number", least=0)
    then: str = option("", "strategy that continues with the final model; empty: none")
    then_rounds: int = option(0, "its rounds; 0: its usual number", least=0)
    seed: int = option(0, "decides every random choice of the experiment", least=0)
    data: str = option("digits", "a data set by its name, FILE.npz or FILE.csv")
    data_dir: str = option("", "folder with data files; empty: $FL_STRATEGIES_DATA")
    label: str = option("", "label column of FILE.csv")
    task: LabelKind = option("auto", "labels of a file; auto: by public ones")
    drop: str = option("", "columns of FILE.csv to drop, comma-separated")
    encoder: str = option("", "frozen encoder of images or texts, see docs; empty: none")
    standardise: bool = option(False, "scale the encoder's columns by public rows")
    schema: str = option("", "file that declares columns, label, bounds; empty: none")
    public: str = option("", "image set that gives the public rows; empty: the data's own")
    joint_classes: bool = option(False, "public images of another set keep their classes")
    train_rows: int = option(0, "most private rows of all parties; 0: all", least=0)
    public_rows: int = option(0, "most public rows; 0: all", least=0)
    test_rows: int = option(0, "most test rows; 0: all", least=0)
    partition: Scheme = option("dirichlet", "how rows are dealt")
    beta: float = option(0.5, "Dirichlet concentration; smaller: parties less alike", above=0)
    balanced: bool = option(True, "Dirichlet parties of about the same size")
    mixing: float = option(0.0, "share of rows that pooled-halves deals anew", least=0)
    shares: str = option("", "parties' shares of the rows, such as 0.7,0.3; empty: equal")
    min_records: int = option(10, "fewest records of a party", least=0)
    learner: str = option("", "party models, assigned round-robin; empty: some that fit")
    teacher: str = option("", "model of teachers, if there are any; empty: the party's")
    final_learner: str = option("", "model that the server trains; empty: one that fits")
    pretrain_once: bool = option(False, "one pre-trained model for all parties")
    delta: float = option(0.00001, "delta of every epsilon", above=0)
    max_epsilon: float = option(0.0, "budget of server and parties; 0: none", least=0)
    state_dir: str = option("", "folder where parties keep their ledgers; empty: none")
    max_wait: float = option(120.0, "seconds to wait for the parties to come", above=0)
    timeout: float = option(3600.0, "seconds to wait for their answers", above=0)
    min_parties: int = option(0, "fewest parties to continue with; 0: two", least=0)
    fraction_train: float = option(1.0, "share of the parties a round asks", above=0, most=1)
    min_train_nodes: int = option(1, "fewest parties a round asks", least=1)
    half_precision: bool = option(False, "models travel as float16")
    output_dir: str = option("runs", "folder that gets one folder of results a run")
    checkpoint_dir: str = option("", "folder that keeps a run, to resume after a kill")
    resume: bool = option(False, "resume the run in checkpoint-dir")
    num_workers: int = option(0, "processes of the in-process runner; 0: one per core", least=0)
    solo: bool = option(True, "also train each party alone, to compare")
    pooled: bool = option(True, "also train on the pooled data, to compare")
    pooled_learner: str = option("", "model of the pooled data; empty: the final one")
    pate: bool = option(False, "also train PATE on the pooled data, to compare")
    public_only: bool = option(False, "also train on labelled public rows alone, to compare")
    final: FinalOptions = field(default_factory=FinalOptions)
    """Settings of the server's model."""
    options: Options = field(default_factory=Options)
    """Settings of the strategy."""
    then_options: Options = field(default_factory=Options)
    """Settings of the strategy that continues, by its section alone."""

    def __post_init__(self) -> None:
        """Check each setting, then what goes together."""
        super().__post_init__()
        for key, name in (("options", self.strategy), ("then_options", self.then)):
            kind, given = options_of(name) if name else Options, getattr(self, key)
            if type(given) is Options:
                object.__setattr__(self, key, kind())
            fits, rule = isinstance(getattr(self, key), kind), f"those of {name}"
            require(fits, OWNER, key, rule, type(given).__name__)
        self._check_names()

    def _check_names(self) -> None:
        require(bool(self.output_dir), OWNER, "output-dir", "a folder", self.output_dir)
        at_server = self.chosen().get("privacy-level") == "L1"
        guarded = bool(self.state_dir) or at_server or not self.max_epsilon
        require(guarded, OWNER, "state-dir", "given with max-epsilon", self.state_dir)
        require(bool(self.then) or not self.then_rounds, OWNER, "then", "given", self.then)
        kept = bool(self.checkpoint_dir) or not self.resume
        require(kept, OWNER, "checkpoint-dir", "given with resume", self.checkpoint_dir)
        kinds = {name: algorithm.strategy for name, algorithm in REGISTRY.items()}
        teach = [n for n in kinds if "num-teachers" in kinds[n].options_type.settings()]
        start = [n for n in kinds if "pretrained" in kinds[n].takes]
        for key, value, owners in (
            ("teacher", self.teacher, teach),
            ("pretrain-once", self.pretrain_once, start),
        ):
            fits, rule = not value or self.strategy in owners, "omitted unless for "
            require(fits, OWNER, key, rule + " or ".join(owners), value)
        check_dataset_name(OWNER, self.data)
        check_public(OWNER, self.data, self.public, self.joint_classes)
        check_encoder(OWNER, self.data, self.encoder, standardise=self.standardise)
        check_schema(OWNER, self.data, self.schema, self.encoder, self.drop)
        _ = self.party_shares
        for name in self.learner_names:
            check_learner_name(OWNER, "learner", name)
        for key in ("teacher", "final-learner", "pooled-learner"):
            if name := getattr(self, key.replace("-", "_")):
                check_learner_name(OWNER, key, name)

    @property
    def learner_names(self) -> tuple[str, ...]:
        """Names in `learner`, assigned round-robin; none if some are to be chosen."""
        return tuple(name.strip() for name in self.learner.split(",") if self.learner)

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

    @property
    def rounds_of_links(self) -> tuple[int, ...]:
        """Rounds of the strategy, as asked for or as usual, and of one that continues."""
        release = getattr(self.options, "release", None)
        planned = release.rounds_planned if isinstance(release, LocalNoise) else None
        names = [self.strategy, *filter(None, [self.then])]
        usual, *later = [find_algorithm(name).strategy.usual_rounds for name in names]
        first = self.num_server_rounds or planned or usual
        return first, *(self.then_rounds or number for number in later)

    @property
    def num_rounds(self) -> int:
        """Rounds of the whole run."""
        return sum(self.rounds_of_links)

    @property
    def public_labels(self) -> bool:
        """Whether anybody learns from labels of public rows."""
        asked = ("public_labels", "pretrain_epochs")
        return self.public_only or any(getattr(self.options, name, False) for name in asked)

    @property
    def without_public(self) -> bool:
        """Whether a schema stands for public rows: nobody needs any, or asks for some."""
        kinds = [
            find_algorithm(name).strategy for name in filter(None, [self.strategy, self.then])
        ]
        needed = any(kind.needs_public for kind in kinds) or self.public_labels or self.pate
        return bool(self.schema) and not self.public_rows and not needed

    @property
    def longest_run(self) -> float:
        """Seconds after which a run must have ended: each round waits, trains and delivers."""
        return self.num_rounds * (self.max_wait + 2 * self.timeout)

    @property
    def workers(self) -> int:
        """Processes to use on this machine."""
        return self.num_workers or os.cpu_count() or 1

    @classmethod
    def of(cls, **given: object) -> Self:
        """Return settings by snake_case names, those of the strategy too; None: not given."""
        whole = {key_of(name): value for name, value in given.items()}
        strategy = str(whole.get("strategy", DEFAULT_STRATEGY))
        known = known_settings(strategy)
        for key in whole:
            _require_known(strategy, key)
        return cls.from_run_config(
            {
                key: known[key].kind() if value is None else _plain(value)
                for key, value in whole.items()
            }
        )

    def but(self, **changes: object) -> Self:
        """Return the same settings except for some; see `of`."""
        own = self.chosen() if changes.get("strategy", self.strategy) == self.strategy else {}
        later = self._later() if changes.get("then", self.then) == self.then else {}
        given = {key.replace("-", "_"): v for key, v in {**self.to_config(), **own}.items()}
        return self.of(**{**given, **self._final(), **later, **changes})

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Value], **overrides: Value) -> Self:
        """Return settings from kebab-case keys; what is missing keeps its default.

        Parameters
        ----------
        run_config : mapping
            Keys as in `Context.run_config`, with or without the strategy's section.
        **overrides
            Snake-case settings that win over `run_config`.
        """
        given = {**run_config, **{key_of(name): value for name, value in overrides.items()}}
        given = by_new_names(given)
        strategy = str(given.get("strategy", DEFAULT_STRATEGY))
        for key in given:
            _require_known(strategy, key)
        final = {k.removeprefix(FINAL): v for k, v in given.items() if k.startswith(FINAL)}
        short = {key: value for key, value in given.items() if "." not in key}
        section, known = _own_section(strategy, given), cls.settings()
        own = section | {
            key: value
            for key, value in short.items()
            # A default for all strategies decides nothing that one of them was given.
            if key not in section or key not in known or value != known[key].default
        }
        settings = cls.from_config({k: value for k, value in short.items() if k in known})
        then = settings.then
        later = options_of(then).from_config(_own_section(then, given)) if then else Options()
        return replace(
            settings,
            final=FinalOptions.from_config(final),
            options=options_of(strategy).from_config(own),
            then_options=later,
        )

    def chosen(self) -> dict[str, Value]:
        """Return what is set about the strategy, by short keys; 0 where nothing is."""
        whole = {key: setting.default for key, setting in self.options.settings().items()}
        return {**whole, **self.options.to_config()}

    def to_run_config(self) -> dict[str, Value]:
        """Return all settings as a run configuration has them."""
        section = section_of(self.strategy)
        own = {f"{section}.{key}": value for key, value in self.chosen().items()}
        return {**self.to_config(), **self._final(), **own, **self._later()}

    def _final(self) -> dict[str, Value]:
        return {f"{FINAL}{key}": value for key, value in self.final.to_config().items()}

    def _later(self) -> dict[str, Value]:
        """Return what is set about the strategy that continues, in its section."""
        section = section_of(self.then)
        return {f"{section}.{key}": v for key, v in self.then_options.to_config().items()}

    def to_report(self) -> dict[str, Value]:
        """Return all settings by short keys, as results have them."""
        return {**self.to_config(), **self._final(), **self.chosen(), **self._later()}


def _plain(value: object) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def options_of(strategy: str) -> type[Options]:
    """Return what can be set about a strategy."""
    return find_algorithm(strategy).strategy.options_type


def section_of(strategy: str) -> str:
    """Return the section of a strategy's settings, whose name TOML takes without quotes.

    Examples
    --------
    >>> section_of("fedkt"), section_of("flower:FedProx")
    ('fedkt', 'flower-fedprox')
    """
    return strategy.replace(":", "-").lower()


def all_sections() -> dict[str, str]:
    """Return all strategies, ours and Flower's, by their sections."""
    return {section_of(name): name for name in [*REGISTRY, *FLOWER_STRATEGIES]}


def known_settings(strategy: str) -> Mapping[str, Setting]:
    """Return all settings of a run of a strategy, by short keys."""
    return {**options_of(strategy).settings(), **common_settings()}


@functools.cache
def common_settings() -> Mapping[str, Setting]:
    """Return the settings that runs of all strategies have, those of models last."""
    own, models = Settings.settings(), ModelOptions.settings()
    first = {key: setting for key, setting in own.items() if key not in models}
    old = {
        key: Setting(key, type(absent), absent, f"old name of {new}", (), False)
        for key, (new, absent) in RENAMED.items()
    }
    final = {f"{FINAL}{key}": one for key, one in FinalOptions.settings().items()}
    return {**first, **models, **old, **final}


def by_new_names(given: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings by their current names; warn about old ones."""
    current = {key: value for key, value in given.items() if key not in RENAMED}
    for old in given.keys() & RENAMED.keys():
        new, absent = RENAMED[old]
        if given[old] != absent:
            logger.warning("Settings: %s is now %s; the next release forgets it.", old, new)
            current[new] = given[old]
    return current


def as_published(given: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings of a paper's experiment, whose hyper-parameters all models have.

    Examples
    --------
    >>> as_published({"epochs": 3, "max-depth": 6, "final-learner-epochs": 9})
    {'epochs': 3, 'max-depth': 6, 'final.epochs': 9, 'final.max-depth': 6}
    """
    renamed = {
        RENAMED[k][0]: v for k, v in given.items() if k in RENAMED and v != RENAMED[k][1]
    }
    plain = {key: value for key, value in given.items() if key not in RENAMED}
    final = {f"{FINAL}{k}": v for k, v in plain.items() if k in FinalOptions.settings()}
    return {**plain, **final, **renamed}


def _own_section(strategy: str, given: Mapping[str, Value]) -> dict[str, Value]:
    """Return what a strategy's section says; raise for a section or key that is unknown."""
    own = {}
    for key, value in given.items():
        section, dot, short = key.partition(".")
        if not dot or key.startswith(FINAL):
            continue
        require_setting(OWNER, section, all_sections())
        name = all_sections()[section]
        require_setting(f"{OWNER} of {name}", short, options_of(name).settings())
        if name == strategy:
            own[short] = value
    return own


def _require_known(strategy: str, key: str) -> None:
    """Raise for a setting that a run of this strategy does not have."""
    known = known_settings(strategy)
    if key in known or ("." in key and not key.startswith(FINAL)):
        return
    owners: dict[str, list[str]] = {}
    for name in all_sections().values():
        for setting in options_of(name).settings():
            owners.setdefault(setting, []).append(name)
    if others := owners.get(key):
        raise InvalidParameter(
            f"{OWNER}: key must be a setting of {strategy}, got {key!r}, which "
            f"{', '.join(others)} {'has' if len(others) == 1 else 'have'}."
        )
    near = nearest_name(key, [*known, *owners])
    if near and near not in known:
        raise InvalidParameter(
            f"{OWNER}: key must be a known setting, got {key!r}. "
            f"Did you mean {near!r}, a setting of {', '.join(owners[near])}?"
        )
    require_setting(OWNER, key, known)


def describe() -> Iterator[tuple[str, Value, str]]:
    """Give key, default and meaning of every setting, in the sections of a run config."""
    of_strategies = {
        f"{section}.{key}": setting
        for section, name in all_sections().items()
        for key, setting in options_of(name).settings().items()
    }
    for key, setting in {**common_settings(), **of_strategies}.items():
        choices = f": {' '.join(setting.choices)}" if setting.choices else ""
        yield key, setting.default, setting.meaning + choices


def parse_assignments(texts: Sequence[str], *strategies: str) -> dict[str, Value]:
    """Read `key=value` texts of the command line; each setting decides its type.

    Parameters
    ----------
    texts : sequence of str
    *strategies : str
        Whose settings may be given; the default strategy's if none is named.

    Examples
    --------
    >>> parse_assignments(["beta=1", "release=nfdp"], "fedmd")
    {'beta': 1.0, 'release': 'nfdp'}
    """
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        require(bool(equals), OWNER, "an assignment", "of the form key=value", text)
        pairs[key.strip()] = value.strip()
    named = [pairs["strategy"]] if "strategy" in pairs else strategies or [DEFAULT_STRATEGY]
    return {key: _setting(named, key).parse(OWNER, value) for key, value in pairs.items()}


def _setting(strategies: Sequence[str], key: str) -> Setting:
    section, dot, short = key.rpartition(".")
    if dot and not key.startswith(FINAL):
        require_setting(OWNER, section, all_sections())
        known = options_of(all_sections()[section]).settings()
        require_setting(OWNER, short, known)
        return known[short]
    whose = [name for name in strategies if key in known_settings(name)] or strategies
    _require_known(whose[0], key)
    return known_settings(whose[0])[key]


PRESETS: Final = ("paper",)


def published_strategies() -> list[str]:
    """Return the strategies whose papers' settings are known."""
    files = (item.name for item in (resources.files("simulations") / "presets").iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def paper_table(strategy: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what a paper says about a strategy, by data set.

    Each data set has the tables `settings` (kebab-case keys), `published` (the paper's
    results) and `expected` (what our own runs must reach).
    """
    folder, known = resources.files("simulations") / "presets", published_strategies()
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
    return {"strategy": strategy, "data": data, **as_published(table[data]["settings"])}
