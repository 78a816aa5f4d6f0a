"""From settings to a federation: its data, its parties, its strategy and its comparisons.

FedMD's authors let every party train on labelled public rows first; Sun and Lyu start all
parties from one such model.
"""

import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any

import numpy as np

from fl_strategies import (
    REGISTRY,
    FedMDOptions,
    FedMomentsOptions,
    KnowledgeStrategy,
    LocalNoise,
    Party,
    SampleOnce,
    SumOptions,
    chain,
    find_algorithm,
)
from fl_strategies._util import Array, IntArray, derive_rng
from fl_strategies.errors import InvalidParameter, MissingExtra, StrategyError, between, require
from fl_strategies.learners import (
    METRICS,
    ContinuingLearner,
    Evaluation,
    Learner,
    LearnerFactory,
    PortableLearner,
    can_travel,
    evaluate_constant,
    evaluate_model,
    quality,
    variance_explained,
)
from fl_strategies.options import Options
from fl_strategies.server.run import OnRound
from fl_strategies.wire import keys
from simulations.config import FinalOptions, Settings
from simulations.data.schema import Schema
from simulations.data.sets import Dataset, Request, load_dataset
from simulations.data.splits import Deal, partition
from simulations.data.tables import listed
from simulations.models import LEARNERS, ModelOptions, learner_factory
from simulations.runtime.processes import all_workers_needed, become_worker

logger = logging.getLogger("flwr.fl_strategies")

OWNER = "Settings"
MAY_CHANGE = frozenset(
    {
        *("checkpoint-dir", "resume", "output-dir", "data-dir", "state-dir"),
        *("num-server-rounds", "then-rounds", "min-parties", "max-wait", "timeout"),
        *("solo", "pooled", "pooled-learner", "pate", "public-only", "num-workers"),
    }
)
"""Settings that a run may have another value of when it is resumed."""
USUAL = ("random-forest", "xgboost", "logistic-regression", "mlp")
"""Models that parties have by default, round-robin."""
SCORERS = ("xgboost-scores", "forest-scores", "mlp")
"""The same where models learn from scores or travel."""
FINAL = ("extra-trees", "xgboost-scores", "mlp")
REGRESSORS = ("forest-scores", "xgboost-scores", "ridge")
"""Models that parties and server have by default where targets are numbers."""
MARGIN = 1.0
MARGIN_WITH_NOISE = 0.1
WORD_MODEL = "embedding-bag"
MOST_CLASSES = 12
"""Classes that a description of the data names."""


def is_able(
    factory: LearnerFactory, needs: tuple[type, ...], *, if_missing: bool = False
) -> bool:
    """Return whether a learner has what is needed, or `if_missing` if it is not installed."""
    try:
        learner = factory()
    except MissingExtra:
        return if_missing
    except StrategyError:
        return False
    return has_all(learner, needs)


def has_all(learner: Learner, needs: tuple[type, ...]) -> bool:
    """Return whether a learner has all protocols, and can travel as it is set if it must."""
    at_hand = PortableLearner not in needs or can_travel(learner)
    return at_hand and all(isinstance(learner, need) for need in needs)


