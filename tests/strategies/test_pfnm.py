"""PFNM: matched neurons against plain loops, and against networks that are known to match."""

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clients import ModelCard, TorchLearner, client_app, load_model, save_model
from fl_strategies import PFNM, Party
from fl_strategies._util import Array
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, UnsupportedLearner
from fl_strategies.learners import DenseLayer
from fl_strategies.party.party import PartyPolicy
from fl_strategies.strategies.pfnm import (
    Network,
    Prior,
    Units,
    as_large_as_most,
    match_gains,
    match_layer,
    match_networks,
)
from fl_strategies.strategies.weights.party import CLASS_COUNTS
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge
from simulations.runtime.local import run_local
from tests.toys import (
    NUM_CLASSES,
    TEST,
    accuracy,
    common_options,
    loading,
    torch_factory,
    toy_party,
)

VAGUE = Prior(sigma=1.0, sigma0=1e9, gamma=1e-9)
"""Units are the means of their neurons, and new ones are unlikely."""


def random_network(rng: np.random.Generator, *sizes: int) -> list[DenseLayer]:
    return [(rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in itertools.pairwise(sizes)]


def permuted(network: Network, rng: np.random.Generator) -> list[DenseLayer]:
    """Return the same function with its hidden neurons in another order."""
    layers = list(network)
    for depth in range(len(layers) - 1):
        order = rng.permutation(len(layers[depth][1]))
        (weight, bias), (after, last) = layers[depth], layers[depth + 1]
        layers[depth], layers[depth + 1] = (weight[order], bias[order]), (after[:, order], last)
    return layers


def outputs(network: Network, x: Array) -> Array:
    for weight, bias in network[:-1]:
        x = np.maximum(x @ weight.T + bias, 0)
    return x @ network[-1][0].T + network[-1][1]


@pytest.mark.parametrize("hidden", [(7,), (7, 5), (4, 6, 5)])
def test_permuted_networks_are_matched_back(hidden: tuple[int, ...]) -> None:
    """Parties with one network in different orders get this network, and no unit more."""
    rng = np.random.default_rng(0)
    network = random_network(rng, 4, *hidden, 3)
    parties = [network, *(permuted(network, rng) for _ in range(3))]
    counts = rng.integers(1, 50, size=(4, 3)).astype(float)

    found = match_networks(parties, counts, VAGUE, num_sweeps=2, rng=rng)

    x = rng.normal(size=(20, 4))
    assert [len(bias) for _, bias in found[:-1]] == list(hidden)
    np.testing.assert_allclose(outputs(found, x), outputs(network, x), rtol=1e-6, atol=1e-6)


def test_a_single_party_gets_its_own_network() -> None:
    """Nothing is matched with one party, and a vague prior leaves its weights alone."""
    rng = np.random.default_rng(1)
    network = random_network(rng, 3, 6, 4, 2)

    found = match_networks([network], np.array([[5.0, 2.0]]), VAGUE, num_sweeps=3, rng=rng)

    for (weight, bias), (own_weight, own_bias) in zip(found, network, strict=True):
        np.testing.assert_allclose(weight, own_weight, rtol=1e-7)
        np.testing.assert_allclose(bias, own_bias, rtol=1e-7)


def slow_gain(copies: list[Array], precisions: list[Array], prior: Prior) -> float:
    """Return twice the log-density that the first neuron adds to others of the same unit.

    The density of several noisy copies of one unit, by its peak over the unit: the largest
    of -(unit^2 / sigma0) - sum (v - unit)^2 * precision, number by number, less what the
    copies would have without any unit, -v^2 * precision.
    """

    def peak(seen: list[tuple[float, float]]) -> float:
        total = 1 / prior.sigma0 + sum(p for _, p in seen)
        unit = sum(value * p for value, p in seen) / total
        density = -(unit**2) / prior.sigma0
        return density + sum(-p * (value - unit) ** 2 + p * value**2 for value, p in seen)

    gain = 0.0
    for number in range(len(copies[0])):
        seen = [(c[number], p[number]) for c, p in zip(copies, precisions, strict=True)]
        gain += peak(seen) - peak(seen[1:])
    return gain


def test_gains_are_those_of_plain_loops() -> None:
    """Known and new units, popularity and the count of new ones, number by number."""
    rng = np.random.default_rng(2)
    prior, num_parties, size = Prior(sigma=0.5, sigma0=3.0, gamma=7.0), 5, 4
    own, precision = rng.normal(size=(3, size)), rng.uniform(0, 2, size=size)
    members = [[0, 1], [1], [0, 1, 2]]
    others = [rng.normal(size=(3, size)) for _ in range(3)]
    spreads = [rng.uniform(0.1, 2, size=size) for _ in range(3)]
    sums = np.array([sum(others[p][i] * spreads[p] for p in m) for i, m in enumerate(members)])
    totals = np.array([1 / 3.0 + sum(spreads[p] for p in m) for m in members])
    uses = np.array([len(m) for m in members])

    gains = match_gains(own, precision, Units(sums, totals, uses), prior, num_parties)

    for row in range(3):
        for unit, parties in enumerate(members):
            copies = [own[row], *(others[p][unit] for p in parties)]
            known = [precision, *(spreads[p] for p in parties)]
            slow = slow_gain(copies, known, prior)
            popular = 2 * math.log(len(parties) / (num_parties - len(parties)))
            assert gains[row, unit] == pytest.approx(slow + popular)
        for new in range(3):
            alone = slow_gain([own[row]], [precision], prior)
            rare = 2 * math.log(7.0 / num_parties / (new + 1))
            assert gains[row, 3 + new] == pytest.approx(alone + rare)


def test_neurons_that_differ_become_units_of_their_own() -> None:
    """Far neurons are new units, near ones are shared, and means shrink as the prior says."""
    prior = Prior(sigma=1.0, sigma0=10.0, gamma=1.0)
    vectors = [np.array([[9.0, 0.0], [0.0, 9.0]]), np.array([[0.0, 9.2], [-9.0, -9.0]])]

    found, units = match_layer(
        vectors, [np.ones(2)] * 2, prior, num_sweeps=1, rng=np.random.default_rng(0)
    )

    assert len(units.uses) == 3
    assert found[0][1] == found[1][0]
    assert units.means[found[0][1]] == pytest.approx([0.0, 18.2 / 2.1])
    assert units.means[found[1][1]] == pytest.approx([-9 / 1.1, -9 / 1.1])


def test_weights_to_a_class_count_by_shares_of_its_records() -> None:
    """Of matched neurons, a party without records of a class says nothing about it."""
    rng = np.random.default_rng(3)
    one = random_network(rng, 3, 4, 2)
    other = [one[0], (one[1][0] + np.array([[0.1], [0.2]]), one[1][1] + 1)]

    found = match_networks(
        [one, other], np.array([[30.0, 0.0], [10.0, 5.0]]), VAGUE, num_sweeps=0, rng=rng
    )

    np.testing.assert_allclose(found[1][0][0], one[1][0][0] + 0.1 / 4, rtol=1e-6)
    np.testing.assert_allclose(found[1][0][1], other[1][0][1], rtol=1e-6)
    np.testing.assert_allclose(found[1][1], one[1][1] + [0.25, 1.0], rtol=1e-6)


perceptron = torch_factory(6, learning_rate=0.05, batch_size=8)


def perceptron_party(number: int) -> Party:
    return replace(toy_party(number), learner_fn=perceptron, learner_name="perceptron")


def strategy(**options: Any) -> PFNM:
    common = {**common_options(3), "learner_fn": perceptron, "learner_name": "perceptron"}
    return PFNM.from_settings(**{**common, **options})


def test_a_wider_network_is_learned_delivered_and_saved(tmp_path: Path) -> None:
    """The result has more units than a party's network, and is the same everywhere."""
    received = list[TorchLearner]()
    on_model = lambda model, *_: received.append(model)  # noqa: E731
    app = client_app(loading(perceptron_party), on_model=on_model)
    server = strategy(sigma=0.1, local_epochs=10)

    result = run_local(server, app, 3)

    units = result.train_metrics_clientapp[1]["num-hidden-units"]
    assert isinstance(units, int | float)
    assert 6 < units <= 18
    assert accuracy(server.model_.predict(TEST[0])) > 0.85
    card = ModelCard(learner="perceptron", row_shape=(2,), classes=("a", "b", "c"))
    save_model(server.model_, tmp_path, card)
    loaded = load_model(tmp_path, perceptron)
    for model in (*received, loaded):
        np.testing.assert_array_equal(model.logits(TEST[0]), server.model_.logits(TEST[0]))
    assert len(received) == 3


def test_a_twin_of_other_arrays_has_the_usual_size() -> None:
    """Arrays that no perceptron of this kind has are left for `from_arrays` to refuse."""
    learner = perceptron()
    arrays = learner.initialised(rng=np.random.default_rng(0)).to_arrays()
    wider = {**arrays, "0.weight": np.zeros((9, 2), np.float32)}

    for wrong in ({}, wider, {**arrays, "3.bias": np.zeros(1)}):
        with pytest.raises(KnowledgeMismatch):
            learner.sized_for(wrong).from_arrays(wrong)


def test_few_bytes_make_no_large_network() -> None:
    """A bias and no weights would otherwise decide how much memory a receiver takes."""
    learner = perceptron()

    def wide(inputs: int, num_classes: int) -> dict[str, Array]:
        shapes = {
            "0.weight": (1000, inputs),
            "0.bias": (1000,),
            "2.weight": (num_classes, 1000),
            "2.bias": (num_classes,),
        }
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    for arrays in (wide(0, NUM_CLASSES), wide(2, 9)):
        assert learner.sized_for(arrays).module_fn is learner.module_fn
        with pytest.raises(KnowledgeMismatch):
            learner.sized_for(arrays).from_arrays(arrays)


class Scaled(nn.Sequential):
    """A perceptron that needs values when it is made, or keeps a constant outside its state."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, NUM_CLASSES))
        scale = self[0].weight.abs().max().item() if computes else 1.0  # type: ignore[operator]
        self.register_buffer("scale", torch.tensor(0 * scale + 2.0), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = super().forward(rows) * self.scale
        return scores


@pytest.mark.parametrize("computes", [True, False])
def test_networks_that_need_values_get_them(computes: bool) -> None:
    """Sizes are found without memory where that is possible, and otherwise with it."""
    learner = TorchLearner(lambda: Scaled(computes=computes), num_classes=NUM_CLASSES)
    layers = random_network(np.random.default_rng(0), 2, 9, NUM_CLASSES)

    model = learner.from_layers(layers)

    expected = 2 * outputs(layers, TEST[0])
    np.testing.assert_allclose(model.logits(TEST[0]), expected, rtol=1e-4, atol=1e-4)


def test_one_huge_network_does_not_decide_what_all_say() -> None:
    """It is as large as twice the others, and they are what they were; two have no median."""
    rng = np.random.default_rng(0)
    honest: list[Network] = [random_network(rng, 2, 5, 3) for _ in range(3)]
    liar: Network = [(1e30 * w, 1e30 * b) for w, b in honest[0]]

    found, changed = as_large_as_most([*honest, liar])

    largest = max(np.abs(a).max() for network in honest for layer in network for a in layer)
    assert changed == 1
    assert max(np.abs(a).max() for layer in found[-1] for a in layer) < 3 * largest
    assert found[:-1] == honest
    assert as_large_as_most([honest[0], liar]) == ([honest[0], liar], 0)


def test_layers_too_wide_to_match_are_refused_at_once() -> None:
    """The assignment of 65,536 neurons would take the server's memory, and days."""

    def wide() -> TorchLearner:
        return TorchLearner(
            lambda: nn.Sequential(nn.Linear(2, 65_536), nn.ReLU(), nn.Linear(65_536, 3)),
            num_classes=NUM_CLASSES,
        )

    with pytest.raises(InvalidParameter, match="PFNM: learner_fn must be of at most 5792 unit"):
        PFNM(learner_fn=wide, num_classes=NUM_CLASSES, num_parties=3)


def test_other_networks_are_refused() -> None:
    """A network with normalisation has more that learns than neurons."""

    def normalised() -> TorchLearner:
        layers = (nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES))
        return TorchLearner(
            lambda: copy.deepcopy(nn.Sequential(*layers)), num_classes=NUM_CLASSES
        )

    with pytest.raises(UnsupportedLearner, match="dense layers with biases"):
        PFNM(learner_fn=normalised, num_classes=NUM_CLASSES, num_parties=2)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.array([10, 10, 10]), "add up"),
        (np.array([50, -10, 0]), "from 0"),
        (np.array([20, 20]), "of shape"),
        (np.array([20.0, 20.0, 0.0]), "int64"),
    ],
)
def test_counts_that_do_not_add_up_are_refused(counts: Array, words: str) -> None:
    """Counts are whole numbers of classes that sum to the records a party claims."""
    arrays = perceptron().initialised(rng=np.random.default_rng(0)).to_arrays()
    said = Knowledge("weights", {**arrays, CLASS_COUNTS: counts}, {keys.NUM_EXAMPLES: 40})

    with pytest.raises(KnowledgeMismatch, match=words):
        strategy().check(said)


def test_a_policy_of_protected_answers_refuses_class_counts() -> None:
    """No private training helps where exact counts leave as well."""
    server = strategy()
    careful = PartyPolicy(allow_models=True)
    free = replace(careful, allow_unprotected=True, max_run_epsilon=None)
    policies = [free, careful, free]
    app = client_app(loading(lambda n: replace(perceptron_party(n), policy=policies[n])))

    run_local(server, app, 3)

    (reason,) = server.rejected_.values()
    assert "what leaves must be protected" in reason
