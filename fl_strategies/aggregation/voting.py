"""Counting votes: pure functions on label arrays, shared by every strategy that votes."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from fl_strategies.arrays import Array, FloatArray, IntArray

LEAST_OF_POSSIBLE: Final = 0.5
LEAST_OF_TYPICAL: Final = 0.25
"""What a party must reach to be counted if some are excluded; see `least_agreeing`."""


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


def consistent_labels(labels: Array, num_classes: int) -> Array:
    """Return the label that all voters of (num_voters, num_rows) share in each row, or -1.

    The answer takes as few bytes a row as `num_classes` allows, because a server may have to
    keep the answers of thousands of parties.
    """
    smallest = np.min_scalar_type(-num_classes)
    return np.where(consistent_mask(labels), labels[0], -1).astype(smallest)


def add_votes(counts: IntArray, votes: Array, worth: int) -> None:
    """Add one party's votes (num_rows,), -1 for none, to counts (num_rows, num_classes)."""
    rows = np.flatnonzero(votes >= 0)
    counts[rows, votes[rows]] += worth


def agreements(votes: Sequence[Array], num_classes: int) -> FloatArray:
    """Measure how far each party agrees with the plurality of all others, in two ways.

    A party is compared on the rows where it votes and one class leads among the others.

    Parameters
    ----------
    votes : a (num_rows,) for each party
        -1 where a party has no vote.
    num_classes : int

    Returns
    -------
    agreements : (num_parties, 2)
        First the share of a party's votes that name the leading class. Second the same, out
        of the most that were possible given how often the party names each class and how
        often each leads: a party that knows two classes only, and takes every row for one of
        them, has few votes for the leading class and yet all that it could have. Both are 1
        where there is nothing to compare.

    Examples
    --------
    >>> honest, constant, liar = [[0, 1, 1]] * 4, [0, 0, 0], [1, 0, 0]
    >>> agreements(np.array([*honest, constant, liar]), num_classes=2)[3:].round(2)
    array([[1.  , 1.  ],
           [0.33, 1.  ],
           [0.  , 0.  ]])
    """
    rest = np.zeros((len(votes[0]), num_classes), dtype=np.int64)
    for own in votes:
        add_votes(rest, own, 1)
    measured = []
    # One party at a time: memory stays at the size of the counts.
    for own in votes:
        add_votes(rest, own, -1)
        measured.append(_agreement(own, rest))
        add_votes(rest, own, 1)
    return np.array(measured)


def _agreement(own: Array, rest: IntArray) -> tuple[float, float]:
    decided = (rest == rest.max(axis=1, keepdims=True)).sum(axis=1) == 1
    compared = np.flatnonzero(decided & (own >= 0))
    said, leading = own[compared], rest[compared].argmax(axis=1)
    num_classes = rest.shape[1]
    named, led = (np.bincount(labels, minlength=num_classes) for labels in (said, leading))
    agreed, possible = int((said == leading).sum()), int(np.minimum(named, led).sum())
    return agreed / len(said) if len(said) else 1.0, agreed / possible if possible else 1.0


def num_trimmed(num_parties: int, share: float) -> int:
    """Return the share of parties as a number, rounded down.

    Examples
    --------
    >>> num_trimmed(100, 0.29), num_trimmed(4, 0.2)  # 100 * 0.29 is 28.999999999999996
    (29, 0)
    """
    return math.floor(num_parties * share + 1e-9)


def least_agreeing(votes: Sequence[Array], num_classes: int, share: float) -> list[int]:
    """Return the positions of parties that vote against all others, in ascending order.

    They are those of which one of these is true, the worst first, and no more than the
    share of all parties, rounded down:

    - the party agrees in less than half of the votes in which it could (`agreements`), as
      one whose labels are exchanged;
    - it agrees in less than a quarter of the share in which the median party does, as one
      that names the same class for every row.

    Of parties that are equally bad, those that come later in `votes` are taken.
    """
    count = num_trimmed(len(votes), share)
    if not count:
        return []
    agreed, of_possible = agreements(votes, num_classes).T
    typical = max(float(np.median(agreed)), 1e-12)
    quality = np.minimum(of_possible / LEAST_OF_POSSIBLE, agreed / typical / LEAST_OF_TYPICAL)
    order = np.argsort(quality[::-1], kind="stable")
    worst = len(votes) - 1 - order[:count]
    return sorted(worst[quality[worst] < 1].tolist())


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
