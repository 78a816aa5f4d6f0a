"""Show whether a change of the code changed a result of any strategy, to the bit.

    python benchmarks/golden.py record runs/golden.json
    python benchmarks/golden.py compare runs/golden.json
    python benchmarks/golden.py compare runs/golden.json --only fedkt fedmd-ldp

Record before a change and compare after it; `compare` names the first differences of each
case and exits with 1 if there are any. Each case is a small federation in this process: all
strategies of the registry, every way in which a party or the server protects what leaves, a
chain, Flower's own strategies, servers that are killed and resumed, rounds that fail, and
parties whose policies refuse.

Recorded
    Every field of every message in both directions, by name and in its order on the wire, and
    a digest of the encoded content; error replies; the metrics of each round and those given
    to `on_round`; the ledger and its statement; `epsilon.csv`; the parties' journals; arrays
    and outputs of the final model; outputs of the model that each party receives.
Left out
    What differs between two runs of the same code: ids of messages, which are hashes over
    the time among others; times of creation and delivery, and the time to live; the seconds
    of `on_round`; the time of a line in a journal, and its checksum, which covers the time.
Pinned
    Randomness of the operating system. Noise of cases with `seeded-noise` does not come from
    there, but promises nothing, so epsilon is infinite. Cases named ``secret`` draw as a real
    run does and have a finite epsilon; they repeat because here a seeded stream stands in for
    the operating system. So it does for the names of runs. Flower's own strategies sample by
    the module `random`, which is seeded.

Bits are those of one machine and one set of packages; record again after either changes.
"""

import argparse
import hashlib
import json
import logging
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias
from unittest import mock

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result, Strategy

from clients.app import client_app
from fl_strategies import KnowledgeStrategy, Learner, Party, _compat, write_epsilon_csv
from fl_strategies.errors import InvalidData, StrategyError
from fl_strategies.party.party import SIMULATED, PartyPolicy
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import encode_arrays
from simulations.config import Settings, Value
from simulations.federation import Federation, load_federation
from simulations.runtime.client_app import load_party
from simulations.runtime.local import InMemoryGrid

Sections: TypeAlias = dict[str, dict[str, str]]
"""Of a case, in the order in which things happened: title, field, value."""
Edit: TypeAlias = Callable[[Federation], Federation]

MOST_SHOWN: Final = 5
LONGEST: Final = 100
BYTES: Final = "bytes"
PACKAGES: Final = (
    "flwr",
    "numpy",
    "scipy",
    "scikit-learn",
    "numba",
    "torch",
    "opacus",
    "dp-accounting",
    "xgboost",
    "xgboost-cpu",
)
SOURCES: Final = (
    "fl_strategies.privacy.mechanisms.os",
    "fl_strategies._compat.secrets",
    "fl_strategies.server.run.secrets",
    "fl_strategies.strategies.fedmd.samples.secrets",
)
"""Where this package draws from the operating system."""


# Cases


