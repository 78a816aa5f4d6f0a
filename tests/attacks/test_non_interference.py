"""Nothing leaves a party that depends on a record, but through noise that is accounted."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict
from torch import nn

import clients.app
from clients.app import FAILED, NO_BUDGET, client_app
from clients.networks.learner import TorchLearner
from clients.networks.private import DPTorchLearner
from fl_strategies import (
    FENS,
    REGISTRY,
    FedHistogram,
    FedKD,
    FedKT,
    FedMD,
    FedMoments,
    FedRegression,
)
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.features import FeatureMap
from fl_strategies.learners import LearnerFactory
from fl_strategies.party import role
from fl_strategies.party.party import RecordForm, number_of_cell
from fl_strategies.party.role import PartyRole, PartyState
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.server.strategy import KnowledgeStrategy
from fl_strategies.strategies.fedkd import FedKDParty
from fl_strategies.strategies.fedkt import FedKTParty
from fl_strategies.strategies.sums.histogram import Cells
from fl_strategies.strategies.sums.moments import SummedMoments
from fl_strategies.strategies.sums.regression import Components
from fl_strategies.strategies.sums.statistics import NUMBER, Tally
from fl_strategies.strategies.weights import FedAvg
from fl_strategies.wire import keys
from simulations.config import Settings
from simulations.data.sets import Request, load_dataset
from simulations.deploy.data import read_labelled, read_public
from simulations.models import LEARNERS, learner_factory
from simulations.runtime.local import InMemoryGrid, run_local
from tests.attacks import interference
from tests.attacks.interference import (
    NEIGHBOURS,
    NUM_CLASSES,
    ORDINARY,
    PUBLIC,
    SAMPLE,
    SETS,
    WIDTH,
    Recording,
    Records,
    noise_without_data,
    party_of,
    rows,
    transcript,
    with_last,
)

SMALL = Settings.of(
    num_trees=3, boosting_rounds=3, epochs=2, batch_size=8, num_parties=1, optimizer="sgd"
)


def family(name: str) -> LearnerFactory:
    return learner_factory(name, row_shape=(WIDTH,), num_classes=NUM_CLASSES, settings=SMALL)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, NUM_CLASSES)


def plain(**options: Any) -> TorchLearner:
    return TorchLearner(linear, num_classes=NUM_CLASSES, epochs=2, batch_size=8, **options)


def private() -> DPTorchLearner:
    return DPTorchLearner(
        linear,
        num_classes=NUM_CLASSES,
        epochs=2,
        batch_size=8,
        noise_multiplier=1.0,
        private_distill=True,
    )


COMMON: Mapping[str, Any] = {"num_classes": NUM_CLASSES, "num_parties": 1, "public": PUBLIC.x}
L2 = {"privacy_level": "L2", "num_teachers": 4, "num_splits": 2, "gamma": 0.5}


def fedkt(learner_fn: LearnerFactory, **options: Any) -> FedKT:
    return FedKT.from_settings(**COMMON, learner_fn=learner_fn, **options)


def fedkd(learner_fn: LearnerFactory, **options: Any) -> FedKD:
    return FedKD.from_settings(**COMMON, learner_fn=learner_fn, **options)


def fedmd(learner_fn: LearnerFactory, **options: Any) -> FedMD:
    return FedMD.from_settings(**COMMON, learner_fn=learner_fn, epochs_initial=2, **options)


def fedhistogram(learner_fn: LearnerFactory, **options: Any) -> FedHistogram:
    return FedHistogram.from_settings(**COMMON, learner_fn=learner_fn, **options)


def fedregression(learner_fn: LearnerFactory, **options: Any) -> FedRegression:
    return FedRegression.from_settings(**COMMON, learner_fn=learner_fn, **options)


def fedmoments(learner_fn: LearnerFactory, **options: Any) -> FedMoments:
    return FedMoments.from_settings(**COMMON, learner_fn=learner_fn, **options)


def fedavg(learner_fn: LearnerFactory) -> FedAvg:
    return FedAvg(**COMMON, learner_fn=learner_fn)


def relayed(name: str, learner_fn: LearnerFactory) -> KnowledgeStrategy[Any]:
    options = {**COMMON, "num_parties": 2}
    return REGISTRY[name].strategy(**options, learner_fn=learner_fn)


def registered(name: str, learner_fn: LearnerFactory, **options: Any) -> KnowledgeStrategy[Any]:
    return REGISTRY[name].strategy.from_settings(**COMMON, learner_fn=learner_fn, **options)


def fens(learner_fn: LearnerFactory) -> KnowledgeStrategy[Any]:
    return FENS.from_settings(**COMMON, learner_fn=learner_fn, aggregator="mean")


Make = Callable[..., KnowledgeStrategy[Any]]
LDP = {"release": "ldp", "accept_noise": True}
NOISY: Mapping[str, Make] = {
    "fedkt L2": partial(fedkt, **L2),
    "fedkt L2 laplace": partial(fedkt, **L2, noise="laplace", corrected=False),
    "fedkt L2 counts": partial(fedkt, **L2, vote_weights="noisy-counts"),
    "fedkt L2 bought counts": partial(
        fedkt,
        privacy_level="L2",
        num_teachers=4,
        target_epsilon=2.0,
        vote_weights="noisy-counts",
        accept_noise=True,
    ),
    "fedkt L2 scores": partial(fedkt, **L2, vote_weights="noisy-counts", exchange="scores"),
    "fedkt L2 confident": partial(
        fedkt,
        privacy_level="L2",
        num_teachers=4,
        noise="confident-gaussian",
        sigma=2.0,
        threshold=0.1,
        threshold_sigma=2.0,
    ),
    "fedhistogram L2": partial(
        fedhistogram, target_epsilon=1.0, num_cells=3, accept_noise=True
    ),
    "fedregression L2": partial(
        fedregression, target_epsilon=1.0, num_components=2, accept_noise=True
    ),
    "fedmoments L2": partial(fedmoments, target_epsilon=1.0, accept_noise=True),
    "fedmoments L2 cosines": partial(
        fedmoments, features="cosines", num_cosines=6, target_epsilon=1.0, accept_noise=True
    ),
    "fedstatistics L2": partial(
        registered, "fedstatistics", target_epsilon=1.0, accept_noise=True
    ),
    "fedmd ldp labels": partial(fedmd, **LDP, noise="gumbel", gamma=0.5),
    "fedmd ldp softmax": partial(fedmd, **LDP, payload="softmax", sigma=1.0),
    "fedmd ldp logits": partial(
        fedmd, **LDP, payload="logits", noise="laplace", gamma=0.5, clipping_norm=1.0
    ),
}
"""Any learner; the noise comes after it."""
TRAINED_PRIVATELY: Mapping[str, Make] = {
    "fedkt L0": partial(fedkt, num_teachers=2, vote_weights="none"),
    "fedkt L0 counts": partial(fedkt, vote_weights="noisy-counts"),
    "fedkd": partial(fedkd, weights="uniform"),
    "fedkd counts": partial(fedkd, weights="noisy-counts"),
    "fedkd evidence": partial(fedkd, weights="noisy-evidence"),
    "fedmd": partial(fedmd),
    "fedmd mean": partial(fedmd, payload="softmax", consensus="mean"),
    "fedavg": fedavg,
    "feddf": partial(registered, "feddf"),
    "scaffold": partial(registered, "scaffold"),
    "avgkd": partial(relayed, "avgkd"),
    "pkd": partial(relayed, "pkd"),
    "ekd": partial(relayed, "ekd"),
    "fens": fens,
}
"""Learners of DP-SGD; the noise is in the training."""


NETWORK = partial(plain, optimizer="sgd", learning_rate=0.1)
MAKERS: Mapping[str, Make] = {
    **NOISY,
    **TRAINED_PRIVATELY,
    "fedmd nfdp": partial(fedmd, release="nfdp", num_samples=SAMPLE, with_replacement=False),
    "fedmd nfdp scores": partial(
        fedmd, release="nfdp", num_samples=SAMPLE, payload="softmax", consensus="evidence"
    ),
    "fedkt L1": partial(fedkt, privacy_level="L1", gamma=0.5, accept_noise=True),
    "fedkd noise": partial(fedkd, weights="uniform", gamma=0.1),
    "fedhistogram L1": partial(
        fedhistogram, privacy_level="L1", target_epsilon=9.0, num_cells=3, accept_noise=True
    ),
    "fedmoments central": partial(
        fedmoments, privacy_level="central", target_epsilon=1.0, accept_noise=True
    ),
    "fedstatistics central": partial(
        registered,
        "fedstatistics",
        privacy_level="central",
        target_epsilon=1.0,
        accept_noise=True,
    ),
    "fedregression central": partial(
        fedregression,
        privacy_level="central",
        target_epsilon=1.0,
        num_components=2,
        accept_noise=True,
    ),
}


def said(
    setting: str,
    learner_fn: LearnerFactory,
    records: Records,
    held_out: Records | None = None,
    **options: Any,
) -> Any:
    """Return all replies of a party with these records, of two rounds where there are more."""
    strategy = MAKERS[setting](learner_fn)
    party = party_of(records, learner_fn=learner_fn, **options)
    if held_out is not None:
        party = replace(party, x_test=held_out.x, y_test=held_out.y)
    other = replace(party_of(ORDINARY, learner_fn=learner_fn), partition_id=1)
    rounds = 1 if strategy.last_round == 1 else 2
    return transcript(strategy, [party, other][: strategy.num_parties], rounds)


def learner_of(name: str) -> LearnerFactory:
    return {"network": NETWORK, "dp-sgd": private}.get(name) or family(name)


@cache
def said_first(setting: str, learner: str, name: str) -> Any:
    """Return the replies to a set that several neighbours are compared with."""
    return said(setting, learner_of(learner), SETS[name])


def assert_silent(setting: str, learner: str, pair: str) -> None:
    name, neighbour = NEIGHBOURS[pair]
    first = said_first(setting, learner, name)

    assert all(kind == "reply" for kind, _ in first)
    assert said(setting, learner_of(learner), neighbour) == first


@pytest.mark.parametrize("pair", NEIGHBOURS)
@pytest.mark.parametrize("setting", [*NOISY, "fedmd nfdp", "fedmd nfdp scores"])
def test_replies_with_noise_depend_on_no_record(setting: str, pair: str) -> None:
    """Every level, noise and payload, for a network that a large record drives to NaN.

    Of noise-free privacy: on no record that was not drawn.
    """
    assert_silent(setting, "network", pair)


@pytest.mark.parametrize("pair", ["another record", "beyond float32", "all of one class"])
@pytest.mark.parametrize("setting", TRAINED_PRIVATELY)
def test_replies_of_private_training_depend_on_no_record(setting: str, pair: str) -> None:
    """DP-SGD in every strategy that can use it."""
    assert_silent(setting, "dp-sgd", pair)


TEST = rows(30, 3)
"""Held-out rows as `party_of` has them."""
HELD_OUT: Mapping[str, Records] = {
    "other labels": Records(TEST.x, (TEST.y + 1) % NUM_CLASSES),
    "a label": with_last(TEST, TEST.x[-1], 0),
    "beyond float32": with_last(TEST, 1e39, 0),
    "five rows": Records(TEST.x[:5], TEST.y[:5]),
    "none": Records(TEST.x[:0], TEST.y[:0]),
}
NETWORKS = [setting for setting in MAKERS if setting not in TRAINED_PRIVATELY]


@pytest.mark.parametrize("held_out", HELD_OUT)
@pytest.mark.parametrize("setting", MAKERS)
def test_replies_depend_on_no_held_out_record(setting: str, held_out: str) -> None:
    """Wherever anything is promised: to an example or a party, by noise or by a sample."""
    learner = "network" if setting in NETWORKS else "dp-sgd"
    first = said_first(setting, learner, "ordinary")

    assert all(kind == "reply" for kind, _ in first)
    assert said(setting, learner_of(learner), ORDINARY, HELD_OUT[held_out]) == first


def said_of_tests(setting: str) -> list[Any]:
    """Return the replies of a party with all test rows, and with five."""
    learner = learner_of("network" if setting in NETWORKS else "dp-sgd")
    return [said(setting, learner, ORDINARY, own) for own in (TEST, HELD_OUT["five rows"])]


class Forgetful(Recording):
    """A party that has lost its memory when it is asked how good the model is."""

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.EVALUATE:
            context = replace(context, state=RecordDict())
        return super().__call__(message, context)


@pytest.mark.parametrize("setting", MAKERS)
def test_a_party_without_memory_tells_no_accuracy(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's word that privacy is promised is enough, and so is a private learner."""
    monkeypatch.setattr(interference, "Recording", Forgetful)
    one, other = said_of_tests(setting)

    assert len(one) > 1
    assert one == other


