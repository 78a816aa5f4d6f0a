"""Data sets, and the split of their rows into private, public and test rows.

Private rows belong to the parties, public rows to everybody, test rows to nobody. All that
is random here comes from numpy's `RandomState`, whose numbers never change between releases.
"""

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from fl_strategies._util import Array, IntArray
from fl_strategies.errors import require, require_data
from fl_strategies.tasks import Task

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
        Rows that become the parties' private records. Rows are float32 vectors, float32
        images (channels, height, width) or int64 token numbers (length,).
    x_public : (num_public, ...)
        Rows that everybody holds.
    x_test, y_test : (num_test, ...), like y_train
        Rows that measure the models and nothing else.
    classes : tuple of str
        Name of each class index, or of each label of a multi-label task.
    task : "single-label" or "multi-label"
        With "multi-label", labels are -1 (unknown), 0 (no) and 1 (yes).
    y_public : optional
        Labels of the public rows, where these come from the same source as the others or
        have classes of their own.
    num_public_classes : int (default: 0)
        How many classes, the last of the list, no private row has.
    groups : (num_train,) int64, optional
        Who or what a private row comes from, such as its writer; see `partition`.
    understood : tuple of str
        What was made of the columns of a table, in words.
    """

    name: str
    x_train: Array
    y_train: IntArray
    x_public: Array
    x_test: Array
    y_test: IntArray
    classes: tuple[str, ...]
    task: Task = "single-label"
    y_public: IntArray | None = None
    groups: IntArray | None = None
    num_public_classes: int = 0
    understood: tuple[str, ...] = ()

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
        """How many classes, the first of the list, private and test rows can have."""
        return self.num_classes - self.num_public_classes


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What is asked of a loader: where to look, and how many rows to take.

    Parameters
    ----------
    rng : RandomState
        Decides every random choice, in the order in which a loader makes them.
    data_dir : str
        Folder with data files; empty: the environment's.
    public : str
        Name of another data set that gives the public rows; empty: none.
    joint_classes : bool
        Whether these public rows keep their classes, listed after the data's own.
    public_labels : bool
        Whether public rows without a label are of no use.
    num_train, num_public, num_test : int
        The most rows of each kind; 0: all there are.
    """

    rng: np.random.RandomState
    data_dir: str = ""
    public: str = ""
    joint_classes: bool = False
    public_labels: bool = False
    num_train: int = 0
    num_public: int = 0
    num_test: int = 0

    def __post_init__(self) -> None:
        """Check the limits."""
        for name in ("num_train", "num_public", "num_test"):
            value = getattr(self, name)
            require(
                value >= 0, "load_dataset", name.replace("_", "-"), "at least 0 (0: all)", value
            )

    def limit(self, rows: Rows) -> Rows:
        """Return at most the rows asked for, at random; without limits nothing is drawn."""
        train, public, test = rows
        return (
            self._some(train, self.num_train),
            self._some(public, self.num_public),
            self._some(test, self.num_test),
        )

    def _some(self, rows: IntArray, limit: int) -> IntArray:
        if not 0 < limit < len(rows):
            return rows
        return np.asarray(self.rng.permutation(rows)[:limit])


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
