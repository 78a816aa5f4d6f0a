"""Soft targets as weighted classes, for models that are made to learn labels.

A row that is 70 % one class and 30 % another becomes two rows with these weights. Whatever
minimises a weighted sum over rows, such as the impurity of trees or a log-loss, then
minimises the cross-entropy of the soft targets themselves.
"""

from typing import Final, NamedTuple

import numpy as np
from scipy.special import expit, logit, softmax

from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.protocols import Link, Recipe
from fl_strategies.core.tasks import check_targets
from fl_strategies.exceptions import require, require_data

# Every class that is kept costs a row of training. One of less than 1/64 of a row hardly moves
# a model, but all of a rare class may lie below that, and its order of rows with it: so no
# class loses more than a quarter of its weight, unless it is below 1/4096 and mere rounding.
LARGEST_CUT: Final = 1 / 64
SMALLEST_CUT: Final = 1 / 4096
MOST_LOST: Final = 1 / 4
# Averages of probabilities may leave 0 to 1 by this much.
_ROUNDING: Final = 1e-6
_LARGEST: Final = float(np.finfo(np.float32).max)


class WeightedLabels(NamedTuple):
    """Labels of rows, several a row with weights that sum to 1, in the order of rows."""

    rows: IntArray
    """Which row a label belongs to, (m,); every row has at least one."""
    classes: IntArray
    weights: FloatArray

    @property
    def likeliest(self) -> IntArray:
        """The class of largest weight of every row; ties go to the first."""
        order = np.lexsort((self.classes, -self.weights, self.rows))
        first = np.unique(self.rows[order], return_index=True)[1]
        return self.classes[order[first]]

    @property
    def are_plain(self) -> bool:
        """Whether every row has one label only."""
        return len(self.rows) == int(self.rows[-1]) + 1


def check_soft_targets(
    owner: str, targets: Array, num_rows: int, num_classes: int, link: Link
) -> None:
    """Raise `InvalidData` unless targets (num_rows, num_classes) are what the link gives."""
    check_targets(owner, "targets", targets, num_rows, num_classes, "regression")
    if not targets.size:
        return
    low, high = float(targets.min()), float(targets.max())
    fits = max(-low, high) <= _LARGEST
    require_data(fits, owner, "targets", "within the range of float32", "a larger value")
    inside = link == "identity" or (low >= -_ROUNDING and high <= 1 + _ROUNDING)
    rule = f"probabilities, as link {link} says"
    require_data(inside, owner, "targets", rule, "numbers outside 0 to 1")


def class_shares(owner: str, targets: FloatArray, recipe: Recipe) -> FloatArray:
    """Return checked targets as the probabilities of classes at temperature 1.

    Examples
    --------
    >>> recipe = Recipe(link="softmax", temperature=2.0)
    >>> class_shares("Doc", np.array([[0.75, 0.25]]), recipe)
    array([[0.9, 0.1]])
    """
    if recipe.link == "identity":
        return np.asarray(softmax(targets.astype(np.float64), axis=1))
    shares = _clipped(targets)
    if recipe.link == "sigmoid":
        shares = _cooled(shares, recipe.temperature)
    largest = shares.max(axis=1, keepdims=True)
    some = bool((largest > 0).all())
    require_data(some, owner, "targets", "above 0 for some class of every row", "a row of 0")
    shares = shares / largest
    if recipe.link == "softmax":
        shares = shares**recipe.temperature
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def label_shares(owner: str, targets: FloatArray, recipe: Recipe) -> FloatArray:
    """Return checked targets as the probabilities of independent labels at temperature 1."""
    able = recipe.link != "softmax"
    require(able, owner, "link", "identity or sigmoid for multi-label tasks", recipe.link)
    if recipe.link == "identity":
        return np.asarray(expit(targets.astype(np.float64)))
    return _cooled(_clipped(targets), recipe.temperature)


def weigh(shares: FloatArray) -> WeightedLabels:
    """Return the classes of every row that matter, with weights that sum to 1.

    Examples
    --------
    >>> weigh(np.array([[0.75, 0.25, 0.0], [0.0, 0.0, 1.0]])).weights
    array([0.75, 0.25, 1.  ])
    """
    cut = np.clip(MOST_LOST * shares.mean(axis=0), SMALLEST_CUT, LARGEST_CUT)
    kept = (shares > cut) | (shares == shares.max(axis=1, keepdims=True))
    rows, classes = np.nonzero(kept)
    weights = shares[rows, classes]
    totals = np.bincount(rows, weights=weights)
    return WeightedLabels(rows, classes, weights / totals[rows])


def _clipped(targets: FloatArray) -> FloatArray:
    return np.clip(targets.astype(np.float64), 0.0, 1.0)


def _cooled(shares: FloatArray, temperature: float) -> FloatArray:
    """Return the sigmoid of what has these values as its sigmoid after division."""
    with np.errstate(over="ignore"):
        return np.asarray(expit(temperature * logit(shares)))
