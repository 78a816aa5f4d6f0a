"""Who holds which rows: the ways a pooled data set is dealt out to the parties.

Written here rather than taken from a library because a federation needs three promises at
once: the paper's balancing, every row dealt exactly once, and a clear error instead of a
party that is too small.
"""

import math
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from fl_strategies.exceptions import InvalidParameter, require, require_data
from fl_strategies.protocols import FloatArray, IntArray
from fl_strategies.tasks import check_labels, check_targets

Scheme: TypeAlias = Literal[
    "dirichlet", "iid", "by-label", "pooled-halves", "random-shares", "by-group"
]

SCHEMES: Final[tuple[str, ...]] = get_args(Scheme)
MAX_DRAWS: Final = 10_000


def partition(
    y: IntArray,
    *,
    num_parties: int,
    scheme: str,
    rng: np.random.RandomState,
    num_classes: int,
    beta: float = 0.5,
    min_records: int = 10,
    labels_per_party: int = 0,
    balanced: bool = True,
    mixing: float = 0.0,
    shares: tuple[float, ...] = (),
    groups: IntArray | None = None,
) -> list[IntArray]:
    """Deal every row to exactly one party.

    Parameters
    ----------
    y : (num_records,) or (num_records, num_classes)
        Class index of every row, or its labels of -1, 0 and 1. A row with several labels is
        dealt as one of its rarest positive label (FedKD); rows without any form one more
        class, the last.
    num_parties : int
        How many parties there are.
    scheme : {"dirichlet", "iid", "by-label", "pooled-halves", "random-shares", "by-group"}
        `dirichlet`: each class is shared out in proportions drawn from Dirichlet(`beta`),
        rarer classes first. The draw is repeated until every party has `min_records` rows.
        For Adult and cod-rna, the same seed gives the very partitions of FedKT's authors.
        `iid`: at random, in shares that differ by at most one row.
        `by-label`: party p holds the `labels_per_party` neighbouring classes that start at
        p * `labels_per_party` (counted round the class list); parties that hold the same
        class share its rows evenly at random.
        `pooled-halves`: each party holds a block of neighbouring classes, as long as its
        share says; then a fraction `mixing` of every party's rows is pooled, shuffled and
        dealt back in the numbers that were given (AvgKD).
        `random-shares`: at random, in the proportions of `shares`.
        `by-group`: each party holds whole groups, as many as the others or one more; parties
        beyond the number of groups share the rows of one.
    rng : RandomState
        The only source of randomness; see `load_dataset` on why it is numpy's older one.
    num_classes : int
        Length of the class list.
    beta : float
        Concentration of the Dirichlet distribution; the smaller, the more unlike the
        parties are.
    min_records : int
        The fewest rows a party may hold.
    labels_per_party : int
        Classes of a party in `by-label`; 0 takes the fewest that leave no class out.
    balanced : bool
        Whether in `dirichlet` a party that already holds its fair share of rows gets none of
        the classes that follow, but for a row that rounding leaves over (FedKT); without,
        parties may differ much in size (FedDF, FedKD).
    mixing : float
        Fraction of rows that `pooled-halves` deals anew: 0 keeps classes apart, 1 is i.i.d.
    shares : tuple of float
        Each party's share; equal ones if empty.
    groups : (num_records,), optional
        Group of every row, such as its writer, for `by-group`.

    Returns
    -------
    list of (num_records_of_party,) arrays
        Ascending row numbers of each party.

    Examples
    --------
    >>> y = np.array([0, 1, 0, 1, 0, 1])
    >>> parts = partition(
    ...     y, num_parties=2, scheme="by-label", min_records=1, num_classes=2,
    ...     rng=np.random.RandomState(0),
    ... )
    >>> [part.tolist() for part in parts]
    [[0, 2, 4], [1, 3, 5]]
    """
    require(scheme in SCHEMES, "partition", "scheme", f"one of {', '.join(SCHEMES)}", scheme)
    require(num_parties >= 1, "partition", "num-parties", "at least 1", num_parties)
    y, num_classes = _dealt_classes(y, num_classes)
    if num_parties * min_records > len(y):
        raise InvalidParameter(
            f"partition: num-parties x min-records must be at most {len(y)}, the rows there "
            f"are, got {num_parties} x {min_records}. Lower either."
        )
    if scheme == "dirichlet":
        return _dirichlet(y, num_parties, num_classes, beta, min_records, balanced, rng)
    if scheme == "iid":
        return [np.sort(part) for part in np.array_split(rng.permutation(len(y)), num_parties)]
    if scheme == "by-label":
        parts = _by_label(y, num_parties, num_classes, labels_per_party, rng)
    elif scheme == "by-group":
        parts = _by_group(len(y), groups, num_parties, rng)
    elif scheme == "random-shares":
        ends = _ends(shares, num_parties, len(y))
        parts = np.split(rng.permutation(len(y)), ends)
    else:
        blocks = _ends(shares, num_parties, num_classes)
        parts = _pooled(np.searchsorted(blocks, y, side="right"), num_parties, mixing, rng)
    smallest = min(map(len, parts))
    require(
        smallest >= min_records, "partition", "min-records",
        f"at most {smallest}, the rows of the smallest party", min_records,
    )  # fmt: skip
    return [np.sort(part) for part in parts]


def _dealt_classes(y: IntArray, num_classes: int) -> tuple[IntArray, int]:
    """Return one class a row and the number of classes, also where rows have several labels."""
    if y.ndim == 1:
        check_labels("partition", "y", y, len(y), num_classes)
        return y, num_classes
    check_targets("partition", "y", y, len(y), num_classes, "multi-label")
    is_positive = y == 1
    counts = is_positive.sum(axis=0)
    rarity = np.where(is_positive, counts, len(y) + 1)
    rarest = rarity.argmin(axis=1)
    return np.where(is_positive.any(axis=1), rarest, num_classes), num_classes + 1


