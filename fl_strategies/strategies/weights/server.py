"""The server side of weight averaging; see `fl_strategies.strategies.weights`."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Final, TypeVar, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    Strategy,
)

from fl_strategies._util import Array, content_hash, derive_rng
from fl_strategies.errors import KnowledgeMismatch, NotEnoughParties, require
from fl_strategies.learners import (
    ContinuingLearner,
    Learner,
    LearnerFactory,
    StartingLearner,
    Task,
    check_task,
)
from fl_strategies.privacy.accountant import Entry
from fl_strategies.release import ReleaseFacts, ReleasePlan
from fl_strategies.server.replies import PartyReply
from fl_strategies.server.run import Run, State
from fl_strategies.server.strategy import (
    FederationOptions,
    KnowledgeStrategy,
    check_factories,
    logger,
    public_array,
)
from fl_strategies.strategies.weights.options import (
    MODEL,
    TASK,
    WEIGHTS,
    FedAvgOptions,
    WeightsOptions,
    make_flower,
    options_for,
    release_plan,
)
from fl_strategies.strategies.weights.party import (
    CountedWeights,
    require_averaged,
    split_counts,
)
from fl_strategies.strategies.weights.restraint import (
    Layout,
    LocalWeights,
    as_layout,
    layout_of,
    read_weights,
    restrained,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    Knowledge,
    Metrics,
    Scalar,
    decode_arrays,
    encode_arrays,
)

_CLIPPED_ELSEWHERE: Final = (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)
_MOST_LOOKS: Final = 8
_PLAIN: Final = (bool, int, float, str, type(None), np.ndarray)
_WITHOUT_LIMIT: Final = 2**62


class PresentNodes(Grid):
    """All that Flower's class sees of the federation: the connected nodes, and no others.

    Its own sampling waits for ever if it wants more nodes than there are.
    """

    def __init__(self, owner: str, nodes: Collection[int]) -> None:
        self._owner, self._nodes, self._looks = owner, list(nodes), 0

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes; raise if somebody waits for more."""
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            raise NotEnoughParties(
                f"{self._owner}: min_train_nodes and min_available_nodes of Flower's strategy "
                f"must be at most the parties that are there, {len(self._nodes)}, got more."
            )
        return self._nodes

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("Only ids of nodes can be asked for.")

    set_run = create_message = push_messages = pull_messages = send_and_receive = _unused

    @property
    def run(self) -> Any:
        """Unavailable."""
        return self._unused()


@dataclass(frozen=True)
class KeptArrays:
    """An `ArrayRecord` as a checkpoint keeps it."""

    arrays: Mapping[str, Array]


def check_inner(owner: str, flower: Strategy, *, is_kept: bool) -> None:
    """Raise `InvalidParameter` for a strategy that cannot do here what it promises."""
    for part in layers(flower):
        clipped = not isinstance(part, _CLIPPED_ELSEWHERE)
        rule = (
            "one that clips at the server (DifferentialPrivacyServerSide...): whether parties "
            "clip, which their mods decide, nobody here would notice"
        )
        require(clipped, owner, "flower", rule, type(part).__name__)
        share = getattr(part, "fraction_train", 1.0)
        require(share == 1.0, owner, "fraction_train", "given to this strategy", share)
    if is_kept:
        for name, value in attributes(flower):
            rule = f"omitted: a checkpoint cannot hold {name} of {type(flower).__name__}"
            kept = callable(value) or isinstance(value, Strategy) or _is_plain(value)
            require(kept, owner, "checkpoint_dir", rule, type(value).__name__)


def layers(flower: Strategy) -> Iterator[Strategy]:
    """Give a strategy, then what it wraps, and so on."""
    part: object = flower
    while isinstance(part, Strategy):
        yield part
        part = getattr(part, "strategy", None)


def attributes(flower: Strategy) -> Iterator[tuple[str, object]]:
    """Give what a strategy, and what it wraps, has by attribute."""
    for depth, part in enumerate(layers(flower)):
        for name, value in vars(part).items():
            yield f"{depth}.{name}", value


def remember(flower: Strategy) -> dict[str, object]:
    """Return what a strategy has, as plain values: momenta, its last model, settings."""
    found = {name: value for name, value in attributes(flower) if _is_plain(value)}
    return {
        name: KeptArrays(decode_arrays(value, _WITHOUT_LIMIT))
        if isinstance(value, ArrayRecord)
        else value
        for name, value in found.items()
        if not name.endswith(".strategy")
    }


