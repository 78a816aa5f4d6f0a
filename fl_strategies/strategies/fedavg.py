"""FedAvg: federated averaging of weights, the baseline of federated learning, in many rounds.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data (AISTATS 2017), Algorithm 1.

    round 1   party    draws first weights, from a generator that is the same for all
              party    trains them on its records and sends them
              server   takes the mean of all weights, by numbers of records
    round r   party    continues from the mean of round r - 1
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, TypeAlias, TypeVar, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies.aggregation.evidence import believed_sizes
from fl_strategies.arrays import Array, content_hash
from fl_strategies.core.accounting import (
    ledger_of,
    ledger_to_text,
    privacy_metrics,
    spend,
    unprotected,
)
from fl_strategies.core.party import Party, check_rows
from fl_strategies.core.policy import Request
from fl_strategies.core.protocols import (
    ContinuingLearner,
    Learner,
    LearnerFactory,
    plan_of,
)
from fl_strategies.core.reported_ledgers import (
    Reported,
    enter_reported,
    most_expensive,
    read_charges,
)
from fl_strategies.core.role import PartyRole, check_public_data, measure, read_round, read_seed
from fl_strategies.core.state import State
from fl_strategies.core.strategy import FederationOptions, KnowledgeStrategy, logger
from fl_strategies.core.tasks import METRICS, Task, check_task
from fl_strategies.core.training import public_model, require_finite, require_plan, trained
from fl_strategies.exceptions import (
    KnowledgeMismatch,
    UnsupportedLearner,
    require,
    require_known,
)
from fl_strategies.options import Options, option
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.randomness import derive_rng
from fl_strategies.wire import keys
from fl_strategies.wire.config import config_choice
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar
from fl_strategies.wire.replies import PartyReply

TASK: Final = "task"
WEIGHTS: Final = "weights"
UNPROTECTED_WEIGHTS: Final = "weights left the party that were trained without noise"
UNPROTECTED: Final[Sequence[Entry]] = (
    (NonPrivateEvent(unit="example", reason=UNPROTECTED_WEIGHTS), 1),
)
AUDIENCE: Final = "the server, the other parties and everybody who sees a model"

MOST_TIMES_DISTANCE: Final = 2.0
"""Weights are at most so many times as far from the middle as those of the median party."""
_FEWEST_RESTRAINED: Final = 3

# A server cannot make a party train without end.
MAX_EPOCHS: Final = 10_000
MAX_RECORDS: Final = 2**40
# Beyond it squares overflow, and no honest network has such weights.
LARGEST_WEIGHT: Final = 1e30

S = TypeVar("S")
Layout: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """What a party sent: weights, how many records they saw, and what that cost a record."""

    arrays: Mapping[str, Array]
    num_records: int
    charges: Sequence[Entry]

    @property
    def layout(self) -> Layout:
        """Names, types and shapes."""
        arrays = sorted(self.arrays.items())
        return tuple((name, array.dtype.str, array.shape) for name, array in arrays)


def average(weights: Sequence[LocalWeights]) -> dict[str, Array]:
    """Return the mean of each array, weighted by records; of whole numbers the largest.

    Whole numbers are counters, such as the batches that a normalisation has seen.

    Examples
    --------
    >>> small = LocalWeights({"w": np.array([0.0])}, 1, ())
    >>> large = LocalWeights({"w": np.array([4.0])}, 3, ())
    >>> average([small, large])
    {'w': array([3.])}
    """
    total = sum(part.num_records for part in weights)
    means: dict[str, Array] = {}
    for name, first in weights[0].arrays.items():
        arrays = [part.arrays[name] for part in weights]
        if first.dtype.kind != "f":
            means[name] = np.asarray(np.max(arrays, axis=0))
            continue
        mean = np.zeros(first.shape)
        for part, array in zip(weights, arrays, strict=True):
            mean += array * np.float64(part.num_records / total)
        means[name] = mean.astype(first.dtype)
    return means


def restrained(weights: Sequence[LocalWeights]) -> tuple[list[LocalWeights], int]:
    """Return weights that one party cannot pull wherever it likes, and how many were changed.

    Weights that are much farther from the middle, the median of each number, than those of
    the median party are moved towards it; and numbers of records are those of
    `believed_sizes`. Fewer than three parties have no middle.
    """
    if len(weights) < _FEWEST_RESTRAINED:
        return list(weights), 0
    sizes = believed_sizes(np.array([part.num_records for part in weights], dtype=np.float64))
    names = [name for name, array in weights[0].arrays.items() if array.dtype.kind == "f"]
    middle = {name: np.median([p.arrays[name] for p in weights], axis=0) for name in names}
    away = np.array([_distance(part.arrays, middle) for part in weights])
    most = MOST_TIMES_DISTANCE * float(np.median(away))
    restrained_, changed = [], 0
    for part, size, distance in zip(weights, sizes, away, strict=True):
        pull = min(1.0, most / distance) if distance > 0 else 1.0
        moved = {name: _pulled(part.arrays[name], middle[name], pull) for name in names}
        changed += int(pull < 1 or size < part.num_records)
        arrays = {**part.arrays, **moved} if pull < 1 else part.arrays
        restrained_.append(replace(part, arrays=arrays, num_records=max(round(size), 1)))
    return restrained_, changed


def _distance(arrays: Mapping[str, Array], middle: Mapping[str, Array]) -> float:
    squares = [np.square(arrays[name] - middle[name].astype(np.float64)) for name in middle]
    return float(np.sqrt(sum(part.sum() for part in squares)))


def _pulled(array: Array, middle: Array, pull: float) -> Array:
    return np.asarray(middle + pull * (array - middle), dtype=array.dtype)


@dataclass(frozen=True, kw_only=True)
class FedAvgOptions(Options):
    """Options of `FedAvg`.

    Parameters
    ----------
    local_epochs : int
        The paper's E: passes of a party over its records in a round.
    """

    owner: ClassVar[str] = "FedAvg"

    local_epochs: int = option(
        1, "passes of a party over its records in a round", least=1, most=MAX_EPOCHS
    )


@dataclass(kw_only=True)
class FedAvgState(State):
    """Also what each party reports that its releases have cost, and the model's layout."""

    ledgers: dict[int, Reported] = field(default_factory=dict)
    layout: Layout | None = None


