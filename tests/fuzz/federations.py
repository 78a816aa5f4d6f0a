"""Small real federations whose messages are recorded, to be damaged afterwards."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from sklearn.tree import DecisionTreeClassifier

from clients import RidgeLearner, SklearnLearner, TorchLearner, client_app
from fl_strategies import REGISTRY, KnowledgeStrategy, Party
from fl_strategies._compat import records_from_bytes
from simulations.runtime.local import InMemoryGrid
from tests.toys import NUM_CLASSES, common_options, toy_party

NUM_PARTIES = 4
CANARY = 7.140625e-3
"""A number of a private record; exact in every type, and in no message."""


def tree() -> SklearnLearner:
    return SklearnLearner(DecisionTreeClassifier(max_depth=3), num_classes=NUM_CLASSES)


def ridge() -> RidgeLearner:
    return RidgeLearner(num_classes=NUM_CLASSES)


def network() -> TorchLearner:
    return TorchLearner(
        lambda: torch.nn.Linear(2, NUM_CLASSES), num_classes=NUM_CLASSES, epochs=1
    )


LEARNERS: Mapping[str, Callable[[], Any]] = {"tree": tree, "ridge": ridge, "network": network}


@dataclass(frozen=True)
class Variant:
    """One way to run a strategy: its settings and the parties' model."""

    strategy: str
    learner: str
    settings: Mapping[str, Any]
    num_rounds: int

    def build(self) -> KnowledgeStrategy[Any]:
        options = {
            **common_options(NUM_PARTIES),
            "learner_fn": LEARNERS[self.learner],
            "learner_name": self.learner,
            **self.settings,
        }
        return REGISTRY[self.strategy].strategy.from_settings(**options)  # type: ignore[arg-type]

    def load(self, context: Context) -> Party:
        party = toy_party(int(context.node_config["partition-id"]), num_records=12)
        x = np.concatenate([np.full_like(party.x[:1], CANARY), party.x[1:]])
        return replace(
            party,
            x=x,
            x_test=party.x[:6],
            y_test=party.y[:6],
            learner_fn=LEARNERS[self.learner],
            learner_name=self.learner,
            catalogue=LEARNERS,
        )

    def app(self) -> ClientApp:
        return client_app(self.load)


def _variant(
    strategy: str, learner: str = "ridge", *, rounds: int = 1, **settings: Any
) -> Variant:
    return Variant(strategy, learner, settings, rounds)