@dataclass(frozen=True)
class Case:
    """A federation and what happens to it.

    Parameters
    ----------
    settings : mapping
        Of the run, on top of `SMALL`.
    edit : callable, optional
        Gives the federation other rows or another task; its parties then have no journal.
    failing : tuple of int
        Parties whose data cannot be read, so that they answer with an error.
    policies : tuple of PartyPolicy
        One per party; none: they allow what an experiment needs.
    stops : bool
        Whether the run must end without a result.
    dies_after : int
        Replies after which the server is killed, to be resumed; 0: it lives.
    server : callable, optional
        Makes one of Flower's strategies, whose own server then asks our parties.
    """

    settings: Mapping[str, Value]
    edit: Edit | None = None
    failing: tuple[int, ...] = ()
    policies: tuple[PartyPolicy, ...] = ()
    stops: bool = False
    dies_after: int = 0
    server: Callable[[], Strategy] | None = None

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of what runs on our server, also of what continues."""
        if self.server is not None:
            return ()
        named = (self.settings["strategy"], self.settings.get("then", ""))
        return tuple(str(name) for name in named if name)

    def refused(self) -> "Case":
        """Return the case with parties of which each refuses something else."""
        number: Value = len(POLICIES)
        settings = {**self.settings, "num-parties": number, "min-parties": number}
        return replace(self, settings=settings, policies=POLICIES, stops=True)


NUM_PARTIES: Final = 4
SMALL: Final[Mapping[str, Value]] = {
    "num-parties": NUM_PARTIES,
    "train-rows": 240,
    "public-rows": 60,
    "test-rows": 60,
    "num-trees": 5,
    "boosting-rounds": 3,
    "epochs": 2,
    "num-features": 50,
    "final.num-trees": 5,
    "final.boosting-rounds": 3,
    "final.epochs": 2,
    "final.num-features": 50,
    "seed": 3,
    "num-workers": 1,
    "solo": False,
    "pooled": False,
    "max-wait": 5.0,
}
JOURNALS: Final[Mapping[str, Value]] = {"state-dir": "state"}
SEEDED: Final[Mapping[str, Value]] = {"seeded-noise": True}
MLP: Final[Mapping[str, Value]] = {"learner": "mlp", "final-learner": "mlp"}
SCORERS: Final[Mapping[str, Value]] = {
    "learner": "xgboost-scores,forest-scores,mlp,ridge",
    "final-learner": "mlp",
    "num-server-rounds": 3,
}
BINARY: Final[Mapping[str, Value]] = {"data": "breast-cancer"}
POLICIES: Final = (
    replace(SIMULATED, max_epochs=1),
    replace(SIMULATED, max_fits=1),
    replace(SIMULATED, max_predictions=1),
    replace(SIMULATED, allow_models=False),
    replace(SIMULATED, strategies=("another",)),
    PartyPolicy(allow_models=True, max_run_epsilon=1.0),
)
"""Each refuses by another part of what a strategy says about a request."""
FLOWER: Final[Mapping[str, Any]] = {
    "min_train_nodes": NUM_PARTIES,
    "min_evaluate_nodes": NUM_PARTIES,
    "min_available_nodes": NUM_PARTIES,
}


def as_images(federation: Federation) -> Federation:
    """Return the digits as images of one channel, for networks with convolutions."""
    data = federation.dataset
    rows = {name: getattr(data, name) for name in ("x_train", "x_public", "x_test")}
    images = {name: x.reshape(len(x), 1, 8, 8) for name, x in rows.items()}
    return replace(federation, dataset=replace(data, **images))


def with_labels(federation: Federation) -> Federation:
    """Return rows with two labels each: the class, and whether the first column is high."""
    data = federation.dataset
    pairs = (("y_train", data.x_train), ("y_public", data.x_public), ("y_test", data.x_test))
    labels = {n: np.stack([getattr(data, n) % 2, x[:, 0] > 0], axis=1) for n, x in pairs}
    typed: dict[str, Any] = {name: y.astype(np.int64) for name, y in labels.items()}
    changed = replace(data, **typed, classes=("class", "high"), task="multi-label")
    return replace(federation, dataset=changed)


def with_numbers(federation: Federation) -> Federation:
    """Return rows with a number to predict in place of a class."""
    data = federation.dataset
    pairs = (("y_train", data.x_train), ("y_public", data.x_public), ("y_test", data.x_test))
    numbers: dict[str, Any] = {name: x[:, :1] - x[:, 1:2] ** 2 for name, x in pairs}
    changed = replace(data, **numbers, classes=("number",), task="regression")
    return replace(federation, dataset=changed)


def _fedkd() -> Iterator[tuple[str, Case]]:
    noise: dict[str, Value] = {"strategy": "fedkd", "weights": "uniform", "gamma": 5.0}
    secret: dict[str, Value] = {
        "strategy": "fedkd",
        "noise": "gaussian",
        "target-epsilon": 10.0,
        **JOURNALS,
    }
    yield "fedkd-evidence", Case({"strategy": "fedkd"})
    yield (
        "fedkd-counts",
        Case({"strategy": "fedkd", "weights": "counts", "loss": "l1", "final-learner": "mlp"}),
    )
    yield (
        "fedkd-uniform",
        Case({"strategy": "fedkd", "weights": "uniform", "consensus": "median", **BINARY}),
    )
    yield (
        "fedkd-largest-logit",
        Case(
            {
                "strategy": "fedkd",
                "weights": "counts",
                "scale": "max",
                "num-levels": 16,
                "rounding": "stochastic",
                "num-server-rounds": 2,
            }
        ),
    )
    yield "fedkd-noisy-evidence", Case({"strategy": "fedkd", "weights": "noisy-evidence"})
    yield "fedkd-noise", Case({**noise, **SEEDED})
    yield "fedkd-noisy-counts", Case({**noise, **SEEDED, "weights": "noisy-counts"})
    yield "fedkd-noise-secret", Case({**secret, "weights": "uniform"})
    yield "fedkd-noisy-counts-secret", Case({**secret, "weights": "noisy-counts"})
    yield "fedkd-one-party-fails", Case({"strategy": "fedkd"}, failing=(2,))
    yield (
        "fedkd-noise-secret-fails",
        Case(
            {**secret, "weights": "noisy-counts", "min-parties": NUM_PARTIES},
            failing=(1,),
            stops=True,
        ),
    )
    yield (
        "fedkd-images",
        Case(
            {
                "strategy": "fedkd",
                "learner": "cnn-2-4-8,mlp",
                "final-learner": "cnn-2-4-8",
                "num-predictions": 2,
                "augmentation": "crop",
            },
            edit=as_images,
        ),
    )
    yield (
        "fedkd-multi-label",
        Case(
            {"strategy": "fedkd", "learner": "random-forest,mlp", "final-learner": "mlp"},
            edit=with_labels,
        ),
    )


def _fedkt() -> Iterator[tuple[str, Case]]:
    noisy: dict[str, Value] = {
        "strategy": "fedkt",
        "gamma": 0.25,
        "num-queries": 30,
        "accept-noise": True,
    }
    level1 = {**noisy, "privacy-level": "L1"}
    level2 = {**noisy, "privacy-level": "L2"}
    yield "fedkt-l0", Case({"strategy": "fedkt"})
    yield (
        "fedkt-l0-paper",
        Case(
            {
                "strategy": "fedkt",
                "learner": "decision-tree,boosted-trees,forest",
                "num-splits": 2,
                "num-teachers": 3,
                "corrected": False,
                "vote-weights": "none",
            }
        ),
    )
    yield "fedkt-l0-models", Case({"strategy": "fedkt", "exchange": "models"})
    yield "fedkt-l0-trimmed", Case({"strategy": "fedkt", "trim-fraction": 0.25})
    yield "fedkt-l1", Case({**level1, **SEEDED})
    yield "fedkt-l2", Case({**level2, **SEEDED})
    yield "fedkt-l1-secret", Case({**level1, **BINARY})
    yield (
        "fedkt-l1-target-secret",
        Case(
            {
                "strategy": "fedkt",
                "privacy-level": "L1",
                "noise": "gaussian",
                "target-epsilon": 8.0,
                "num-queries": 10,
                "accept-noise": True,
            }
        ),
    )
    yield (
        "fedkt-l1-confident-secret",
        Case(
            {
                "strategy": "fedkt",
                "privacy-level": "L1",
                "noise": "confident-gaussian",
                "sigma": 4.0,
                "threshold": 3.0,
                "threshold-sigma": 4.0,
                "num-queries": 30,
                "accept-noise": True,
            }
        ),
    )
    yield "fedkt-l2-secret", Case({**level2, **JOURNALS, **BINARY})
    yield (
        "fedkt-l2-scores-secret",
        Case(
            {
                **level2,
                **JOURNALS,
                **BINARY,
                "exchange": "scores",
                "vote-weights": "noisy-counts",
            }
        ),
    )
    yield (
        "fedkt-l2-target-secret",
        Case(
            {
                "strategy": "fedkt",
                "privacy-level": "L2",
                "noise": "laplace",
                "target-epsilon": 8.0,
                "accept-noise": True,
                "learner": "logistic-regression",
                **JOURNALS,
                **BINARY,
            }
        ),
    )
    yield (
        "fedkt-l1-secret-fails",
        Case({**level1, "min-parties": NUM_PARTIES}, failing=(0,), stops=True),
    )
    yield (
        "fedkt-l2-secret-fails",
        Case({**level2, **JOURNALS, "min-parties": NUM_PARTIES}, failing=(0,), stops=True),
    )


def _fedmd() -> Iterator[tuple[str, Case]]:
    short: dict[str, Value] = {"epochs-initial": 2, "num-server-rounds": 2}
    plain: dict[str, Value] = {"strategy": "fedmd", **short}
    sample: dict[str, Value] = {**plain, "release": "nfdp", "num-samples": 20}
    noise: dict[str, Value] = {
        **plain,
        "release": "ldp",
        "noise": "gaussian",
        "sigma": 8.0,
        "num-public": 20,
        "accept-noise": True,
    }
    yield "fedmd-none", Case({**plain, "num-server-rounds": 3})
    yield "fedmd-logits", Case({**plain, "payload": "logits", "final-learner": "mlp"})
    yield (
        "fedmd-trimmed-mean",
        Case({**plain, "payload": "softmax", "consensus": "trimmed-mean", **MLP, **BINARY}),
    )
    yield "fedmd-evidence", Case({**plain, "payload": "softmax", "consensus": "evidence"})
    yield (
        "fedmd-pretrained",
        Case({**plain, **MLP, "pretrain-epochs": 2, "pretrain-once": True}),
    )
    yield "fedmd-nfdp", Case({**sample, **SEEDED})
    yield "fedmd-ldp", Case({**noise, **SEEDED})
    yield "fedmd-nfdp-secret", Case({**sample, **JOURNALS})
    yield "fedmd-ldp-secret", Case({**noise, **JOURNALS})
    yield (
        "fedmd-ldp-target-secret",
        Case(
            {
                "strategy": "fedmd",
                **short,
                "release": "ldp",
                "target-epsilon": 8.0,
                "accept-noise": True,
                "learner": "logistic-regression",
                **JOURNALS,
                **BINARY,
            }
        ),
    )
    yield (
        "fedmd-ldp-secret-fails",
        Case({**noise, **JOURNALS, "min-parties": NUM_PARTIES}, failing=(3,), stops=True),
    )
    yield (
        "fedmd-ldp-secret-resumed",
        Case({**noise, **JOURNALS, "checkpoint-dir": "kept"}, dies_after=NUM_PARTIES * 2 + 2),
    )
    yield (
        "fedmd-ldp-secret-budget",
        Case({**noise, **JOURNALS, "max-epsilon": 3.0, "num-server-rounds": 3}),
    )
    yield "cronus", Case({**plain, "strategy": "cronus"})
    yield "cronus-ldp", Case({**noise, **SEEDED, "strategy": "cronus"})


def _sums(name: str) -> Iterator[tuple[str, Case]]:
    plain: dict[str, Value] = {"strategy": name, "num-components": 5, **BINARY}
    noisy: dict[str, Value] = {**plain, "target-epsilon": 5.0, "accept-noise": True}
    yield f"{name}-none", Case({"strategy": name})
    for level in ("L1", "L2", "central"):
        case = f"{name}-{level.lower()}"
        given: dict[str, Value] = {**noisy, "privacy-level": level}
        yield case, Case({**given, **SEEDED})
        yield f"{case}-secret", Case({**given, **(JOURNALS if level == "L2" else {})})
        yield (
            f"{case}-secret-fails",
            Case({**given, **JOURNALS, "min-parties": NUM_PARTIES}, failing=(2,), stops=True),
        )


def _statistics() -> Iterator[tuple[str, Case]]:
    plain: dict[str, Value] = {"strategy": "fedstatistics", "accept-noise": True, **BINARY}
    timed: dict[str, Value] = {"time": "column 1", "event": "column 2", "num-times": 5}
    yield "fedstatistics-none", Case({"strategy": "fedstatistics"})
    yield "fedstatistics-times", Case({"strategy": "fedstatistics", **BINARY, **timed})
    for level in ("L2", "central"):
        given = {**plain, "privacy-level": level, "target-epsilon": 5.0}
        case = f"fedstatistics-{level.lower()}"
        yield case, Case({**given, "correlations": False, **SEEDED})
        yield f"{case}-secret", Case({**given, **(JOURNALS if level == "L2" else {})})


def _weights() -> Iterator[tuple[str, Case]]:
    short: dict[str, Value] = {**MLP, "num-server-rounds": 2, "local-epochs": 2}
    yield "fedavg", Case({"strategy": "fedavg", **short})
    yield (
        "fedavg-sampled",
        Case(
            {
                "strategy": "fedavg",
                **short,
                "num-server-rounds": 3,
                "half-precision": True,
                "fraction-train": 0.5,
                "min-train-nodes": 2,
            }
        ),
    )
    yield (
        "fedavg-dp-sgd-secret",
        Case(
            {**short, "strategy": "fedavg", "learner": "dp-mlp", "final-learner": "dp-mlp"}
            | {"num-server-rounds": 1, "local-epochs": 1, **JOURNALS}
        ),
    )
    yield (
        "fedavg-resumed",
        Case(
            {"strategy": "fedavg", **short, "checkpoint-dir": "kept"},
            dies_after=NUM_PARTIES * 2 + 1,
        ),
    )
    yield "scaffold", Case({"strategy": "scaffold", **short})
    yield "feddf", Case({"strategy": "feddf", **short})
    yield "fedgen", Case({"strategy": "fedgen", **short, "generator-steps": 5})
    yield "fedproto", Case({"strategy": "fedproto", **short})
    yield "pfnm", Case({"strategy": "pfnm", "local-epochs": 2})
    yield "fens", Case({"strategy": "fens", "num-server-rounds": 2})
    yield (
        "fens-network",
        Case({"strategy": "fens", "aggregator": "network", "num-server-rounds": 2}),
    )
    yield "flower-fedprox", Case({"strategy": "flower:FedProx", **short})
    yield "flower-krum", Case({"strategy": "flower:Krum", **short})


def _others() -> Iterator[tuple[str, Case]]:
    for name in ("akd", "avgkd", "ekd", "pkd"):
        yield name, Case({"strategy": name, **SCORERS})
    yield (
        "akd-resumed",
        Case({"strategy": "akd", **SCORERS, "checkpoint-dir": "kept"}, dies_after=3),
    )
    yield "akd-regression", Case({"strategy": "akd", **SCORERS}, edit=with_numbers)
    chained: dict[str, Value] = {"then": "flower:FedProx", "then-rounds": 2, **MLP}
    yield "chain", Case({"strategy": "fedkt", **chained, "flower-fedprox.proximal-mu": 0.25})
    yield (
        "chain-secret",
        Case(
            {
                "strategy": "fedhistogram",
                "privacy-level": "L2",
                "target-epsilon": 5.0,
                "accept-noise": True,
                **chained,
                "then": "fedmd",
                "fedmd.release": "ldp",
                "fedmd.sigma": 8.0,
                "fedmd.noise": "gaussian",
                "fedmd.num-public": 20,
                "fedmd.accept-noise": True,
                **JOURNALS,
            }
        ),
    )
    own = {"strategy": "flower:FedAvg", **MLP, "num-server-rounds": 2}
    yield "flower-own-fedavg", Case(own, server=lambda: flower.FedAvg(**FLOWER))
    yield (
        "flower-own-krum",
        Case(own, server=lambda: flower.Krum(num_malicious_nodes=1, **FLOWER)),
    )


def _all() -> Iterator[tuple[str, Case]]:
    families = (
        _fedkd(),
        _fedkt(),
        _fedmd(),
        *map(_sums, ("fedhistogram", "fedregression", "fedmoments")),
    )
    for name, case in chain(*families, _statistics(), _weights(), _others()):
        yield name, case
        if Case(case.settings) == case and "fraction-train" not in case.settings:
            yield f"{name}-refused", case.refused()


CASES: Final[Mapping[str, Case]] = dict(_all())


def uncovered(strategies: Iterable[str]) -> list[str]:
    """Return which strategies no case runs."""
    covered = {name for case in CASES.values() for name in case.strategies}
    return sorted(set(strategies) - covered)


# Recording


class Killed(BaseException):
    """Ends the server process, as far as the run can tell."""


@dataclass
class Record:
    """Collects what a case does, in order.

    Parameters
    ----------
    sections : Sections
    asked : dict of int to str
        The round in which each party was asked last; replies do not say theirs.
    """

    sections: Sections = field(default_factory=dict)
    asked: dict[int, str] = field(default_factory=dict)

    def add(self, title: str, fields: Mapping[str, str]) -> None:
        """Add a section; a title that is there already is counted."""
        titles = (title if number == 1 else f"{title} ({number})" for number in count(1))
        self.sections[next(t for t in titles if t not in self.sections)] = dict(fields)

    def add_message(self, message: Message, party: int, *, to_party: bool) -> None:
        """Add all that a message carries, in its order on the wire."""
        if message.has_error():
            fields = {"error": f"{message.error.code} {message.error.reason}"}
        else:
            fields = {BYTES: digest(_compat.records_to_bytes(message.content))}
            fields |= fields_of(message.content)
        if to_party:
            config = message.content.config_records[keys.CONFIG]
            self.asked[party] = str(config[keys.SERVER_ROUND])
        way = f"server -> party {party}" if to_party else f"party {party} -> server"
        kind = message.metadata.message_type
        self.add(f"round {self.asked[party]}, {kind}, {way}", fields)


class RecordingGrid(InMemoryGrid):
    """Records what passes, and kills the server after some replies."""

    def __init__(self, *given: Any, record: Record, dies_after: int = 0, **named: Any) -> None:
        super().__init__(*given, **named)
        self._record, self._left = record, dies_after
        self._parties = {node: i for i, node in enumerate(self.get_node_ids())}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Record questions before the parties see them."""
        sent = list(messages)
        for message in sent:
            party = self._parties[message.metadata.dst_node_id]
            self._record.add_message(message, party, to_party=True)
        return super().push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Record answers as they arrive at the server."""
        replies = super().pull_messages(message_ids)
        for reply in replies:
            party = self._parties[reply.metadata.src_node_id]
            self._record.add_message(reply, party, to_party=False)
            self._left -= 1
            if self._left == 0:
                raise Killed
        return replies


def digest(data: bytes) -> str:
    """Return the length of some bytes and the beginning of their hash."""
    return f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:16]}"


def text_of(value: object) -> str:
    """Return a value as exact text; long texts by their beginning and their hash."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... {digest(text.encode())}"


