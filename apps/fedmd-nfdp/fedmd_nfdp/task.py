"""Data and networks."""

import numpy as np
from clients import TorchLearner
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

NUM_CLASSES = 10
NUM_PIXELS = 64


def load_split(split: str):
    """Return images and labels of "train", which is dealt out, of "public" or of "test"."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(1).permutation(len(y))
    parts = {"test": rows[:300], "public": rows[300:600], "train": rows[600:]}
    return x[parts[split]].astype(np.float32) / 16, y[parts[split]]


def load_data(partition_id: int, num_partitions: int):
    """Return the rows of one node: x_train, x_test, y_train, y_test."""
    x, y = load_split("train")
    mine = slice(partition_id, None, num_partitions)
    return train_test_split(x[mine], y[mine], test_size=0.2, random_state=42)


def make_network(*widths: int):
    """Return a learner: a network with hidden layers of these widths."""

    def module() -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in zip((NUM_PIXELS, *widths), widths, strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], NUM_CLASSES))

    return TorchLearner(module, num_classes=NUM_CLASSES, learning_rate=0.005)


def make_wide():
    """Return a network of one hidden layer."""
    return make_network(128)


def make_deep():
    """Return a network of two hidden layers."""
    return make_network(64, 64)


def make_small():
    """Return a network for a weak machine."""
    return make_network(32)


MODELS = {"wide": make_wide, "deep": make_deep, "small": make_small}