def test_an_accuracy_before_a_promise_is_recorded() -> None:
    """A server that asks for it first has broken what the party promises afterwards."""
    state = PartyState()
    party, open_ = party_of(ORDINARY, learner_fn=NETWORK), fedkd(NETWORK)
    model = NETWORK().fit(*TEST, rng=np.random.default_rng(0))
    config = ConfigRecord({**open_.party_config(), keys.STRATEGY: "fedkd"})  # type: ignore[arg-type]

    told = FedKDParty().measure(party, model, config, state)

    assert told[keys.ACCURACY] > 0.5
    assert state.ledger(1e-5).get_epsilon(1e-5) == math.inf
    quiet = {**fedkt(NETWORK, **L2).party_config(), keys.SEED: 0, keys.STRATEGY: "fedkt"}
    _, metrics = FedKTParty().train(party, None, ConfigRecord(quiet), state)  # type: ignore[arg-type]
    assert metrics[keys.EPSILON_EXAMPLE] == math.inf


def test_on_public_test_rows_a_known_model_is_measured() -> None:
    """It says nothing that the sample's answers do not; of a model behind noise it would."""
    test = {"x_test": TEST.x, "y_test": TEST.y, "public_test": True}
    told = {}
    for setting in ("fedmd nfdp", "fedmd ldp labels", "fedkt L2", "fedkt L1"):
        party = replace(party_of(ORDINARY, learner_fn=NETWORK), **test)
        result = run_local(
            MAKERS[setting](NETWORK), client_app(lambda _, own=party: own), 1, num_rounds=1
        )
        told[setting] = keys.ACCURACY in result.evaluate_metrics_clientapp[1]

    assert told == {
        "fedmd nfdp": True,
        "fedmd ldp labels": False,
        "fedkt L2": True,
        "fedkt L1": True,
    }