class FedAvg(KnowledgeStrategy[LocalWeights]):
    """All parties train one model in turns; the server averages what they make of it.

    The baseline to compare knowledge transfer with: all parties need the same kind of model,
    and its weights travel in every round.

    Leaves the party
        In every round the weights of its model after training, and its number of records.
    Guarantee
        None: epsilon is infinite. Only if every party trains with differential privacy, by
        a learner whose `partial_fit` adds to its `privacy_events`, each record is protected
        against the server and everybody else, and the events of all rounds add up; `ledger_`
        is that of the party whose events, as the parties report them, cost most. Not covered:
        rows that parties only evaluate on, the number of records, settings chosen on private
        data. One party cannot claim any number of records, or send weights any distance
        from the others' (`restrained`); what it does within these limits is averaged.

    Parameters
    ----------
    public : (num_public, ...)
        Not learned from. Parties that hold other public rows are excluded, because that
        mostly means other preprocessing.
    num_classes : int
        Length of the federation's class list; labels or outputs in other tasks.
    learner_fn : factory
        Makes the model, the same at all parties. It must be an `IncrementalLearner` and a
        `PortableLearner`, such as `TorchLearner`.
    learner_name : str
        What parties must call their own model to take part.
    task : "single-label", "multi-label" or "regression"
    options : FedAvgOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Notes
    -----
    The paper's C is 1: all connected parties take part in every round. Its B, batch size,
    and its step size are settings of the learner, whose optimizer starts anew in each round.
    In round 1 nothing is sent: every party draws the same first weights, because the learner
    draws them before anything else from a generator that the seed names. A party that comes
    later gets the mean. Weights that the learner cannot read, that are not finite, or whose
    names, types or shapes differ from the model's are excluded; before there is a model, from
    those that most parties sent.
    """

    name: ClassVar[str] = "fedavg"
    options_type = FedAvgOptions
    usual_rounds: ClassVar[int] = 10
    same_learner: ClassVar[bool] = True
    relays_models: ClassVar[bool] = True
    party_learner_needs = final_learner_needs = (ContinuingLearner,)
    state_type = FedAvgState
    reply_kind = WEIGHTS

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        task: Task = "single-label",
        options: FedAvgOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        check_rows("FedAvg", "public", public)
        check_task("FedAvg", task, num_classes)
        learner, rule = require_averaged("FedAvg", learner_fn()), f"of {num_classes} classes"
        same = learner.num_classes == num_classes
        require(same, "FedAvg", "learner_fn", rule, learner.num_classes)
        self.public_hash = content_hash(public)
        self.num_classes, self.task = num_classes, task
        self.options = options or FedAvgOptions()
        self.learner_fn, self.model_name = learner_fn, learner_name
        self.state: FedAvgState = FedAvgState(ledger=self._new_ledger())

    def _new_ledger(self) -> PrivacyLedger:
        return PrivacyLedger(
            "example", delta=DEFAULT_DELTA, num_parties=self.num_parties, audience=AUDIENCE
        )

    def party_config(self) -> dict[str, Scalar]:
        """Return the model's name, its task and for how long it is to be trained."""
        return {
            **self.options.to_config(),
            TASK: self.task,
            keys.LEARNER: self.model_name,
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: self.public_hash,
        }

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return the present model; nothing before there is one."""
        return self.state.delivery

    def check(self, knowledge: Knowledge) -> LocalWeights:
        """Check one party's weights by the server's own learner."""
        num_records = knowledge.meta.get(keys.NUM_EXAMPLES)
        if type(num_records) is not int or not 1 <= num_records <= MAX_RECORDS:
            raise KnowledgeMismatch(
                f"Reply: {keys.NUM_EXAMPLES} must be a whole number from 1 to {MAX_RECORDS}, "
                f"got {num_records!r}."
            )
        for name, array in knowledge.arrays.items():
            # NaN compares as false, so it is refused as well.
            if not (np.abs(array) <= LARGEST_WEIGHT).all():
                raise KnowledgeMismatch(
                    f"Reply: array {name[:80]!r} must be finite and at most "
                    f"{LARGEST_WEIGHT:g} in magnitude, got others."
                )
        self._rebuild(knowledge.arrays)
        charges = read_charges(knowledge.meta.get(keys.PRIVACY_EVENTS))
        return LocalWeights(knowledge.arrays, num_records, charges)

    def _rebuild(self, arrays: Mapping[str, Array]) -> ContinuingLearner:
        return require_averaged("FedAvg", self.learner_fn()).from_arrays(arrays)

    def exclude(self, replies: Sequence[PartyReply[LocalWeights]]) -> Mapping[int, str]:
        """Return nodes whose weights cannot be averaged with the others'."""
        layouts = {reply.node_id: reply.knowledge.layout for reply in replies}
        if not layouts:
            return {}
        usual = self.state.layout or Counter(layouts.values()).most_common(1)[0][0]
        return dict.fromkeys(
            (node for node, layout in layouts.items() if layout != usual),
            "Reply: weights must have the model's layout, got another.",
        )

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Make the mean of all weights the model."""
        self.record_releases()
        weights, changed = restrained([reply.knowledge for reply in self.replies])
        if changed:
            logger.warning("FedAvg counts the weights of %s parties for less.", changed)
        model = self._rebuild(average(weights))
        self.state.layout = weights[0].layout
        return self.keep_model(model), {keys.NUM_CAPPED: changed}

    def record_releases(self) -> None:
        """Record what parties say that their weights have cost."""
        for reply in self.replies:
            charges, times = reply.knowledge.charges, self.run.attempts_of(reply.node_id)
            enter_reported(self.state.ledgers, reply, charges, times, self._new_ledger())
        if self.state.ledgers:
            self.state.ledger = most_expensive(self.state.ledgers.values())


class FedAvgParty(PartyRole):
    """The party's role: continue from the mean with the own records."""

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return that weights leave after so many passes."""
        epochs = FedAvgOptions.received(config).local_epochs
        return replace(super().request(party, config), epochs=epochs)

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: RecordDict
    ) -> tuple[Knowledge, Metrics]:
        """Return the weights after training, and how many records they have seen."""
        owner = party.owner
        check_public_data(party, config)
        require_known(len(party.y) > 0, owner, "x", "records to learn from", "none")
        config_choice(config, TASK, [party.task])
        epochs, server_round = FedAvgOptions.received(config).local_epochs, read_round(config)
        _check_name(party, config.get(keys.LEARNER))
        learner = require_averaged(owner, party.learner_fn())
        plan = plan_of(learner, len(party.y), epochs=epochs)
        charges = plan or UNPROTECTED
        ledger = spend(party, charges, f"fedavg, round {server_round}", DEFAULT_DELTA, state)
        if received is None:
            rng = derive_rng(read_seed(config), "fedavg", "initial")
        else:
            learner = learner.from_arrays(received.arrays)
            rng = party.rng(read_seed(config), "fedavg", server_round)

        def train() -> ContinuingLearner:
            model = learner.partial_fit(party.x, party.y, rng=rng, epochs=epochs)
            require_plan(model, plan)
            require_finite(model)
            return model

        stand_in = functools.partial(_public_model, party)
        model = trained(train, stand_in, promised=bool(plan))
        metrics = privacy_metrics(party=unprotected(UNPROTECTED_WEIGHTS), example=ledger)
        metrics[keys.LOCAL_FIGURE] = measure(party, model, state)[METRICS[party.task]]
        meta: dict[str, Scalar] = {
            keys.NUM_EXAMPLES: len(party.y),
            keys.PRIVACY_EVENTS: ledger_to_text(ledger_of(charges, DEFAULT_DELTA)),
        }
        return Knowledge(WEIGHTS, model.to_arrays(), meta), metrics


def _public_model(party: Party) -> ContinuingLearner:
    return require_averaged(party.owner, public_model(party, party.learner_fn))


def require_averaged(owner: str, learner: Learner) -> ContinuingLearner:
    """Return the learner if its weights can be averaged; say what to do if they cannot."""
    if not isinstance(learner, ContinuingLearner):
        raise UnsupportedLearner(
            f"{owner}: the learner must keep learning (distill, partial_fit) and travel "
            f"(to_arrays, from_arrays) for its weights to be averaged, got "
            f"{type(learner).__name__}. Use a network, or another strategy."
        )
    return learner


def _check_name(party: Party, asked: object) -> None:
    if asked != party.learner_name:
        raise KnowledgeMismatch(
            f"{party.owner}: the averaged model must be this party's own "
            f"({party.learner_name!r}), got {str(asked)[:80]!r}. FedAvg needs one kind of "
            f"model at all parties and on the server."
        )