def text_of_array(array: Any) -> str:
    """Return type, shape and digest of an array, of numpy or as Flower sends it."""
    if isinstance(array, FlowerArray):
        return f"{array.dtype} {tuple(array.shape)} {array.stype} {digest(array.data)}"
    plain = np.ascontiguousarray(array)
    return f"{plain.dtype} {plain.shape} {digest(plain.tobytes())}"


def fields_of(content: RecordDict) -> dict[str, str]:
    """Return every field of every record, in order."""
    fields = {}
    for name, record in content.items():
        fields[name] = type(record).__name__
        show = text_of_array if isinstance(record, ArrayRecord) else text_of
        fields |= {f"{name}/{key}": show(value) for key, value in record.items()}
    return fields


@contextmanager
def pinned() -> Iterator[None]:
    """Let what this package draws from the operating system be the same each time.

    Other packages draw from it too, some of them when they are first imported; they keep the
    real one, so that a case does not depend on those before it.
    """
    stream, state = random.Random(0), random.getstate()  # noqa: S311 - nothing to protect
    source = SimpleNamespace(
        urandom=stream.randbytes,
        token_bytes=stream.randbytes,
        token_hex=lambda size: stream.randbytes(size).hex(),
        randbits=stream.getrandbits,
    )
    random.seed(0)
    with ExitStack() as stack:
        stack.callback(random.setstate, state)
        for name in SOURCES:
            stack.enter_context(mock.patch(name, source))
        yield


