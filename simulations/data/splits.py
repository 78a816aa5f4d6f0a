"""Data sets, split into private, public and test rows, and private rows dealt to parties.

Private rows belong to the parties, public rows to everybody, test rows to nobody. All that
is random here comes from numpy's `RandomState`, whose numbers never change between releases.

The partitioners are written here because a federation needs three promises at once: the
paper's balancing, every row dealt exactly once, and a clear error instead of a party that is
too small.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import InvalidParameter, require, require_data
from fl_strategies.learners import Task, check_labels, check_targets
from simulations.data.schema import Schema

Rows: TypeAlias = tuple[IntArray, IntArray, IntArray]
"""Row numbers of train, public and test."""

PAPER_TRAIN_SHARE: Final = 0.75
EMBEDDED_TRAIN_SHARE: Final = 0.6


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """One learning task, ready to be dealt out to parties.

    Parameters
    ----------
    name : str
        What reports call it.
    x_train, y_train : (num_train, ...), (num_train,) or (num_train, num_classes) int64
        or, of numeric targets, (num_train, 1) float64.
        Rows that become the parties' private records. Rows are float32 vectors, float32
        images (channels, height, width) or int64 token numbers (length,).
    x_public : (num_public, ...)
        Rows that everybody holds.
    x_test, y_test : (num_test, ...), like y_train
        Rows that measure the models and nothing else.
    classes : tuple of str
        Name of each class index, or of each label of a multi-label task.
    task : "single-label", "multi-label" or "regression"
        With "multi-label", labels are -1 (unknown), 0 (no) and 1 (yes); with "regression"
        they are numbers, and `classes` has the name of the target.
    y_public : optional
        Labels of the public rows, where these come from the same source as the others or
        have classes of their own.
    num_public_classes : int (default: 0)
        How many classes, the last of the list, no private row has.
    groups : (num_train,) int64, optional
        Who or what a private row comes from, such as its writer; see `partition`.
    understood : tuple of str
        What was made of the columns of a table, in words.
    encoding : str
        Hash of what made rows of raw records; none if empty.
    schema : Schema, optional
        Declared columns by which rows were read.
    target_range : pair of float, optional
        Least and largest numeric target of public rows.
    """

    name: str
    x_train: Array
    y_train: Array
    x_public: Array
    x_test: Array
    y_test: Array
    classes: tuple[str, ...]
    task: Task = "single-label"
    y_public: Array | None = None
    groups: IntArray | None = None
    num_public_classes: int = 0
    understood: tuple[str, ...] = ()
    encoding: str = ""
    schema: Schema | None = None
    target_range: tuple[float, float] | None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.x_train.shape[1:]

    @property
    def num_features(self) -> int:
        """Length of a row when it is laid out flat."""
        return math.prod(self.row_shape)

    @property
    def num_classes(self) -> int:
        """Length of the class list."""
        return len(self.classes)

    @property
    def num_private_classes(self) -> int:
        """Number of classes, the first of the list, that private and test rows can have."""
        return self.num_classes - self.num_public_classes


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """A request to a loader.

    Parameters
    ----------
    rng : RandomState
        Decides the split. Numpy promises that this generator, unlike its newer one, gives
        the same numbers in every release, so a seed names a split for ever.
    data_dir : str
        Folder with the data files, such as `a9a.npz`; the environment variable
        `FL_STRATEGIES_DATA` if empty. What is not there is downloaded, where its owners
        offer it to everybody: see `simulations.data.images`.
    label : str
        Column of a table that holds the class.
    task : "auto", "classes" or "numbers"
        What labels of a file are; by default what public ones look like.
    drop : str
        Columns of a table to drop, with commas between them.
    public : str
        Image set whose training images become the public rows of another image set, cut and
        coloured to fit. All held-out rows of the set itself are then test rows.
    joint_classes : bool (default: False)
        With `public`: its rows keep their labels, in one list of classes in which those of
        the data set come first. So parties can train on labelled public rows, as in FedMD.
    public_labels : bool (default: False)
        Whether public rows must have labels. If not, rows of a table without a label become
        public ones, and `y_public` is None where there are some; otherwise they are dropped.
    num_train, num_public, num_test : int
        The most rows of each kind, taken at random; 0: all there are.
    encoder : str
        Frozen encoder that makes rows of images or texts; see `clients.find_encoder`.
    standardise : bool (default: False)
        Whether its columns are standardised by mean and deviation of the public rows.
    schema : str
        File that declares the columns of a table, and its label; see `Schema`.
    without_public : bool (default: False)
        With a schema: rows that would be public are private ones.
    """

    rng: np.random.RandomState
    data_dir: str = ""
    label: str = ""
    task: str = "auto"
    drop: str = ""
    public: str = ""
    joint_classes: bool = False
    public_labels: bool = False
    num_train: int = 0
    num_public: int = 0
    num_test: int = 0
    encoder: str = ""
    standardise: bool = False
    schema: str = ""
    without_public: bool = False

    def __post_init__(self) -> None:
        """Check the limits."""
        for key in ("num-train", "num-public", "num-test"):
            value = getattr(self, key.replace("-", "_"))
            require(value >= 0, "load_dataset", key, "at least 0 (0: all)", value)

    @property
    def raw(self) -> bool:
        """Whether rows are as a frozen encoder takes them: images as bytes, texts as texts."""
        return bool(self.encoder)

    def limit(self, rows: Rows) -> Rows:
        """Return at most the rows asked for, at random; without limits nothing is drawn."""
        limits = self.num_train, self.num_public, self.num_test
        train, public, test = (
            self.rng.permutation(part)[:most] if 0 < most < len(part) else part
            for part, most in zip(rows, limits, strict=True)
        )
        return train, public, test


def split_rows(
    num_rows: int, train_share: float, rng: np.random.RandomState, what: str = "the data"
) -> Rows:
    """Return the row numbers of train, public and test.

    Held-out rows come first from the permutation, and their first half is public: for
    the same seed these are the very rows that FedKT's authors train and test on. `what`
    names the rows where they are too few.
    """
    require_data(num_rows >= 8, "load_dataset", what, "at least 8 rows", num_rows)
    order, held_out = rng.permutation(num_rows), math.ceil((1 - train_share) * num_rows)
    return order[held_out:], order[: held_out // 2], order[held_out // 2 : held_out]


def split_groups(groups: Array, train_share: float, rng: np.random.RandomState) -> Rows:
    """Split like `split_rows`, but with all rows of a group, such as a patient, in one part.

    Examples
    --------
    >>> parts = split_groups(np.repeat(np.arange(10), 3), 0.6, np.random.RandomState(0))
    >>> [len(rows) for rows in parts]
    [18, 6, 6]
    """
    names, group_of_row = np.unique(groups, return_inverse=True)
    train, public, test = (
        np.flatnonzero(np.isin(group_of_row, part))
        for part in split_rows(len(names), train_share, rng)
    )
    return train, public, test


def halves(num_rows: int, rng: np.random.RandomState) -> tuple[IntArray, IntArray]:
    """Return the row numbers of a random half and of the rest, which may have one more."""
    public, test = np.split(rng.permutation(num_rows), [num_rows // 2])
    return public, test


MAX_DRAWS: Final = 10_000
TENTHS: Final = 10
"""Classes that numeric targets are dealt as."""


Scheme: TypeAlias = Literal[
    "dirichlet", "iid", "by-label", "pooled-halves", "random-shares", "by-group"
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Deal:
    """Rows to deal and how; each scheme reads the parameters that it knows."""

    y: Array
    """Class index of every row, (num_records,), or its labels of -1, 0 and 1, (num_records,
    num_classes). A row with several labels is dealt as one of its rarest positive label
    (FedKD); rows without any form one more class, the last. Numbers, (num_records, 1), are
    dealt as ten classes: the lowest tenth of them, and so on."""
    num_parties: int
    scheme: str
    """Name of a partitioner in `DEALERS`."""
    num_classes: int
    """Length of the class list, of which some may have no rows."""
    rng: np.random.RandomState
    """The only source of randomness; see `load_dataset` on why it is numpy's older one."""
    min_records: int = 10
    """The fewest rows a party may hold."""
    beta: float = 0.5
    """Concentration of `dirichlet`; the smaller, the more unlike the parties are."""
    balanced: bool = True
    """Whether in `dirichlet` a party that already holds its fair share of rows gets none of
    the classes that follow, but for a row that rounding leaves over (FedKT); without,
    parties may differ much in size (FedDF, FedKD)."""
    mixing: float = 0.0
    """Fraction of rows that `pooled-halves` deals anew: 0 keeps classes apart, 1 is i.i.d."""
    shares: tuple[float, ...] = ()
    """Each party's share in `pooled-halves` and `random-shares`; equal ones if empty."""
    groups: IntArray | None = None
    """Group of every row, such as its writer, for `by-group`."""


