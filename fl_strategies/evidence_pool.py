"""What a server keeps of the parties' evidence, and the consensus that it makes of it."""

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from fl_strategies.consensus import MAX_WEIGHT, ExactSum
from fl_strategies.evidence import (
    add_label_shares,
    add_share,
    believed_sizes,
    check_share,
    class_weights_of,
    label_weights_of,
    match_label_shares,
    match_share,
    pooled_label_shares,
    pooled_share,
)
from fl_strategies.exceptions import InvalidParameter, require
from fl_strategies.protocols import FloatArray, IntArray
from fl_strategies.tasks import Task

Contrast: TypeAlias = Literal["none", "public", "uncovered"]
ClassShare: TypeAlias = Literal["auto", "pooled", "none"] | Sequence[float]

CONTRASTS: Final[tuple[str, ...]] = get_args(Contrast)
SHARE_RULES: Final = ("auto", "pooled", "none")


class EvidenceConsensus:
    """The weighted mean of parties' evidence, kept as whole sums.

    The result has the same bits in whatever order parties come, and memory does not depend
    on their number. Parties are summed in groups of about the same size, a factor of two
    wide, so that a size that is not believed can be cut after the last of them has
    answered: see `believed_sizes`. There are at most 42 groups, of which those are kept
    that have a member.

    Parameters
    ----------
    shape : (rows, classes)
    bound : float
        No evidence may be larger in magnitude.
    """

    def __init__(self, shape: tuple[int, int], *, bound: float) -> None:
        self._shape, self._bound = shape, bound
        self._sums: dict[int, ExactSum] = {}
        self._weights: dict[int, IntArray] = {}
        self._sizes: list[float] = []

    def add(self, evidence: FloatArray, weights: FloatArray, size: float) -> None:
        """Take one party's evidence (rows, classes), its weights (classes,) and its size.

        Weights are at most the root of the size, which is at most 2**40.
        """
        require(0 <= size <= 2.0**40, "EvidenceConsensus", "size", "from 0 to 2**40", size)
        group = _group(size)
        parts = np.rint(weights * (MAX_WEIGHT / 2 ** (group / 2))).astype(np.int64)
        fits = bool(((parts >= 0) & (parts <= MAX_WEIGHT)).all())
        require(fits, "EvidenceConsensus", "weights", "from 0 to the root of size", weights)
        if group not in self._sums:
            self._sums[group] = ExactSum(self._shape, self._bound)
            self._weights[group] = np.zeros(self._shape[1], dtype=np.int64)
        self._sums[group].add(evidence, parts)
        self._weights[group] += parts
        self._sizes.append(size)

    def result(self) -> FloatArray:
        """Return the mean; 0, for no opinion, where nobody has any weight."""
        require(bool(self._sizes), "EvidenceConsensus", "replies", "at least one", 0)
        worths = self._worths()
        total, weight = np.zeros(self._shape), np.zeros(self._shape[1])
        for group in sorted(self._sums):
            worth = worths[group]
            total += worth * self._sums[group].total()
            weight += worth * self._weights[group]
        return np.asarray(total / np.where(weight > 0, weight, 1.0))

    def _worths(self) -> dict[int, float]:
        """Return what a whole weight is worth in each group, less where sizes were cut."""
        worths = {group: 2.0 ** (group / 2) for group in self._sums}
        believed = believed_sizes(np.array(self._sizes))
        for claimed, size in zip(self._sizes, believed, strict=True):
            if size < claimed:
                group = _group(claimed)
                worths[group] = min(worths[group], math.sqrt(2 * size))
        return worths


def _group(size: float) -> int:
    """Return the exponent of the smallest power of two above a size."""
    return max(math.frexp(size)[1], 0)


class EvidencePool:
    """Evidence of all parties on the same rows, and the consensus on them.

    Parameters
    ----------
    shape : (rows, classes)
    bound : float
        No evidence may be larger in magnitude.
    task : "single-label" or "multi-label"
    share : "auto", "pooled", "none" or numbers
        Which mean probabilities the classes get on these rows. ``"pooled"``: the shares of
        all parties' records, right for rows of the same kind. ``"none"``: what the evidence
        and these shares say of each row, right also for rows of another domain. Numbers:
        these shares. ``"auto"``: ``"none"`` if more than half of the parties find the public
        rows unlike their records, otherwise ``"pooled"``.
    """

    def __init__(
        self, shape: tuple[int, int], *, bound: float, task: Task, share: ClassShare
    ) -> None:
        self._consensus = EvidenceConsensus(shape, bound=bound)
        self._task, self._share = task, share
        self._counts: list[FloatArray] = []
        self.num_uncovered = 0

    def add(self, evidence: FloatArray, counts: FloatArray, contrast: Contrast) -> None:
        """Take one party's evidence (rows, classes) and counts.

        Counts are (classes,), or for several labels (2, classes): how many records have a
        label, and how many are known not to.
        """
        if self._task == "multi-label":
            weights, size = label_weights_of(*counts), float(counts.sum(axis=0).max())
        else:
            weights = class_weights_of(counts, contrasted=contrast == "public")
            size = float(counts.sum())
        self._consensus.add(evidence, weights, size)
        self._counts.append(counts)
        self.num_uncovered += contrast == "uncovered"

    @property
    def rule(self) -> ClassShare:
        """The rule in force, after `auto` has been decided."""
        if self._share != "auto":
            return self._share
        return "none" if 2 * self.num_uncovered > len(self._counts) else "pooled"

    def result(self) -> FloatArray:
        """Return unnormalised log-probabilities of classes, or log-odds of labels."""
        scores, rule = self._consensus.result(), self.rule
        several = self._task == "multi-label"
        pooled = pooled_label_shares(self._counts) if several else pooled_share(self._counts)
        if rule == "none":
            return (add_label_shares if several else add_share)(scores, pooled)
        share = pooled if rule == "pooled" else np.asarray(rule, dtype=np.float64)
        return (match_label_shares if several else match_share)(scores, share)


def read_class_share(owner: str, share: ClassShare, num_classes: int, task: Task) -> ClassShare:
    """Return a checked rule; numbers may come as text with commas between them."""
    if isinstance(share, str) and share not in SHARE_RULES:
        try:
            share = [float(part) for part in share.split(",")]
        except ValueError:
            rule = f"one of {', '.join(SHARE_RULES)}, or {num_classes} numbers"
            raise InvalidParameter(
                f"{owner}: class_share must be {rule}, got {share!r}."
            ) from None
    if isinstance(share, str):
        return share
    given = np.asarray(share, dtype=np.float64)
    if task == "multi-label":
        fits = given.shape == (num_classes,) and bool(((given > 0) & (given < 1)).all())
        require(fits, owner, "class_share", f"{num_classes} numbers between 0 and 1", share)
    else:
        check_share(owner, given, num_classes)
    return tuple(float(part) for part in given)
