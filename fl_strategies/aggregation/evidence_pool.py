"""What a server keeps of the parties' evidence, and the consensus that it makes of it."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from fl_strategies.aggregation.consensus import MAX_WEIGHT, ExactSum
from fl_strategies.aggregation.evidence import (
    add_label_shares,
    add_share,
    believed_parts,
    believed_sizes,
    check_share,
    class_weights_of,
    label_weights_of,
    match_label_shares,
    match_share,
    pooled_label_shares,
    pooled_share,
)
from fl_strategies.aggregation.outliers import outliers
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import InvalidParameter, require
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics, shown

logger = logging.getLogger("flwr.fl_strategies")

Contrast: TypeAlias = Literal["none", "public", "uncovered"]
ClassShare: TypeAlias = Literal["auto", "pooled", "none"] | Sequence[float]
Decode: TypeAlias = Callable[[Array, FloatArray], FloatArray]

CONTRASTS: Final[tuple[str, ...]] = get_args(Contrast)
SHARE_RULES: Final = ("auto", "pooled", "none")
MAX_SIZE: Final = 2.0**40
LEAST_SHARE: Final = 0.25
"""A party is judged by classes of at least this part of its mean class."""
MOST_JUDGED: Final = 1000
"""Most parties among which outliers are sought."""


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
        require(0 <= size <= MAX_SIZE, "EvidenceConsensus", "size", "from 0 to 2**40", size)
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


class Heard(NamedTuple):
    """What one party said, as compact as it came."""

    values: Array
    counts: FloatArray
    contrast: Contrast
    party: int


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
        these shares. ``"auto"``: ``"pooled"`` if more than half of the parties compare their
        classes only with each other, otherwise ``"none"``: evidence that is relative to the
        public rows gains nothing by it, and a liar about its counts could move every row.
    decode : callable, optional
        Makes evidence (rows, classes) of what a party sent and its counts; by default it
        sent evidence.
    exclude_outliers : bool (default: True)
        Do not count parties that contradict most others: see `aggregation.outliers`. What
        parties sent is then kept as it came until all are there; otherwise only sums are.
        Of more than `MOST_JUDGED` parties nobody is judged: one of so many decides little,
        and memory must not grow with their replies.

    Attributes
    ----------
    outliers, capped : tuple of int
        After `result`: partition ids of parties that were not counted, and of those that
        count with fewer records than they claim.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        bound: float,
        task: Task,
        share: ClassShare,
        decode: Decode = lambda values, _: values,
        exclude_outliers: bool = True,
    ) -> None:
        self._consensus = EvidenceConsensus(shape, bound=bound)
        self._task, self._share, self._decode = task, share, decode
        self._exclude_outliers = exclude_outliers
        self._heard: list[Heard] = []
        self._counts: list[tuple[int, FloatArray]] = []
        self._contrasts = Counter[str]()
        self.outliers: tuple[int, ...] = ()
        self.capped: tuple[int, ...] = ()

    def add(
        self, values: Array, counts: FloatArray, contrast: Contrast, party: int = 0
    ) -> None:
        """Take what a party sent about the rows, its counts and its partition id.

        Counts are (classes,), or for several labels (2, classes): how many records have a
        label, and how many are known not to.
        """
        self._contrasts[contrast] += 1
        heard = Heard(values, counts, contrast, party)
        if not self._exclude_outliers:
            self._count(heard)
            return
        self._heard.append(heard)
        if len(self._heard) > MOST_JUDGED:
            logger.warning("No outliers are sought among more than %s parties.", MOST_JUDGED)
            self._exclude_outliers = False
            for one in self._heard:
                self._count(one)
            self._heard = []

    def _count(self, heard: Heard) -> None:
        """Add a party's evidence to the sums."""
        evidence = self._decode(heard.values, heard.counts)
        self._consensus.add(evidence, self._weights(heard), self._size(heard.counts))
        self._counts.append((heard.party, heard.counts))

    def _weights(self, heard: Heard) -> FloatArray:
        if self._task == "multi-label":
            return label_weights_of(*heard.counts)
        return class_weights_of(heard.counts, contrasted=heard.contrast == "public")

    def _size(self, counts: FloatArray) -> float:
        """Return how many records a party claims; nobody has more than the sums can hold."""
        several = self._task == "multi-label"
        return min(float(counts.sum(axis=0).max() if several else counts.sum()), MAX_SIZE)

    def _count_heard(self) -> None:
        """Count those who do not contradict most others."""
        heard = sorted(self._heard, key=lambda one: one.party)
        self._heard = []
        positions = {*self._find_outliers(heard)}
        self.outliers = tuple(heard[position].party for position in sorted(positions))
        for position, one in enumerate(heard):
            if position not in positions:
                self._count(one)

    def _find_outliers(self, heard: Sequence[Heard]) -> list[int]:
        absolute = [self._task == "multi-label" or one.contrast == "public" for one in heard]
        return outliers(
            lambda position: self._decode(heard[position].values, heard[position].counts),
            self._judged_by(heard),
            np.where(absolute, 1, 2),
        )

    def _judged_by(self, heard: Sequence[Heard]) -> FloatArray:
        """Return the weights of the parties' classes, 0 for those that nobody is judged by.

        Where the median party knows less than a third of the classes, an honest one would look
        like a liar by a class of which it has a record or two. Where parties know most
        classes they are judged by all: a liar may claim to know nothing but its own.
        """
        weights = np.array([self._weights(one) for one in heard])
        if self._task == "multi-label":
            return weights
        counts = np.array([one.counts for one in heard])
        well = counts >= LEAST_SHARE * counts.mean(axis=1, keepdims=True)
        alike = 3 * np.median((well & (counts > 0)).sum(axis=1)) >= counts.shape[1]
        return weights if alike else np.where(well, weights, 0.0)

    @property
    def num_uncovered(self) -> int:
        """How many parties find the public rows unlike their records."""
        return self._contrasts["uncovered"]

    @property
    def rule(self) -> ClassShare:
        """The rule in force, after `auto` has been decided."""
        if self._share != "auto":
            return self._share
        return "pooled" if 2 * self._contrasts["none"] > self._contrasts.total() else "none"

    def result(self) -> FloatArray:
        """Return unnormalised log-probabilities of classes, or log-odds of labels."""
        if self._heard:
            self._count_heard()
        scores, rule = self._consensus.result(), self.rule
        counts = [own for _, own in self._counts]
        parts = believed_parts(counts)
        self.capped = tuple(
            party for (party, _), part in zip(self._counts, parts, strict=True) if part < 1
        )
        several = self._task == "multi-label"
        pooled = pooled_label_shares(counts) if several else pooled_share(counts)
        if rule == "none":
            return (add_label_shares if several else add_share)(scores, pooled)
        share = pooled if rule == "pooled" else np.asarray(rule, dtype=np.float64)
        return (match_label_shares if several else match_share)(scores, share)

    def report(self, owner: str) -> Metrics:
        """Say in the log who was not counted, or not in full; return how many they are."""
        if self.outliers:
            logger.warning(
                "%s does not count parties %s, which contradict most others.",
                owner,
                shown(self.outliers),
            )
        if self.capped:
            logger.warning(
                "%s counts parties %s with fewer records than they claim: their numbers or "
                "class shares are far from the others'.",
                owner,
                shown(self.capped),
            )
        return {keys.NUM_OUTLIERS: len(self.outliers), keys.NUM_CAPPED: len(self.capped)}


def read_class_share(
    owner: str, share: str | Sequence[float], num_classes: int, task: Task
) -> ClassShare:
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
        return share  # type: ignore[return-value]
    given = np.asarray(share, dtype=np.float64)
    if task == "multi-label":
        fits = given.shape == (num_classes,) and bool(((given > 0) & (given < 1)).all())
        require(fits, owner, "class_share", f"{num_classes} numbers between 0 and 1", share)
    else:
        check_share(owner, given, num_classes)
    return tuple(float(part) for part in given)
