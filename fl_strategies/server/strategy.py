"""One round of knowledge transfer as a Flower strategy: ask, collect, combine, deliver.

Subclasses say what to ask of a party, how to read its answer and how to combine the
answers. Here is the rest: waiting for the parties, one deterministic order of replies,
excluding a bad reply without ending the run, metrics, and the delivery of the result.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypedDict, TypeVar, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fl_strategies._compat import warn_of_untested_flower
from fl_strategies._util import (
    Array,
    content_hash,
    derive_rng,
    nearest_name,
    require_argument,
    to_rows,
)
from fl_strategies.errors import (
    InvalidParameter,
    NotEnoughParties,
    NotFitted,
    PrivacyBudgetExceeded,
    RunFailed,
    UnsupportedLearner,
    require,
)
from fl_strategies.learners import (
    Learner,
    LearnerFactory,
    Task,
    can_travel,
    check_made,
    require_portable,
)
from fl_strategies.options import Options, key_of
from fl_strategies.party.party import check_rows
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.ledger import PrivacyLedger, describe_releases
from fl_strategies.privacy.noise import require_useful_signal
from fl_strategies.release import PrivateVariant, ReleasePlan, open_charges
from fl_strategies.server.replies import (
    EVALUATION,
    Known,
    PartyReply,
    PartyReport,
    aggregate_metrics,
    check_claim,
    cut_short,
    enter_reported,
    holders,
    metrics_by_party,
    most_expensive,
    parse_reply,
    registered,
    settle,
    wait_for_parties,
    without_unknown,
)
from fl_strategies.server.run import Callbacks, Checkpoint, EvaluateFn, OnRound, Run, State
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    HALF_PRECISION,
    MAX_REPLY_BYTES,
    Knowledge,
    Metrics,
    Scalar,
    as_meant,
    decode_arrays,
    encode_arrays,
    offer,
    write_messages,
)


def described(value: object) -> object:
    """Return a setting as JSON has it; of code, which has none, only that it is there."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return content_hash(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: described(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): described(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    return value if isinstance(value, str | int | float | None) else "..."


class FederationOptions(TypedDict, total=False):
    """Keyword arguments that all strategies take; see `KnowledgeStrategy`."""

    num_parties: int
    min_available_nodes: int
    min_parties: int
    fraction_train: float
    min_train_nodes: int
    max_wait: float
    seed: int
    evaluate: bool
    max_reply_bytes: int
    half_precision: bool
    encoding: str
    members: Mapping[int, int] | None
    checkpoint_dir: str | Path | None
    resume: bool
    on_round: OnRound | Sequence[OnRound] | None


def completed(owner: str, given: FederationOptions) -> FederationOptions:
    """Return all options that have a default; raise `InvalidParameter` for a broken rule."""
    number = given.get("num_parties", given.get("min_available_nodes", 2))
    same = given.get("min_available_nodes", number) == number
    rule = f"omitted, or num_parties={number}, which means the same"
    require(same, owner, "min_available_nodes", rule, given.get("min_available_nodes"))
    options: FederationOptions = {
        "min_parties": min(2, number),
        "fraction_train": 1.0,
        "min_train_nodes": 1,
        "max_wait": 120.0,
        "seed": 0,
        "evaluate": True,
        "max_reply_bytes": MAX_REPLY_BYTES,
        "half_precision": False,
        "encoding": "",
        **given,
        "num_parties": number,
    }
    some = f"from 1 to num_parties={number}"
    rules = {
        "num_parties": (number >= 1, "at least 1"),
        "min_parties": (1 <= options["min_parties"] <= number, some),
        "fraction_train": (0 < options["fraction_train"] <= 1, "above 0 and at most 1"),
        "min_train_nodes": (1 <= options["min_train_nodes"] <= number, some),
        "max_wait": (options["max_wait"] >= 0, "at least 0 seconds"),
        "seed": (options["seed"] >= 0, "at least 0"),
        "max_reply_bytes": (options["max_reply_bytes"] > 0, "positive"),
        "encoding": (isinstance(options["encoding"], str), "a hash, or empty"),
    }
    values = dict(options)
    for name, (holds, rule) in rules.items():
        require(holds, owner, name, rule, values[name])
    return options


def public_array(owner: str, public: object) -> Array:
    """Return public rows as an array of finite numbers, from a list, frame or tensor too."""
    rows = to_rows(owner, "public", public)
    check_rows(owner, "public", rows)
    return rows


