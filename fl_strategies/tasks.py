"""What labels can be, and what counts as a good model for each kind."""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from fl_strategies import keys
from fl_strategies.exceptions import require, require_data
from fl_strategies.protocols import Array, FloatArray, Learner

Task: TypeAlias = Literal["single-label", "multi-label", "regression"]

TASKS: Final[tuple[str, ...]] = get_args(Task)
METRICS: Final[Mapping[str, str]] = {
    "single-label": keys.ACCURACY,
    "multi-label": keys.MEAN_AUC,
    "regression": keys.MEAN_SQUARED_ERROR,
}
"""Name of the figure of each task; only the last is better when smaller."""
UNKNOWN: Final = -1
"""A label of a multi-label record that nobody has decided."""


def check_task(owner: str, task: str, num_classes: int) -> None:
    """Raise `InvalidParameter` unless the task is known and has enough classes."""
    require(task in TASKS, owner, "task", f"one of {', '.join(TASKS)}", task)
    least = 2 if task == "single-label" else 1
    require(num_classes >= least, owner, "num_classes", f"at least {least}", num_classes)


def check_targets(
    owner: str, name: str, y: Array, num_rows: int, num_classes: int, task: Task
) -> None:
    """Raise `InvalidData` unless `y` is what the task learns, one row a record.

    Single-label: class indices (n,). Multi-label: (n, num_classes) of -1 (unknown),
    0 (no) and 1 (yes). Regression: finite numbers (n, num_classes).
    """
    if task == "single-label":
        check_labels(owner, name, y, num_rows, num_classes)
        return
    shape = (num_rows, num_classes)
    require_data(y.shape == shape, owner, name, f"of shape {shape}", f"shape {y.shape}")
    if task == "regression":
        require_data(y.dtype.kind == "f", owner, name, "floating-point numbers", y.dtype)
        finite = bool(np.isfinite(y).all())
        require_data(finite, owner, name, "finite", "NaN or infinity")
        return
    require_data(y.dtype.kind in "iu", owner, name, "an array of -1, 0 and 1", y.dtype)
    outside = y[(y < UNKNOWN) | (y > 1)]
    require_data(not len(outside), owner, name, "an array of -1, 0 and 1", outside[:1])


def check_labels(owner: str, name: str, y: Array, num_rows: int, num_classes: int) -> None:
    """Raise `InvalidData` unless `y` holds one class index per row."""
    require_data(
        y.ndim == 1 and np.issubdtype(y.dtype, np.integer),
        owner, name, "a flat array of class indices", f"shape {y.shape} of {y.dtype}",
    )  # fmt: skip
    require_data(len(y) == num_rows, owner, name, f"{num_rows} labels, one a row", len(y))
    if len(y):
        outside = y[(y < 0) | (y >= num_classes)]
        require_data(
            not len(outside), owner, name,
            f"between 0 and {num_classes - 1}, the federation's class list", outside[:1],
        )  # fmt: skip


def quality(model: Learner, x: Array, y: Array, task: Task) -> float:
    """Return accuracy, mean area under the ROC curve, or mean squared error."""
    if task == "single-label":
        return float((model.predict(x) == y).mean())
    scores = model.logits(x)
    if task == "regression":
        return float(np.square(scores - y).mean())
    return mean_auc(scores, y)


def mean_auc(scores: FloatArray, y: Array) -> float:
    """Return the mean over labels of the area under the ROC curve.

    Unknown labels are left out; so are labels with positives or negatives only, for which
    no curve exists. NaN if nothing is left.

    Examples
    --------
    >>> y = np.array([[0, 1], [1, 0], [1, -1]])
    >>> mean_auc(np.array([[0.1, 2.0], [0.7, 1.0], [0.1, 3.0]]), y)
    0.875
    """
    areas = []
    for column, labels in zip(scores.T, y.T, strict=True):
        known = labels != UNKNOWN
        ranks, positive = _ranks(column[known]), labels[known] == 1
        num_positive, num_negative = int(positive.sum()), int((~positive).sum())
        if num_positive and num_negative:
            above = ranks[positive].sum() - num_positive * (num_positive + 1) / 2
            areas.append(above / (num_positive * num_negative))
    return float(np.mean(areas)) if areas else float("nan")


def _ranks(values: Array) -> FloatArray:
    """Return the place of each value, from 1; equal values share the mean of theirs.

    As `scipy.stats.rankdata`, whose import takes a party a second of every message.
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: FloatArray = counts.cumsum() - (counts - 1) / 2
    return means[places]
