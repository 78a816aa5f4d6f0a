"""Counting votes: pure functions on label arrays, shared by every strategy that votes."""

import numpy as np

from fl_strategies.protocols import Array, FloatArray, IntArray


def count_votes(labels: Array, num_classes: int) -> IntArray:
    """Count the votes of every row.

    Parameters
    ----------
    labels : (num_voters, num_rows)
    num_classes : int

    Returns
    -------
    counts : (num_rows, num_classes)
        Rows sum to the number of voters.
    """
    num_rows = labels.shape[1]
    counts = np.zeros(num_rows * num_classes, dtype=np.int64)
    offsets = np.arange(num_rows) * num_classes
    # One voter at a time: a flat index touches each cell once, so memory stays at the
    # size of the answer whatever the number of voters.
    for voter in labels:
        counts[offsets + voter] += 1
    return counts.reshape(num_rows, num_classes)


def consistent_mask(labels: Array) -> Array:
    """Return on which rows of (num_voters, num_rows) all voters agree, (num_rows,) of bool."""
    agreed: Array = (labels == labels[0]).all(axis=0)
    return agreed


def consistent_votes(labels: Array, num_classes: int) -> IntArray:
    """Count one party's students by consistent voting (Algorithm 1, lines 15 to 19).

    A party whose s students all name class m adds s to m; a party whose students
    disagree adds nothing.

    Parameters
    ----------
    labels : (num_students, num_rows)
    num_classes : int

    Returns
    -------
    counts : (num_rows, num_classes)
    """
    num_students, num_rows = labels.shape
    counts = np.zeros((num_rows, num_classes), dtype=np.int64)
    agreed = np.flatnonzero(consistent_mask(labels))
    counts[agreed, labels[0, agreed]] = num_students
    return counts


def plurality(counts: Array, rng: np.random.Generator) -> IntArray:
    """Return the class with most votes in each row, (num_rows,).

    Ties go to a class drawn uniformly among the leaders by `rng`: the lowest index would
    favour whatever class happens to be listed first. One draw per cell is taken whether
    or not there is a tie, so that a row's answer does not depend on other rows' ties.
    """
    priority: FloatArray = rng.random(counts.shape)
    leaders = counts == counts.max(axis=1, keepdims=True)
    winners: IntArray = np.where(leaders, priority, -1.0).argmax(axis=1)
    return winners


def agreement(counts: Array) -> float:
    """Return the mean share of votes that the leading class holds; NaN without rows."""
    if not len(counts):
        return float("nan")
    return float((counts.max(axis=1) / counts.sum(axis=1)).mean())