def _dirichlet(
    y: IntArray,
    num_parties: int,
    num_classes: int,
    beta: float,
    min_records: int,
    balanced: bool,
    rng: np.random.RandomState,
) -> list[IntArray]:
    require(beta > 0, "partition", "beta", "greater than 0", beta)
    # Rarest class first: the rows that full parties are refused are then common ones.
    rarest_first = np.argsort(np.bincount(y, minlength=num_classes), kind="stable")
    for _ in range(MAX_DRAWS):
        parts = [np.empty(0, dtype=np.int64)] * num_parties
        for label in rarest_first:
            rows = rng.permutation(np.flatnonzero(y == label))
            shares = rng.dirichlet(np.full(num_parties, beta))
            is_open = np.array(
                [not balanced or len(part) < len(y) / num_parties for part in parts]
            )
            ends = (np.cumsum(_only_to(is_open, shares)) * len(rows)).astype(np.int64)
            dealt = np.split(rows, ends[:-1])
            parts = [np.concatenate(pair) for pair in zip(parts, dealt, strict=True)]
        if min(map(len, parts)) >= min_records:
            return [np.sort(part) for part in parts]
    raise InvalidParameter(
        f"partition: beta must be large enough to give each of {num_parties} parties "
        f"{min_records} rows, got {beta} and no such draw in {MAX_DRAWS}. "
        "Raise beta, or lower min-records or num-parties."
    )


def _only_to(is_open: NDArray[np.bool], shares: FloatArray) -> FloatArray:
    """Divide the shares of parties that are full among the others."""
    # A small beta can round all shares down to 0 of 0, or put a class on full parties only.
    shares = np.nan_to_num(shares) * is_open
    if not shares.any():
        shares = is_open.astype(np.float64)
    normalised: FloatArray = shares / shares.sum()
    return normalised


def _deal(y: IntArray, counts: IntArray, rng: np.random.RandomState) -> list[IntArray]:
    """Deal the rows of each class at random in the given numbers."""
    hands: list[list[IntArray]] = [[] for _ in range(counts.shape[1])]
    for label, class_counts in enumerate(counts):
        rows = rng.permutation(np.flatnonzero(y == label))
        for hand, rows_dealt in zip(
            hands, np.split(rows, np.cumsum(class_counts)[:-1]), strict=True
        ):
            hand.append(rows_dealt)
    return [np.sort(np.concatenate(hand)) for hand in hands]


def _by_label(
    y: IntArray,
    num_parties: int,
    num_classes: int,
    labels_per_party: int,
    rng: np.random.RandomState,
) -> list[IntArray]:
    held = labels_per_party or -(-num_classes // num_parties)
    require(
        held <= num_classes <= held * num_parties, "partition", "labels-per-party",
        f"between {-(-num_classes // num_parties)} and {num_classes}", held,
    )  # fmt: skip
    counts = np.zeros((num_classes, num_parties), dtype=np.int64)
    for label, size in enumerate(np.bincount(y, minlength=num_classes)):
        holders = [p for p in range(num_parties) if (label - p * held) % num_classes < held]
        counts[label, holders] = [
            len(part) for part in np.array_split(range(size), len(holders))
        ]
    return _deal(y, counts, rng)


def _by_group(
    num_rows: int, groups: IntArray | None, num_parties: int, rng: np.random.RandomState
) -> list[IntArray]:
    if groups is None:
        raise InvalidParameter(
            "partition: scheme must be another one for data without groups, got 'by-group'."
        )
    fits = groups.shape == (num_rows,)
    require_data(fits, "partition", "groups", f"{num_rows} groups, one a row", groups.shape)
    names, group_of_row = np.unique(groups, return_inverse=True)
    order = rng.permutation(len(names))
    if num_parties <= len(names):
        hands = np.array_split(order, num_parties)
        return [np.flatnonzero(np.isin(group_of_row, hand)) for hand in hands]
    holders = np.arange(num_parties) % len(names)
    parts = [np.empty(0, dtype=np.int64)] * num_parties
    for position, group in enumerate(order):
        rows = rng.permutation(np.flatnonzero(group_of_row == group))
        parties = np.flatnonzero(holders == position)
        for party, part in zip(parties, np.array_split(rows, len(parties)), strict=True):
            parts[party] = part
    return parts


def _ends(shares: tuple[float, ...], num_parties: int, total: int) -> IntArray:
    """Return where the part of each party but the last ends among so many things."""
    shares = shares or (1 / num_parties,) * num_parties
    fits = len(shares) == num_parties and min(shares) > 0 and math.isclose(sum(shares), 1)
    rule = f"{num_parties} numbers above 0 that sum to 1"
    require(fits, "partition", "shares", rule, shares)
    ends: IntArray = np.rint(np.cumsum(shares)[:-1] * total).astype(np.int64)
    return ends


def _pooled(
    owner: IntArray, num_parties: int, mixing: float, rng: np.random.RandomState
) -> list[IntArray]:
    """Let every party give a fraction of its rows and get as many back from the pool."""
    require(0 <= mixing <= 1, "partition", "mixing", "between 0 and 1", mixing)
    orders = [rng.permutation(np.flatnonzero(owner == party)) for party in range(num_parties)]
    given = [int(mixing * len(order)) for order in orders]
    pool = rng.permutation(
        np.concatenate([order[:count] for order, count in zip(orders, given, strict=True)])
    )
    returned = np.split(pool, np.cumsum(given)[:-1])
    return [
        np.concatenate([order[count:], back])
        for order, count, back in zip(orders, given, returned, strict=True)
    ]