def run(case: Case) -> Sections:
    """Run a case and return all that must not change."""
    record = Record()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(chdir(folder))
        stack.enter_context(pinned())
        settings = Settings.from_run_config({**SMALL, **case.settings})
        federation = load_federation(settings)
        if case.edit is not None:
            federation = case.edit(federation)
        if case.server is not None:
            _run_flowers_own(case.server(), case, federation, record)
        else:
            _run_ours(case, federation, record)
        _add_journals(record)
    return record.sections


def _run_ours(case: Case, federation: Federation, record: Record) -> None:
    def on_round(number: int, metrics: Mapping[str, float]) -> None:
        texts = {name: text_of(value) for name, value in metrics.items() if name != "seconds"}
        record.add(f"round {number}, on_round", texts)

    if case.dies_after:
        with suppress(Killed):
            killed = federation.strategy([on_round])
            _start(killed, case, federation, record, dies_after=case.dies_after)
            raise InvalidData(f"Golden: the server must be killed, got {killed.round_} rounds.")
        record.add("killed", {})
        resumed = replace(federation.settings, resume=True)
        federation = replace(federation, settings=resumed)
    strategy, result = federation.strategy([on_round]), None
    try:
        result = _start(strategy, case, federation, record)
    except StrategyError as error:
        if not case.stops:
            raise
        record.add("error", {"text": f"{type(error).__name__}: {error}"})
    if case.stops and result is not None:
        raise InvalidData("Golden: the run must end without a result, got one.")
    _add_outcome(record, strategy)
    if result is not None:
        _add_result(record, result)
        _add_model(record, "final model", strategy.model_, federation.dataset.x_test)