class Particular(DPTorchLearner):
    """A model that fails on one held-out row."""

    def logits(self, x: Any) -> Any:
        require_small(x)
        return super().logits(x)


def test_no_held_out_row_decides_how_many_models_are_refused() -> None:
    """The sum of EKD is not even tried on rows whose metrics stay at home."""

    def make() -> Particular:
        private_: Any = {"noise_multiplier": 1.0, "private_distill": True, "epochs": 1}
        return Particular(linear, num_classes=NUM_CLASSES, batch_size=8, **private_)

    one, other = (
        said("ekd", make, ORDINARY, own) for own in (TEST, HELD_OUT["beyond float32"])
    )
    assert one == other


FAMILIES = list(LEARNERS)[: list(LEARNERS).index("mnist-net")]
"""All learners of flat rows."""


@pytest.mark.parametrize("pair", ["beyond float32", "all of one class"])
@pytest.mark.parametrize("learner", FAMILIES)
def test_replies_of_every_family_depend_on_no_record(learner: str, pair: str) -> None:
    """What the noise covers is any function of a subset: also a model that fails."""
    for setting in ("fedkt L2", "fedmd ldp softmax"):
        assert_silent(setting, learner, pair)


WHOLE = np.rint(ORDINARY.x * 30).astype(int).tolist()
"""Records as whole numbers, some beyond the bound."""
HOSTILE: Mapping[str, tuple[list[Any], Any]] = {
    "extreme": ([3e37, -1.7e308, 0.5], 0),
    "subnormal": ([5e-324, -5e-324, 0.5], 0),
    "missing": ([np.nan, np.inf, np.nan], 0),
    "integer overflow": ([2**63, -(2**63), 2**62 + 1], 0),
    "text": (["about 4", "3,5", "7"], 0),
    "unknown label": ([1, 2, 3], "sick"),
}
"""Records that some readers cannot hold, and their labels."""


