"""Boosted trees from binned rows and the shares of their classes."""

from typing import Final

import numpy as np

from clients.boosting_bins import Bins
from clients.boosting_kernels import Draft, Growth, Rule, Stack, Work, boost
from clients.tree_arrays import Trees
from fl_strategies.arrays import Array, FloatArray

# Nodes of all trees for which there is room at first.
_FIRST_ROOM: Final = 2**14


def boost_trees(
    bins: Bins, targets: Array, offsets: FloatArray, num_rounds: int, rule: Rule
) -> tuple[Trees, FloatArray]:
    """Return trees, round by round one for each score, and what they say of the rows, (k, n).

    Parameters
    ----------
    targets : (k, n) of float32
        How much of every row is the second of two classes, k = 1, or each of several.
    offsets : (k,) of float32
        Scores before the first tree.
    """
    num_scores, num_rows = targets.shape
    scores = np.repeat(offsets[:, np.newaxis], num_rows, axis=1)
    # Every leaf has a row at least.
    most = min(2 * num_rows, 2 ** (min(rule.max_depth, num_rows) + 1))
    growth = _growth(num_rounds * num_scores, num_scores * most + _FIRST_ROOM)
    used = np.zeros(3, dtype=np.int64)
    work, stack, draft = _work(bins), _stack(bins), _draft(most)
    chances = np.empty_like(scores)
    while True:
        boost(bins, rule, targets, scores, chances, work, stack, draft, growth, used)
        if used[0] == len(growth.sizes):
            return _finished(growth, used), scores
        growth = _with_more_room(growth)


def _work(bins: Bins) -> Work:
    num_rows, num_bins = len(bins.codes), len(bins.cuts)
    gains = np.empty(num_bins)
    return Work(
        packed=np.empty(num_rows, dtype=np.int64),
        rows=np.empty(num_rows, dtype=np.uint32),
        spare=np.empty(num_rows, dtype=np.uint32),
        below=np.empty(num_bins, dtype=np.int64),
        gains=gains,
        gain_bits=gains.view(np.int64),
    )


def _stack(bins: Bins) -> Stack:
    height = len(bins.codes).bit_length() + 1  # only smaller halves are stacked
    node, start, stop, level, total = np.empty((5, height), dtype=np.int64)
    sums = np.empty((height, len(bins.cuts)), dtype=np.int64)
    return Stack(node, start, stop, level, total, sums)


def _draft(num_nodes: int) -> Draft:
    left, column, cut, order = np.empty((4, num_nodes), dtype=np.int64)
    return Draft(left, column, cut, np.empty(num_nodes, dtype=np.float32), order)


def _growth(num_trees: int, room: int) -> Growth:
    return Growth(
        sizes=np.empty(num_trees, dtype=np.int64),
        leaf=np.empty(room, dtype=bool),
        features=np.empty(room, dtype=np.int64),
        thresholds=np.empty(room, dtype=np.float32),
        values=np.empty(room, dtype=np.float32),
    )


def _with_more_room(growth: Growth) -> Growth:
    sizes, *nodes = growth
    return Growth(sizes, *(np.concatenate([array, np.empty_like(array)]) for array in nodes))


def _finished(growth: Growth, used: Array) -> Trees:
    _, nodes, splits = used.tolist()
    return Trees(
        growth.sizes,
        growth.leaf[:nodes].copy(),
        growth.features[:splits].copy(),
        growth.thresholds[:splits].copy(),
        growth.values[: nodes - splits, np.newaxis].copy(),
    )