def check_factories(
    owner: str,
    learner_fn: LearnerFactory | None,
    num_classes: int,
    **others: Mapping[str, LearnerFactory] | None,
) -> None:
    """Raise `InvalidParameter`, saying what to write, for what makes no learner."""
    given = {
        f"{place}[{name!r}]": fn
        for place in others
        for name, fn in (others[place] or {}).items()
    }
    if learner_fn is not None:
        given["learner_fn"] = learner_fn
    for name, factory in given.items():
        check_made(owner, name, factory, num_classes)


# A child of Flower's logger, so that our lines appear among Flower's own.
logger = logging.getLogger("flwr.fl_strategies")

S = TypeVar("S")


T = TypeVar("T")


class KnowledgeStrategy(Strategy, Generic[T]):
    """Base of all strategies: the engine of a round, and the hooks that an author fills in.

    A subclass sets `name`, `reply_kind`, `options_type`, `takes` and `identified_by`, and in
    its constructor `state` (a `state_type`, with the ledger that `new_ledger` makes of the
    first round's plan; `round_` is read from the state, so not before it is set) and, if
    parties get a final model, `learner_fn` and `model_name`. It must have `party_config`,
    `check` and `finish`; all other hooks have defaults. `round_` counts from 1 within a round,
    and rounds may differ in everything: `reply_kind` and `plan` can be properties that ask for
    it. A round calls the hooks in this order:

    1. `begin_round` makes ready; `nodes_for_round` chooses among the connected parties.
    2. `party_config` is sent to every party, `knowledge_for` is what one learns from.
    3. `check` parses a reply, which is hostile until then, and changes nothing; `add` takes
       what it returns, in any order; `exclude` names replies that do not fit the others.
    4. The price of the round is charged, by the `ReleasePlan` that the property `plan`
       returns. With fewer than `num_replies_needed` replies the round has failed: what has
       left is charged all the same, and nothing below happens.
    5. `finish` combines what was added, usually ends in `keep_model`, and returns metrics.
    6. `delivery_for` is what a party is given, and `confirm_delivery` notes who has it.

    What a round leaves to the next is in `state`, and nothing else is: a checkpoint holds it.
    A run that ends before a round has called `keep_model` fails, unless `has_result` differs.

    What a subclass declares, as class attributes:

    - `state_type`: what rounds leave to the next.
    - `reply_kind`: the kind of `Knowledge` that parties answer with.
    - `options_type`: what can be set about the algorithm itself.
    - `takes`: keyword arguments of its constructor, besides those of `FederationOptions`.
    - `tasks`: what it learns, if it takes a `task` at all; numbers only where it says so.
    - `identified_by`: attributes that must be as before in a resumed run. These are all
      settings, and so all public attributes; what follows from them is a property.
    - `model_name`: what parties call the final model; they need a factory of this name.
    - `run_settings`: what else a resumed run must have as before, such as its learner's.
    - `last_round`: after it there is nothing more to ask, and a whole run has as many; or None.
    - `usual_rounds`: rounds of a run unless another number is given.
    - `central`: whether the run ends in one model for everybody, or each party keeps its own.
    - `same_learner`: whether all parties and the server need the same kind of model.
    - `relays_models`: whether parties' models travel, so the server must rebuild them.
    - `model_as_made`: whether the final model has the shape that its factory makes, so that
      another strategy can continue with it.
    - `parties_train`: whether parties train models of their own.
    - `needs_public`: whether there must be public rows, also where a schema declares columns.
    - `party_learner_needs`, `final_learner_needs`: protocols beyond `Learner` that the models
      of parties and server must have.
    - `usual_final_learners`: names of models that learn its result better than usual ones.
    - `forms`: what to set for each form of it, by the name that policies of parties permit;
      none if it has one form.
    - `private_variants`: what comparisons run at a budget.

    Parameters
    ----------
    num_parties : int
        Parties to wait for before a round.
    min_available_nodes : int
        Flower's name for `num_parties`.
    min_parties : int (default: 2, or 1 if only one party is expected)
        Fewest parties to continue with, both after waiting and after bad replies.
    fraction_train, min_train_nodes : float, int (default: 1, 1)
        Share of the connected parties that a round asks, and fewest to ask. Who is not asked
        is for this round like a party that is away. No privacy is claimed from it.
    max_wait : float (default: 120)
        Seconds to wait for `num_parties` to connect.
    seed : int (default: 0)
        Seed of the experiment. It never feeds noise that protects privacy.
    evaluate : bool (default: True)
        Deliver the final model to the parties, who report its accuracy on their own
        held-out rows, if they have any.
    max_reply_bytes : int (default: 256 MiB)
        Largest reply that is read.
    half_precision : bool (default: False)
        Let parties send float32 models as float16, at half the bytes and three digits.
    encoding : str (default: none)
        Hash of what made rows of raw records, such as `clients.Encoder.hash`. Every message
        names it, and a party whose own is another one refuses before it pays.
    members : mapping of node id to partition id, optional
        Who is who, as its operator knows; other nodes are not asked. Without, a node has
        the number of its first answer, for the whole run (see `server.replies`).
    checkpoint_dir : str or Path, optional
        Folder in which the run is kept, so that it can be resumed after the server was killed.
        It holds what parties sent, so it needs the protection that the server itself has.
    resume : bool (default: False)
        Resume the run in `checkpoint_dir`, if there is one. Parties are not asked again
        for what has arrived, and the result is the same to the bit.
    on_round : callable or list of callables, optional
        Called as `on_round(number, metrics)` after each round, with the round's metrics by
        names such as ``"train/epsilon-example"``; see docs/tracking.md. An exception in it is
        logged once and ends nothing. The last round may come again after a resume.

    Attributes
    ----------
    parties_ : dict of partition id to `PartyReport`
        What each party reported last.
    ledger_ : PrivacyLedger
        What the run released, in the unit that its guarantee is about.
    rejected_ : dict
        Per node id: why its reply of the last round was excluded.
    undelivered_ : dict
        Per node id: why it did not confirm that it has what the last round came to.
    round_ : int
        Rounds asked so far, over all calls of `start`: a second call continues.
    """

    name: ClassVar[str]
    reply_kind: str
    state: State
    state_type: ClassVar[type[State]] = State
    model_name: str = ""
    options_type: ClassVar[type[Options]] = Options
    takes: ClassVar[tuple[str, ...]] = (
        "public",
        "num_classes",
        "learner_fn",
        "learner_name",
        "task",
        "options",
    )
    identified_by: ClassVar[tuple[str, ...]] = (
        "public",
        "num_classes",
        "learner_fn",
        "model_name",
        "task",
        "options",
    )
    run_settings: Mapping[str, Scalar]
    tasks: ClassVar[Sequence[Task]] = ("single-label", "multi-label")
    last_round: int | None = None
    central: ClassVar[bool] = True
    usual_rounds: ClassVar[int] = 1
    same_learner: ClassVar[bool] = False
    relays_models: ClassVar[bool] = False
    model_as_made: ClassVar[bool] = True
    parties_train: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True
    party_learner_needs: ClassVar[tuple[type, ...]] = ()
    final_learner_needs: ClassVar[tuple[type, ...]] = ()
    usual_final_learners: ClassVar[tuple[str, ...]] = ()
    forms: ClassVar[Mapping[str, Mapping[str, Scalar]]] = {}
    private_variants: ClassVar[tuple[PrivateVariant, ...]] = ()
    failure_: str = "the strategy has not run"
    _model: Learner | None
    _is_charged = False

    # What an author fills in, in the order in which a round calls it.

    @abstractmethod
    def party_config(self) -> dict[str, Scalar]:
        """Return the settings that parties need in round `round_`."""

    def begin_round(self) -> bool:
        """Make ready to ask the parties; return whether they may be asked at all."""
        return True

    def nodes_for_round(self, nodes: list[int]) -> list[int]:
        """Return which of the connected nodes to ask; all of them by default.

        With none, nothing is sent and the round does not count.
        """
        return nodes

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return what this node is to learn from before it trains; nothing by default."""
        return None

    @abstractmethod
    def check(self, knowledge: Knowledge) -> T:
        """Return a party's answer; raise `KnowledgeMismatch` to exclude it.

        Nothing may change here: what is excluded leaves no trace.
        """

    def add(self, reply: PartyReply[T]) -> None:
        """Take a checked reply into the round; by default it is kept until the end.

        Replies come in any order, so sums must not depend on it. Must not fail.
        """
        self._kept.append(reply)

    def exclude(self, replies: Sequence[PartyReply[T]]) -> Mapping[int, str]:  # noqa: ARG002
        """Return nodes whose reply does not fit the others', and why; none by default."""
        return {}

    def num_replies_needed(self) -> int:
        """Return how many valid replies a round needs; `min_parties` by default.

        Never more are needed than nodes were asked.
        """
        return self.min_parties

    @abstractmethod
    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Combine what was added, and return the result with metrics of its own."""

    def delivery_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return what this node is given after a round; by default the final model."""
        return self.state.delivery

    def confirm_delivery(self, replies: Sequence[PartyReply[None]]) -> None:
        """Note who has received and measured what was delivered."""

    def warm_start(self, arrays: Mapping[str, Array]) -> None:  # noqa: ARG002
        """Begin with a model that is given to `start`; raise where that means nothing."""
        raise InvalidParameter(
            f"{type(self).__name__}: initial_arrays must be empty, got some. Its model is made "
            f"of what the parties know, not continued from another one."
        )

    @property
    def delivered_learner(self) -> str:
        """Name of the learner whose model `delivery_for` gives; empty if it gives none.

        Every request names it, so that a party that could not read the model refuses before
        it pays.
        """
        made = getattr(self, "learner_fn", None)
        return self.model_name if made is not None and can_travel(made()) else ""

    @property
    def most_score_bytes(self) -> int:
        """How large the array ``scores`` of a reply is; 0 if it must not be compressed.

        The size of a compressed reply reveals something about the scores to whoever counts
        bytes. So it is 0 where scores are protected only by what the server makes of them.
        """
        return 0

    @property
    def sends_models(self) -> bool:
        """Whether replies are models, which may travel in half precision."""
        return self.relays_models or self.reply_kind == "models"

    @property
    def ends_early(self) -> bool:
        """Whether a run that too few parties are left for keeps its result and ends."""
        return False

    @property
    def has_result(self) -> bool:
        """Whether there is something to show for the run; by default a model."""
        return self._model is not None

    # Privacy. A strategy declares it and charges nothing by itself.

    @property
    def plan(self) -> ReleasePlan:
        """What a round releases; the worst unless a strategy declares it.

        Made of options and facts, such as how many parties have answered, by the function
        that the party's role uses.
        """
        return ReleasePlan(name=self.name)

    def new_ledger(self, plan: ReleasePlan, **settings: Any) -> PrivacyLedger:
        """Return the run's ledger, once noise is known to leave a signal."""
        require_useful_signal(
            type(self).__name__, plan.no_signal(), accepted=plan.accepted, advice_of=plan.advice
        )
        given = {"num_parties": self.num_parties, **settings}
        return PrivacyLedger(plan.unit, delta=plan.delta, audience=plan.audience, **given)

    def charge(self, *, failed: bool = False) -> None:
        """Enter what this round releases, once.

        The engine does it before `finish`, and for a round that `failed`, of which everything
        counts but the noise that the server has not drawn. A strategy may do it earlier.

        Raises
        ------
        PrivacyBudgetExceeded
            Nothing must be made of the answers. What has left the parties is entered all the
            same, and so is a failed round, whatever it costs.
        """
        if self._is_charged:
            return
        self._is_charged = True
        plan = self.plan
        if plan.reported:
            self.enter_reported(self.replies)
            if not failed:
                self.ledger_.check_budget()
            return
        price, ledger = plan.price(), self.ledger_
        enter = ledger.compose_all if failed else ledger.charge_all
        for event in open_charges(*price.unprotected, unit=plan.unit):
            enter([event])
        published = () if failed else price.published
        attempts = self.run.num_attempts
        for attempt in range(attempts):
            try:
                if entries := [*price.answers, *(() if attempt else published)]:
                    enter(entries)
            except PrivacyBudgetExceeded:
                if not (price.answers and self._sent):
                    raise
                # The parties have answered: that is entered, and no more is made of it.
                for _ in range(attempt, attempts):
                    ledger.compose_all(price.answers)
                ledger.check_budget()
                raise

    def enter_reported(self, replies: Sequence[PartyReply[T]]) -> None:
        """Enter what parties report that their answers cost; see `ReleasePlan.reported`."""
        for reply in replies:
            times = max(1, self.run.attempts_of(reply.node_id))
            empty = self.ledger_.emptied()
            enter_reported(self.state.ledgers, reply, self.reported(reply), times, empty)
        if self.state.ledgers:
            self.state.ledger = most_expensive(self.state.ledgers.values())

    def reported(self, reply: PartyReply[T]) -> Sequence[Entry]:
        """Return what a party reports that its answer costs."""
        raise NotImplementedError

    # What an author uses.

    @property
    def replies(self) -> list[PartyReply[T]]:
        """What `add` has kept, by the numbers of the parties and sorted."""
        found = [
            replace(reply, partition_id=self.party_of(reply.node_id)) for reply in self._kept
        ]
        return sorted(found, key=lambda reply: reply.partition_id)

    def party_of(self, node_id: int) -> int:
        """Return which party a node is."""
        return self.members[node_id][1]

    @property
    def num_asked(self) -> int:
        """How many parties are asked in this round."""
        return len(self._sent)

    def keep_model(self, model: Learner) -> ArrayRecord | None:
        """Keep the final model; return its arrays if it can travel."""
        self._model = model
        try:
            arrays = require_portable(model).to_arrays()
        except UnsupportedLearner as error:
            logger.info("%s: the final model stays on the server. %s", self.name, error)
            return None
        self.state.delivery = Knowledge("model", arrays, {keys.LEARNER: self.model_name})
        return encode_arrays(arrays)

    def fail(self, reason: str) -> None:
        """Note why a round has no result."""
        self.failure_ = reason.removesuffix(".")
        logger.error("%s has no result: %s.", self.name, self.failure_)

    # What is made of settings.

    def __init__(self, **federation: Unpack[FederationOptions]) -> None:
        owner = type(self).__name__
        self.require_arguments(federation)
        options = completed(owner, federation)
        self.num_parties = options["num_parties"]
        self.min_parties = options["min_parties"]
        self.max_wait = options["max_wait"]
        self.seed = options["seed"]
        self.evaluate = options["evaluate"]
        self.max_reply_bytes = options["max_reply_bytes"]
        self._fraction_train = options["fraction_train"]
        self._min_train_nodes = options["min_train_nodes"]
        self._half = options["half_precision"]
        self.encoding = options["encoding"]
        self._registered = registered(owner, federation.get("members"), self.num_parties)
        self.run = self._make_run(federation.get("checkpoint_dir"), federation.get("resume"))
        self.run_settings = {}
        self.rejected_: dict[int, str] = {}
        self.undelivered_: dict[int, str] = {}
        self._model = None
        self._kept: list[PartyReply[T]] = []
        self._sent: list[Message] = []
        self._refused = 0
        self._callbacks = Callbacks(owner, federation.get("on_round"))
        self._evaluates = False
        self._is_started = False

    def _make_run(self, folder: str | Path | None, resume: bool | None) -> Run:
        given, owner = bool(folder) or not resume, type(self).__name__
        require(given, owner, "checkpoint_dir", "given with resume", folder)
        if not folder:
            return Run()
        return Checkpoint(Path(folder), resume=bool(resume), kinds=self.state_type.kinds)

    def adopt(self, run: Run) -> None:
        """Take part in a run that somebody else keeps, such as a chain of strategies."""
        self.run = run

    def identity(self) -> dict[str, object]:
        """Return what must be the same to resume a run: all settings but patience."""
        names = ("num_parties", "seed", "run_settings", *self.identified_by)
        own = {name: described(getattr(self, name)) for name in names}
        ledger = self.state.ledger
        budget = [ledger.unit, ledger.delta, ledger.max_epsilon]
        own |= self.party_config()
        if self.encoding:
            own[keys.ENCODING] = self.encoding
        if self._half:
            own[HALF_PRECISION] = True
        return {**own, "budget": budget, keys.STRATEGY: self.name}

    @classmethod
    def from_settings(cls, **given: Any) -> Self:
        """Make a strategy of flat settings, as a run configuration has them.

        Parameters
        ----------
        **given
            What the constructor takes, and by snake_case names what its options are made
            of; None stands for what is not given.

        Examples
        --------
        `FedKT.from_settings(..., privacy_level="L1", gamma=0.1)` is short for
        `FedKT(..., options=FedKTOptions(privacy=VotePrivacy(level="L1", gamma=0.1)))`.
        """
        own = cls.arguments()
        for name in given:
            require_argument(cls.__name__, name, [*own, *cls.setting_names()])
        flat = {key_of(name): value for name, value in given.items() if name not in own}
        options = cls.options_type.from_config(cls.options_type.completed(flat))
        rest: dict[str, Any] = {name: value for name, value in given.items() if name in own}
        if "options" in own:  # a strategy need not have any
            rest["options"] = options
        return cls(**rest)

    @classmethod
    def arguments(cls) -> list[str]:
        """Return what the constructor takes."""
        return [*cls.takes, *FederationOptions.__annotations__]

    @classmethod
    def setting_names(cls) -> list[str]:
        """Return what `from_settings` takes besides."""
        return [key.replace("-", "_") for key in cls.options_type.settings()]

    @classmethod
    def require_arguments(cls, given: Iterable[str]) -> None:
        """Raise `InvalidParameter`, saying what to write, for an argument nobody knows."""
        own, settings = cls.arguments(), cls.setting_names()
        for name in given:
            rule = "names of arguments of its constructor"
            require(name not in cls.takes, cls.__name__, "takes", rule, name)
            meant = nearest_name(name, [*own, *settings])
            question = "" if meant == name else f"Did you mean {meant!r}? "
            hint = (
                f"{question}Write options={cls.options_type.__name__}(...), "
                f"or {cls.__name__}.from_settings({meant}=...)."
            )
            require_argument(cls.__name__, name, own, hint if meant in settings else "")

    # What is read during and after a run.

    @property
    def round_(self) -> int:
        """Rounds asked so far."""
        return self.state.round

    @property
    def parties_(self) -> dict[int, PartyReport]:
        """What each party reported last."""
        return self.state.parties

    @property
    def ledger_(self) -> PrivacyLedger:
        """What the run released."""
        return self.state.ledger

    @property
    def members(self) -> Known:
        """Which node is which party: as its operator says, or as their first answers did."""
        return self._registered or self.state.members

    @property
    def model_(self) -> Learner:
        """The final model."""
        if self._model is None:
            raise NotFitted(
                f"{type(self).__name__}: model_ must be read after a run that ended well, "
                f"got none: {self.failure_}."
            )
        return self._model

    def require_result(self) -> None:
        """Raise if the run was for nothing, and say what has left the parties all the same."""
        if self.has_result:
            return
        released = describe_releases(self.ledger_.entries)
        raise RunFailed(
            f"{type(self).__name__}: the run must end with a result, got none: "
            f"{self.failure_}. What has left the parties all the same: {released}"
        )

    # Flower's methods.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run some rounds; see Flower's `Strategy.start`. Raise `RunFailed` without a result.

        `initial_arrays` are for strategies that continue from a model; others refuse any.
        `evaluate_fn` gets the arrays of the final model by the names that `to_arrays` gives
        them, for a network those of its state; before there are any it is not called.
        With a checkpoint `num_rounds` counts from the beginning of the run, and rounds that
        are over are not repeated.
        """
        warn_of_untested_flower()
        begin = partial(
            super().start,
            initial_arrays=initial_arrays,
            timeout=timeout,
            train_config=train_config,
            evaluate_config=evaluate_config,
        )
        if initial_arrays:
            self.warm_start(decode_arrays(initial_arrays, self.max_reply_bytes))
        self._evaluates = evaluate_fn is not None
        evaluate = self._ending_rounds(evaluate_fn) if evaluate_fn else None
        self._is_started = True
        try:
            result = self.run.execute(self, begin, grid, num_rounds, evaluate)
        finally:
            self._is_started = False
        self.require_result()
        return result

    def _ending_rounds(self, evaluate: EvaluateFn) -> EvaluateFn:
        """Return a user's evaluation, after which a round has ended."""

        def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            if not (number or arrays):
                # Flower's round 0: whoever loads no arrays into a model would fail.
                return None
            metrics = evaluate(number, arrays)
            if number:
                self._end_round(metrics)
            return metrics

        return evaluated

    def summary(self) -> None:
        """Log the settings."""
        logger.info("\t├──> %s:", type(self).__name__)
        for key, value in {**self.party_config(), "num-parties": self.num_parties}.items():
            logger.info("\t│\t├── %s: %s", key, value)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the parties of this round, for `start` alone.

        Flower's wrappers call this from a `start` of their own. They clip and blur arrays as
        if they were updates of weights: around a strategy whose messages are votes, scores or
        whole models they would run and protect nothing.
        """
        if not self._is_started:
            owner = type(self).__name__
            raise InvalidParameter(
                f"{owner}: it must be run by its own start, got run by something else. "
                f"Around {owner} a wrapper protects nothing: use the strategy's own privacy "
                f"options, or wrap Flower's own class and give that to FlowerStrategy."
            )
        return self.ask_parties(server_round, arrays, config, grid)

    def ask_parties(
        self,
        server_round: int,
        arrays: ArrayRecord,  # noqa: ARG002 - Flower's signature
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Ask the parties of this round, once the expected ones are there."""
        fits, rule = self.sends_models or not self._half, "false unless parties send models"
        require(fits, type(self).__name__, "half_precision", rule, self._half)
        self._callbacks.begin(self.round_)
        self._sent = []
        if self.last_round is not None and server_round > self.last_round:
            logger.info("%s has ended; nothing is sent.", self.name)
            return []
        self.run.begin_round()
        self._kept = []
        self._is_charged = False
        if not self.begin_round():
            return []
        try:
            present = wait_for_parties(
                type(self).__name__,
                grid,
                num_parties=self.num_parties,
                min_parties=self.min_parties,
                max_wait=self.max_wait,
                only=self._registered,
            )
        except NotEnoughParties as error:
            if not self.ends_early or self.run.is_kept:
                raise
            logger.warning("%s ended after round %s: %s", self.name, self.round_, error)
            return []
        nodes = self.nodes_for_round(self._sampled(present))
        if not nodes:
            self.failure_ = "nobody was asked"
            logger.info("%s has nobody to ask; nothing is sent.", self.name)
            return []
        self.rejected_, self.undelivered_ = {}, {}
        self.state.round += 1
        content = {node: self.knowledge_for(node) for node in nodes}
        self._sent = self._messages(MessageType.TRAIN, content, config)
        return self._sent

    def _sampled(self, nodes: list[int]) -> list[int]:
        """Return the nodes of a round as Flower would: a share of them, but not too few.

        The experiment's seed decides, so a round that is resumed asks the same nodes again.
        """
        size = max(int(len(nodes) * self._fraction_train), self._min_train_nodes)
        if size >= len(nodes):
            return nodes
        rng = derive_rng(self.seed, "sampling", self.round_ + 1)
        chosen = rng.choice(len(nodes), size=size, replace=False)
        return [nodes[i] for i in sorted(chosen)]

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002 - Flower's signature
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the valid replies; with too few of them, report nothing and say why."""
        accepted = self._collect(replies, self.reply_kind, self.check, self.add)
        if not self._sent:
            return None, None
        needed = min(self.num_replies_needed(), len(self._sent))
        if len(accepted) < needed:
            self.fail(
                f"{len(accepted)} of {len(self._sent)} parties sent a valid reply and "
                f"{needed} are needed ({self._first_rejection()})"
            )
            if self._refused < len(self._sent):  # otherwise nothing can have left a party
                self.charge(failed=True)
            self._sent = []  # there is nothing new to deliver
            self._stop_to_resume()
            return None, None
        arrays, metrics = self._combined()
        self._kept = []
        totals = aggregate_metrics([reply.metrics for reply in accepted])
        totals |= {
            keys.NUM_PARTIES: len(accepted),
            keys.NUM_REJECTED: len(self.rejected_),
            **metrics,
        }
        self.state.history["train"][self.round_] = totals
        return arrays, MetricRecord({**totals})

    def _combined(self) -> tuple[ArrayRecord | None, Metrics]:
        """Combine what was added, once it is paid for."""
        try:
            self.charge()
        except (PrivacyBudgetExceeded, InvalidParameter) as error:
            self.fail(str(error))
            return None, {}
        self.failure_ = f"round {self.round_} made no model"
        return self.finish()

    def configure_evaluate(
        self,
        server_round: int,  # noqa: ARG002 - Flower's signature
        arrays: ArrayRecord,  # noqa: ARG002 - Flower's signature
        config: ConfigRecord,
        grid: Grid,  # noqa: ARG002 - Flower's signature
    ) -> list[Message]:
        """Deliver the result to the parties of this round."""
        nodes = [message.metadata.dst_node_id for message in self._sent if self.evaluate]
        content = {node: self.delivery_for(node) for node in nodes}
        content = {node: given for node, given in content.items() if given is not None}
        self._sent = self._messages(MessageType.EVALUATE, content, config)
        return self._sent

    def aggregate_evaluate(
        self,
        server_round: int,  # noqa: ARG002 - Flower's signature
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """Combine what the parties measured on their own held-out rows."""
        totals = self._evaluated(replies)
        if not self._evaluates:
            self._end_round()
        return None if totals is None else MetricRecord({**totals})

    def _evaluated(
        self, replies: Iterable[Message]
    ) -> Mapping[str, float | list[float]] | None:
        sent = {message.metadata.dst_node_id for message in self._sent}
        accepted = self._collect(replies, EVALUATION, lambda _: None, lambda _: None)
        self._sent = []
        self.confirm_delivery(accepted)
        # They have answered, and paid, for a model that they do not have.
        lacking, unknown = sent - {r.node_id for r in accepted}, "it did not confirm it"
        self.undelivered_ = {n: self.rejected_.get(n, unknown) for n in sorted(lacking)}
        if self.undelivered_:
            named = "; ".join(f"node {node}: {why}" for node, why in self.undelivered_.items())
            logger.warning("%s: not everybody has the model. %s", self.name, named)
        if not sent:
            return None
        totals: dict[str, float | list[float]] = {
            **aggregate_metrics([reply.metrics for reply in accepted]),
            keys.NUM_UNDELIVERED: len(self.undelivered_),
        }
        if not self.central:
            totals |= metrics_by_party(accepted)
        totals = without_unknown(totals)
        if not totals.get(keys.NUM_EXAMPLES):
            logger.info(
                "No party reports how good the model is: one without held-out rows (x_test) "
                "cannot, and one with a journal, a policy or a promise of privacy does not."
            )
        self.state.history["evaluate"][self.round_] = totals
        return totals

    def _end_round(self, evaluated: Mapping[str, Any] | None = None) -> None:
        """Call the user's functions with the metrics of this round."""
        history = {phase: of.get(self.round_) for phase, of in self.state.history.items()}
        self._callbacks.end(self.round_, len(self.rejected_), **history, server=evaluated)

    # Messages.

    def _messages(
        self, kind: str, content: Mapping[int, Knowledge | None], config: Mapping[str, object]
    ) -> list[Message]:
        """Return a message a node, with the settings of this round."""
        settings = {
            **config,
            **self.party_config(),
            keys.STRATEGY: self.name,
            keys.SERVER_ROUND: self.round_,
            keys.SEED: self.seed,
        }
        if self.encoding:
            settings[keys.ENCODING] = self.encoding
        if self.run.name:
            settings[keys.RUN_NAME] = self.run.name
        if kind == MessageType.TRAIN:
            settings |= offer(self.most_score_bytes, half=self._half, kept=self.run.is_kept)
            if self.evaluate and self.delivered_learner:
                settings[keys.FINAL_LEARNER] = self.delivered_learner
        return write_messages(kind, content, settings)

    # Replies.

    def _collect(
        self,
        replies: Iterable[Message],
        kind: str,
        check: Callable[[Knowledge], S],
        add: Callable[[PartyReply[S]], None],
    ) -> list[PartyReply[None]]:
        """Take in the replies that are as asked; return who answered, sorted by party.

        A bad one costs its own party the round; one that is missing does as well.
        """
        waiting = {message.metadata.message_id: message for message in self._sent}
        asked, attempt = {message.metadata.dst_node_id for message in self._sent}, 1
        held = holders(self.members, asked)
        accepted: list[PartyReply[None]] = []
        self._refused = 0
        for reply in replies:
            request = waiting.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                logger.warning("%s ignores a reply to no open question.", self.name)
                continue
            node = request.metadata.dst_node_id
            if self.run.first_attempt_of(node) > attempt:
                # Who answered before a resume is known by now; see `check_claim`.
                attempt = self.run.first_attempt_of(node)
                settle(self.members, accepted)
                held = holders(self.members, asked)
            self._refused += reply.has_error()
            try:
                read = parse_reply(
                    request,
                    reply,
                    kind,
                    self.max_reply_bytes,
                    check,
                    check=partial(check_claim, self.members, held, node),
                    restore=partial(
                        as_meant, most_score_bytes=self.most_score_bytes, half=self._half
                    ),
                )
            except Exception as error:  # hostile input may make a learner raise anything
                self._reject(node, str(error) or type(error).__name__)
                continue
            add(read)
            accepted.append(read.without_knowledge())
        for request in waiting.values():
            self._reject(request.metadata.dst_node_id, "it did not answer in time")
        unfit = self.exclude(self._kept) if kind != EVALUATION else {}
        for node, reason in unfit.items():
            self._reject(node, reason)
        self._kept = [reply for reply in self._kept if reply.node_id not in unfit]
        fit = [reply for reply in accepted if reply.node_id not in unfit]
        settled = settle(self.members, fit)
        self.state.note(settled, evaluated=kind == EVALUATION)
        return settled

    def _reject(self, node_id: int, reason: str) -> None:
        reason = cut_short(reason)
        self.rejected_.setdefault(node_id, reason)
        logger.warning("%s excludes node %s: %s", self.name, node_id, reason)

    def _stop_to_resume(self) -> None:
        """End a run that is kept where it failed: later rounds would bury this one."""
        if self.run.is_kept:
            self.run.reopen(self.rejected_)
            raise NotEnoughParties(
                f"{type(self).__name__}: round {self.round_} must have enough replies, got too "
                f"few: {self.failure_}. Give resume to ask these parties again."
            )

    def _first_rejection(self) -> str:
        reasons = [f"node {node}: {reason}" for node, reason in self.rejected_.items()]
        return f"for example {reasons[0].rstrip('.')}" if reasons else "no reply was bad"