def read_files(folder: Path, way: str, x: list[Any], y: list[Any]) -> Records:
    """Return what a deployed party, or a simulated one, reads of a file."""
    if way in ("csv", "parquet"):
        frame = pd.DataFrame(x, columns=["a", "b", "c"]).assign(label=y).astype(str)
        path = folder / f"mine.{way}"
        frame.to_csv(path, index=False) if way == "csv" else frame.to_parquet(path)
    else:
        path = folder / "mine.npz"
        np.savez(path, x=np.array(x), y=np.array(y))
    np.savez(folder / "public.npz", x=PUBLIC.x)
    public = read_public(folder / "public.npz", ("0", "1", "2"))
    return Records(*read_labelled(path, public))


def simulated(folder: Path, x: list[Any], y: list[Any]) -> Records:
    """Return the private rows of a simulation, on its own scale, with the labels given."""
    train = {"x_train": np.array(x), "y_train": ORDINARY.y}
    test = {"x_test": PUBLIC.x, "y_test": PUBLIC.y, "x_public": PUBLIC.x}
    np.savez(folder / "all.npz", **train, **test)  # type: ignore[arg-type]
    data = load_dataset(str(folder / "all.npz"), Request(rng=np.random.RandomState(0)))
    return Records(data.x_train, y)  # type: ignore[arg-type]


