"""The server's pool of the parties' evidence, and the consensus computed from it.

Two honest parties that know a class rank the public rows similarly by their evidence for it.
A liar does not, whatever it claims: one that swaps or negates labels contradicts the others,
and one that always names the same class does not rank rows at all.

A party's agreement is the median of its correlations with every other party, computed over
the classes that both know with each class centred at its mean. Less than half of all parties
cannot move this median. A party far below the typical agreement is an outlier.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.aggregation.consensus import MAX_WEIGHT, ExactSum
from fl_strategies.aggregation.evidence import (
    FEWEST_COMPARED,
    add_label_shares,
    add_share,
    are_alike,
    believed_counts,
    believed_parts,
    believed_sizes,
    check_share,
    class_weights_of,
    group_of,
    label_weights_of,
    likely_share,
    limited_mean,
    match_label_shares,
    match_share,
    pooled_label_shares,
    pooled_share,
)
from fl_strategies.errors import InvalidParameter, require, require_known
from fl_strategies.learners import Task
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics, Scalar, shown

LEAST_OF_TYPICAL: Final = 0.25
"""A party is an outlier below this share of the median party's agreement."""
LEAST_OF_TYPICAL_LIMITED: Final = 0.1
"""The same where the influence of one party on a row is limited. It is lower because less is
then gained by excluding a party that may be honest with few records."""
CONTRADICTION: Final = -0.25
"""A party whose agreement is below this share of the median party's contradicts the others; of
120 honest federations none had one (docs/results/robustness.md)."""
LEAST_TYPICAL: Final = 0.2
"""If the median party agrees less than this with the others, no party is excluded."""
FEWEST_COMPARABLE: Final = 3
"""A party that can be compared with fewer others is never an outlier."""
MOST_COMPARED: Final = 100
"""Largest number of others that a party is compared with: time is linear in the parties."""
_MOST_CELLS: Final = 1 << 24

Evidence: TypeAlias = Callable[[int], FloatArray]


def outliers(
    evidence: Evidence,
    known: FloatArray,
    fewest_common: IntArray,
    *,
    least_typical: float = LEAST_TYPICAL,
    least_of_typical: float = LEAST_OF_TYPICAL,
) -> dict[int, float]:
    """Return the positions of parties that do not agree with most others, ascending.

    The values are their agreements as multiples of the median party's: a party below
    `CONTRADICTION` contradicts the others, any other may well be honest and know little.
    Fewer than half of the parties that can be compared are outliers.

    Parameters
    ----------
    evidence : callable
        Gives the evidence (rows, classes) of the party at a position.
    known : (num_parties, num_classes)
        Above 0 where a party's evidence on a class counts.
    fewest_common : (num_parties,)
        Number of common classes that a comparison with a party needs: 2 for one that
        compares its classes only with each other, so that a single one says nothing.
    least_typical : float
        There are no outliers if the median party agrees less than this with the others.
    least_of_typical : float
        A party is an outlier below this share of the median party's agreement.
    """
    agreed = agreements(evidence, known > 0, fewest_common)
    comparable = ~np.isnan(agreed)
    typical = float(np.median(agreed[comparable])) if comparable.any() else 0.0
    if typical < least_typical:
        return {}
    found = np.flatnonzero(comparable & (agreed < least_of_typical * typical))
    return {int(position): float(agreed[position]) / typical for position in found}


def agreements(evidence: Evidence, known: Array, fewest_common: IntArray) -> FloatArray:
    """Return how far each party agrees with most others, from -1 to 1, (num_parties,).

    NaN for a party that has too little in common with too many.
    """
    references = _references(len(known), evidence)
    others = np.stack([_centred(evidence(k), known[k]).ravel() for k in references])
    squares = (others**2).reshape(len(others), -1, known.shape[1]).sum(axis=1)
    agreed = np.full(len(known), np.nan)
    for k, classes in enumerate(known):
        own = _centred(evidence(k), classes)
        common = (known[references] & classes).sum(axis=1)
        needed = np.maximum(fewest_common[references], fewest_common[k])
        compared = (common >= needed) & (references != k)
        if compared.sum() >= FEWEST_COMPARABLE:
            norms = np.sqrt(known[references] @ (own**2).sum(axis=0) * (squares @ classes))
            products = others @ own.ravel()
            correlations = products / np.where(norms > 0, norms, np.inf)
            agreed[k] = np.median(correlations[compared])
    return agreed


