"""A party's answers, as votes and as evidence.

Votes are label arrays. A model answers with the class shares of its own records; evidence is
its answer with these shares divided out, so that answers of parties with different shares can
be combined (see `aggregation.evidence`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.learners import Task

LEAST_PROBABILITY: Final = 1e-3
"""Smaller probabilities count as this, of rare classes as less: no answer is worth more than
a thousand to one."""

VOTE_STRENGTH: Final = 6.0
"""Evidence of a bare vote for its class, relative to the mean of all classes of the voter."""

PSEUDO_COUNT: Final = 0.5
"""Records added to every class, so that no share is 0."""
CLASS_COUNTS = "class-counts"
LEAST_OF_POSSIBLE: Final = 0.5
LEAST_OF_TYPICAL: Final = 0.25
"""Least relative agreement of a party that is never excluded; see `least_agreeing`."""
_BLOCK_VOTES: Final = 1 << 18
_BLOCK_CELLS: Final = 1 << 16
_MOST_WAITING: Final = 64


def count_votes(labels: Array, num_classes: int) -> IntArray:
    """Count the votes (num_voters, num_rows) of every row, (num_rows, num_classes)."""
    num_voters, num_rows = labels.shape
    counts = np.empty((num_rows, num_classes), dtype=np.int64)
    # Some rows at a time, so that counts and votes stay in the cache: a large one-hot
    # array of all votes would cost a hundred times as much.
    size = max(1, min(_BLOCK_VOTES // max(num_voters, 1), _BLOCK_CELLS // num_classes))
    for start in range(0, num_rows, size):
        some = labels[:, start : start + size]
        width = some.shape[1]
        cells = np.arange(width, dtype=np.intp) * num_classes
        flat = np.add(some, cells, dtype=np.intp).reshape(-1)
        counted = np.bincount(flat, minlength=width * num_classes)
        counts[start : start + size] = counted.reshape(width, num_classes)
    return counts


class VoteSum:
    """Votes added party by party, and counted in batches.

    Memory does not depend on the number of parties.

    Parameters
    ----------
    shape : (rows, classes)
    worth : int
        Weight of every vote.

    Examples
    --------
    >>> votes = VoteSum((2, 3))
    >>> for labels in ([0, 1], [0, -1], [2, 1]):
    ...     votes.add(np.array(labels))
    >>> votes.counts
    array([[2, 0, 1],
           [0, 2, 0]])
    """

    def __init__(self, shape: tuple[int, int], worth: int = 1) -> None:
        num_rows, num_classes = shape
        self._counts: IntArray = np.zeros(shape, dtype=np.int64)
        self._worth, self._num_waiting = worth, 0
        smallest = np.min_scalar_type(num_classes)
        # Column 0 of what is counted stands for no vote.
        self._waiting = np.empty((_MOST_WAITING, num_rows), dtype=smallest)

    def add(self, labels: Array) -> None:
        """Take one voter's label of each row, -1 for none."""
        into = self._waiting[self._num_waiting]
        np.add(labels, 1, out=into, dtype=into.dtype, casting="unsafe")
        self._num_waiting += 1
        if self._num_waiting == _MOST_WAITING:
            self._count()

    def _count(self) -> None:
        waiting, self._num_waiting = self._waiting[: self._num_waiting], 0
        if len(waiting):
            counted = count_votes(waiting, self._counts.shape[1] + 1)[:, 1:]
            self._counts += counted if self._worth == 1 else self._worth * counted

    @property
    def counts(self) -> IntArray:
        """Votes for each class, (rows, classes)."""
        self._count()
        return self._counts


def consistent_mask(labels: Array) -> Array:
    """Return on which rows of (num_voters, num_rows) all voters agree, (num_rows,) of bool."""
    agreed: Array = (labels == labels[0]).all(axis=0)
    return agreed


def consistent_labels(labels: Array, num_classes: int) -> Array:
    """Return the label that all voters of (num_voters, num_rows) share in each row, or -1.

    The result takes as few bytes per row as `num_classes` allows, because a server may have
    to keep the answers of thousands of parties.
    """
    smallest = np.min_scalar_type(-num_classes)
    return np.where(consistent_mask(labels), labels[0], -1).astype(smallest)


