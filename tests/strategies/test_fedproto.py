"""FedProto: prototypes by plain numpy, FedAvg as a limit case, features that agree, liars."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from clients import client_app
from fl_strategies import (
    FedAvg,
    FedProto,
    FedProtoOptions,
    FedProtoParty,
    Knowledge,
    KnowledgeStrategy,
    Party,
)
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import KnowledgeMismatch, UnsupportedLearner
from fl_strategies.strategies import fedproto
from fl_strategies.strategies.fedproto import KNOWN, PROTOTYPES, PrototypeWeights
from fl_strategies.strategies.weights.party import CLASS_COUNTS
from fl_strategies.wire.knowledge import Metrics
from simulations.runtime.local import run_local
from tests.toys import (
    NUM_CLASSES,
    TEST,
    CentroidLearner,
    accuracy,
    common_options,
    lacking,
    loading,
    torch_factory,
)

NUM_PARTIES, UNITS = 3, 5


network = torch_factory(8, UNITS, batch_size=16, learning_rate=0.01)


def party_of(number: int) -> Party:
    """Return a party that lacks the class of its own number."""
    return replace(lacking(number), learner_fn=network)


load = loading(party_of)


def federated(strategy: type[KnowledgeStrategy[Any]] = FedProto, **options: Any) -> Any:
    """Return a strategy after four rounds."""
    settings = {**common_options(NUM_PARTIES), "learner_fn": network, **options}
    made = strategy.from_settings(**settings)
    run_local(made, client_app(load), NUM_PARTIES, num_rounds=4)
    return made


def prototypes(means: FloatArray, counts: Sequence[int]) -> PrototypeWeights:
    return PrototypeWeights({}, sum(counts), (), np.array(counts), means)


def test_prototypes_are_weighted_by_the_records_of_their_class() -> None:
    """Two parties by hand; a class that nobody has keeps the prototype it had."""
    strategy = FedProto.from_settings(**{**common_options(2), "learner_fn": network})
    one, two = np.full((3, UNITS), 1.0), np.full((3, UNITS), 4.0)

    first = strategy._average([prototypes(one, [2, 0, 1]), prototypes(two, [1, 0, 0])])
    known = strategy.prototypes_
    second = strategy._average([prototypes(two, [0, 3, 0]), prototypes(two, [0, 1, 1])])

    assert np.isnan(first)
    assert known is not None
    np.testing.assert_allclose(known[:, 0], [2.0, np.nan, 1.0])
    np.testing.assert_allclose(strategy.prototypes_[:, 0], [2.0, 4.0, 4.0])
    # Only the third class was known before, and one party has it: five times 4 - 1, squared.
    assert second == pytest.approx(3 * np.sqrt(UNITS))


def test_one_huge_prototype_is_shortened() -> None:
    """A liar of four pulls at most by four times the usual length, by its share of records."""
    strategy = FedProto.from_settings(**{**common_options(4), "learner_fn": network})
    honest = [prototypes(np.ones((3, UNITS)), [1, 1, 1]) for _ in range(3)]

    strategy._average([*honest, prototypes(np.full((3, UNITS), 3e38), [1, 1, 1])])

    np.testing.assert_allclose(strategy.prototypes_, (3 + 4) / 4)


def test_a_party_sends_the_means_of_its_own_features() -> None:
    """Recomputed with numpy from the weights that it sends."""
    sent: list[Mapping[str, Array]] = []

    class Watched(FedProto):
        def check(self, knowledge: Knowledge) -> PrototypeWeights:
            sent.append(knowledge.arrays)
            return super().check(knowledge)

    federated(Watched)

    party = party_of(0)
    arrays = next(each for each in sent if not each[CLASS_COUNTS][0])
    own = (CLASS_COUNTS, PROTOTYPES)
    weights = {n: a.astype(np.float64) for n, a in arrays.items() if n not in own}
    features = party.x
    for layer in ("0", "2"):
        features = features @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        features = np.maximum(features, 0)
    for label in (1, 2):
        mean = features[party.y == label].mean(axis=0)
        np.testing.assert_allclose(arrays[PROTOTYPES][label], mean, rtol=1e-4, atol=1e-5)
    assert not arrays[PROTOTYPES][0].any()


def test_without_strength_it_is_fedavg_to_the_bit() -> None:
    """Prototypes travel then, and change nothing."""
    proto, plain = federated(strength=0.0), federated(FedAvg)

    assert proto.model_.logits(TEST[0]).tobytes() == plain.model_.logits(TEST[0]).tobytes()


def test_features_of_a_class_agree_more() -> None:
    """Relative to how far apart classes are, parties' prototypes are closer to the mean."""

    def spread(strength: float) -> float:
        strategy = federated(strength=strength, local_epochs=10)
        means, model = strategy.prototypes_, strategy.model_
        features = model.features(TEST[0])
        within = np.linalg.norm(features - means[TEST[1]], axis=1).mean()
        between = np.linalg.norm(means[:, None] - means[None], axis=2).max()
        assert accuracy(model.predict(TEST[0])) > 0.8
        return float(within / between)

    assert spread(3.0) < 0.85 * spread(0.0)


