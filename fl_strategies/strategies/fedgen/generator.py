"""FedGen's generator: features of a class, learned from nothing but the parties' last layers.

Label y and noise e give features z = A2 relu(A1 [y, e] + a1) + a2. Its objective is the mean
over labels and noise of

    sum_k share_k(y) CE(W_k z + b_k, y)  +  diversity exp(-mean |e_i - e_j|^2 |z_i - z_j|)

where share_k(y) is party k's share of the records of class y. The network is so small that
its gradient is written out here, and the server needs no library of networks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import scipy

from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.protocols import DenseLayer
from fl_strategies.exceptions import require_known

NAMES: Final = ("hidden-weight", "hidden-bias", "feature-weight", "feature-bias")
MOST_UNITS: Final = 10_000
ROWS_PER_CHUNK: Final = 1024
_DECAYS: Final = (0.9, 0.999)
_TINY: Final = 1e-8


@dataclass(frozen=True)
class Heads:
    """Last layers of the parties' networks, and how much each knows of a class.

    Parameters
    ----------
    layers : weights (num_classes, num_features) and biases, one a party
    shares : (num_parties, num_classes)
        Of the records of each class; 0 for classes that nobody has.
    """

    layers: Sequence[DenseLayer]
    shares: FloatArray


class Generator:
    """Features of labels; see the module.

    Parameters
    ----------
    weights : list of four arrays, in the order of `NAMES`
    num_classes : int
    """

    def __init__(self, weights: Sequence[FloatArray], num_classes: int) -> None:
        self.weights, self.num_classes = list(weights), num_classes

    @classmethod
    def drawn(cls, sizes: tuple[int, int, int, int], rng: np.random.Generator) -> Self:
        """Return one of so many classes, noise, hidden units and features, at random."""
        num_classes, num_noise, num_hidden, num_features = sizes
        inputs = num_classes + num_noise
        hidden = rng.normal(size=(num_hidden, inputs)) * np.sqrt(2 / inputs)
        features = rng.normal(size=(num_features, num_hidden)) / np.sqrt(num_hidden)
        return cls(
            [hidden, np.zeros(num_hidden), features, np.zeros(num_features)], num_classes
        )

    def to_arrays(self) -> dict[str, Array]:
        """Return the weights by their names."""
        return dict(zip(NAMES, self.weights, strict=True))

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], num_classes: int, num_features: int
    ) -> Self:
        """Return a received one; raise `KnowledgeMismatch` for arrays that are none."""
        named = arrays.keys() == set(NAMES)
        require_known(named, "Generator", "arrays", f"{', '.join(NAMES)}", "others")
        weights = [np.asarray(arrays[name]) for name in NAMES]
        hidden, features = weights[0], weights[2]
        matrices = hidden.ndim == features.ndim == 2 and num_classes < hidden.shape[1]
        rule = f"matrices, of {num_classes} classes and noise"
        require_known(matrices, "Generator", "weights", rule, "others")
        num_hidden, num_inputs = hidden.shape
        shapes = [(num_hidden, num_inputs), (num_hidden,)]
        shapes += [(num_features, num_hidden), (num_features,)]
        fits = [weight.shape for weight in weights] == shapes
        fits = fits and max(num_hidden, num_inputs) <= MOST_UNITS
        require_known(fits, "Generator", "shapes", f"{shapes}", "others")
        finite = all(w.dtype == np.float64 and np.isfinite(w).all() for w in weights)
        require_known(finite, "Generator", "weights", "finite float64", "others")
        return cls(weights, num_classes)

    def sample(self, labels: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return features of labels (n,), each with noise of its own, (n, num_features)."""
        # A few at a time: whoever sends a generator decides how many hidden units it has.
        parts = [
            labels[at : at + ROWS_PER_CHUNK] for at in range(0, len(labels), ROWS_PER_CHUNK)
        ]
        return np.concatenate([self.forward(self.inputs(part, rng))[1] for part in parts])

    def inputs(self, labels: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return one-hot labels beside new noise."""
        num_noise = self.weights[0].shape[1] - self.num_classes
        noise = rng.normal(size=(len(labels), num_noise))
        return np.hstack([np.eye(self.num_classes)[labels], noise])

    def forward(self, inputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return hidden units and features."""
        first, first_bias, second, second_bias = self.weights
        hidden = np.maximum(inputs @ first.T + first_bias, 0)
        return hidden, hidden @ second.T + second_bias

    def gradient(
        self, inputs: FloatArray, labels: IntArray, heads: Heads, diversity: float
    ) -> tuple[float, list[FloatArray]]:
        """Return the objective on a batch, and its gradient by the weights."""
        hidden, features = self.forward(inputs)
        told, by_features = ensemble_loss(features, labels, heads)
        spread, by_spread = diversity_loss(features, inputs[:, self.num_classes :])
        by_features = by_features + diversity * by_spread
        by_hidden = (by_features @ self.weights[2]) * (hidden > 0)
        slopes = [by_hidden.T @ inputs, by_hidden.sum(axis=0)]
        slopes += [by_features.T @ hidden, by_features.sum(axis=0)]
        return told + diversity * spread, slopes


def ensemble_loss(
    features: FloatArray, labels: IntArray, heads: Heads
) -> tuple[float, FloatArray]:
    """Return how badly the parties' last layers recognise features, and its gradient."""
    rows, loss, slope = np.arange(len(labels)), 0.0, np.zeros_like(features)
    for (weight, bias), shares in zip(heads.layers, heads.shares, strict=True):
        scores = scipy.special.log_softmax(features @ weight.T + bias, axis=1)
        counted = shares[labels] / len(labels)
        loss -= float(counted @ scores[rows, labels])
        errors = np.exp(scores)
        errors[rows, labels] -= 1
        slope += (counted[:, None] * errors) @ weight
    return loss, slope


def diversity_loss(features: FloatArray, noise: FloatArray) -> tuple[float, FloatArray]:
    """Return how alike features of different noise are, from 0 to 1, and its gradient."""
    (count, size), sums, away = features.shape, np.empty_like(features), []
    # Row by row: features by features by numbers would fill memory.
    for row, (made, drawn) in enumerate(zip(features, noise, strict=True)):
        apart, steps = np.square(drawn - noise).mean(axis=1), made - features
        away.append(apart * np.abs(steps).mean(axis=1))
        sums[row] = (apart[:, None] * np.sign(steps)).sum(axis=0)
    alike = float(np.exp(-np.mean(away)))
    return alike, -alike * 2 / (count**2 * size) * sums


@dataclass
class Adam:
    """Steps of the optimizer Adam."""

    rate: float
    _means: list[FloatArray] = field(default_factory=list)
    _squares: list[FloatArray] = field(default_factory=list)
    _steps: int = 0

    def step(self, weights: list[FloatArray], slopes: Sequence[FloatArray]) -> None:
        """Change the weights along their slopes."""
        if not self._steps:
            self._means = [np.zeros_like(slope) for slope in slopes]
            self._squares = [np.zeros_like(slope) for slope in slopes]
        self._steps += 1
        first, second = _DECAYS
        for at, slope in enumerate(slopes):
            self._means[at] = first * self._means[at] + (1 - first) * slope
            self._squares[at] = second * self._squares[at] + (1 - second) * slope**2
            mean = self._means[at] / (1 - first**self._steps)
            square = self._squares[at] / (1 - second**self._steps)
            weights[at] = weights[at] - self.rate * mean / (np.sqrt(square) + _TINY)