def add_votes(counts: IntArray, votes: Array, worth: int) -> None:
    """Add one party's votes (num_rows,), -1 for none, to counts (num_rows, num_classes)."""
    rows = np.flatnonzero(votes >= 0)
    counts[rows, votes[rows]] += worth


def agreements(votes: Sequence[Array], num_classes: int) -> FloatArray:
    """Return how far each party agrees with the plurality of all others, by two measures.

    A party is compared on the rows where it votes and one class leads among the others.

    Parameters
    ----------
    votes : one (num_rows,) per party
        -1 where a party has no vote.
    num_classes : int

    Returns
    -------
    agreements : (num_parties, 2)
        First, the share of a party's votes that name the leading class. Second, the same as a
        fraction of the maximum that is possible given how often the party names each class and
        how often each leads: a party that knows only two classes, and assigns every row to one
        of them, has few votes for the leading class and yet as many as it could have. Both are
        1 where there is nothing to compare.

    Examples
    --------
    >>> honest, constant, liar = [[0, 1, 1]] * 4, [0, 0, 0], [1, 0, 0]
    >>> agreements(np.array([*honest, constant, liar]), num_classes=2)[3:].round(2)
    array([[1.  , 1.  ],
           [0.33, 1.  ],
           [0.  , 0.  ]])
    """
    counted = VoteSum((len(votes[0]), num_classes))
    for own in votes:
        counted.add(own)
    leaders = _Leaders.of(counted.counts)
    return np.array([_agreement(own, leaders, num_classes) for own in votes])


@dataclass(frozen=True, eq=False)
class _Leaders:
    """The leading classes of each row, from which the votes without any one party follow.

    `first` and `second` have the most votes, `number` classes tie with the first, and the
    second has `behind` fewer votes.
    """

    counts: IntArray
    first: IntArray
    second: IntArray
    number: IntArray
    behind: IntArray

    @classmethod
    def of(cls, counts: IntArray) -> "_Leaders":
        rows, first = np.arange(len(counts)), counts.argmax(axis=1)
        most = counts[rows, first]
        others = counts.copy()
        others[rows, first] = -1
        second = others.argmax(axis=1)
        number = (counts == most[:, None]).sum(axis=1)
        return cls(counts, first, second, number, most - others[rows, second])

    def without(self, own: Array) -> tuple[IntArray, IntArray]:
        """Return the rows where this party votes and one other class leads, and that class."""
        rows = np.flatnonzero(own >= 0)
        named, first, number = own[rows], self.first[rows], self.number[rows]
        leads = self.counts[rows, named] == self.counts[rows, first]
        # Its own vote may have made the lead, or prevented one.
        alone = (number == 1) & (~leads | (self.behind[rows] > 1))
        freed = (number == 2) & leads
        leading = np.where(freed & (named == first), self.second[rows], first)
        decided = alone | freed
        return rows[decided], leading[decided]