def in_tensors(_: Path, x: list[Any], y: list[Any]) -> Records:
    """Return a tensor, of objects' numbers where torch has no such type."""
    numbers = [[number_of_cell(cell) for cell in row] for row in x]
    return Records(torch.tensor(numbers), y)  # type: ignore[arg-type]


WAYS: Mapping[str, Callable[[Path, list[Any], list[Any]], Records]] = {
    "list": lambda _, x, y: Records(x, y),  # type: ignore[arg-type]
    "array": lambda _, x, y: Records(np.array(x), np.array(y)),
    "frame": lambda _, x, y: Records(pd.DataFrame(x), pd.Series(y)),  # type: ignore[arg-type]
    "tensor": in_tensors,
    "csv": lambda folder, x, y: read_files(folder, "csv", x, y),
    "parquet": lambda folder, x, y: read_files(folder, "parquet", x, y),
    "npz": lambda folder, x, y: read_files(folder, "npz", x, y),
    "simulated npz": simulated,
}


SAID_OF_CONTENT: dict[tuple[Any, ...], Any] = {}


def said_whole(setting: str, records: Records) -> Any:
    """Return the replies to records, asked for once however they came in."""
    learner_fn = learner_of("dp-sgd" if setting in TRAINED_PRIVATELY else "network")
    party = party_of(records, learner_fn=learner_fn)
    content = [(own.dtype, own.shape, own.tobytes()) for own in (party.x, party.y)]
    key = setting, *content
    if key not in SAID_OF_CONTENT:
        SAID_OF_CONTENT[key] = said(setting, learner_fn, records)
    return SAID_OF_CONTENT[key]


def assert_silent_reader(setting: str, kind: str, way: str, folder: Path) -> None:
    labels = ORDINARY.y.tolist()
    row, label = HOSTILE[kind]
    first = said_whole(setting, WAYS[way](folder, WHOLE, labels))
    other = WAYS[way](folder, [*WHOLE[:-1], row], [*labels[:-1], label])

    assert all(kind == "reply" for kind, _ in first)
    assert said_whole(setting, other) == first


PRIVATE_REPLIES = [*NOISY, *TRAINED_PRIVATELY]
"""Settings in which the reply itself is private, whoever the server is."""


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("setting", PRIVATE_REPLIES)
def test_replies_depend_on_no_record_of_any_reader(
    setting: str, kind: str, tmp_path: Path
) -> None:
    """Every private strategy and every record that is hard to read, the ways in by turns.

    `test_readers.py` has all of them, and what they make of records.
    """
    place = PRIVATE_REPLIES.index(setting) + 3 * [*HOSTILE].index(kind)
    assert_silent_reader(setting, kind, [*WAYS][place % len(WAYS)], tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "setting", ["fedkt L2", "fedhistogram L2", "fedmoments L2", "fedmd ldp softmax"]
)
def test_replies_depend_on_no_record_by_any_way_in(
    setting: str, way: str, tmp_path: Path
) -> None:
    """An extreme record, which `.npz` files once brought in as infinity, and a text."""
    for kind in ("extreme", "text"):
        assert_silent_reader(setting, kind, way, tmp_path)


