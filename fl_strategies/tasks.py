"""Kinds of labels, and the metrics that evaluate a model for each of them."""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import require, require_data
from fl_strategies.learners import Learner
from fl_strategies.wire import keys

Task: TypeAlias = Literal["single-label", "multi-label", "regression"]

TASKS: Final[tuple[str, ...]] = get_args(Task)
METRICS: Final[Mapping[str, str]] = {
    "single-label": keys.ACCURACY,
    "multi-label": keys.MEAN_AUC,
    "regression": keys.MEAN_SQUARED_ERROR,
}
"""Main metric of each task; only the last is better when smaller."""
UNKNOWN: Final = -1
"""A label of a multi-label record that is not known."""


def check_task(owner: str, task: str, num_classes: int) -> None:
    """Raise `InvalidParameter` unless the task is known and has enough classes."""
    require(task in TASKS, owner, "task", f"one of {', '.join(TASKS)}", task)
    least = 2 if task == "single-label" else 1
    require(num_classes >= least, owner, "num_classes", f"at least {least}", num_classes)


def check_targets(
    owner: str, name: str, y: Array, num_rows: int, num_classes: int, task: Task
) -> None:
    """Raise `InvalidData` unless `y` holds targets of the task, one row per record.

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
    flat = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
    rule = "a flat array of class indices"
    require_data(flat, owner, name, rule, f"shape {y.shape} of {y.dtype}")
    require_data(len(y) == num_rows, owner, name, f"{num_rows} labels, one per row", len(y))
    if len(y):
        outside = y[(y < 0) | (y >= num_classes)]
        rule = f"between 0 and {num_classes - 1}, the federation's class list"
        require_data(not len(outside), owner, name, rule, outside[:1])


class Judgement(NamedTuple):
    """Metrics of a model on some rows."""

    figures: dict[str, float]
    """All metrics of the task by name; NaN where the rows define none."""
    shares: FloatArray
    """Contribution of each row: the mean is the main metric, the spread its sampling error."""


def paired_error(one: FloatArray, other: FloatArray) -> float:
    """Return the standard error of the difference of two models, from their shares per row."""
    return float((one - other).std() / np.sqrt(max(len(one), 1)))


def figure_names(task: Task, num_classes: int) -> tuple[str, ...]:
    """Return the metrics of a task, the one of `METRICS` first."""
    if task != "single-label":
        return (METRICS[task],)
    curve = (keys.AUC,) if num_classes == 2 else ()
    return keys.ACCURACY, keys.BALANCED_ACCURACY, keys.MACRO_F1, *curve


def quality(model: Learner, x: Array, y: Array, task: Task) -> float:
    """Return accuracy, mean area under the ROC curve, or mean squared error."""
    if task == "single-label":
        return float((model.predict(x) == y).mean())
    scores = model.logits(x)
    if task == "regression":
        return float(np.square(scores - y).mean())
    return mean_auc(scores, y)


def judge(model: Learner, x: Array, y: Array, task: Task) -> Judgement:
    """Return all metrics of a model, and each row's contribution to the main one."""
    if task == "single-label":
        scores = model.logits(x) if model.num_classes == 2 else None
        margins = None if scores is None else scores[:, 1] - scores[:, 0]
        return _judge_labels(model.predict(x), margins, y)
    scores = model.logits(x)
    if task == "regression":
        return _judge_outputs(scores, y)
    return Judgement({keys.MEAN_AUC: mean_auc(scores, y)}, _auc_shares(scores, y))


def judge_constant(trained: Array, y: Array, num_classes: int, task: Task) -> Judgement:
    """Evaluate the constant model, the baseline that all others have to beat.

    The answer is the most frequent class of the targets in `trained`, or their mean in
    regression. In multi-label learning a constant ranks no row, so the area is one half.
    """
    if task == "multi-label":
        return Judgement({keys.MEAN_AUC: 0.5}, np.full(len(y), 0.5))
    if task == "regression":
        return _judge_outputs(trained.mean(axis=0), y)
    most = np.bincount(trained, minlength=num_classes).argmax()
    margins = np.zeros(len(y)) if num_classes == 2 else None
    return _judge_labels(np.full(len(y), most), margins, y)