def recall(flower: Strategy, kept: Mapping[str, object]) -> None:
    """Give a strategy back what `remember` returned."""
    parts = list(layers(flower))
    for name, value in kept.items():
        depth, _, attribute = name.partition(".")
        if isinstance(value, KeptArrays):
            value = encode_arrays(value.arrays)
        setattr(parts[int(depth)], attribute, value)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping) and not isinstance(value, ArrayRecord):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, ArrayRecord))


W = TypeVar("W", bound=LocalWeights)


@dataclass(kw_only=True)
class WeightsState(State):
    """Also what Flower's class keeps."""

    kinds = (*State.kinds, KeptArrays)

    flower: dict[str, Any] = field(default_factory=dict)


class FlowerStrategy(KnowledgeStrategy[LocalWeights]):
    """One of Flower's strategies with everything that ours have around it.

    All parties train one model in every round, and Flower's class makes the next one of
    theirs. It never sees a reply that is not as asked: other arrays, names, shapes or types,
    numbers that are not finite, and metrics it cannot weigh by end no run and spoil no mean.
    It also gets a ledger, a checkpoint, and parties that charge before they train.

    Leaves the party
        In every round the weights of its model after training, and its number of records.
    Guarantee
        None: epsilon is infinite. Only if every party trains with differential privacy, by
        a learner whose `partial_fit` adds to its `privacy_events`, each record is protected
        against the server and everybody else, and the events of all rounds add up; `ledger_`
        is that of the party whose events, as the parties report them, cost most. Noise that
        Flower's wrappers add at the server counts for nothing here: the server has seen the
        weights, and a mean by numbers of records is not what they calibrate for. Not
        covered: rows that parties only evaluate on, the number of records, settings chosen
        on private data.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list; labels or outputs in other tasks.
    learner_fn : factory
        Makes the model, the same at all parties. It must be an `IncrementalLearner` and a
        `PortableLearner`, such as `TorchLearner`.
    flower : flwr.serverapp.strategy.Strategy, optional
        Any strategy of Flower's that averages weights, also in a wrapper that clips at the
        server; what the class itself names by default. Its own sampling must be off: give
        `fraction_train` here.
    learner_name : str
        What parties must call their own model to take part.
    task : "single-label", "multi-label" or "regression"
    public : (num_public, ...), optional
        Not learned from. If given, parties that hold other public rows are excluded, because
        that mostly means other preprocessing.
    options : WeightsOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Notes
    -----
    The first weights are `initial_arrays` of `start`, or drawn by the learner from the seed.
    A learner that cannot draw any without records (`StartingLearner`) makes the parties
    draw, each from the same generator; Flower's classes that compare a mean with the last
    model then have none in round 1 and say so. Batch size and step size are settings of the
    learner, whose optimizer starts anew in each round.

    Examples
    --------
    ``FlowerStrategy(flower=FedProx(proximal_mu=0.1), learner_fn=..., num_classes=10)``
    """

    name: ClassVar[str] = "flower"
    flower_type: ClassVar[type[Strategy]] = flower_strategies.FedAvg
    options_type = WeightsOptions
    tasks: ClassVar[Sequence[Task]] = ("single-label", "multi-label", "regression")
    takes: ClassVar[tuple[str, ...]] = (
        "num_classes",
        "learner_fn",
        "flower",
        "learner_name",
        "task",
        "public",
        "options",
    )
    identified_by: ClassVar[tuple[str, ...]] = (
        "public_hash",
        "num_classes",
        "task",
        "options",
        "learner_fn",
        "model_name",
        "initial_hash",
        "flower_settings",
    )
    usual_rounds: ClassVar[int] = 10
    same_learner: ClassVar[bool] = True
    relays_models: ClassVar[bool] = True
    needs_public: ClassVar[bool] = False
    party_learner_needs: ClassVar[tuple[type, ...]] = (ContinuingLearner,)
    final_learner_needs = party_learner_needs
    state_type = WeightsState
    reply_kind = WEIGHTS

    def __init__(
        self,
        *,
        num_classes: int,
        learner_fn: LearnerFactory,
        flower: Strategy | None = None,
        learner_name: str = "learner",
        task: Task = "single-label",
        public: Array | None = None,
        options: WeightsOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        owner = type(self).__name__
        check_task(owner, task, num_classes)
        check_factories(owner, learner_fn, num_classes)
        self._learner = self.require_learner(learner_fn())
        rows = None if public is None else public_array(owner, public)
        self.public_hash = None if rows is None else content_hash(rows)
        self.num_classes, self.task = num_classes, task
        self.options = options or self.options_type()
        self.learner_fn, self.model_name = learner_fn, learner_name
        self.initial_hash = ""
        self.state: WeightsState = self.state_type(ledger=self.new_ledger(self.plan))
        self._flower = flower or make_flower(self.flower_type, self.options)
        check_inner(owner, self._flower, is_kept=self.run.is_kept)
        self.flower_settings = {"class": type(self._flower).__name__, **remember(self._flower)}
        self._asked: dict[str, Scalar] = {}
        self._lesson: Knowledge | None = None

    def require_learner(self, learner: Learner) -> ContinuingLearner:
        """Return the learner if this strategy can use it; say what to do if it cannot."""
        return require_averaged(type(self).__name__, learner)

    @property
    def plan(self) -> ReleasePlan:
        """What one round releases, as its parties report."""
        return release_plan(self.name, self.options, ReleaseFacts(num_classes=self.num_classes))

    def reported(self, reply: PartyReply[LocalWeights]) -> Sequence[Entry]:
        """Return the reported cost of a party's weights."""
        return reply.knowledge.charges

    def adopt(self, run: Run) -> None:
        """Take part in a run that is kept, if what Flower's class has can be."""
        check_inner(type(self).__name__, self._flower, is_kept=run.is_kept)
        super().adopt(run)

    def warm_start(self, arrays: Mapping[str, Array]) -> None:
        """Begin with these weights instead of random ones."""
        model = self._learner.from_arrays(arrays)
        self.initial_hash = content_hash(np.concatenate([a.ravel() for a in arrays.values()]))
        if self.state.delivery is None:
            self.state.delivery = Knowledge(MODEL, model.to_arrays(), self._model_meta)

    @property
    def _model_meta(self) -> dict[str, Scalar]:
        return {keys.LEARNER: self.model_name}

    def party_config(self) -> dict[str, Scalar]:
        """Return the model's name, its task, how to train it, and Flower's own settings."""
        public = {} if self.public_hash is None else {keys.PUBLIC_HASH: self.public_hash}
        return {
            **self.options.to_config(),
            **self._asked,
            TASK: self.task,
            keys.LEARNER: self.model_name,
            keys.NUM_CLASSES: self.num_classes,
            **public,
        }

    def begin_round(self) -> bool:
        """Draw the first weights, or give Flower's class back what it kept."""
        if self.state.flower:
            recall(self._flower, self.state.flower)
        if self.state.delivery is None and isinstance(self._learner, StartingLearner):
            drawn = self._learner.initialised(rng=derive_rng(self.seed, "weights", "initial"))
            self.state.delivery = Knowledge(MODEL, drawn.to_arrays(), self._model_meta)
        self._lesson = self.lesson()
        return True

    def lesson(self) -> Knowledge | None:
        """Return what all parties get this round: the present model, if there is one."""
        return self.state.delivery

    def nodes_for_round(self, nodes: list[int]) -> list[int]:
        """Let Flower's class say what to send to parties, and which of them to ask."""
        present = PresentNodes(type(self).__name__, nodes)
        model = encode_arrays(self._present_model())
        messages = [
            *self._flower.configure_train(self.round_ + 1, model, ConfigRecord(), present)
        ]
        configs = messages[0].content.config_records.values() if messages else ()
        config: Any = next(iter(configs), {})
        self._asked = dict(config)
        chosen = {message.metadata.dst_node_id for message in messages}
        return [node for node in nodes if node in chosen]

    def _present_model(self) -> Mapping[str, Array]:
        return self.state.delivery.arrays if self.state.delivery is not None else {}

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return the round's lesson, which is encoded once for all nodes."""
        return self._lesson

    def check(self, knowledge: Knowledge) -> LocalWeights:
        """Check one party's weights by the server's own learner."""
        weights = read_weights(knowledge)
        self._learner.from_arrays(weights.arrays)
        return weights

    def exclude(self, replies: Sequence[PartyReply[LocalWeights]]) -> Mapping[int, str]:
        """Return nodes whose weights cannot be averaged with the others'."""
        layouts = {reply.node_id: layout_of(reply.knowledge.arrays) for reply in replies}
        if not layouts:
            return {}
        usual = self._model_layout() or Counter(layouts.values()).most_common(1)[0][0]
        reason = "Reply: weights must have the model's layout, got another."
        return {node: reason for node, layout in layouts.items() if layout != usual}

    def _model_layout(self) -> Layout:
        return layout_of(self._present_model())

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Let Flower's class make the next model."""
        replies = self.replies
        weights, changed = self._restrained([reply.knowledge for reply in replies])
        capped: Metrics = {keys.NUM_CAPPED: changed}
        model_before = self._present_model() or weights[0].arrays
        try:
            arrays = self._aggregate([r.node_id for r in replies], weights, model_before)
            model = self._learner.from_arrays(arrays)
        except Exception as error:  # Flower's class, and a user's own, may raise anything
            self.fail(f"{type(self._flower).__name__} made no model of the weights: {error}")
            return None, capped
        self.state.flower = remember(self._flower)
        return self.keep_model(model), capped

    def _restrained(self, weights: Sequence[W]) -> tuple[list[W], int]:
        """Return weights as far as they count, and of how many parties they were changed."""
        if not self.options.restrain:
            return list(weights), 0
        counted, changed = restrained(weights)
        if changed:
            logger.warning("%s counts the weights of %s parties for less.", self.name, changed)
        return counted, changed

    def _aggregate(
        self, nodes: Sequence[int], weights: Sequence[LocalWeights], model: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return what Flower's class makes of weights that have a model's layout."""
        requests = {message.metadata.dst_node_id: message for message in self._sent}
        found = [getattr(part, "weighted_by_key", None) for part in layers(self._flower)]
        weight_key, replies = next(filter(None, found), "num-examples"), []
        for node, part in zip(nodes, weights, strict=True):
            # In the model's order: some of Flower's classes pair arrays by their positions.
            arrays = encode_arrays({name: part.arrays[name] for name in model})
            weight = MetricRecord({weight_key: part.num_records})
            content = RecordDict({keys.ARRAYS: arrays, keys.METRICS: weight})
            replies.append(Message(content, reply_to=requests[node]))
        made, _ = self._flower.aggregate_train(self.round_, replies)
        if made is None:
            raise KnowledgeMismatch("it needs more replies, or other ones")
        return as_layout(decode_arrays(made, _WITHOUT_LIMIT), model)


class CountedStrategy(FlowerStrategy):
    """Base of strategies whose parties also send class counts: records have one label each.

    Parameters
    ----------
    num_classes, learner_fn, learner_name, public, options, **federation
        See `FlowerStrategy`, whose class is Flower's FedAvg here.
    """

    takes: ClassVar[tuple[str, ...]] = (
        "num_classes",
        "learner_fn",
        "learner_name",
        "public",
        "options",
    )

    def __init__(
        self,
        *,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        public: Array | None = None,
        options: WeightsOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            learner_fn=learner_fn,
            learner_name=learner_name,
            public=public,
            options=options,
            **federation,
        )

    def check(self, knowledge: Knowledge) -> CountedWeights:
        """Check one party's weights, and that its counts agree with them."""
        weights, counts = split_counts(knowledge, self.num_classes)
        checked = super().check(weights)
        return CountedWeights(checked.arrays, checked.num_records, checked.charges, counts)

    @property
    def counted(self) -> list[CountedWeights]:
        """The weights and counts of this round, party by party."""
        parts = [reply.knowledge for reply in self.replies]
        return [part for part in parts if isinstance(part, CountedWeights)]


class FedAvg(FlowerStrategy):
    """The baseline of federated learning: the mean of all weights, by numbers of records.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep
    Networks from Decentralized Data (AISTATS 2017), Algorithm 1, with C = 1 unless
    `fraction_train` is given. The mean is Flower's. Unless `restrain` is off, one party can
    neither claim any number of records nor send weights any distance from the others'
    (`restrained`); what it does within these limits is averaged. See `FlowerStrategy`.
    """

    name: ClassVar[str] = "fedavg"
    options_type = FedAvgOptions


@cache
def flower_strategy(
    kind: type[Strategy], name: str = "", **settings: float
) -> type[FlowerStrategy]:
    """Return one of Flower's strategies as one of ours, with its settings as options.

    Parameters
    ----------
    kind : class of flwr.serverapp.strategy, or a subclass
    name : str
        What parties and run configurations call it; ``flower:`` and the class by default.
    **settings : int, float or bool
        Arguments of a class of your own that are to be options, with their defaults; those of
        Flower's classes are known.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedProx
    >>> flower_strategy(FedProx).name
    'flower:FedProx'
    """
    own = {
        "name": name or f"flower:{kind.__name__}",
        "flower_type": kind,
        "options_type": options_for(kind, **settings),
        "__module__": __name__,
        "__doc__": f"Flower's `{kind.__name__}`; see `FlowerStrategy`.",
    }
    return type(kind.__name__, (FlowerStrategy,), own)