@pytest.mark.parametrize("way", ["list", "array", "frame"])
@pytest.mark.parametrize(
    "setting", ["fedhistogram", "fedregression", "fedmoments", "fedstatistics"]
)
def test_one_record_moves_sums_of_whole_numbers_by_what_is_accounted(
    setting: str, way: str, tmp_path: Path
) -> None:
    """One fraction among 400 whole numbers once cut all the others: sums moved by hundreds."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-90, 90, size=(400, WIDTH)).tolist(), (np.arange(400) % 3).tolist()
    cells = {
        "fedhistogram": Cells.of_rows(PUBLIC.x, 3, NUM_CLASSES, rng, 8),
        "fedregression": Components.of_rows(PUBLIC.x, 2),
        "fedmoments": SummedMoments(
            FeatureMap.of_rows(PUBLIC.x).with_cosines(PUBLIC.x, 6, rng),
            2,
            np.empty(0),
            np.empty(0),
        ),
        "fedstatistics": Tally(
            num_values=WIDTH,
            low=np.full(WIDTH, -90.0),
            high=np.full(WIDTH, 90.0),
            kinds=np.full(WIDTH, NUMBER),
            gaps=np.full(WIDTH, -1),
            levels=90,
            digits=1,
            num_bins=20,
            num_times=2,
        ),
    }[setting]
    sums = []
    for last in (x[-1], [0.5, 0.5, 0.5]):
        records = WAYS[way](tmp_path, [*x[:-1], last], y)
        party = party_of(records, learner_fn=NETWORK)
        sums.append(cells.of_records(party.x, party.y, NUM_CLASSES, "single-label"))

    multiples = cells.multiples(NUM_CLASSES, "single-label")
    moved = np.linalg.norm((np.subtract(*sums) * multiples).astype(np.float64))
    assert moved <= cells.moved(NUM_CLASSES, "single-label") + 1e-9


class Fussy(TorchLearner):
    """Fails on one record, and quotes it."""

    def fit(self, x: Any, y: Any, **options: Any) -> Any:
        require_small(x)
        return super().fit(x, y, **options)

    def fit_many(self, sets: Any, **options: Any) -> Any:
        for x, _ in sets:
            require_small(x)
        return super().fit_many(sets, **options)

    def partial_fit(self, x: Any, y: Any, **options: Any) -> Any:
        require_small(x)
        return super().partial_fit(x, y, **options)


def require_small(x: Any) -> None:
    worst = np.abs(x).max()
    if worst > 25:
        raise KnowledgeMismatch(f"Fussy: a record must be small, got {worst}.")


def fussy() -> Fussy:
    return Fussy(linear, num_classes=NUM_CLASSES, epochs=1)


@pytest.mark.parametrize("setting", ["fedkt L2", "fedmd ldp softmax"])
def test_a_record_cannot_turn_a_reply_into_an_error(setting: str) -> None:
    """A learner that raises on it is replaced by a model of public rows."""
    _, neighbour = NEIGHBOURS["beyond float32"]
    ordinary = said(setting, fussy, ORDINARY)

    assert said(setting, fussy, neighbour) == ordinary


def test_a_failure_without_a_promise_is_one_constant_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, neighbour = NEIGHBOURS["beyond float32"]
    party = party_of(neighbour, learner_fn=fussy)
    replies = transcript(fedkt(fussy), [party])

    assert replies == [("error", FAILED)]
    assert "a record must be small, got 42.9" in caplog.text


def account(folder: Path, records: Records = ORDINARY, **limits: float) -> PartyJournal:
    own = data_fingerprint(records.x, records.y)
    return PartyJournal(folder, fingerprint=own, **limits)  # type: ignore[arg-type]


def test_a_record_moved_by_1e_9_is_not_named_to_the_server(tmp_path: Path) -> None:
    """A journal of other data refuses, in the words of any failure."""
    journal = account(tmp_path)
    assert said("fedkt L2", NETWORK, ORDINARY, journal=journal)[0][0] == "reply"
    _, moved = NEIGHBOURS["moved by 1e-9"]
    replies = said("fedkt L2", NETWORK, moved, journal=account(tmp_path, moved))

    assert replies == [("error", FAILED)]


def test_a_refusal_says_nothing_about_other_federations(tmp_path: Path) -> None:
    """Not what has been spent, nor for whom, nor how much is left."""
    journal = account(tmp_path, max_epsilon=0.1)

    assert said("fedkt L2", NETWORK, ORDINARY, journal=journal) == [("error", NO_BUDGET)]


def test_a_party_is_charged_before_it_looks_at_a_record(tmp_path: Path) -> None:
    """Work that dies in the middle has been paid for."""
    for setting in ("fedkt L2", "fedkd", "fedmd ldp softmax", "fedavg", "avgkd"):
        journal = account(tmp_path / setting)
        with pytest.raises(KeyboardInterrupt):
            said(setting, dying(setting), ORDINARY, journal=journal)
        assert len(journal.entries()) == 1


def dying(setting: str) -> LearnerFactory:
    """Return learners whose training ends the process."""
    base = plain if setting in NOISY else private

    def make() -> Any:
        learner = base()
        for verb in ("fit", "fit_many", "partial_fit", "distill"):
            setattr(learner, verb, _die)
        return learner

    return make


def _die(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def leaks(setting: str, learner: str, pair: str) -> bool:
    """Tell whether the check finds that a reply depends on a record."""
    said_first.cache_clear()
    try:
        assert_silent(setting, learner, pair)
    except AssertionError:
        return True
    finally:
        said_first.cache_clear()
    return False


def test_the_check_finds_training_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back: a failing model ends in an error, and values are not bounded."""
    monkeypatch.setattr(role, "trained", lambda train, *_, **__: train())
    monkeypatch.setattr(RecordForm, "read", lambda _, __, ___, x: np.asarray(x))

    assert leaks("fedkt L2", "network", "beyond float32")
    assert not leaks("fedkt L2", "network", "another record")


