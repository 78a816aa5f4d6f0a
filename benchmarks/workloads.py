"""The parties that the benchmarks train: data, models and sizes, the same for both sides."""

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fl_strategies._util import Array
from simulations.models import ModelOptions, Problem

NUM_SPLITS, NUM_TEACHERS = 2, 5
SEED = 0


@dataclass(frozen=True)
class Workload:
    """One FedKT party: ten teachers of private rows, two students of public ones.

    `images` are (n, height, width) of bytes, which a plain script decodes one by one; other
    rows are numbers. Labels of the public rows only judge the answers.
    """

    name: str
    learner: str
    options: ModelOptions
    x: Array
    y: Array
    public: Array
    public_y: Array
    num_classes: int
    images: bool = False

    @property
    def title(self) -> str:
        """Name of the measurement, with our learner where it differs from the plain side's."""
        return f"{self.name} party" + (f" ({self.learner})" if self.name in FURTHER else "")

    @property
    def rows(self) -> Array:
        """Private rows as a learner takes them."""
        return _as_rows(self.x) if self.images else self.x

    @property
    def public_rows(self) -> Array:
        """Public rows as a learner takes them."""
        return _as_rows(self.public) if self.images else self.public

    @property
    def problem(self) -> Problem:
        """The shape of the learning problem."""
        return Problem(self.rows.shape[1:], self.num_classes, "single-label")


def make(name: str, scale: float = 1.0) -> Workload:
    """Return a workload by name; a scale below 1 leaves rows and epochs out, for a test."""
    kind = {"mlp": _network, "cnn": _network, "xgboost": _xgboost, "forest": _forest}[name]
    return kind(name, scale)


NAMES = ("mlp", "cnn", "xgboost", "forest")
FURTHER = {"xgboost": ("xgboost", "lightgbm")}
"""Learners of ours that are measured beside the fastest one, against the same plain side."""


def make_all(name: str, scale: float = 1.0) -> list[Workload]:
    """Return a workload with the fastest of our learners, and with each further one."""
    work = make(name, scale)
    return [work, *(replace(work, learner=other) for other in FURTHER.get(name, ()))]


def _network(name: str, scale: float) -> Workload:
    x, y = _digits()
    private, public = int(6000 * scale), int(2000 * scale)
    epochs = max(1, int({"mlp": 5, "cnn": 2}[name] * scale))
    return Workload(
        name=name,
        learner={"mlp": "mlp", "cnn": "convolutional"}[name],
        options=ModelOptions(epochs=epochs, batch_size=32),
        x=x[:private],
        y=y[:private],
        public=x[-public:],
        public_y=y[-public:],
        num_classes=10,
        images=True,
    )


def _xgboost(name: str, scale: float) -> Workload:
    x, y = _table("cod_rna.npz", 8)
    private, public = int(1085 * scale), int(4000 * scale)
    options = ModelOptions(boosting_learning_rate=0.05, boosting_gamma=1.0, max_depth=6)
    return Workload(
        name, "boosted-trees", options, x[:private], y[:private], x[-public:], y[-public:], 2
    )


def _forest(name: str, scale: float) -> Workload:
    x, y = _table("a9a.npz", 123)
    private, public = int(490 * scale), int(4000 * scale)
    options = ModelOptions(num_trees=max(5, int(100 * scale)), max_depth=6)
    return Workload(
        name, "forest", options, x[:private], y[:private], x[-public:], y[-public:], 2
    )


def _as_rows(images: Array) -> Array:
    return (images[:, None] / 255).astype(np.float32)


@cache
def _digits() -> tuple[Array, Array]:
    """Return MNIST's training images, or scikit-learn's small digits enlarged to its size."""
    data = _file("mnist.npz")
    if data is not None:
        return data["x_train"], data["y_train"].astype(np.int64)
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(np.arange(8000) % len(digits.target))
    large = np.kron(digits.images[order], np.ones((3, 3)))
    padded = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    return (padded * (255 / 16)).astype(np.uint8), digits.target[order].astype(np.int64)


@cache
def _table(name: str, num_features: int) -> tuple[Array, Array]:
    """Return a table, or invented rows with as many columns."""
    data = _file(name)
    if data is None:
        from sklearn.datasets import make_classification

        x, y = make_classification(8000, num_features, n_informative=6, random_state=SEED)
    else:
        x, y = data["x_train"], data["y_train"]
    order = np.random.default_rng(SEED).permutation(len(x))[:8000]
    _, labels = np.unique(np.asarray(y)[order], return_inverse=True)
    return np.asarray(x)[order].astype(np.float32), labels.astype(np.int64)


def _file(name: str) -> Any:
    path = Path(os.environ.get("FL_STRATEGIES_DATA", ".")) / name
    return np.load(path) if path.is_file() else None