def _references(num_parties: int, evidence: Evidence) -> IntArray:
    """Return the parties that all are compared with: all, or some that are spread evenly."""
    cells = evidence(0).size
    most = min(MOST_COMPARED, max(_MOST_CELLS // cells, 10 * FEWEST_COMPARABLE))
    return np.unique(np.linspace(0, num_parties - 1, min(num_parties, most)).astype(np.int64))


def _centred(evidence: FloatArray, known: Array) -> FloatArray:
    """Return how evidence differs from its mean, for the classes that are known."""
    centred = np.where(known, evidence - evidence.mean(axis=0), 0.0)
    return np.asarray(centred, dtype=np.float32)


logger = logging.getLogger("flwr.fl_strategies")

Contrast: TypeAlias = Literal["none", "public", "uncovered"]
ClassShare: TypeAlias = Literal["auto", "pooled", "none"] | Sequence[float]
Decode: TypeAlias = Callable[[Array, FloatArray], FloatArray]

CONTRAST: Final = "contrast"
"""Entry of a message with one of these."""
CONTRASTS: Final[tuple[str, ...]] = get_args(Contrast)
SHARE_RULES: Final = ("auto", "pooled", "none")
MAX_SIZE: Final = 2.0**40
LEAST_SHARE: Final = 0.25
"""A party is compared on classes with at least this share of the records of its mean class."""
MOST_SCREENED: Final = 1000
"""Largest number of parties among which outliers are sought."""
MOST_TIMES_BELIEVED: Final = 100.0
"""A claim of more than this multiple of the capped value is logged as a warning. Honest
parties that are larger than the others do not reach it."""


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
        group = group_of(size)
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
        # The worth of a whole weight in each group, less where sizes are capped.
        worths = {group: 2.0 ** (group / 2) for group in self._sums}
        believed = believed_sizes(np.array(self._sizes))
        for claimed, size in zip(self._sizes, believed, strict=True):
            if size < claimed:
                group = group_of(claimed)
                worths[group] = min(worths[group], math.sqrt(2 * size))
        total, weight = np.zeros(self._shape), np.zeros(self._shape[1])
        for group in sorted(self._sums):
            worth = worths[group]
            total += worth * self._sums[group].total()
            weight += worth * self._weights[group]
        return np.asarray(total / np.where(weight > 0, weight, 1.0))


class Reply(NamedTuple):
    """One party's reply, kept in the compact form in which it was received."""

    values: Array
    counts: FloatArray
    contrast: Contrast
    party: int


class EvidencePool:
    """The evidence of all parties on the same rows, and its consensus.

    Parameters
    ----------
    shape : (rows, classes)
    bound : float
        No evidence may be larger in magnitude.
    task : "single-label" or "multi-label"
    share : "auto", "pooled", "none" or numbers
        The mean probabilities of the classes on these rows. ``"pooled"``: the shares of
        all parties' records, right for rows of the same kind. ``"none"``: whatever follows
        from the evidence and these shares, right even for rows of another domain. Numbers:
        these shares. ``"auto"``: ``"pooled"`` if more than half of the parties compare their
        classes only with each other, otherwise ``"none"``: evidence that is relative to the
        public rows gains nothing by it, and a liar about its counts could move every row.
    decode : callable, optional
        Turns what a party sent, and its counts, into evidence (rows, classes), each row
        independently; by default parties send evidence.
    exclude_outliers : bool (default: True)
        Exclude parties that contradict most others: see `aggregation.pool`. Replies are
        then kept as received until the last has arrived; otherwise only sums are kept, and
        neither are claims of single classes compared nor is the influence on a row limited.
        Among more than `MOST_SCREENED` parties none is excluded: a single one has little
        influence, and memory must not grow with their replies.
    limited : bool (default: False)
        Limit how far one party moves a row, for evidence that may be arbitrarily strong:
        see `limited_mean`. Votes are all of one strength and need no limit.

    Attributes
    ----------
    outliers, capped : tuple of int
        After `result`: partition ids of parties that were excluded, and of those whose
        claimed records were capped.
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
        limited: bool = False,
    ) -> None:
        self._consensus = EvidenceConsensus(shape, bound=bound)
        self._task, self._share, self._decode = task, share, decode
        self._exclude_outliers, self._limited = exclude_outliers, limited
        self._replies: list[Reply] = []
        self._mean: FloatArray | None = None
        self._counts: list[tuple[int, FloatArray]] = []
        self._contrasts = Counter[str]()
        self._contradicting: tuple[int, ...] = ()
        self._absurd: tuple[int, ...] = ()
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
        reply = Reply(values, counts, contrast, party)
        if not self._exclude_outliers:
            self._count(reply)
            return
        self._replies.append(reply)
        if len(self._replies) > MOST_SCREENED:
            logger.warning("No outliers are sought among more than %s parties.", MOST_SCREENED)
            self._exclude_outliers = False
            for one in self._replies:
                self._count(one)
            self._replies = []

    def _count(self, reply: Reply, believed: FloatArray | None = None) -> None:
        """Add a party's evidence to the sums, weighted by its capped class counts."""
        counts = reply.counts if believed is None else believed
        evidence = self._decode(reply.values, reply.counts)
        weights = self._weights(counts, reply.contrast)
        self._consensus.add(evidence, weights, self._size(counts))
        self._counts.append((reply.party, reply.counts))

    def _weights(self, counts: FloatArray, contrast: Contrast) -> FloatArray:
        if self._task == "multi-label":
            return label_weights_of(*counts)
        return class_weights_of(counts, contrasted=contrast == "public")

    def _size(self, counts: FloatArray) -> float:
        """Return a party's claimed number of records, capped at what the sums can hold."""
        several = self._task == "multi-label"
        return min(float(counts.sum(axis=0).max() if several else counts.sum()), MAX_SIZE)

    def _combine(self) -> FloatArray:
        """Return the mean evidence of the parties that do not contradict most others."""
        if not self._replies:
            return self._consensus.result() if self._mean is None else self._mean
        replies = sorted(self._replies, key=lambda one: one.party)
        self._replies = []
        found = self._find_outliers(replies)
        self.outliers = tuple(replies[position].party for position in found)
        contradicting = [k for k, agreed in found.items() if agreed < CONTRADICTION]
        self._contradicting = tuple(replies[position].party for position in contradicting)
        counted = [one for position, one in enumerate(replies) if position not in found]
        believed = self._believed([one.counts for one in counted])
        if self._limited:
            self._mean = self._limited_mean(counted, believed)
            return self._mean
        for one, counts in zip(counted, believed, strict=True):
            self._count(one, counts)
        return self._consensus.result()

    def _limited_mean(self, counted: Sequence[Reply], believed: FloatArray) -> FloatArray:
        """Return the mean in which the influence of one party on a row is limited."""
        self._counts = [(one.party, one.counts) for one in counted]
        sizes = np.array([self._size(counts) for counts in believed])
        part = believed_sizes(sizes) / np.where(sizes > 0, sizes, 1.0)
        weights = np.array(
            [
                self._weights(counts, one.contrast)
                for one, counts in zip(counted, believed, strict=True)
            ]
        )
        return limited_mean(
            lambda k, rows: self._decode(counted[k].values[rows], counted[k].counts),
            weights * np.sqrt(part)[:, None],
            len(counted[0].values),
        )

    def _believed(self, counts: Sequence[FloatArray] | FloatArray) -> FloatArray:
        """Return class counts, capped at what those of the others make plausible."""
        stated = np.asarray(counts, dtype=np.float64)
        return stated if self._task == "multi-label" else believed_counts(stated)

    def _find_outliers(self, replies: Sequence[Reply]) -> dict[int, float]:
        absolute = [self._task == "multi-label" or one.contrast == "public" for one in replies]
        return outliers(
            lambda position: self._decode(replies[position].values, replies[position].counts),
            self._compared_classes(replies),
            np.where(absolute, 1, 2),
            least_of_typical=LEAST_OF_TYPICAL_LIMITED if self._limited else LEAST_OF_TYPICAL,
        )

    def _compared_classes(self, replies: Sequence[Reply]) -> FloatArray:
        """Return the weights of the parties' classes, 0 for those that are not compared.

        Where the median party knows less than a third of the classes, an honest party could
        look like a liar because of a class of which it has a record or two. Where parties
        know most classes, all are compared: a liar might claim to know only its own.
        """
        weights = np.array([self._weights(one.counts, one.contrast) for one in replies])
        if self._task == "multi-label":
            return weights
        counts = np.array([one.counts for one in replies])
        well = counts >= LEAST_SHARE * counts.mean(axis=1, keepdims=True)
        alike = 3 * np.median((well & (counts > 0)).sum(axis=1)) >= counts.shape[1]
        return weights if alike else np.where(well, weights, 0.0)

    @property
    def num_uncovered(self) -> int:
        """Number of parties that find the public rows unlike their records."""
        return self._contrasts["uncovered"]

    @property
    def rule(self) -> ClassShare:
        """The rule in force, after `auto` has been decided."""
        if self._share != "auto":
            return self._share
        return "pooled" if 2 * self._contrasts["none"] > self._contrasts.total() else "none"

    def result(self) -> FloatArray:
        """Return unnormalised log-probabilities of classes, or log-odds of labels."""
        scores, rule = self._combine(), self.rule
        stated = np.asarray([own for _, own in self._counts], dtype=np.float64)
        believed = self._believed(stated)
        self._note_capped(stated, believed)
        several = self._task == "multi-label"
        if several:
            pooled = pooled_label_shares(believed)
        elif self._shares_are_open(believed):
            pooled = likely_share(scores, believed)
        else:
            pooled = pooled_share(believed)
        if rule == "none":
            return (add_label_shares if several else add_share)(scores, pooled)
        share = pooled if rule == "pooled" else np.asarray(rule, dtype=np.float64)
        return (match_label_shares if several else match_share)(scores, share)

    def _shares_are_open(self, believed: FloatArray) -> bool:
        """Return whether class shares should also be estimated from the public rows.

        Otherwise claims alone would decide the shares of parties that differ. The estimate
        needs evidence relative to the public rows from most parties.
        """
        relative = 2 * self._contrasts["public"] > self._contrasts.total()
        open_ = self._share == "auto" and self._limited and len(believed) >= FEWEST_COMPARED
        return open_ and relative and not are_alike(believed)

    def _note_capped(self, stated: FloatArray, believed: FloatArray) -> None:
        """Note the parties whose claimed records are capped."""
        flat = stated.reshape(len(stated), -1).sum(axis=1)
        counted = believed.reshape(len(believed), -1).sum(axis=1) * believed_parts(believed)
        parties = np.array([party for party, _ in self._counts])
        self.capped = tuple(parties[counted < flat].tolist())
        self._absurd = tuple(parties[MOST_TIMES_BELIEVED * counted < flat].tolist())

    def report(self, owner: str) -> Metrics:
        """Log the parties that were excluded or capped, and return their numbers."""
        if self._contradicting:
            logger.warning(
                "%s does not count parties %s, which contradict most others.",
                owner,
                shown(self._contradicting),
            )
        unlike = tuple(party for party in self.outliers if party not in self._contradicting)
        if unlike:
            logger.info(
                "%s does not count parties %s: their evidence has nothing in common with the "
                "others', which a few records can explain.",
                owner,
                shown(unlike),
            )
        if self._absurd:
            logger.warning(
                "%s limits the weight of parties %s, which claim more than %g times the "
                "records that the others' numbers make plausible.",
                owner,
                shown(self._absurd),
                MOST_TIMES_BELIEVED,
            )
        limited = tuple(party for party in self.capped if party not in self._absurd)
        if limited:
            logger.info(
                "%s limits the weight of parties %s, whose class counts are far from the "
                "others'. Parties that differ are often so.",
                owner,
                shown(limited),
            )
        return {keys.NUM_OUTLIERS: len(self.outliers), keys.NUM_CAPPED: len(self.capped)}


def read_contrast(owner: str, meta: Mapping[str, Scalar]) -> Contrast:
    """Return how a party's records relate to the public rows, as it reports."""
    contrast = meta.get(CONTRAST)
    rule = f"one of {', '.join(CONTRASTS)}"
    require_known(contrast in CONTRASTS, owner, CONTRAST, rule, shown(contrast))
    return contrast  # type: ignore[return-value]


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