def _judge_labels(predicted: IntArray, margins: FloatArray | None, y: Array) -> Judgement:
    hits = (predicted == y).astype(np.float64)
    curve = {} if margins is None else {keys.AUC: auc(margins, y == 1)}
    figures = {keys.ACCURACY: float(hits.mean()), **class_figures(predicted, y), **curve}
    return Judgement(figures, hits)


def _judge_outputs(outputs: FloatArray, y: Array) -> Judgement:
    errors = np.square(outputs - y)
    return Judgement({keys.MEAN_SQUARED_ERROR: float(errors.mean())}, errors.mean(axis=1))


def class_figures(predicted: IntArray, y: IntArray) -> dict[str, float]:
    """Return metrics that weight all classes equally, however few rows they have.

    Balanced accuracy is the mean recall of the classes that occur in `y`, macro F1 the mean
    of F1 over those that occur in `y` or are predicted; both as in scikit-learn.

    Examples
    --------
    >>> class_figures(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1]))["balanced-accuracy"]
    0.5
    """
    size = 1 + max(predicted.max(initial=0), y.max(initial=0))
    hits, named, actual = (
        np.bincount(rows, minlength=size) for rows in (y[predicted == y], predicted, y)
    )
    occurs, counts = actual > 0, (actual + named) > 0
    return {
        keys.BALANCED_ACCURACY: float((hits[occurs] / actual[occurs]).mean()),
        keys.MACRO_F1: float((2 * hits[counts] / (actual + named)[counts]).mean()),
    }


def auc(scores: FloatArray, positive: Array) -> float:
    """Return the area under the ROC curve, ties counted half; NaN if there is no curve."""
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    above = _ranks(scores)[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def mean_auc(scores: FloatArray, y: Array) -> float:
    """Return the mean over labels of the area under the ROC curve.

    Unknown labels are excluded; so are labels with positives or negatives only, for which
    no curve exists. NaN if nothing is left.

    Examples
    --------
    >>> y = np.array([[0, 1], [1, 0], [1, -1]])
    >>> mean_auc(np.array([[0.1, 2.0], [0.7, 1.0], [0.1, 3.0]]), y)
    0.875
    """
    columns = zip(scores.T, y.T, strict=True)
    areas = np.array([auc(c[labels != UNKNOWN], _positive(labels)) for c, labels in columns])
    known = areas[~np.isnan(areas)]
    return float(known.mean()) if len(known) else float("nan")


def _positive(labels: Array) -> Array:
    positive: Array = labels[labels != UNKNOWN] == 1
    return positive


def _auc_shares(scores: FloatArray, y: Array) -> FloatArray:
    """Return each row's contribution to the mean area, by DeLong's decomposition.

    A positive row ranks above a share of the negative ones, and vice versa. That share, minus
    the area and scaled by the rarity of its side, is the row's influence; an unknown label
    has none. The variance of the mean over rows is then that of the area.
    """
    shares = []
    for column, labels in zip(scores.T, y.T, strict=True):
        known, positive = labels != UNKNOWN, _positive(labels)
        area = auc(column[known], positive)
        if np.isnan(area):
            continue
        share = np.full(len(labels), area)
        share[known] += _influence(column[known], positive, area) * len(labels)
        shares.append(share)
    return np.mean(shares, axis=0) if shares else np.full(len(y), np.nan)


def _influence(scores: FloatArray, positive: Array, area: float) -> FloatArray:
    ranks, influence = _ranks(scores), np.empty(len(scores))
    for side, sign in ((positive, 1), (~positive, -1)):
        beaten = (ranks[side] - _ranks(scores[side])) / (~side).sum()
        wins = beaten if sign > 0 else 1 - beaten
        influence[side] = (wins - area) / side.sum()
    return influence


def _ranks(values: Array) -> FloatArray:
    """Return the place of each value, from 1; equal values share the mean of theirs.

    The same as `scipy.stats.rankdata`, whose import would cost a party a second per message.
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: FloatArray = counts.cumsum() - (counts - 1) / 2
    return means[places]
