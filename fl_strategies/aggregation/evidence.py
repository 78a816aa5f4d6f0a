"""Combine the evidence of parties whose class shares differ, and limit what they claim.

A model answers with the class shares of its own records: p_k(c|x) is proportional to
p(x|c) pi_k(c). Votes and means average these shares together with the information in the
records, and parties that lack a class outvote those that know it. Here the shares are divided
out first:

    evidence   A_k(x, c) = log p_k(c|x) - log pi_k(c)    for the classes that k has seen,
                           up to a constant in x         and nothing for all others
    weight     w_kc: how well k can know c, by its number of records of c
    consensus  z(x, c) = mean_k A_k(x, c), weighted by w_kc, + b_c

The constant is the mean over the classes that the party has seen, so only the difference
between these counts; or it makes A an estimate of log p(x|c) / p_public(x), for parties that
also learn to tell their own records from public rows (`party.role.contrasted`). A party can
then express that a row is unlike anything it knows, and one with a single class can contribute
too. b_c gives the classes their shares (`match_share`, `add_share`). With several labels every
label is a binary problem of its own, with its own shares.

A claim is a number of records, or the scale of a party's scores. Sums are kept in groups of
claims a factor of two wide, so that a claim can be capped after the last party has answered
although only sums are kept. One party must not decide a row, however large its scores:
`limited_mean` clips values to within `MOST_BEYOND_MEDIAN` of the weighted median of all. And
one party must not decide how frequent a class is, however many records it claims: see
`believed_counts`, and `likely_share` where class shares differ so much that no claim looks odd.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from fl_strategies._util import Array, FloatArray
from fl_strategies.aggregation.votes import CLASS_COUNTS, PSEUDO_COUNT, log_softmax
from fl_strategies.errors import require_data, require_known
from fl_strategies.privacy.noise import ScoreMechanism
from fl_strategies.wire.knowledge import ScoreFormat

_LARGEST_GROUP: Final = 41
MOST_TIMES_SCALE: Final = 2.0
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
        return group_of(claim)

    def parts(self) -> dict[int, float]:
        """Return the groups that are capped, and the factor that is applied to each."""
        parts: dict[int, float] = {}
        for claimed, part in zip(self._claimed, self._believed_parts(), strict=True):
            if part < 1:
                group = group_of(claimed)
                parts[group] = min(parts.get(group, 1.0), float(part))
        return parts

    @property
    def num_cut(self) -> int:
        """Number of claims that are capped."""
        return int((self._believed_parts() < 1).sum())

    def _believed_parts(self) -> FloatArray:
        claimed = np.array(self._claimed)
        return _parts(claimed, self._believe(claimed)) if len(claimed) else claimed


def group_of(claim: float) -> int:
    """Return the exponent of the smallest power of two above a claim, within reason."""
    return min(max(math.frexp(claim)[1], 0), _LARGEST_GROUP)


def root_mean_square(scores: Array) -> float:
    """Return the root mean square of scores."""
    return float(np.sqrt(np.mean(np.square(scores, dtype=np.float64))))


def capped_scales(claimed: FloatArray) -> FloatArray:
    """Return the capped scale of each party's scores.

    Examples
    --------
    >>> capped_scales(np.array([1.0, 2.0, 3.0, 100.0]))
    array([1., 2., 3., 5.])
    """
    return np.asarray(np.minimum(claimed, MOST_TIMES_SCALE * float(np.median(claimed))))


_LARGEST_COUNT = 2.0**40


def read_counts(arrays: Mapping[str, Array], *shape: int) -> FloatArray:
    """Return received class counts; raise `KnowledgeMismatch` for impossible ones."""
    counts = arrays.get(CLASS_COUNTS, np.empty(0))
    fits, found = counts.dtype == np.float64, f"shape {counts.shape} of {counts.dtype}"
    rule = f"{shape} numbers (float64)"
    require_known(fits and counts.shape == shape, "scores", CLASS_COUNTS, rule, found)
    possible = bool(((counts >= 0) & (counts <= _LARGEST_COUNT)).all())
    require_known(possible, "scores", CLASS_COUNTS, "from 0 to 2**40", counts.ravel()[:8])
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


def capped_claims(counts: Sequence[FloatArray | None]) -> tuple[list[FloatArray | None], int]:
    """Return capped class counts, and the number of parties whose counts were capped."""
    stated = [own for own in counts if own is not None]
    if len(stated) < len(counts):
        return list(counts), 0
    parts = believed_parts(stated)
    return [part * own for part, own in zip(parts, stated, strict=True)], int((parts < 1).sum())


def scale_factors(parties: Sequence[Array], form: ScoreFormat) -> FloatArray:
    """Return the factor that brings each party's scores to the capped scale."""
    claimed = np.array([root_mean_square(form.decode(values)) for values in parties])
    return _parts(claimed, capped_scales(claimed))