def test_the_check_finds_the_time_that_training_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back: each reply says how long it took."""
    train = clients.app._train

    def timed(*args: Any) -> RecordDict:
        start = time.perf_counter()
        content = train(*args)
        content.metric_records[keys.METRICS]["train-time"] = time.perf_counter() - start
        return content

    monkeypatch.setattr(clients.app, "_train", timed)
    assert leaks("fedkt L2", "network", "another record")


def test_the_check_finds_errors_that_quote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back: an error travels in its own words."""

    def quoting(message: Message, respond: Callable[[], RecordDict]) -> Message:
        try:
            return Message(respond(), reply_to=message)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    monkeypatch.setattr(clients.app, "_guarded", quoting)
    monkeypatch.setattr(role, "trained", lambda train, *_, **__: train())
    _, neighbour = NEIGHBOURS["beyond float32"]

    assert "got 42.9" in str(said("fedkt L2", fussy, neighbour))


@pytest.mark.parametrize(
    "setting", ["fedmd", "fedavg", "avgkd", "fedmd ldp softmax", "fedmd nfdp", "fedkt L1"]
)
def test_the_check_finds_accuracies(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back: a party tells how good its model is although privacy is promised."""
    monkeypatch.setattr(PartyRole, "promises", lambda *_: False)

    one, other = said_of_tests(setting)
    assert one != other


def published(setting: str, records: Records, held_out: Records = TEST) -> Any:
    """Return what a trusted server publishes: the model, all metrics and its statement."""
    shared = {**COMMON, "num_parties": 3, "seed": 1}
    strategy = TRUSTED[setting](shared)
    named: Any = {"learner_name": "forest", "catalogue": {"learner": family("ridge")}}
    learner_fn = family("random-forest")
    parties = [
        replace(party_of(own, learner_fn=learner_fn, **named), partition_id=number)
        for number, own in enumerate((records, ORDINARY, ORDINARY))
    ]
    parties[0] = replace(parties[0], x_test=held_out.x, y_test=held_out.y)
    with noise_without_data():
        grid = InMemoryGrid(
            client_app(lambda c: parties[int(c.node_config["partition-id"])]), 3
        )
        result = strategy.start(grid, ArrayRecord(), num_rounds=1)
    metrics = [result.train_metrics_clientapp, result.evaluate_metrics_clientapp]
    assert all(metrics), "the parties take the model and are asked about it"
    model = {name: array.tobytes() for name, array in strategy.model_.to_arrays().items()}
    return model, repr(metrics), strategy.ledger_.statement()


TRUSTED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "fedkt L1": lambda shared: FedKT.from_settings(
        **shared,
        learner_fn=family("ridge"),
        privacy_level="L1",
        gamma=0.5,
        num_teachers=2,
        accept_noise=True,
    ),
    "fedkd": lambda shared: FedKD.from_settings(
        **shared, learner_fn=family("ridge"), weights="uniform", gamma=0.1
    ),
}


@pytest.mark.parametrize("setting", TRUSTED)
def test_what_a_trusted_server_publishes_depends_on_no_party(setting: str) -> None:
    """All records of one party are others, and one of them would make training fail."""
    _, neighbour = NEIGHBOURS["beyond float32"]
    others = Records(neighbour.x[::-1], neighbour.y)

    first = published(setting, ORDINARY)
    assert published(setting, others) == first
    assert published(setting, ORDINARY, HELD_OUT["five rows"]) == first
