"""What trees with one number a leaf say of rows in all, compiled.

A tree of few nodes is asked from its leaves up: every node takes the number of one of its
children, for a block of rows at once, until the root has the answers. That is a few
instructions for sixteen rows, without any jump. Larger trees are walked, row by row.
"""

from typing import Final, NamedTuple

import numpy as np

from clients.compiling import compiled, part
from clients.tree_arrays import Trees
from fl_strategies.arrays import Array, FloatArray, IntArray

BLOCK: Final = 128
MOST_NODES: Final = 255
"""Trees with more are walked."""


class _Tree(NamedTuple):
    """One of `Trees`."""

    leaf: Array
    features: IntArray
    thresholds: FloatArray
    values: FloatArray


def sum_of_trees(trees: Trees, x: Array, offsets: FloatArray) -> FloatArray:
    """Return `Trees.sums` of rows (n, d) of float32, the other way round: (k, n).

    Trees may have been received: `Trees.from_arrays` has seen that all of them are whole and
    have no other columns than the rows. More is not indexed here.
    """
    scores = np.repeat(offsets[:, np.newaxis], len(x), axis=1)
    largest = int(trees.sizes.max())
    length = min(BLOCK, len(x))
    columns = np.empty((x.shape[1], length), dtype=np.float32)
    said = np.empty((min(largest, MOST_NODES), length), dtype=np.float32)
    number = np.empty(largest if largest > MOST_NODES else 0, dtype=np.int64)
    arrays = _Tree(trees.leaf, trees.features, trees.thresholds, trees.values[:, 0])
    # Another kind of array, such as a read-only one, would be compiled for anew.
    rows = np.require(x, requirements=("C", "W"))
    add_trees(rows, trees.sizes, arrays, columns, said, number, scores)
    return np.nan_to_num(scores, copy=False)


@compiled
def add_trees(
    x: Array,
    sizes: Array,
    trees: _Tree,
    columns: Array,
    said: Array,
    number: Array,
    scores: Array,
) -> None:
    """Add what whole trees say of rows to scores (k, n), block by block."""
    for first in range(0, len(x), BLOCK):
        rows = x[first : first + BLOCK]
        for i in range(len(rows)):
            for j in range(rows.shape[1]):
                columns[j, i] = rows[i, j]
        nodes = splits = 0
        for t in range(len(sizes)):
            end, last = nodes + sizes[t], splits + (sizes[t] - 1) // 2
            tree = _Tree(
                trees.leaf[nodes:end],
                trees.features[splits:last],
                trees.thresholds[splits:last],
                trees.values[nodes - splits : end - last],
            )
            out = scores[t % len(scores), first : first + len(rows)]
            if sizes[t] <= MOST_NODES:
                _blend(tree, columns, said, out)
            else:
                _walk(tree, rows, number, out)
            nodes, splits = end, last


@part
def _blend(tree: _Tree, columns: Array, said: Array, out: Array) -> None:
    """Add what a tree says of a block of columns, children before parents."""
    splits, leaves = len(tree.features), len(tree.values)
    for node in range(len(tree.leaf) - 1, -1, -1):
        own = said[node]
        if tree.leaf[node]:
            leaves -= 1
            for i in range(len(out)):
                own[i] = tree.values[leaves]
        else:
            splits -= 1
            column, threshold = columns[tree.features[splits]], tree.thresholds[splits]
            left, right = said[2 * splits + 1], said[2 * splits + 2]
            for i in range(len(out)):
                lower, upper = left[i], right[i]
                own[i] = upper if column[i] > threshold else lower
    for i in range(len(out)):
        out[i] += said[0, i]


@part
def _walk(tree: _Tree, rows: Array, number: Array, out: Array) -> None:
    """Add what a tree says of a block of rows; `number` counts splits and leaves apart."""
    splits = 0
    for node in range(len(tree.leaf)):
        number[node] = node - splits if tree.leaf[node] else splits
        splits += not tree.leaf[node]
    for i in range(len(rows)):
        node = 0
        while not tree.leaf[node]:
            split = number[node]
            above = rows[i, tree.features[split]] > tree.thresholds[split]
            node = 2 * split + 1 + above
        out[i] += tree.values[number[node]]
