"""Trees and forests of scikit-learn classifiers as plain arrays, without pickle.

What arrives is walked in numpy, see `clients.tree_arrays`: no native code reads a node that
somebody else has written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import numpy as np

from clients.sklearn_arrays import OWNER, Shape
from clients.tabular import require_array, to_float32
from clients.tree_arrays import VALUES_AT_ONCE, Trees, sklearn_tree
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.exceptions import MissingExtra, UnsupportedLearner, require_known

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
except ImportError as error:
    raise MissingExtra(OWNER, str(error.name), "sklearn") from error

VALUES: Final = "values"
LEAF_VALUES: Final = "leaf-values"


def trees_to_arrays(trees: Sequence[Any]) -> dict[str, Array]:
    """Return fitted trees as arrays over all their nodes, splits and leaves.

    Leaves share few distinct rows of class shares, so these are listed once.
    """
    grown = Trees.grow(sklearn_tree(tree.tree_, tree.tree_.value[:, 0]) for tree in trees)
    shares, index = np.unique(grown.values, axis=0, return_inverse=True)
    narrow = index.reshape(-1, 1).astype(np.min_scalar_type(len(shares) - 1))
    received = ReceivedTrees(replace(grown, values=narrow), shares, trees[0].tree_.n_features)
    return received.to_arrays()


class ReceivedTrees(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Trees that have arrived, with scores that are the sender's to the bit.

    Parameters
    ----------
    trees : Trees
        A leaf holds one number, that of its row in `shares`: a model of a thousand classes
        takes hardly more memory than one of two.
    shares : (num_distinct, num_classes)
    width : int
    """

    def __init__(self, trees: Trees, shares: FloatArray, width: int) -> None:
        self.trees = trees
        self.shares = shares
        self.width = width

    def to_arrays(self) -> dict[str, Array]:
        """Return the trees as arrays for the wire."""
        arrays = self.trees.to_arrays(self.width)
        return {**arrays, LEAF_VALUES: arrays[VALUES], VALUES: self.shares.copy()}

    def predict_proba(self, x: Array) -> FloatArray:
        """Return the mean class shares of the leaves that rows fall into, (n, k)."""
        rows = to_float32(OWNER, np.asarray(x))
        return np.concatenate([self._mean(leaf) for leaf in self.trees.leaf_values(rows)])

    def _mean(self, leaf_values: Array) -> FloatArray:
        """Return the mean of shares (b, k); trees are added one after the other.

        That is scikit-learn's order, on which the last bit of a sum depends.
        """
        index = leaf_values[:, :, 0]
        total = np.zeros((index.shape[1], self.shares.shape[1]))
        step = max(1, VALUES_AT_ONCE // total.size)
        for start in range(0, len(index), step):
            shares = self.shares[index[start : start + step]]
            shares[0] += total
            total = shares.sum(axis=0)
        return np.asarray(total / len(index))

    def predict(self, x: Array) -> IntArray:
        """Return the likeliest class of every row; ties go to the first."""
        labels: IntArray = self.predict_proba(x).argmax(axis=1)
        return labels

    def fit(self, x: Array, y: Array) -> NoReturn:  # noqa: ARG002 - scikit-learn asks for it
        """Refuse: these trees are fitted already."""
        raise UnsupportedLearner(f"{OWNER}: received trees must stay as they are, got rows.")

    def __sklearn_is_fitted__(self) -> bool:
        """Return that they are fitted, which a `Pipeline` wants to know."""
        return True


def trees_from_arrays(
    num_trees: int, arrays: Mapping[str, Array], shape: Shape
) -> ReceivedTrees:
    """Return received trees; raise `KnowledgeMismatch` for all that are not whole."""
    own = dict(arrays)
    for name in (VALUES, LEAF_VALUES):
        require_known(name in own, OWNER, "arrays", f"with {name!r}", sorted(map(str, own)))
    distinct = len(np.atleast_1d(own[VALUES]))
    require_known(distinct > 0, OWNER, VALUES, "at least one row", distinct)
    rows = (distinct, shape.num_classes)
    shares = require_array(OWNER, own, VALUES, np.float64, rows)
    sound = shares.min() >= 0 and shares.max() <= 1 and np.allclose(shares.sum(axis=1), 1)
    require_known(sound, OWNER, VALUES, "shares that sum to 1", "something else")
    own[VALUES] = own.pop(LEAF_VALUES)
    trees = Trees.from_arrays(
        OWNER,
        own,
        num_trees=num_trees,
        width=shape.width,
        num_values=1,
        dtype=np.min_scalar_type(distinct - 1),
        max_bytes=shape.max_bytes,
    )
    inside = bool((trees.values < distinct).all())
    require_known(inside, OWNER, LEAF_VALUES, f"below {distinct}", "a larger index")
    return ReceivedTrees(trees, shares, shape.width)