def partition(deal: Deal) -> list[IntArray]:
    """Deal every row to exactly one party; return the ascending row numbers of each.

    Examples
    --------
    >>> y, rng = np.array([0, 1, 0, 1, 0, 1]), np.random.RandomState(0)
    >>> deal = Deal(
    ...     y=y, num_parties=2, scheme="by-label", num_classes=2, rng=rng, min_records=1
    ... )
    >>> [part.tolist() for part in partition(deal)]
    [[0, 2, 4], [1, 3, 5]]
    """
    owner, least = "partition", deal.min_records
    rule = f"one of {', '.join(SCHEMES)}"
    require(deal.scheme in SCHEMES, owner, "scheme", rule, deal.scheme)
    require(deal.num_parties >= 1, owner, "num-parties", "at least 1", deal.num_parties)
    y, num_classes = _dealt_classes(deal.y, deal.num_classes)
    if deal.num_parties * least > len(y):
        raise InvalidParameter(
            f"{owner}: num-parties x min-records must be at most {len(y)}, the rows there "
            f"are, got {deal.num_parties} x {least}. Lower either."
        )
    parts = DEALERS[deal.scheme](replace(deal, y=y, num_classes=num_classes))
    smallest = min(map(len, parts))
    rule = f"at most {smallest}, the rows of the smallest party"
    require(smallest >= least, owner, "min-records", rule, least)
    return [np.sort(part) for part in parts]