def _parts(claimed: FloatArray, believed: FloatArray) -> FloatArray:
    """Return the factors from claims to their capped values; 1 for a claim of 0."""
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


MOST_TIMES_SMALLER: Final = 10.0
MOST_TIMES_MEDIAN: Final = 4.0
"""A party's claimed records are capped at this multiple of the mean of the smaller parties, or
of the median party, whichever is more."""
MOST_TIMES_ALIKE: Final = 2.0
"""A lower cap, as a multiple of the median party, where parties are of similar size."""
MOST_DISTANCE_ALIKE: Final = 0.25
"""Parties are alike if the class shares of two thirds of them are within this distance of the
usual ones: the share of their records that would have to be of another class."""
MOST_TIMES_DISTANCE: Final = 2.0
LEAST_DISTANCE: Final = 0.1
LEAST_PART: Final = 1 / 3
"""Among such parties, one whose shares are so many times as far away as theirs, and not hardly
at all, counts less; but never for less than this part."""
MOST_BEYOND_MEDIAN: Final = 1.0
"""Evidence is clipped to within this distance of the weighted median of the parties."""
FEWEST_COMPARED: Final = 5
"""Smallest number of parties at which claims of classes are compared."""
MOST_TIMES_TYPICAL: Final = 2.0
"""Claimed records of a class are capped at this multiple of the median party's, or of the
runner-up's where parties differ and at least half of them know the class."""
LEAST_KNOWN: Final = 0.25
"""A party knows a class of which it has this share of the records of its mean class."""
MOST_TIMES_MEDIAN_SHARE: Final = 1.5
"""In the class shares of parties that differ, the size of a party is capped at this multiple of
the median party's."""
SHARPNESS: Final = 3.0
"""The mean of many cautious answers is too cautious: a consensus that is right on nine rows
of ten gives them seven tenths. The choice: docs/results/consensus.md."""
_MOST_CELLS: Final = 1 << 22
_TINY: Final = 1e-300
_TOLERANCE, _MAX_STEPS = 1e-7, 2000


