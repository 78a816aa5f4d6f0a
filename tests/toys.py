"""A federation small enough to run in milliseconds, and real: three blobs, real learners."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from scipy.special import softmax

from fl_strategies import FedKD, FedKT, Knowledge, KnowledgeStrategy, Party
from fl_strategies._util import Array, FloatArray, IntArray, derive_rng
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.learners import Correction, DenseLayer, Objective, Proximal, Recipe
from fl_strategies.privacy.events import DPSGDEvent, PrivacyEvent
from fl_strategies.server.replies import PartyReply
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import decode_arrays, encode_arrays
from simulations.runtime.local import InMemoryGrid

NUM_CLASSES = 3
CENTRES = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
OUTSIDE = 10.0
"""Where the centroid of a class without rows travels: weights must be finite to be averaged."""


class Planned:
    """Mixin of learners that say beforehand what each of their trainings costs."""

    planned: tuple[tuple[PrivacyEvent, int], ...]

    def planned_events(
        self,
        num_records: int,  # noqa: ARG002 - the same for any number
        *,
        epochs: int | None = None,  # noqa: ARG002
        distill: bool = False,  # noqa: ARG002
    ) -> tuple[tuple[PrivacyEvent, int], ...]:
        return self.planned


class CentroidLearner:
    """Nearest class centroid on a bootstrap sample: random, portable, no library."""

    num_classes = NUM_CLASSES

    def __init__(self) -> None:
        self.centroids: FloatArray = np.full((NUM_CLASSES, 2), np.inf)

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        rows = rng.integers(len(y), size=len(y))
        x, y = x[rows], y[rows]
        for label in np.unique(y):
            self.centroids[label] = x[y == label].mean(axis=0)
        return self

    def distill(
        self, x: Array, targets: FloatArray, *, rng: np.random.Generator, recipe: Recipe
    ) -> Self:
        """Take the means of rows, weighted by the chance of each class."""
        rows = rng.integers(len(x), size=len(x))
        chances = softmax(targets[rows], axis=1) if recipe.link == "identity" else targets[rows]
        totals = chances.sum(axis=0)[:, None]
        means = chances.T @ x[rows] / np.maximum(totals, 1e-12)
        self.centroids = np.where(totals > 1e-9, means, np.inf)
        return self

    steps_taken = 1

    def partial_fit(
        self,
        x: Array,
        y: IntArray,
        *,
        rng: np.random.Generator,
        epochs: int,  # noqa: ARG002 - one pass is all there is
        objective: Objective | None = None,
    ) -> Self:
        """Move the known centroids half-way to the new ones, less with an objective."""
        before = self.centroids
        new = CentroidLearner().fit(x, y, rng=rng).centroids
        known = np.isfinite(self.centroids) & np.isfinite(new)
        with np.errstate(invalid="ignore"):
            between = (self.centroids + new) / 2
        unknown = np.where(np.isfinite(new), new, self.centroids)
        self.centroids = np.where(known, between, unknown)
        for term in () if objective is None else objective.terms:
            if isinstance(term, Proximal):
                held = (self.centroids + term.mu * before) / (1 + term.mu)
                self.centroids = np.where(np.isfinite(before), held, self.centroids)
            elif isinstance(term, Correction) and objective is not None:
                step = objective.step_size or 1.0
                self.centroids = self.centroids - step * term.arrays["centroids"]
        return self

    def initialised(self, *, rng: np.random.Generator) -> "CentroidLearner":
        twin = CentroidLearner()
        twin.centroids = rng.normal(scale=0.1, size=(NUM_CLASSES, 2))
        return twin

    def to_layers(self) -> list[DenseLayer]:
        """Return the one layer that tells the nearest centroid, but for what all share."""
        centroids = self.to_arrays()["centroids"]
        return [(2 * centroids, -(centroids**2).sum(axis=1))]

    def head(self) -> DenseLayer:
        """Return the one layer: rows are the features."""
        return self.to_layers()[0]

    def features(self, x: Array) -> FloatArray:
        """Return the rows."""
        return np.asarray(x, dtype=np.float64)

    def from_layers(self, layers: Sequence[DenseLayer]) -> "CentroidLearner":
        ((weight, _),) = layers
        return self.from_arrays({"centroids": weight / 2})

    def sized_for(self, arrays: Mapping[str, Array]) -> Self:  # noqa: ARG002 - of one size
        return self

    def logits(self, x: Array) -> FloatArray:
        distances = ((x[:, None, :] - self.centroids[None]) ** 2).sum(axis=2)
        return -np.minimum(distances, 1e6)

    def predict(self, x: Array) -> IntArray:
        return self.logits(x).argmax(axis=1)

    def to_arrays(self) -> dict[str, Array]:
        return {"centroids": np.nan_to_num(self.centroids, posinf=OUTSIDE)}

    def from_arrays(self, arrays: Mapping[str, Array]) -> "CentroidLearner":
        centroids = arrays.get("centroids")
        if (
            set(arrays) != {"centroids"}
            or centroids is None
            or centroids.shape != (NUM_CLASSES, 2)
        ):
            raise KnowledgeMismatch("CentroidLearner: centroids must be (3, 2), got others.")
        twin = CentroidLearner()
        twin.centroids = np.where(centroids == OUTSIDE, np.inf, centroids)
        return twin


class Careful(Planned, CentroidLearner):
    """Claims to have been trained with DP-SGD; the arithmetic of charges is what is tested."""

    privacy_events = planned = (
        (DPSGDEvent(noise_multiplier=4.0, records=40, batch_size=4, steps=10), 1),
    )


class PrivatelyFitted:
    """Mixin of learners whose fits cost three steps of DP-SGD, by their number of rows."""

    privacy_events: tuple[Any, ...] = ()

    def planned_events(self, num_records: int, **_: object) -> tuple[Any, ...]:
        event = DPSGDEvent(noise_multiplier=4.0, records=num_records, batch_size=2, steps=3)
        return ((event, 1),)

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Any:
        self.privacy_events = self.planned_events(len(y))
        return super().fit(x, y, rng=rng)  # type: ignore[misc]


def watched(kind: type, seen: list[Any], method: str = "fit") -> Any:
    """Return a learner that notes in a list all that one of its methods is given."""

    def note(self: Any, *given: Any, **named: Any) -> Any:
        seen.append((*given, *named.values()))
        return getattr(kind, method)(self, *given, **named)

    return type(kind.__name__, (kind,), {method: note})


class EditedGrid(InMemoryGrid):
    """Passes the replies to every batch of messages through `edit(number, replies)`.

    It returns those that the server is to get; nothing means that it has changed them.
    """

    def __init__(self, app: ClientApp, num_nodes: int, edit: Callable[..., Any]) -> None:
        super().__init__(app, num_nodes)
        self.edit, self.sends = edit, 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        self.sends += 1
        replies: list[Message] = super().send_and_receive(messages, timeout=timeout)
        edited = self.edit(self.sends, replies)
        return replies if edited is None else edited  # type: ignore[no-any-return]


def blobs(num_rows: int, *path: str | int) -> tuple[Array, IntArray]:
    """Return rows around the three centres with their labels."""
    rng = derive_rng(0, "blobs", *path)
    y = rng.integers(NUM_CLASSES, size=num_rows)
    return CENTRES[y] + rng.normal(scale=0.8, size=(num_rows, 2)), y


PUBLIC, PUBLIC_LABELS = blobs(60, "public")
TEST = blobs(200, "test")


def toy_party(partition_id: int, num_records: int = 40) -> Party:
    """Return one party of the toy federation."""
    x, y = blobs(num_records, "party", partition_id)
    return Party(
        x=x,
        y=y,
        public=PUBLIC,
        num_classes=NUM_CLASSES,
        learner_fn=CentroidLearner,
        learner_name="centroid",
        partition_id=partition_id,
        x_test=TEST[0],
        y_test=TEST[1],
    )


def loading(make: Callable[[int], Party]) -> Callable[[Context], Party]:
    """Load parties by their numbers, as a `ClientApp` does."""
    return lambda context: make(int(context.node_config["partition-id"]))


load_toy_party = loading(toy_party)


def load_with(change: Callable[[Party], Party], only: int) -> Callable[[Context], Party]:
    """Load toy parties of which one is changed, or raises."""
    return loading(lambda n: change(toy_party(n)) if n == only else toy_party(n))


def lacking(number: int, size: int = 40) -> Party:
    """Return a party that lacks the class of its own number."""
    party = toy_party(number, 3 * size)
    rows = np.flatnonzero(party.y != number)[:size]
    return replace(party, x=party.x[rows], y=party.y[rows])


def torch_factory(*hidden: int, activation: str = "ReLU", **settings: Any) -> Callable[[], Any]:
    """Return a factory of perceptrons on toy rows; without hidden units one `nn.Linear`."""
    from torch import nn

    from clients.networks.learner import TorchLearner

    def module() -> nn.Module:
        if not hidden:
            return nn.Linear(2, NUM_CLASSES)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((2, *hidden)):
            layers += [nn.Linear(before, after), getattr(nn, activation)()]
        return nn.Sequential(*layers, nn.Linear(hidden[-1], NUM_CLASSES))

    return lambda: TorchLearner(module, num_classes=NUM_CLASSES, **settings)


DESCENT: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "batch_size": 10_000}
"""Settings of a network that takes one step of plain descent per epoch."""
Change = Callable[[RecordDict], None]


class WatchedGrid(InMemoryGrid):
    """Keeps the messages of training, and may change what the first party answers then.

    `alter` gets the replies of every phase, and returns those that the server is to get.
    """

    def __init__(
        self,
        app: ClientApp,
        num_parties: int,
        change: Change | None = None,
        only_in_round: int = 0,
        alter: Callable[[list[Message]], list[Message]] = lambda replies: replies,
    ) -> None:
        super().__init__(app, num_parties)
        self.change, self.only_in_round, self.alter = change, only_in_round, alter
        self.wire: list[tuple[list[Message], list[Message]]] = []
        self.replies: list[Message] = []
        self.result: Any = None

    def send_and_receive(self, messages: Any, **rest: Any) -> list[Message]:
        sent = list(messages)
        replies = self.alter(super().send_and_receive(sent, **rest))
        if sent and sent[0].metadata.message_type == "train":
            number = sent[0].content.config_records[keys.CONFIG][keys.SERVER_ROUND]
            if self.change is not None and self.only_in_round in (0, number):
                self.change(replies[0].content)
            self.wire.append((sent, replies))
        self.replies += replies
        return replies

    def serve(self, strategy: KnowledgeStrategy[Any], num_rounds: int = 1) -> Self:
        """Run some rounds and keep the result."""
        self.result = strategy.start(self, ArrayRecord(), num_rounds=num_rounds)
        return self

    @property
    def asked(self) -> list[list[int]]:
        """Parties that each round asked to train."""
        return [sorted(m.metadata.dst_node_id - 1000 for m in sent) for sent, _ in self.wire]


def arrays_in(content: RecordDict | Message) -> dict[str, Array]:
    """Return the arrays of a message."""
    records = content.content if isinstance(content, Message) else content
    return decode_arrays(records.array_records[keys.ARRAYS], 2**30)


def with_arrays(change: Callable[[dict[str, Array]], Mapping[str, Array]]) -> Change:
    """Return a change of the arrays that a party sends."""

    def changed(content: RecordDict) -> None:
        content[keys.ARRAYS] = encode_arrays(change(arrays_in(content)))

    return changed


def with_meta(key: str, value: Any) -> Change:
    """Return a change of one value that a party sends."""

    def changed(content: RecordDict) -> None:
        content.config_records[keys.META][key] = value

    return changed


def weights_of(strategy: KnowledgeStrategy[Any]) -> dict[str, Array]:
    """Return the arrays of the final model."""
    arrays: dict[str, Array] = strategy.model_.to_arrays()  # type: ignore[attr-defined]
    return arrays


def without_records(party: Party) -> Party:
    return replace(party, x=party.x[:0], y=party.y[:0])


def common_options(num_parties: int = 4, seed: int = 0) -> dict[str, object]:
    """Return what every strategy of the registry can be built from."""
    return {
        "public": PUBLIC,
        "num_classes": NUM_CLASSES,
        "learner_fn": CentroidLearner,
        "learner_name": "centroid",
        "num_parties": num_parties,
        "seed": seed,
        "max_wait": 0.0,
    }


SHORT: dict[str, dict[str, object]] = {"fedgen": {"generator_steps": 5}}
"""Settings of strategies whose usual ones take long; toys need no good features."""


def toy_fedkt(**changes: object) -> FedKT:
    """Return FedKT with few voters, whose noise is accepted however strong it is."""
    options = {**common_options(), "accept_noise": True}
    return FedKT.from_settings(**{**options, **changes})  # type: ignore[arg-type]


PAPER = {"num_splits": 2, "num_teachers": 5, "corrected": False, "vote_weights": "none"}
"""FedKT as it was published."""


def paper_fedkt(**changes: object) -> FedKT:
    return toy_fedkt(**{**PAPER, **changes})


def toy_fedkd(**changes: object) -> FedKD:
    return FedKD.from_settings(**{**common_options(), **changes})  # type: ignore[arg-type]


def accuracy(labels: Sequence[int] | IntArray) -> float:
    return float((np.asarray(labels) == TEST[1]).mean())


def hear(
    strategy: KnowledgeStrategy[Any],
    *said: Knowledge,
    metrics: Sequence[Mapping[str, float]] = (),
) -> None:
    """Let a strategy check and add what parties 0, 1, ... said in a round."""
    for number, knowledge in enumerate(said):
        own = dict(metrics[number]) if metrics else {}
        strategy.state.members[number] = number, number
        strategy.add(PartyReply(number, number, "", strategy.check(knowledge), own))