def _dealt_classes(y: Array, num_classes: int) -> tuple[IntArray, int]:
    """Return one class a row and the number of classes, also where rows have several labels."""
    if y.dtype.kind == "f":
        check_targets("partition", "y", y, len(y), 1, "regression")
        edges = np.quantile(y[:, 0], np.arange(1, TENTHS) / TENTHS)
        return np.searchsorted(edges, y[:, 0], side="right"), TENTHS
    if y.ndim == 1:
        check_labels("partition", "y", y, len(y), num_classes)
        return y, num_classes
    check_targets("partition", "y", y, len(y), num_classes, "multi-label")
    is_positive = y == 1
    counts = is_positive.sum(axis=0)
    rarity = np.where(is_positive, counts, len(y) + 1)
    rarest = rarity.argmin(axis=1)
    return np.where(is_positive.any(axis=1), rarest, num_classes), num_classes + 1


def _dirichlet(deal: Deal) -> list[IntArray]:
    """Share out each class in proportions drawn from Dirichlet(`beta`), rarer classes first.

    The draw is repeated until every party has `min_records` rows. For Adult and cod-rna,
    the same seed gives the very partitions of FedKT's authors.
    """
    require(deal.beta > 0, "partition", "beta", "greater than 0", deal.beta)
    for _ in range(MAX_DRAWS):
        parts = _dirichlet_draw(deal)
        if min(map(len, parts)) >= deal.min_records:
            return parts
    raise InvalidParameter(
        f"partition: beta must be large enough to give each of {deal.num_parties} parties "
        f"{deal.min_records} rows, got {deal.beta} and no such draw in {MAX_DRAWS}. "
        "Raise beta, or lower min-records or num-parties."
    )


def _dirichlet_draw(deal: Deal) -> list[IntArray]:
    parts = [np.empty(0, dtype=np.int64)] * deal.num_parties
    fair_share = len(deal.y) / deal.num_parties if deal.balanced else math.inf
    # Rarest class first: the rows that full parties are refused are then common ones.
    counts = np.bincount(deal.y, minlength=deal.num_classes)
    for label in np.argsort(counts, kind="stable"):
        rows = deal.rng.permutation(np.flatnonzero(deal.y == label))
        shares = deal.rng.dirichlet(np.full(deal.num_parties, deal.beta))
        is_open = np.array([len(part) < fair_share for part in parts])
        ends = (np.cumsum(_only_to(is_open, shares)) * len(rows)).astype(np.int64)
        dealt = np.split(rows, ends[:-1])
        parts = [np.concatenate(pair) for pair in zip(parts, dealt, strict=True)]
    return parts


def _only_to(is_open: NDArray[np.bool], shares: FloatArray) -> FloatArray:
    """Divide the shares of parties that are full among the others."""
    # A small beta can round all shares down to 0 of 0, or put a class on full parties only.
    shares = np.nan_to_num(shares) * is_open
    if not shares.any():
        shares = is_open.astype(np.float64)
    normalised: FloatArray = shares / shares.sum()
    return normalised