def limited_mean(
    evidence: Callable[[int, slice], FloatArray], weights: FloatArray, num_rows: int
) -> FloatArray:
    """Return the weighted mean of evidence, with limited influence of one party on a row.

    Values farther than `MOST_BEYOND_MEDIAN` from the weighted median, row by row and class by
    class, are clipped (one step of Huber's estimator, at a fixed width). A party with a tenth
    of the weight moves a score by a tenth, and the median by at most one place, whatever it
    sends. A party that alone knows a class is its own median, and is not clipped. Two
    parties have no middle: theirs is the plain mean.

    Parameters
    ----------
    evidence : callable
        Gives the evidence of a party on some rows, (rows, C).
    weights : (num_parties, C)
    num_rows : int

    Returns
    -------
    mean : (num_rows, C)
        0, for no opinion, where nobody has any weight.

    Examples
    --------
    >>> sent = np.array([[[2.0, -2.0]]] * 4 + [[[-10.0, 10.0]]])
    >>> limited_mean(lambda k, rows: sent[k, rows], np.ones((5, 2)), 1)
    array([[ 1.8, -1.8]])
    """
    num_parties, num_classes = weights.shape
    total = np.where(weights.sum(axis=0) > 0, weights.sum(axis=0), 1.0)
    mean = np.empty((num_rows, num_classes))
    width = max(1, _MOST_CELLS // (num_parties * num_classes))
    for start in range(0, num_rows, width):
        rows = slice(start, min(start + width, num_rows))
        values = np.stack([evidence(k, rows) for k in range(num_parties)])
        if num_parties > 2:
            middle = _weighted_median(values, weights)
            low, high = middle - MOST_BEYOND_MEDIAN, middle + MOST_BEYOND_MEDIAN
            values = np.clip(values, low, high)
        mean[rows] = np.einsum("knc,kc->nc", values, weights) / total
    return mean


def _weighted_median(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the median over parties of values (K, n, C) by weights (K, C).

    Between two values where exactly half of the weight is on each side, their mean.
    """
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    spread = np.broadcast_to(weights[:, None, :], values.shape)
    below = np.cumsum(np.take_along_axis(spread, order, axis=0), axis=0)
    half, slack = below[-1] / 2, 1e-9 * below[-1]
    last = len(values) - 1
    lower = np.minimum((below < half - slack).sum(axis=0), last)
    upper = np.minimum((below <= half + slack).sum(axis=0), last)
    ends = [np.take_along_axis(ordered, place[None], axis=0)[0] for place in (lower, upper)]
    return np.asarray((ends[0] + ends[1]) / 2)


def class_weights_of(counts: FloatArray, *, contrasted: bool) -> FloatArray:
    """Return a party's weight for each class, (C,).

    The root of its records, or, for a party that compares classes only with each other,
    the root of n_c (n - n_c) / n: telling a class from the rest takes records of both.
    """
    total = counts.sum()
    against = 1.0 if contrasted else (total - counts) / max(total, 1.0)
    return np.asarray(np.sqrt(counts * against))


def label_weights_of(positives: FloatArray, negatives: FloatArray) -> FloatArray:
    """Return a party's weight for each label of multi-label records, (C,)."""
    known = np.maximum(positives + negatives, 1.0)
    return np.asarray(np.sqrt(positives * negatives / known))


def believed_sizes(sizes: FloatArray, total: int | None = None) -> FloatArray:
    """Return each party's number of records, capped at what all claims make plausible.

    Honest sizes differ widely, and one claim of a trillion must not decide everything. From
    the smallest on, each claim is capped at a multiple of the mean of those that claim less,
    or of the median party, so liars cannot vouch for each other either. No claim may exceed
    what the sizes of the others make likely: the 98th percentile of a log-normal with their
    median and lower quartile.

    Parameters
    ----------
    sizes : (num_parties,)
    total : int, optional
        Records of all parties, known independently of them. If claims exceed it, those large
        enough to be the reason share what the others leave; but a party no larger than the
        median one is never capped.

    Examples
    --------
    >>> believed_sizes(np.array([1e12, 100.0, 400.0, 100.0, 1e12]))
    array([2000.,  100.,  400.,  100., 2000.])
    >>> believed_sizes(np.array([100.0, 100.0, 100.0, 1e12]))
    array([100., 100., 100., 200.])
    >>> believed_sizes(np.array([100.0, 80.0, 120.0, 1e12]), total=400)
    array([100.,  80., 120., 110.])
    """
    believed = np.array(sizes, dtype=np.float64)
    usual, smaller, count = MOST_TIMES_MEDIAN * float(np.median(sizes)), 0.0, 0
    distinct, which, numbers = np.unique(believed, return_inverse=True, return_counts=True)
    granted = np.empty(len(distinct))
    for place, (size, number) in enumerate(
        zip(distinct.tolist(), numbers.tolist(), strict=True)
    ):
        most = max(MOST_TIMES_SMALLER * smaller / count, usual) if count else math.inf
        granted[place] = min(size, most)
        smaller += min(size, most) * number
        count += number
    quarter, median = (max(float(np.quantile(sizes, q)), 1.0) for q in (0.25, 0.5))
    most_likely = median * max(MOST_TIMES_ALIKE, (median / quarter) ** 3)
    likely = np.minimum(granted[which], most_likely)
    return np.asarray(likely if total is None else np.minimum(likely, _left(sizes, total)))


def _left(sizes: FloatArray, total: float) -> FloatArray:
    """Return the sizes after capping the claims that can be the reason for the excess.

    The fewest claims that together are as large as the excess, and any that could replace
    the smallest of them, are cut to one level at which the total is kept.
    """
    excess = float(sizes.sum()) - total
    if excess <= 0:
        return sizes
    largest = np.sort(sizes)[::-1]
    reached = np.cumsum(largest)
    fewest = int(np.searchsorted(reached, min(excess, reached[-1])))
    suspects = sizes >= excess - (reached[fewest - 1] if fewest else 0.0)
    room = total - float(sizes[~suspects].sum())
    level = max(_level(sizes[suspects], room), float(np.median(sizes)))
    return np.where(suspects, np.minimum(sizes, level), sizes)


def _level(sizes: FloatArray, room: float) -> float:
    """Return to which level sizes, more than `room` together, are to be cut to fill it."""
    ascending = np.sort(sizes)
    below = np.cumsum(ascending) - ascending
    levels = (room - below) / np.arange(len(sizes), 0, -1)
    return float(levels[np.argmax(levels < ascending)])


def believed_parts(counts: Sequence[FloatArray] | FloatArray) -> FloatArray:
    """Return the factor that caps each party's counts before they are used.

    Sizes are those of `believed_sizes`. Where parties are alike in their class shares, one
    whose shares are quite different counts with fewer records still: it would decide how
    frequent its classes are.

    Examples
    --------
    >>> alike = [np.array([50.0, 50.0])] * 4
    >>> believed_parts([*alike, np.array([200.0, 0.0])]).round(3)
    array([1.   , 1.   , 1.   , 1.   , 0.333])
    """
    held = np.asarray(counts, dtype=np.float64)
    sizes = held.sum(axis=1) if held.ndim == 2 else held.sum(axis=1).max(axis=1)
    parts = np.where(sizes > 0, believed_sizes(sizes) / np.maximum(sizes, _TINY), 1.0)
    return np.asarray(parts * _plausible(_shares(held)))


def _plausible(shares: FloatArray) -> FloatArray:
    """Return 1, or less for parties whose class shares are far from the usual ones."""
    distance, typical = _distances(shares)
    if typical > MOST_DISTANCE_ALIKE:
        return np.ones(len(shares))
    most = max(MOST_TIMES_DISTANCE * typical, LEAST_DISTANCE)
    return np.asarray(np.clip(most / np.maximum(distance, _TINY), LEAST_PART, 1.0))


def _distances(shares: FloatArray) -> tuple[FloatArray, float]:
    """Return each party's distance from the usual class shares, and their 2/3 quantile."""
    usual = np.median(shares, axis=0)
    distance = np.abs(shares - usual / max(float(usual.sum()), _TINY)).sum(axis=1) / 2
    return distance, float(np.quantile(distance, 2 / 3))


def _shares(counts: FloatArray) -> FloatArray:
    flat = counts.reshape(len(counts), -1)
    return np.asarray(flat / np.maximum(flat.sum(axis=1, keepdims=True), _TINY))


def believed_counts(counts: FloatArray) -> FloatArray:
    """Return class counts (num_parties, C), capped by the others' claims of each class.

    A claim of ten times as many records of one class triples a party's weight on it. Nobody
    is believed to have more than `MOST_TIMES_TYPICAL` times the median claim where parties
    are alike, and otherwise that many times the runner-up's. Where fewer than half of
    the parties know a class, the largest claim may well be right, and stays.

    Examples
    --------
    >>> believed_counts(np.array([[9.0, 9.0]] * 4 + [[99.0, 9.0]]))[-1]
    array([18.,  9.])
    """
    if len(counts) < FEWEST_COMPARED:
        return counts
    if are_alike(counts):
        typical = np.median(counts, axis=0)
    else:
        known = (counts > 0) & (counts >= LEAST_KNOWN * counts.mean(axis=1, keepdims=True))
        runner_up = np.sort(counts, axis=0)[-2]
        typical = np.where(2 * known.sum(axis=0) >= len(counts), runner_up, 0.0)
    most = np.where(typical > 0, MOST_TIMES_TYPICAL * typical, np.inf)
    return np.minimum(counts, most)


def are_alike(counts: FloatArray) -> bool:
    """Return whether most parties have about the same class shares."""
    return _distances(_shares(counts))[1] <= MOST_DISTANCE_ALIKE


def likely_share(scores: FloatArray, counts: FloatArray) -> FloatArray:
    """Return the class shares most likely given both claims and public rows, (C,).

    Where parties' class shares differ, no claim of records looks odd, and one could move the
    shares of all. But evidence relative to the public rows is an estimate of
    log p(x|c) / p_public(x), so the public rows say how frequent the classes are among them:
    the s that maximises mean(log(sum_c s_c exp(score_c))). Claims count as much as the rows:
    they are the prior, of parties of at most 1.5 times the median size. Each step of this
    expectation maximisation raises the posterior.

    Parameters
    ----------
    scores : (n, C)
        Consensus of the parties' evidence.
    counts : (num_parties, C)
        Believed class counts.
    """
    sizes = counts.sum(axis=1)
    part = np.minimum(
        1.0, MOST_TIMES_MEDIAN_SHARE * np.median(sizes) / np.maximum(sizes, _TINY)
    )
    prior = pooled_share(counts * part[:, None])
    share, sharp = prior, SHARPNESS * scores
    for _ in range(_MAX_STEPS):
        with np.errstate(divide="ignore"):
            responsible = np.exp(log_softmax(sharp + np.log(share)))
        new = (responsible.mean(axis=0) + prior) / 2
        settled = np.abs(new - share).max() < _TOLERANCE
        share = new
        if settled:
            break
    return np.asarray(share / share.sum())


def pooled_share(counts: Sequence[FloatArray] | FloatArray) -> FloatArray:
    """Return the class shares of all parties' records together, (C,).

    Claimed counts are capped first; see `believed_parts`.
    """
    held = np.asarray(counts, dtype=np.float64)
    total = _exact_total(held * believed_parts(held)[:, None])
    share: FloatArray = total / max(total.sum(), _TINY)
    return share


def pooled_label_shares(counts: Sequence[FloatArray] | FloatArray) -> FloatArray:
    """Return the positive share of each label over all parties' records, (C,)."""
    held = np.asarray(counts, dtype=np.float64)
    part = believed_parts(held)
    positives, negatives = (_exact_total(half * part[:, None]) for half in held.swapaxes(0, 1))
    known = positives + negatives + 2 * PSEUDO_COUNT
    share: FloatArray = (positives + PSEUDO_COUNT) / known
    return share


def match_share(scores: FloatArray, share: FloatArray) -> FloatArray:
    """Shift scores class by class until their mean probabilities are the given shares.

    Returns z = scores + b such that the mean over rows of softmax(z) is `share`. b is the
    minimiser of a convex function, mean(logsumexp(scores + b)) - share @ b, so it is unique
    up to a constant; each step, b += log(share / mean), lowers this function. It is right
    where rows have about the class shares of the records.

    Parameters
    ----------
    scores : (n, C)
    share : (C,)
        Not negative, with sum 1. A class with share 0 gets no row.

    Examples
    --------
    >>> z = match_share(np.array([[0.0, 0.0], [0.0, 3.0]]), np.array([0.5, 0.5]))
    >>> np.exp(z - np.logaddexp.reduce(z, axis=1)[:, None]).mean(axis=0).round(6)
    array([0.5, 0.5])
    """
    check_share("match_share", share, scores.shape[1])
    held = share > 0
    log_share, inner = np.log(share[held]), scores[:, held]
    shift = np.zeros(int(held.sum()))
    for _ in range(_MAX_STEPS):
        log_values = log_softmax(inner + shift)
        top = log_values.max(axis=0)
        step = log_share - (top + np.log(np.exp(log_values - top).mean(axis=0)))
        shift += step
        if np.abs(step).max() < _TOLERANCE:
            break
    matched = np.full(scores.shape, -np.inf)
    matched[:, held] = inner + shift
    return finite_floor(matched)


def add_share(scores: FloatArray, share: FloatArray) -> FloatArray:
    """Add the logarithm of the class shares, which is right wherever the rows come from."""
    check_share("add_share", share, scores.shape[1])
    with np.errstate(divide="ignore"):
        return finite_floor(scores + np.log(share))


def match_label_shares(log_odds: FloatArray, shares: FloatArray) -> FloatArray:
    """Shift the log-odds of each label until its mean probability is its share."""
    matched = np.empty_like(log_odds)
    for label, share in enumerate(np.clip(shares, 1e-6, 1 - 1e-6)):
        pair = np.stack([np.zeros(len(log_odds)), log_odds[:, label]], axis=1)
        pair = match_share(pair, np.array([1 - share, share]))
        matched[:, label] = pair[:, 1] - pair[:, 0]
    return matched


def add_label_shares(log_odds: FloatArray, shares: FloatArray) -> FloatArray:
    """Add the log-odds of the labels' shares."""
    inside = np.clip(shares, 1e-6, 1 - 1e-6)
    return np.asarray(log_odds + np.log(inside / (1 - inside)))


def check_share(owner: str, share: FloatArray, num_classes: int) -> None:
    """Raise `InvalidData` unless there is one share per class and they sum to 1."""
    fits = share.shape == (num_classes,) and bool((share >= 0).all())
    fits = fits and math.isclose(float(share.sum()), 1.0, abs_tol=1e-6)
    require_data(fits, owner, "share", f"{num_classes} numbers that sum to 1", share)


def finite_floor(scores: FloatArray) -> FloatArray:
    """Replace minus infinity by 50 below the row's largest score, negligible in a softmax."""
    floor = scores.max(axis=1, keepdims=True) - 50.0
    return np.asarray(np.maximum(scores, floor))


def _exact_total(rows: FloatArray) -> FloatArray:
    """Sum over the first axis, the same in whatever order the rows come."""
    return np.array([math.fsum(column) for column in rows.T])