def test_counts_and_means_make_epsilon_infinite() -> None:
    """The ledger names both, beside the weights."""
    statement = federated().ledger_.statement()

    assert "class counts left the party exactly" in statement
    assert "class means of features left without noise" in statement


@pytest.mark.parametrize(
    "spoiled",
    [
        np.zeros((NUM_CLASSES, UNITS)),
        np.zeros((NUM_CLASSES, UNITS + 1), dtype=np.float32),
        np.full((NUM_CLASSES, UNITS), np.nan, dtype=np.float32),
    ],
    ids=["float64", "other width", "NaN"],
)
def test_prototypes_that_are_none_cost_their_party_the_round(
    spoiled: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' are averaged."""
    honest = FedProtoParty.train

    def spoil(role: FedProtoParty, party: Party, *rest: Any) -> tuple[Knowledge, Metrics]:
        said, metrics = honest(role, party, *rest)
        if party.partition_id == 1:
            said = replace(said, arrays={**said.arrays, PROTOTYPES: spoiled})
        return said, metrics

    monkeypatch.setattr(FedProtoParty, "train", spoil)
    strategy = FedProto.from_settings(**common_options(NUM_PARTIES) | {"learner_fn": network})
    run_local(strategy, client_app(load), NUM_PARTIES, num_rounds=1)

    assert len(strategy.rejected_) == 1
    assert PROTOTYPES in next(iter(strategy.rejected_.values()))


def test_a_server_cannot_send_prototypes_of_another_shape() -> None:
    """A party refuses them before it pays."""
    model = network().initialised().to_arrays()
    own = {
        PROTOTYPES: np.zeros((NUM_CLASSES, 2), np.float32),
        KNOWN: np.ones(NUM_CLASSES, bool),
    }
    received = Knowledge("weights", {**model, **own})

    with pytest.raises(KnowledgeMismatch, match=PROTOTYPES):
        FedProtoParty().objective(
            party_of(0), received, ConfigRecord(FedProtoOptions().to_config())
        )


def test_learners_without_features_are_refused() -> None:
    """The sentence names the method."""

    class Featureless(CentroidLearner):
        @property
        def features(self) -> Any:  # type: ignore[override]
            raise AttributeError

    with pytest.raises(UnsupportedLearner, match="features"):
        FedProto(num_classes=NUM_CLASSES, learner_fn=Featureless)


def test_it_is_written_with_the_author_s_page_alone() -> None:
    """Nothing but `extend` is imported, and the page shows parts of this very file."""
    source = Path(fedproto.__file__).read_text(encoding="utf-8")
    page = Path(fedproto.__file__).parents[2] / "docs" / "adding_a_strategy.md"
    blocks = re.findall(r"```python notest\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)

    ours = [line for line in source.splitlines() if line.startswith("from fl_strategies")]
    assert ours == ["from fl_strategies.extend import ("]
    assert len(source.splitlines()) < 300
    shown = [block for block in blocks if "MyPartyState" not in block]
    assert len(shown) == 4
    assert [block for block in shown if block not in source] == []
