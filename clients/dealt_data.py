"""Parties of a project that deals its rows out by a function, as Flower's quickstarts do."""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Context

from fl_strategies import Party
from fl_strategies._util import Array, require_argument
from fl_strategies.errors import InvalidData, require, require_data
from fl_strategies.party.party import is_missing
from fl_strategies.wire import keys

LoadData: TypeAlias = Callable[[int, int], Sequence[Any]]

logger = logging.getLogger("flwr.fl_strategies")

_OWNER = "party_loader"


def party_loader(load_data: LoadData, **party: Any) -> Callable[[Context], Party]:
    """Return what `client_app` needs, made of a function that deals out rows.

    Parameters
    ----------
    load_data : callable
        Takes Flower's partition id and the number of partitions. Returns four arrays in the
        order of scikit-learn's `train_test_split`, x_train, x_test, y_train and y_test; or
        two sets, to train on and to test on: pairs (x, y), or data sets or loaders of torch.
        Rows without a label are dropped, and counted in the party's own log alone.
    **party
        All else that a `Party` takes, such as `public`, `num_classes` and `learner_fn`.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from sklearn.linear_model import LogisticRegression
    >>> from clients import SklearnLearner
    >>> def load_data(partition_id, num_partitions):
    ...     x = np.arange(8.0).reshape(8, 1)
    ...     return x[:6], x[6:], [0, 0, 0, 1, 1, 1], [1, 1]
    >>> load = party_loader(
    ...     load_data,
    ...     num_classes=2,
    ...     learner_fn=lambda: SklearnLearner(LogisticRegression(), num_classes=2),
    ... )
    >>> node = Context(1, 1, {"partition-id": 3, "num-partitions": 4}, RecordDict(), {})
    >>> load(node)
    Party(partition_id=3, learner_name='learner', task='single-label', num_classes=2, \
x=(6, 1) float64, y=(6,) int64, public=(0, 1) float64, x_test=(2, 1) float64, y_test=(2,) int64)
    """
    known = [*inspect.signature(Party.__init__).parameters]
    for name in party:
        require_argument(_OWNER, name, known)

    def load_party(context: Context) -> Party:
        node = context.node_config
        for key in (keys.PARTITION_ID, keys.NUM_PARTITIONS):
            require(key in node, _OWNER, "node_config", f"with {key!r}", sorted(node))
        number, count = int(node[keys.PARTITION_ID]), int(node[keys.NUM_PARTITIONS])
        x, x_test, y, y_test = _four_arrays(load_data(number, count))
        classes = party.get("classes") or ()
        x, y = _labelled("y_train", x, y, classes)
        x_test, y_test = _labelled("y_test", x_test, y_test, classes)
        return Party(x=x, y=y, x_test=x_test, y_test=y_test, partition_id=number, **party)

    return load_party


def _four_arrays(loaded: Sequence[Any]) -> Sequence[Any]:
    """Return arrays in the order of `train_test_split`."""
    if len(loaded) == 4:
        y_comes_second = _depth(loaded[1]) < _depth(loaded[0])
        rule, got = "x_train, x_test, y_train and y_test in this order", "labels as the second"
        require_data(not y_comes_second, _OWNER, "what load_data returns", rule, got)
        return loaded
    if len(loaded) != 2:
        raise InvalidData(
            f"{_OWNER}: load_data must return x_train, x_test, y_train and y_test, or a set to "
            f"train on and one to test on, got {len(loaded)} values."
        )
    (x, y), (x_test, y_test) = map(_rows_and_labels, loaded)
    return x, x_test, y, y_test


def _rows_and_labels(given: Any) -> tuple[Any, Any]:
    """Return rows and labels of a pair, or of a data set or a loader of torch."""
    if isinstance(given, tuple | list):
        x, y = given
        return x, y
    # A loader shuffles and may drop rows; the set behind it has them all, in order.
    rows = getattr(given, "dataset", given)
    if hasattr(rows, "tensors"):
        x, y = rows.tensors
        return x, y
    items = [rows[i] for i in range(len(rows))]
    pairs = [tuple(item.values()) if isinstance(item, dict) else item for item in items]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _depth(given: Any) -> int:
    """Return the number of dimensions; records of a list may be of several shapes."""
    if not isinstance(given, list | tuple):
        return np.ndim(given)
    deeper = any(hasattr(one, "__len__") and not isinstance(one, str) for one in given)
    return 2 if deeper else 1


def _labelled(name: str, x: Any, y: Any, classes: Sequence[object]) -> tuple[Any, Any]:
    """Return the rows that have a label, and their labels; all as they are if all have one."""
    missing = is_missing(y, classes)
    if not missing.any() or len(x) != len(missing):
        return x, y
    logger.warning("%d rows without a label in %s are dropped.", missing.sum(), name)
    return _rows_at(x, ~missing), _rows_at(y, ~missing)


def _rows_at(x: Any, kept: Array) -> Any:
    """Return some rows of an array, a list, a tensor or a frame."""
    if isinstance(x, list | tuple):
        return [row for row, keep in zip(x, kept, strict=True) if keep]
    return x.loc[kept] if hasattr(x, "loc") else x[np.flatnonzero(kept)]