def _by_label(deal: Deal) -> list[IntArray]:
    """Give each party the classes that follow those of the party before it.

    All hold the same number, the fewest that leave no class out, and the first class
    follows the last. Parties that hold the same class share its rows evenly at random.
    """
    num_held = math.ceil(deal.num_classes / deal.num_parties)
    first_held = num_held * np.arange(deal.num_parties)
    holders = {
        label: np.flatnonzero((label - first_held) % deal.num_classes < num_held)
        for label in range(deal.num_classes)
    }
    return _share_evenly(deal, deal.y, holders)


def _by_group(deal: Deal) -> list[IntArray]:
    """Give each party whole groups, as many as the others or one more.

    Parties beyond the number of groups share the rows of one.
    """
    if deal.groups is None:
        raise InvalidParameter(
            "partition: scheme must be another one for data without groups, got 'by-group'."
        )
    shape, rule = deal.groups.shape, f"{len(deal.y)} groups, one per row"
    require_data(shape == (len(deal.y),), "partition", "groups", rule, shape)
    names, group_of_row = np.unique(deal.groups, return_inverse=True)
    num_groups = len(names)
    order = deal.rng.permutation(num_groups)
    if deal.num_parties <= num_groups:
        hands = np.array_split(order, deal.num_parties)
        return [np.flatnonzero(np.isin(group_of_row, hand)) for hand in hands]
    holders = {
        group: np.arange(turn, deal.num_parties, num_groups)
        for turn, group in enumerate(order.tolist())
    }
    return _share_evenly(deal, group_of_row, holders)


def _share_evenly(
    deal: Deal, kind_of_row: IntArray, holders: Mapping[int, IntArray]
) -> list[IntArray]:
    """Deal the rows of each kind at random to the parties that hold it."""
    hands = [[np.empty(0, dtype=np.int64)] for _ in range(deal.num_parties)]
    for kind, parties in holders.items():
        rows = deal.rng.permutation(np.flatnonzero(kind_of_row == kind))
        for party, part in zip(parties, np.array_split(rows, len(parties)), strict=True):
            hands[party].append(part)
    return [np.concatenate(hand) for hand in hands]


def _random_shares(deal: Deal) -> list[IntArray]:
    """Deal at random, in the proportions of `shares`."""
    ends = _ends(deal, len(deal.y))
    return np.split(deal.rng.permutation(len(deal.y)), ends)


def _pooled_halves(deal: Deal) -> list[IntArray]:
    """Give each party a block of neighbouring classes, as long as its share says, then mix.

    A fraction `mixing` of every party's rows is pooled, shuffled and dealt back in the
    numbers that were given (AvgKD).
    """
    owners = np.searchsorted(_ends(deal, deal.num_classes), deal.y, side="right")
    require(0 <= deal.mixing <= 1, "partition", "mixing", "between 0 and 1", deal.mixing)
    orders = [
        deal.rng.permutation(np.flatnonzero(owners == party))
        for party in range(deal.num_parties)
    ]
    halves = [np.split(order, [int(deal.mixing * len(order))]) for order in orders]
    pool = deal.rng.permutation(np.concatenate([given for given, _ in halves]))
    ends = np.cumsum([len(given) for given, _ in halves])[:-1]
    return [
        np.concatenate([kept, returned])
        for (_, kept), returned in zip(halves, np.split(pool, ends), strict=True)
    ]


def _ends(deal: Deal, total: int) -> IntArray:
    """Return where the part of each party but the last ends among so many things."""
    num_parties = deal.num_parties
    shares = deal.shares or (1 / num_parties,) * num_parties
    fits = len(shares) == num_parties and min(shares) > 0 and math.isclose(sum(shares), 1)
    rule = f"{num_parties} numbers above 0 that sum to 1"
    require(fits, "partition", "shares", rule, shares)
    ends: IntArray = np.rint(np.cumsum(shares)[:-1] * total).astype(np.int64)
    return ends


DEALERS: Final[Mapping[str, Callable[[Deal], list[IntArray]]]] = {
    "dirichlet": _dirichlet,
    # At random, in parts that differ by at most one row.
    "iid": lambda deal: np.array_split(deal.rng.permutation(len(deal.y)), deal.num_parties),
    "by-label": _by_label,
    "pooled-halves": _pooled_halves,
    "random-shares": _random_shares,
    "by-group": _by_group,
}
SCHEMES: Final = tuple(DEALERS)
