"""FedGen: the generator's objective against autograd, and FedAvg without generated features."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn
from torch.nn.functional import cross_entropy

from clients import TorchLearner, client_app
from fl_strategies import FedAvg, FedGen, FedGenParty, Generated, KnowledgeStrategy, Objective
from fl_strategies._util import Array
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, UnsupportedLearner
from fl_strategies.learners import DenseLayer
from fl_strategies.strategies.fedgen import NAMES, Adam, Generator, Heads, diversity_loss
from simulations.runtime.local import run_local
from tests.toys import (
    TEST,
    accuracy,
    common_options,
    lacking,
    loading,
    torch_factory,
    toy_party,
)

SIZES = (3, 2, 5, 4)
"""Classes, noise, hidden units and features of a tiny generator."""


def tiny_heads(rng: np.random.Generator, num_parties: int = 2) -> Heads:
    layers: list[DenseLayer] = [
        (rng.normal(size=(3, 4)), rng.normal(size=3)) for _ in range(num_parties)
    ]
    shares = rng.dirichlet(np.ones(num_parties), size=3).T
    return Heads(layers, shares)


def test_the_objective_and_its_gradient_are_those_of_autograd() -> None:
    """Cross-entropy by shares and diversity, written in torch, give the same slopes."""
    rng = np.random.default_rng(0)
    generator, heads = Generator.drawn(SIZES, rng), tiny_heads(rng)
    labels = np.array([0, 2, 2, 1, 0, 1])
    inputs = generator.inputs(labels, rng)

    loss, slopes = generator.gradient(inputs, labels, heads, diversity=0.7)

    weights = [torch.tensor(weight, requires_grad=True) for weight in generator.weights]
    first, first_bias, second, second_bias = weights
    given, y = torch.tensor(inputs), torch.tensor(labels)
    features = torch.relu(given @ first.T + first_bias) @ second.T + second_bias
    expected = torch.zeros((), dtype=torch.float64)
    for (weight, bias), shares in zip(heads.layers, heads.shares, strict=True):
        scores = features @ torch.tensor(weight).T + torch.tensor(bias)
        each = cross_entropy(scores, y, reduction="none")
        expected = expected + (each * torch.tensor(shares)[y]).mean()
    noise = given[:, 3:]
    apart = (noise[:, None] - noise[None]).square().mean(dim=2)
    away = (features[:, None] - features[None]).abs().mean(dim=2)
    expected = expected + 0.7 * torch.exp(-(apart * away).mean())
    assert loss == pytest.approx(expected.item())
    for slope, auto in zip(slopes, torch.autograd.grad(expected, weights), strict=True):
        np.testing.assert_allclose(slope, auto.numpy(), rtol=1e-9, atol=1e-12)


def test_steps_are_those_of_torchs_adam() -> None:
    """Three steps along given slopes end where torch's optimizer does."""
    rng = np.random.default_rng(1)
    start, slopes = rng.normal(size=4), rng.normal(size=(3, 4))
    ours, adam = [start.copy()], Adam(0.1)
    theirs = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adam([theirs], 0.1)

    for slope in slopes:
        adam.step(ours, [slope])
        theirs.grad = torch.tensor(slope)
        optimizer.step()

    np.testing.assert_allclose(ours[0], theirs.detach().numpy(), rtol=1e-6)


def test_a_trained_generator_makes_features_that_all_heads_recognise() -> None:
    """After some steps most features have the label they were asked for."""
    rng = np.random.default_rng(2)
    generator, heads, adam = Generator.drawn(SIZES, rng), tiny_heads(rng), Adam(0.02)
    for _ in range(200):
        labels = rng.integers(3, size=16)
        _, slopes = generator.gradient(generator.inputs(labels, rng), labels, heads, 0.1)
        adam.step(generator.weights, slopes)

    asked = np.repeat(np.arange(3), 50)
    features = generator.sample(asked, rng)

    scores = sum(features @ weight.T + bias for weight, bias in heads.layers)
    assert (np.asarray(scores).argmax(axis=1) == asked).mean() > 0.9
    assert features[:50].std(axis=0).mean() > 0.01