def _agreement(own: Array, leaders: _Leaders, num_classes: int) -> tuple[float, float]:
    compared, leading = leaders.without(own)
    named = own[compared]
    times, led = (np.bincount(labels, minlength=num_classes) for labels in (named, leading))
    agreed, possible = int((named == leading).sum()), int(np.minimum(times, led).sum())
    return agreed / len(named) if len(named) else 1.0, agreed / possible if possible else 1.0


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

    Parties are returned, the worst first and no more than the given share of all parties
    (rounded down), if one of these is true:

    - the party agrees in less than half of the votes in which it could (`agreements`), like
      one that swaps labels;
    - its share of agreeing votes is less than a quarter of the median party's, like that of
      one that names the same class for every row.

    Among equally bad parties, those later in `votes` are returned.
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
    """Return the class with the most votes in each row, (num_rows,).

    Ties go to a class drawn uniformly among the leaders by `rng`: the lowest index would
    favour the class that happens to be listed first. One draw per cell is made whether or
    not there is a tie, so that a row's answer does not depend on other rows' ties.
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


def class_counts(y: Array, num_classes: int, task: Task) -> IntArray:
    """Return the number of records per class, or of known positives per label."""
    if task == "multi-label":
        counts: IntArray = (y == 1).sum(axis=0).astype(np.int64)
        return counts
    return np.bincount(y, minlength=num_classes).astype(np.int64)


def both_counts(y: Array, num_classes: int, task: Task) -> IntArray:
    """Return the records per class, (C,), or with and without each label, (2, C)."""
    counts = class_counts(y, num_classes, task)
    return np.stack([counts, (y == 0).sum(axis=0)]) if task == "multi-label" else counts


def class_evidence(
    logits: FloatArray, counts: FloatArray, log_ratio: FloatArray | None = None
) -> FloatArray:
    """Return a model's evidence for each class, its own class shares divided out, (n, C).

    Parameters
    ----------
    logits : (n, C)
        Unnormalised log-probabilities of a model.
    counts : (C,)
        Records of each class that it was trained on.
    log_ratio : (n,), optional
        Estimate of log p(x) / p_public(x), where p is the density of the party's records.

    Returns
    -------
    evidence : (n, C)
        0 for classes without records: no opinion, which is not a vote against.

    Examples
    --------
    >>> shares = np.log(np.array([[0.75, 0.25], [0.5, 0.5]]))
    >>> class_evidence(shares, np.array([1e9, 1e9 / 3])).round(3)
    array([[ 0.   , -0.   ],
           [-0.549,  0.549]])
    """
    seen, padded = counts > 0, counts + PSEUDO_COUNT  # shares that are nowhere 0
    prior = (padded / padded.sum())[seen]
    # Relative to a rare class: a floor above its prior would be evidence for it everywhere.
    floor = LEAST_PROBABILITY * np.minimum(1.0, len(prior) * prior)
    relative = np.maximum(log_softmax(logits[:, seen]), np.log(floor)) - np.log(prior)
    if log_ratio is None:
        relative = relative - relative.mean(axis=1, keepdims=True)
    else:
        relative = relative + log_ratio[:, None]
    evidence = np.zeros(logits.shape)
    evidence[:, seen] = relative
    return evidence


def label_evidence(
    log_odds: FloatArray, positives: FloatArray, negatives: FloatArray
) -> FloatArray:
    """Return a multi-label model's evidence, its own shares divided out, (n, C).

    Labels that a party knows of one kind only get 0.
    """
    both = (positives > 0) & (negatives > 0)
    bound = -math.log(LEAST_PROBABILITY)
    prior = np.log((positives + PSEUDO_COUNT) / (negatives + PSEUDO_COUNT))
    return np.where(both, np.clip(log_odds, -bound, bound) - prior, 0.0)


def corrected_labels(logits: FloatArray, counts: FloatArray) -> IntArray:
    """Return the class with most evidence among those that a model has seen, (n,).

    This is the vote that a model would cast had it been trained on equal class shares.
    It depends on nothing but the model and the counts of its own training rows.
    """
    evidence = class_evidence(logits, counts)
    labels: IntArray = np.where(counts > 0, evidence, -np.inf).argmax(axis=1)
    return labels


def vote_evidence(labels: Array, counts: FloatArray) -> FloatArray:
    """Return bare votes (n,), -1 for none, as evidence (n, C) of a party with these counts."""
    seen = counts > 0
    evidence = np.zeros((len(labels), len(counts)))
    # A vote treats all other classes alike, so two numbers describe it.
    known = np.append(seen, False)[labels]
    share = 1 / max(int(seen.sum()), 1)
    evidence[known] = np.where(seen, VOTE_STRENGTH * (0.0 - share), 0.0)
    evidence[known, labels[known]] = VOTE_STRENGTH * (1.0 - share)
    return evidence


def valid_counts(noisy: FloatArray, scale: float) -> FloatArray:
    """Return noisy counts rounded to integers, with those that are mere noise set to 0.

    What is below two scales of the noise counts as no records, because a class that a party
    falsely claims to know hurts more than one that it falsely gives up. The largest stays.
    """
    whole = np.rint(np.maximum(noisy, 0.0))
    kept = np.where(whole >= 2 * scale, whole, 0.0)
    if not kept.any():
        kept.flat[whole.argmax()] = max(float(whole.max()), 1.0)
    return kept


def log_softmax(logits: FloatArray) -> FloatArray:
    """Return the log-probabilities of rows of logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
