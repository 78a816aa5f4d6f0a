"""Claimed record counts: limits on them, and the class weights of FedKD (Eq. 1).

A claim is a number of records, or the scale of a party's scores. Sums are kept in groups of
claims a factor of two wide, so that a claim can be capped after the last party has answered
although only sums are kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from fl_strategies._util.arrays import Array, FloatArray, IntArray
from fl_strategies.aggregation.evidence import believed_parts
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.privacy.noise import ScoreMechanism
from fl_strategies.tasks import Task
from fl_strategies.wire.formats import ScoreFormat

_LARGEST_GROUP: Final = 41
MOST_TIMES_LOUDNESS: Final = 2.0
"""The scale of a party's scores is capped at this multiple of the median party's."""


class Claims:
    """The parties' claims, each of which belongs to a group.

    Parameters
    ----------
    believe : callable
        Maps all claims (num_parties,) to their capped values (num_parties,).
    """

    def __init__(self, believe: Callable[[FloatArray], FloatArray]) -> None:
        self._believe = believe
        self._claimed: list[float] = []

    def add(self, claim: float) -> int:
        """Take a claim and return its group."""
        self._claimed.append(claim)
        return _group(claim)

    def parts(self) -> dict[int, float]:
        """Return the groups that are capped, and the factor that is applied to each."""
        parts: dict[int, float] = {}
        for claimed, part in zip(self._claimed, self._believed_parts(), strict=True):
            if part < 1:
                group = _group(claimed)
                parts[group] = min(parts.get(group, 1.0), float(part))
        return parts

    @property
    def num_cut(self) -> int:
        """Number of claims that are capped."""
        return int((self._believed_parts() < 1).sum())

    def _believed_parts(self) -> FloatArray:
        claimed = np.array(self._claimed)
        if not len(claimed):
            return claimed
        believed = self._believe(claimed)
        return np.where(claimed > 0, believed / np.where(claimed > 0, claimed, 1.0), 1.0)


def _group(claim: float) -> int:
    """Return the exponent of the smallest power of two above a claim, within reason."""
    return min(max(math.frexp(claim)[1], 0), _LARGEST_GROUP)


def loudness(scores: Array) -> float:
    """Return the root mean square of scores."""
    return float(np.sqrt(np.mean(np.square(scores, dtype=np.float64))))


def believed_loudness(claimed: FloatArray) -> FloatArray:
    """Return the capped scale of each party's scores.

    Examples
    --------
    >>> believed_loudness(np.array([1.0, 2.0, 3.0, 100.0]))
    array([1., 2., 3., 5.])
    """
    return np.asarray(np.minimum(claimed, MOST_TIMES_LOUDNESS * float(np.median(claimed))))


CLASS_COUNTS = "class-counts"
_LARGEST_COUNT = 2.0**40


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


def read_counts(arrays: Mapping[str, Array], *shape: int) -> FloatArray:
    """Return received class counts; raise `KnowledgeMismatch` for impossible ones."""
    counts = arrays.get(CLASS_COUNTS, np.empty(0))
    if counts.dtype != np.float64 or counts.shape != shape:
        raise KnowledgeMismatch(
            f"scores: {CLASS_COUNTS} must be {shape} numbers (float64), "
            f"got shape {counts.shape} of {counts.dtype}."
        )
    if not ((counts >= 0) & (counts <= _LARGEST_COUNT)).all():
        raise KnowledgeMismatch(
            f"scores: {CLASS_COUNTS} must be from 0 to 2**40, got {counts.ravel()[:8]}."
        )
    return counts


def class_weights(counts: Sequence[FloatArray | None], num_classes: int) -> FloatArray:
    """Return weights (num_parties, num_classes) that sum to 1 for every class.

    Without counts all parties have the same weight, as they do for a class that nobody holds.

    Examples
    --------
    >>> class_weights([np.array([3.0, 0.0]), np.array([1.0, 0.0])], 2)
    array([[0.75, 0.5 ],
           [0.25, 0.5 ]])
    """
    held = np.array([np.ones(num_classes) if c is None else c for c in counts])
    held = np.where(held.sum(axis=0) > 0, held, 1.0)
    weights: FloatArray = held / held.sum(axis=0)
    return weights


def believed_counts(
    counts: Sequence[FloatArray | None],
) -> tuple[list[FloatArray | None], int]:
    """Return capped class counts, and the number of parties whose counts were capped."""
    stated = [own for own in counts if own is not None]
    if len(stated) < len(counts):
        return list(counts), 0
    parts = believed_parts(stated)
    return [part * own for part, own in zip(parts, stated, strict=True)], int((parts < 1).sum())


def heard_parts(parties: Sequence[Array], form: ScoreFormat) -> FloatArray:
    """Return the factor that brings each party's scores to the capped scale."""
    claimed = np.array([loudness(form.decode(values)) for values in parties])
    believed = believed_loudness(claimed)
    return np.where(claimed > 0, believed / np.where(claimed > 0, claimed, 1.0), 1.0)


def weighted_mean(
    parties: Sequence[Array], weights: FloatArray, form: ScoreFormat
) -> FloatArray:
    """Return the mean of the parties' scores (n, num_classes), weighted class by class."""
    mean = np.zeros(parties[0].shape)
    for values, weight in zip(parties, weights, strict=True):
        mean += weight * form.decode(values)
    return mean


def noisy_weighted_mean(
    parties: Sequence[Array],
    weights: FloatArray,
    form: ScoreFormat,
    mechanism: ScoreMechanism,
    rng: np.random.Generator | None,
) -> FloatArray:
    """Return the weighted mean with the mechanism's noise, a few columns at a time."""
    mean, width = np.zeros(parties[0].shape), mechanism.num_values
    for start in range(0, weights.shape[1], width):
        columns = np.s_[:, start : start + width]
        scores = form.decode(np.stack([values[columns] for values in parties]))
        # The mechanism takes a plain mean, so weights enter as multiples of 1 / K.
        weighted = len(parties) * weights[:, None, start : start + width] * scores
        mean[columns] = mechanism.release(weighted, rng).values
    return mean