def test_features_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory follows the features, not features by hidden units; the noise is the same."""
    made, labels = Generator.drawn(SIZES, np.random.default_rng(0)), np.arange(7) % 3
    whole = made.sample(labels, np.random.default_rng(1))
    sizes, forward = list[int](), made.forward

    def counted(inputs: Array) -> tuple[Array, Array]:
        sizes.append(len(inputs))
        return forward(inputs)

    monkeypatch.setattr(f"{Generator.__module__}.ROWS_PER_CHUNK", 3)
    monkeypatch.setattr(made, "forward", counted)

    np.testing.assert_allclose(made.sample(labels, np.random.default_rng(1)), whole)
    assert sizes == [3, 3, 1]


def test_a_large_batch_takes_little_memory() -> None:
    """Diversity compares all pairs, but holds those of one feature only."""
    rng = np.random.default_rng(0)
    features, noise = rng.normal(size=(200, 100)), rng.normal(size=(200, 2))
    tracemalloc.start()
    diversity_loss(features, noise)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 8 * features.nbytes


def test_a_party_counts_generated_features_as_work() -> None:
    """Its policy limits them, since all of them are learned in every step."""
    config = ConfigRecord({"strategy": "fedgen", "num-generated": 100, "local-epochs": 5})

    assert FedGenParty().plan(toy_party(0), config).predictions == 500


@pytest.mark.parametrize(
    "change",
    [
        lambda _: {},
        lambda arrays: {**arrays, NAMES[0]: arrays[NAMES[0]][0]},
        lambda arrays: {**arrays, NAMES[0]: arrays[NAMES[0]][:, :3]},
        lambda arrays: {**arrays, NAMES[1]: arrays[NAMES[1]][1:]},
        lambda arrays: {**arrays, NAMES[2]: arrays[NAMES[2]] * np.nan},
        lambda arrays: {**arrays, NAMES[3]: arrays[NAMES[3]].astype(np.float16)},
    ],
)
def test_a_generator_that_is_none_is_refused(change: Any) -> None:
    """A party reads a received generator as an untrusted message."""
    arrays = Generator.drawn(SIZES, np.random.default_rng(0)).to_arrays()
    assert Generator.from_arrays(arrays, 3, 4).num_classes == 3

    with pytest.raises(KnowledgeMismatch, match="Generator: "):
        Generator.from_arrays(change(arrays), 3, 4)


network = torch_factory(8, learning_rate=0.1, optimizer="sgd", batch_size=8)
load = loading(lambda n: replace(lacking(n), learner_fn=network, learner_name="network"))


def run(
    kind: type[KnowledgeStrategy[Any]], num_rounds: int = 3, **settings: object
) -> KnowledgeStrategy[Any]:
    given: dict[str, Any] = {
        **common_options(3),
        "learner_fn": network,
        "learner_name": "network",
        "local_epochs": 2,
        **settings,
    }
    strategy = kind.from_settings(**given)
    run_local(strategy, client_app(load), 3, num_rounds=num_rounds)
    return strategy


def test_without_strength_it_is_fedavg_to_the_bit() -> None:
    """Weight 0 of generated features leaves FedAvg; another weight changes the model."""
    plain, zero, own = run(FedAvg), run(FedGen, strength=0.0), run(FedGen, strength=1.0)

    expected = plain.model_.logits(TEST[0])
    np.testing.assert_array_equal(zero.model_.logits(TEST[0]), expected)
    assert not np.array_equal(own.model_.logits(TEST[0]), expected)
    assert accuracy(own.model_.predict(TEST[0])) > 0.8


def test_the_first_round_has_no_generator() -> None:
    """Before any model was averaged there is nothing to generate from."""
    one, fedavg = run(FedGen, num_rounds=1), run(FedAvg, num_rounds=1)

    np.testing.assert_array_equal(one.model_.logits(TEST[0]), fedavg.model_.logits(TEST[0]))
    assert sorted(one.state.generator) == sorted([*NAMES, "class-shares"])  # type: ignore[attr-defined]


def test_features_must_fit_the_last_layer() -> None:
    """Features of another length, or without labels, are named."""
    x, y = np.zeros((8, 2), np.float32), np.zeros(8, np.int64)
    term = Generated(features=np.zeros((5, 7)), labels=np.zeros(5, np.int64))
    wrong = Objective(terms=(term,))

    with pytest.raises(KnowledgeMismatch, match=r"features must be of shape \(n, 8\)"):
        network().partial_fit(x, y, rng=np.random.default_rng(0), epochs=1, objective=wrong)
    with pytest.raises(InvalidParameter, match=r"labels must be of shape \(5,\), one per row"):
        Generated(features=np.zeros((5, 7)), labels=np.zeros(4, np.int64))
    with pytest.raises(UnsupportedLearner, match=r"must end in an nn.Linear with biases"):
        TorchLearner(
            lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.Flatten()), num_classes=3
        ).initialised(rng=np.random.default_rng(0)).head()