_SHORT = {"epochs_initial": 1, "epochs_digest": 1}
_NOISY_COUNTS = {"privacy_level": "L2", "gamma": 0.5, "vote_weights": "noisy-counts"}
_NOISY_SCORES: Mapping[str, Any] = {
    "release": "ldp",
    "payload": "softmax",
    "noise": "gaussian",
    "sigma": 2.0,
    "accept_noise": True,
}
VARIANTS: Mapping[str, Variant] = {
    "fedkt": _variant("fedkt", "tree", num_teachers=2),
    "fedkt-l1": _variant("fedkt", "tree", num_teachers=2, privacy_level="L1", gamma=0.5),
    "fedkt-l2": _variant(
        "fedkt", "tree", num_teachers=2, privacy_level="L2", gamma=0.5, accept_noise=True
    ),
    "fedkt-l2-counts": _variant("fedkt", "tree", **_NOISY_COUNTS),
    "fedkt-l2-scores": _variant("fedkt", "tree", exchange="scores", **_NOISY_COUNTS),
    "fedkt-trimmed": _variant("fedkt", "tree", trim_fraction=0.3),
    "fedkt-models": _variant("fedkt", "tree", num_teachers=2, exchange="models"),
    "fedkt-networks": _variant("fedkt", "network", num_teachers=2, exchange="models"),
    "fedkd": _variant("fedkd"),
    "fedkd-float": _variant("fedkd", num_levels=None, weights="uniform"),
    "fedkd-scale": _variant("fedkd", scale="max", weights="counts", rounds=2),
    "fedkd-noisy": _variant("fedkd", weights="noisy-counts", gamma=1.0, num_levels=256),
    "fedmd": _variant("fedmd", "network", rounds=2, **_SHORT),
    "fedmd-softmax": _variant("fedmd", payload="softmax", consensus="median", rounds=2),
    "fedmd-evidence": _variant("fedmd", payload="softmax", consensus="evidence", rounds=2),
    "fedmd-logits": _variant("fedmd", payload="logits", consensus="class-weighted", rounds=2),
    "fedmd-weighted": _variant("fedmd", consensus="class-weighted", rounds=2),
    "fedmd-nfdp": _variant("fedmd", release="nfdp", num_samples=6, rounds=2),
    "fedmd-ldp": _variant("fedmd", release="ldp", noise="gumbel", gamma=1.0, rounds=2),
    "fedmd-ldp-scores": _variant("fedmd", rounds=2, **_NOISY_SCORES),
    "akd": _variant("akd", rounds=3),
    "avgkd": _variant("avgkd", rounds=2),
    "cronus": _variant("cronus", rounds=2),
    "ekd": _variant("ekd", rounds=3),
    "fedmoments": _variant("fedmoments", features="products", num_products=2),
    "fedmoments-l2": _variant("fedmoments", "tree", target_epsilon=9.0, accept_noise=True),
    "fedmoments-central": _variant(
        "fedmoments", privacy_level="central", target_epsilon=9.0, accept_noise=True
    ),
    "fedstatistics": _variant("fedstatistics", time="column 1", event="column 2"),
    "fedstatistics-l2": _variant("fedstatistics", target_epsilon=9.0, accept_noise=True),
    "fedstatistics-central": _variant(
        "fedstatistics", privacy_level="central", target_epsilon=9.0, accept_noise=True
    ),
    "fens": _variant("fens", aggregator="network", num_hidden=3, rounds=2),
    "pkd": _variant("pkd", rounds=2),
    "fedavg": _variant("fedavg", "network", rounds=2),
    "fedgen": _variant("fedgen", "network", rounds=2, generator_steps=3),
    "fedproto": _variant("fedproto", "network", rounds=2),
    "pfnm": _variant("pfnm", "network", local_epochs=2),
    "feddf": _variant("feddf", "network", rounds=2, distill_epochs=1),
    "scaffold": _variant("scaffold", "network", rounds=2),
}


@dataclass
class Exchange:
    """One question of a strategy to all parties, and their answers.

    `strategy` is as it was after asking; each node had its `state` before it answered.
    """

    strategy: KnowledgeStrategy[Any]
    sent: list[Message]
    replies: list[Message]
    states: dict[int, RecordDict]

    def again(self) -> KnowledgeStrategy[Any]:
        """Return the strategy as it waits for these answers."""
        shared = [*self.sent, *(message.content for message in self.sent)]
        return copy.deepcopy(self.strategy, {id(each): each for each in shared})


class RecordingGrid(InMemoryGrid):
    """Keeps every exchange."""

    def __init__(self, strategy: KnowledgeStrategy[Any], app: ClientApp) -> None:
        super().__init__(app, NUM_PARTIES)
        self.strategy = strategy
        self.exchanges: list[Exchange] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        sent = list(messages)
        before = {node: self.context(node).state for node in self.get_node_ids()}
        strategy = copy.deepcopy(self.strategy, {id(each): each for each in sent})
        replies = super().send_and_receive(sent, timeout=timeout)
        self.exchanges.append(Exchange(strategy, sent, replies, before))
        return replies

    def context(self, node: int) -> Context:
        own = self._nodes[node]
        return Context(
            own.run_id, node, dict(own.node_config), records_from_bytes(own.state), {}
        )


@functools.cache
def recorded(name: str) -> list[Exchange]:
    """Return all exchanges of a run, train and evaluate in turns; each variant runs once."""
    variant = VARIANTS[name]
    strategy = variant.build()
    grid = RecordingGrid(strategy, variant.app())
    strategy.start(grid, ArrayRecord(), num_rounds=variant.num_rounds)
    for exchange in grid.exchanges:
        assert not any(reply.has_error() for reply in exchange.replies)
    return [exchange for exchange in grid.exchanges if exchange.sent]


def recorded_of(name: str, phase: str) -> list[Exchange]:
    """Return the exchanges of one phase, train or evaluate."""
    return [one for one in recorded(name) if one.sent[0].metadata.message_type == phase]


def private_numbers() -> tuple[str, bytes]:
    """Return how the private canary would look in text and in bytes."""
    return repr(CANARY), np.float64(CANARY).tobytes()
