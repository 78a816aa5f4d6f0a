"""Digits of scikit-learn, and what several tests do with them."""

from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.datasets import load_digits

from fl_strategies._util import Array, IntArray

DIGITS, LABELS = load_digits(return_X_y=True)
NUM_CLASSES = 10
X: Array = (DIGITS / 16).astype(np.float32)
Y: IntArray = LABELS.astype(np.int64)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def digits(classes: Sequence[int] | None = None, num_rows: int = 150) -> tuple[Array, IntArray]:
    """Return rows whose columns have 17 values at most, so that every value is a bin."""
    kept = np.isin(LABELS, range(NUM_CLASSES) if classes is None else classes)
    return DIGITS[kept][:num_rows], LABELS[kept][:num_rows]


def same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Tell whether two models are the same arrays."""
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)