def learns_numbers(kind: type[KnowledgeStrategy[Any]]) -> bool:
    """Return whether a strategy learns numeric targets."""
    return "task" in kind.takes and "regression" in kind.tasks


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything a simulated run is made of, the same in every process for one seed."""

    settings: Settings
    dataset: Dataset
    rows: list[IntArray]
    """Row numbers of `dataset.x_train` that each party holds."""
    members: Mapping[int, int] | None = None
    """Parties by node id, where an operator knows."""

    @cached_property
    def kind(self) -> type[KnowledgeStrategy[Any]]:
        """The strategy's class."""
        return find_algorithm(self.settings.strategy).strategy

    @cached_property
    def kinds(self) -> tuple[type[KnowledgeStrategy[Any]], ...]:
        """The same, and the class that continues if there is one."""
        then = self.settings.then
        return (self.kind, find_algorithm(then).strategy) if then else (self.kind,)

    @cached_property
    def needs(self) -> tuple[tuple[type, ...], tuple[type, ...]]:
        """Protocols that the parties' models need, and the server's."""
        party = [need for kind in self.kinds for need in kind.party_learner_needs]
        final = [need for kind in self.kinds for need in kind.final_learner_needs]
        return tuple(dict.fromkeys(party)), tuple(dict.fromkeys(final))

    @property
    def same_learner(self) -> bool:
        """Whether all parties and the server need the same kind of model."""
        return any(kind.same_learner for kind in self.kinds)

    @cached_property
    def learner_names(self) -> tuple[str, ...]:
        """Models of the parties, round-robin: those asked for, or some that fit."""
        if self.settings.learner_names:
            return self.settings.learner_names
        if not (any(kind.parties_train for kind in self.kinds) or self.settings.solo):
            # Nothing is trained at a party, nor to compare: no other library need be loaded.
            return (self.final_learner,)
        needs, _ = self.needs
        if self.same_learner:
            return (self.settings.final_learner or self._fitting(SCORERS, needs)[0],)
        # A library that is not installed takes its model away, and no other.
        usual = all(is_able(self.factory(name), needs, if_missing=True) for name in USUAL)
        return self._fitting(USUAL if usual else SCORERS, needs)

    @cached_property
    def final_learner(self) -> str:
        """Model of the server: the one asked for, or one that fits."""
        if self.settings.final_learner:
            return self.settings.final_learner
        if self.same_learner or self.kind.relays_models:
            return self.learner_names[0]
        return self._fitting(self.kind.usual_final_learners or FINAL, self.needs[1])[0]

    def _fitting(self, names: Sequence[str], needs: tuple[type, ...]) -> tuple[str, ...]:
        """Return which of some models suit data and strategy; raise if none does."""
        words = self.dataset.x_train.dtype.kind in "iu"
        named = (WORD_MODEL,) if words else names
        if self.dataset.task == "regression" and names in (USUAL, SCORERS, FINAL):
            fit = [name for name in REGRESSORS if is_able(self.factory(name), needs)]
            named = tuple(fit) or named
        found = tuple(name for name in named if is_able(self.factory(name), needs))
        rule = f"given: none of {', '.join(named)} suits {self.settings.strategy} and the data"
        require(bool(found), "Settings", "learner", rule, self.settings.learner)
        return found

    @property
    def final_settings(self) -> ModelOptions:
        """Settings of the server's model; unset: the parties' if it is one of theirs."""
        own = self.settings.final
        if not (self.same_learner or self.kind.relays_models):
            return own
        usual = FinalOptions().to_config()
        given = {key: value for key, value in own.to_config().items() if value != usual[key]}
        return ModelOptions.from_config({**self.settings.to_config(), **given})

    def factory(self, name: str, settings: ModelOptions | None = None) -> LearnerFactory:
        """Return the factory of a party's learner for this data set."""
        data = self.dataset
        return learner_factory(
            name,
            row_shape=data.row_shape,
            num_classes=data.num_classes,
            task=data.task,
            settings=settings or self.settings,
        )

    def final_factory(self) -> LearnerFactory:
        """Return the factory of the server's learner."""
        return self.factory(self.final_learner, self.final_settings)

    def catalogue(self) -> dict[str, LearnerFactory]:
        """Return all learners that may travel in this federation, by name."""
        parties = {name: self.factory(name) for name in self.learner_names}
        return dict(sorted({self.final_learner: self.final_factory(), **parties}.items()))

    def party(self, partition_id: int) -> Party:
        """Return one party; parties cycle through the configured learners."""
        settings, data = self.settings, self.dataset
        last = settings.num_parties - 1
        known = 0 <= partition_id <= last
        require(known, "Federation", "partition-id", between(0, last), partition_id)
        rows = self.rows[partition_id]
        name = self.learner_names[partition_id % len(self.learner_names)]
        return Party(
            x=data.x_train[rows],
            y=data.y_train[rows],
            public=data.x_public,
            public_y=data.y_public,
            num_classes=data.num_classes,
            task=data.task,
            learner_fn=self.factory(name),
            teacher_fn=self.factory(settings.teacher) if settings.teacher else None,
            learner_name=name,
            partition_id=partition_id,
            x_test=data.x_test,
            y_test=data.y_test,
            public_test=True,
            encoding=data.encoding,
            catalogue={**self.catalogue(), self.final_learner: self.final_factory()},
        )

    def strategy(self, on_round: Sequence[OnRound] = ()) -> KnowledgeStrategy[Any]:
        """Return the strategy, or the chain of two."""
        settings = self.settings
        self._check_task()
        self._check_learners()
        run: dict[str, Any] = {
            "checkpoint_dir": settings.checkpoint_dir or None,
            "resume": settings.resume,
            "on_round": on_round,
        }
        if settings.then:
            options = settings.options, settings.then_options
            links = map(self._link, self.kinds, options)
            strategy: Any = chain(*links, num_rounds=settings.rounds_of_links, **run)
        else:
            strategy = self._link(self.kind, settings.options, **run)
        kept = settings.to_run_config().items()
        strategy.run_settings = {key: value for key, value in kept if key not in MAY_CHANGE}
        return strategy  # type: ignore[no-any-return]

    def _link(
        self, kind: type[KnowledgeStrategy[Any]], options: Options, **kept: Any
    ) -> KnowledgeStrategy[Any]:
        """Return one strategy, made of what it takes."""
        settings = self.settings
        data = self.dataset
        available: dict[str, Any] = {
            "public": data.x_public if len(data.x_public) else None,
            "num_classes": self.dataset.num_classes,
            "task": self.dataset.task,
            "learner_fn": self.final_factory(),
            "learner_name": self.final_learner,
            "student_fns": self.catalogue(),
            "model_fns": self.catalogue(),
            "options": options,
            "target_bounds": self._target_bounds(options),
        }
        if isinstance(options, FedMDOptions):
            available |= self._fedmd(options)
        if isinstance(options, SumOptions):
            # How many records there are is public in every claim; a deployed server has none.
            expected = options.num_records or sum(map(len, self.rows)) or None
            available["options"] = replace(options, num_records=expected)
        if data.schema is not None:
            available |= self._declared(kind, available["options"], data.schema)
        return kind(
            num_parties=settings.num_parties,
            seed=settings.seed,
            min_parties=settings.min_parties or min(2, settings.num_parties),
            fraction_train=settings.fraction_train,
            min_train_nodes=settings.min_train_nodes,
            max_wait=settings.max_wait,
            half_precision=settings.half_precision,
            encoding=self.dataset.encoding,
            members=self.members,
            **kept,
            **{name: available[name] for name in kind.takes if name in available},
        )

    def _declared(
        self, kind: type[KnowledgeStrategy[Any]], options: Options, schema: Schema
    ) -> dict[str, Any]:
        """Return what a schema decides about a strategy."""
        found = len(self.dataset.x_public) or not kind.needs_public
        able = [name for name, one in REGISTRY.items() if not one.strategy.needs_public]
        rule = f"one of {', '.join(able)} without public rows, which a schema does not replace"
        require(bool(found), OWNER, "strategy", rule, kind.name)
        declared: dict[str, Any] = {"bounds": schema.bounds}
        if getattr(options, "target_bounds", None) is None:
            declared["target_bounds"] = schema.target_bounds
        if isinstance(options, FedMomentsOptions) and options.row_length is None:
            length = schema.longest_row if options.privacy is None else schema.row_length
            declared["options"] = replace(options, row_length=length)
        return declared

    def _target_bounds(self, options: Options) -> tuple[Array, Array] | None:
        """Return how far numeric targets may reach, by public ones, unless it is declared.

        Without noise, where a wide reach costs next to nothing, as far again on either side
        as public targets lie apart; with noise a tenth of it.
        """
        ends = self.dataset.target_range
        if ends is None or getattr(options, "target_bounds", None) is not None:
            return None
        noisy = getattr(options, "privacy", None) is not None
        room = ((ends[1] - ends[0]) or 1.0) * (MARGIN_WITH_NOISE if noisy else MARGIN)
        return np.array([ends[0] - room]), np.array([ends[1] + room])

    def _fedmd(self, options: FedMDOptions) -> dict[str, Any]:
        """Return what a simulation decides about FedMD: rounds planned, a first model."""
        release = options.release
        if isinstance(release, LocalNoise) and release.target_epsilon is not None:
            planned = release.num_rounds_planned or self.settings.rounds_of_links[0]
            options = replace(options, release=replace(release, num_rounds_planned=planned))
        if not self.settings.pretrain_once:
            return {"options": options}
        first = replace(options, pretrain_epochs=0)
        return {"options": first, "pretrained": self.shared_start}

    def _check_task(self) -> None:
        """Raise before anything is trained if a strategy does not learn what labels are."""
        if self.dataset.task != "regression":
            return
        able = [name for name, one in REGISTRY.items() if learns_numbers(one.strategy)]
        rule = f"one of {', '.join(able)} for numeric targets"
        for key, kind in zip(("strategy", "then"), self.kinds, strict=False):
            require(learns_numbers(kind), OWNER, key, rule, getattr(self.settings, key))

    def _check_learners(self) -> None:
        """Raise before anything is trained if a model does not fit data or strategy."""
        smallest, (party_needs, final_needs) = min(map(len, self.rows)), self.needs
        for name in sorted({*self.learner_names}):
            self._check_learner("learner", name, party_needs)
        self._check_learner("final-learner", self.final_learner, final_needs)
        same = not self.same_learner or {*self.learner_names} == {self.final_learner}
        rule = f"the final-learner for {self.settings.strategy}"
        require(same, "Settings", "learner", rule, ",".join(self.learner_names))
        sample = getattr(self.settings.options, "release", None)
        if isinstance(sample, SampleOnce) and not sample.with_replacement:
            rule = f"at most {smallest}, the records of the smallest party"
            fits = sample.num_samples <= smallest
            require(fits, "Settings", "num-samples", rule, sample.num_samples)

    def _check_learner(self, key: str, name: str, needs: tuple[type, ...]) -> None:
        learner = self.factory(name)()
        if not has_all(learner, needs):
            able = [n for n in LEARNERS if is_able(self.factory(n), needs)]
            rule = f"one of {', '.join(able)} for {self.settings.strategy}"
            require(False, "Settings", key, rule, name)
        words = self.dataset.x_train.dtype.kind in "iu"
        rule = "a model of numbers; this one takes words (data such as ag-news-tokens)"
        require(words or name != "embedding-bag", "Settings", key, rule, name)
        make_module = getattr(learner, "module_fn", None)
        if make_module is not None:
            make_module()  # names a network that does not take these rows
        load_kernels = getattr(learner, "load_kernels", None)
        if load_kernels is not None:
            load_kernels()  # once, and not in each of the workers

    def describe_data(self) -> str:
        """Return what was made of the data: columns, classes and rows per party.

        All rows count, private ones too, so it is for the people of a simulation.
        """
        data, sizes = self.dataset, [*map(len, self.rows)]
        labels = [y for y in (data.y_train, data.y_public, data.y_test) if y is not None]
        all_labels = np.concatenate(labels)
        if data.task == "regression":
            low, median, high = np.quantile(all_labels, (0.0, 0.5, 1.0))
            target = f"{data.classes[0]} from {low:.6g} to {high:.6g}, median {median:.6g}"
            said = f"numbers to predict: {target}"
        else:
            counts = np.bincount(all_labels, minlength=len(data.classes))
            shares = [
                f"{name} {100 * count / max(len(all_labels), 1):.1f} %"
                for name, count in zip(data.classes, counts, strict=True)
            ]
            said = f"classes: {listed(shares, MOST_CLASSES)}"
        each = f"{min(sizes)} to {max(sizes)}" if len({*sizes}) > 1 else str(sizes[0])
        parties = "one party" if len(sizes) == 1 else f"{len(sizes)} parties of {each}"
        held_out = f"{len(data.x_public)} public, {len(data.x_test)} test"
        lines = [
            data.name,
            *(data.understood or [f"rows of shape {data.row_shape}"]),
            said,
            f"rows: {sum(sizes)} private in {parties}, {held_out}",
        ]
        return "\n  ".join(lines)

    @property
    def metric(self) -> str:
        """Name of the metric by which models are compared; larger is better."""
        return keys.R2 if self.dataset.task == "regression" else METRICS[self.dataset.task]

    def quality(self, model: Learner) -> float:
        """Return a model's accuracy, or the metric of another task, on the test rows."""
        data = self.dataset
        if data.task == "regression":
            return self.evaluate(model).metrics[self.metric]
        return quality(model, data.x_test, data.y_test, data.task)

    def evaluate(self, model: Learner) -> Evaluation:
        """Return all metrics of a model on the test rows."""
        data = self.dataset
        return self._by_metric(evaluate_model(model, data.x_test, data.y_test, data.task))

    def _by_metric(self, found: Evaluation) -> Evaluation:
        """Return an evaluation whose shares per row have the metric as their mean."""
        numeric = self.dataset.task == "regression"
        return variance_explained(found, self.dataset.y_test) if numeric else found

    def evaluate_majority(self) -> Evaluation:
        """Evaluate the constant answer that fits the private rows of all parties best."""
        data = self.dataset
        targets = data.y_train[np.concatenate(self.rows)]
        return self._by_metric(
            evaluate_constant(targets, data.y_test, data.num_classes, data.task)
        )

    def evaluate_party(self, partition_id: int) -> Evaluation:
        """Train one party's model on its own records alone, as many as it may use."""
        party, settings = self.party(partition_id), self.settings
        rng = derive_rng(settings.seed, "party", partition_id, "solo")
        x, y = party.x, party.y
        sample = getattr(settings.options, "release", None)
        if isinstance(sample, SampleOnce):
            drawn = derive_rng(settings.seed, "party", partition_id, "solo sample").choice(
                len(y), size=sample.num_samples, replace=sample.with_replacement
            )
            x, y = x[drawn], y[drawn]
        return self.evaluate(self._trained_alone(party, x, y, rng))

    def _trained_alone(
        self, party: Party, x: Array, y: IntArray, rng: np.random.Generator
    ) -> Learner:
        """Train on some records; before that on public rows, if the federation does so."""
        learner, settings = party.learner_fn(), self.settings
        early = getattr(settings.options, "pretrain_epochs", 0) > 0
        if not early or not isinstance(learner, ContinuingLearner):
            return learner.fit(x, y, rng=rng)
        if settings.pretrain_once:
            learner = learner.from_arrays(self.shared_start)
        else:
            learner = self._pretrained(learner, party.rng(settings.seed, "pretrain"))
        return learner.partial_fit(x, y, rng=rng, epochs=settings.epochs)

    @cached_property
    def shared_start(self) -> dict[str, Array]:
        """The model that all parties start from with `pretrain-once`, as arrays."""
        names, rule = self.learner_names, "the final-learner with pretrain-once"
        require({*names} == {self.final_learner}, OWNER, "learner", rule, ",".join(names))
        rng = derive_rng(self.settings.seed, "pretrain")
        return self._pretrained(self.factory(self.final_learner)(), rng).to_arrays()

    def _pretrained(self, learner: Learner, rng: np.random.Generator) -> ContinuingLearner:
        """Return a learner after `pretrain-epochs` passes over the public rows."""
        settings, data = self.settings, self.dataset
        epochs = getattr(settings.options, "pretrain_epochs", 0)
        require(epochs > 0, OWNER, "pretrain-epochs", "at least 1 with pretrain-once", epochs)
        if not isinstance(learner, ContinuingLearner):
            raise InvalidParameter(
                f"{OWNER}: learner must be a network, which continues learning, to train on "
                f"public rows first, got {settings.learner!r}."
            )
        if data.y_public is None:
            raise InvalidParameter(
                f"{OWNER}: joint-classes must be true for public rows of another set to have "
                "labels, got False."
            )
        return learner.partial_fit(data.x_public, data.y_public, rng=rng, epochs=epochs)

    def evaluate_parties(self, num_workers: int = 1) -> Iterator[Evaluation]:
        """Train every party alone; with several workers, in forked processes."""
        logger.info("Training every party alone for comparison.")
        numbers = range(self.settings.num_parties)
        if num_workers == 1:
            yield from map(self.evaluate_party, numbers)
            return
        fork = multiprocessing.get_context("fork")
        with (
            all_workers_needed("Federation"),
            ProcessPoolExecutor(
                num_workers, mp_context=fork, initializer=become_worker
            ) as workers,
        ):
            yield from workers.map(_evaluate_party, repeat(self.settings), numbers)

    def evaluate_pooled(self) -> Evaluation:
        """Train on all private data pooled, by the final learner or another: no federation."""
        logger.info("Training on the pooled data for comparison.")
        rng = derive_rng(self.settings.seed, "central")
        name = self.settings.pooled_learner
        model = (self.factory(name) if name else self.final_factory())()
        return self.evaluate(model.fit(self.dataset.x_train, self.dataset.y_train, rng=rng))


@lru_cache(maxsize=1)
def load_federation(settings: Settings) -> Federation:
    """Load the data and deal it to the parties."""
    rng = np.random.RandomState(settings.seed)
    request = Request(
        rng=rng,
        data_dir=settings.data_dir,
        label=settings.label,
        task=settings.task,
        drop=settings.drop,
        public=settings.public,
        joint_classes=settings.joint_classes,
        public_labels=settings.public_labels,
        num_train=settings.train_rows,
        num_public=settings.public_rows,
        num_test=settings.test_rows,
        encoder=settings.encoder,
        standardise=settings.standardise,
        schema=settings.schema,
        without_public=settings.without_public,
    )
    data = load_dataset(settings.data, request)
    deal = Deal(
        y=data.y_train,
        num_parties=settings.num_parties,
        scheme=settings.partition,
        num_classes=data.num_private_classes,
        rng=rng,
        min_records=settings.min_records,
        beta=settings.beta,
        balanced=settings.balanced,
        mixing=settings.mixing,
        shares=settings.party_shares,
        groups=data.groups,
    )
    return Federation(settings, data, partition(deal))


def _evaluate_party(settings: Settings, partition_id: int) -> Evaluation:
    return load_federation(settings).evaluate_party(partition_id)