def _start(
    strategy: Strategy,
    case: Case,
    federation: Federation,
    record: Record,
    *,
    arrays: ArrayRecord | None = None,
    dies_after: int = 0,
) -> Result:
    settings = federation.settings

    def load(context: Context) -> Party:
        number = int(context.node_config[keys.PARTITION_ID])
        if number in case.failing:
            raise InvalidData(f"Golden: the data of party {number} must be there, got none.")
        party = load_party(context) if case.edit is None else federation.party(number)
        return replace(party, policy=case.policies[number]) if case.policies else party

    def on_model(model: Learner, party: Party, _: Context) -> None:
        title = f"model of party {party.partition_id}"
        _add_model(record, title, model, federation.dataset.x_test)

    grid = RecordingGrid(
        client_app(load, on_model=on_model),
        settings.num_parties,
        run_config=settings.to_run_config(),
        record=record,
        dies_after=dies_after,
    )
    with closing(grid):
        first = arrays if arrays is not None else ArrayRecord()
        return strategy.start(grid, first, num_rounds=settings.num_rounds)


def _run_flowers_own(
    strategy: Strategy, case: Case, federation: Federation, record: Record
) -> None:
    learner: Any = federation.final_factory()()
    first = learner.initialised(rng=np.random.default_rng(0))
    arrays = encode_arrays(first.to_arrays())
    result = _start(strategy, case, federation, record, arrays=arrays)
    _add_result(record, result)


def _add_outcome(record: Record, strategy: KnowledgeStrategy[Any]) -> None:
    """Add what a server knows of privacy and of its parties after a run."""
    ledger = strategy.ledger_
    for event, times in ledger.entries:
        record.add("ledger", {"event": repr(event), "count": repr(times)})
    record.add("ledger, in all", {"unit": ledger.unit, "claim": repr(ledger.claim())})
    statement = ledger.statement().splitlines()
    record.add("ledger, statement", {f"line {i}": line for i, line in enumerate(statement, 1)})
    write_epsilon_csv(strategy, "epsilon.csv")
    lines = Path("epsilon.csv").read_bytes().decode().splitlines(keepends=True)
    record.add("epsilon.csv", {f"line {i}": repr(line) for i, line in enumerate(lines, 1)})
    record.add("rejected", {f"node {node}": why for node, why in strategy.rejected_.items()})
    for party, report in sorted(strategy.parties_.items()):
        record.add(f"report of party {party}", {"report": repr(report)})


def _add_result(record: Record, result: Result) -> None:
    phases = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    for phase, rounds in phases.items():
        for number, metrics in rounds.items():
            texts = {name: text_of(value) for name, value in metrics.items()}
            record.add(f"round {number}, {phase} metrics", texts)
    if result.arrays is not None:
        arrays = {name: text_of_array(array) for name, array in result.arrays.items()}
        record.add("final model, arrays", arrays)


def _add_model(record: Record, title: str, model: Learner, x: Any) -> None:
    outputs = {"logits": model.logits(x), "predictions": model.predict(x)}
    record.add(title, {name: text_of_array(array) for name, array in outputs.items()})


def _add_journals(record: Record) -> None:
    """Add the lines of the parties' journals, but for their times and checksums."""
    for path in sorted(Path().glob("state/*/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            fields = json.loads(line)
            del fields["time"], fields["checksum"]
            texts = {name: json.dumps(value) for name, value in fields.items()}
            record.add(f"journal {path.parent.name}/{path.name}", texts)


# Comparing


def differences(before: Sections, now: Sections) -> Iterator[tuple[str, str]]:
    """Yield where two records of a case differ and how, in the order of the first."""
    for title, fields in before.items():
        if title in now:
            yield from ((title, text) for text in _differences(fields, now[title]))
        else:
            yield title, "missing now"
    yield from ((title, "only now") for title in now if title not in before)
    yield from ((new, f"comes where {old} was") for old, new in _moved(before, now))


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    found = []
    for name in dict.fromkeys([*before, *now]):
        was, is_now = before.get(name, "missing"), now.get(name, "missing")
        if was != is_now and name != BYTES:  # which follow from the rest
            found.append(f"{name} differs: was {was}, is {is_now}")
    found = found or [f"{new} comes where {old} was" for old, new in _moved(before, now)]
    return found or ["the same fields in other bytes"] * (before != now)


def _moved(before: Mapping[str, object], now: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the first place at which names that both have are in another order."""
    common = ([n for n in before if n in now], [n for n in now if n in before])
    return [(old, new) for old, new in zip(*common, strict=True) if old != new][:1]


def compare(before: Mapping[str, Sections], now: Mapping[str, Sections]) -> list[str]:
    """Return lines that name the first differences of each case; none if there are none.

    A difference that several messages share is listed once, where it is first.
    """
    lines = []
    for name in dict.fromkeys([*before, *now]):
        if name not in now or name not in before:
            lines.append(f"{name}: {'only now' if name in now else 'missing now'}")
            continue
        titles: dict[str, list[str]] = {}
        for title, text in differences(before[name], now[name]):
            titles.setdefault(text, []).append(title)
        for text, (title, *others) in list(titles.items())[:MOST_SHOWN]:
            also = f" (and {len(others)} more like it)" if others else ""
            lines.append(f"{name}: {title}: {text}{also}")
        if len(titles) > MOST_SHOWN:
            lines.append(f"{name}: ... and {len(titles) - MOST_SHOWN} more differences")
    return lines


# Commands


def environment() -> dict[str, str]:
    """Return what bits depend on besides the code."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def run_all(names: Iterable[str]) -> tuple[dict[str, Sections], list[str]]:
    """Run cases by name; return their records, and a line for each that raised."""
    records, failed, level = {}, [], logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # of parties that fail on purpose
    try:
        for name in names:
            began = time.monotonic()
            try:
                records[name] = run(CASES[name])
            except Exception as error:  # one broken case must not hide the others
                failed.append(f"{name}: raised {type(error).__name__}: {error}")
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    finally:
        logging.disable(level)
    return records, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; return 1 if anything differs or raises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases with these beginnings")
    options = parser.parse_args(arguments)
    beginnings = tuple(options.only or [""])
    names = [name for name in CASES if name.startswith(beginnings)]
    if options.action == "record":
        records, lines = run_all(names)
        if not lines:
            text = json.dumps({"environment": environment(), "cases": records}, indent=1)
            options.file.write_text(text + "\n", encoding="utf-8")
            print(f"{len(records)} cases recorded")
    else:
        before = json.loads(options.file.read_text(encoding="utf-8"))
        records, lines = run_all(names)
        broken = {line.partition(":")[0] for line in lines}
        recorded = before["cases"].items()
        kept = {n: case for n, case in recorded if n.startswith(beginnings) and n not in broken}
        lines += compare(kept, records)
        if lines and before["environment"] != environment():
            lines.append(f"environment: was {before['environment']}, is {environment()}")
        if not lines:
            print(f"{len(records)} cases, all equal to the bit")
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
