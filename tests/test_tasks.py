"""Kinds of labels, and the metrics of models."""

import math

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.learners import (
    METRICS,
    TASKS,
    Recipe,
    Task,
    _ranks,
    auc,
    check_targets,
    check_task,
    class_metrics,
    evaluate_constant,
    evaluate_model,
    link_scores,
    mean_auc,
    metric_names,
    quality,
    variance_explained,
)
from tests.toys import TEST, CentroidLearner, blobs


@settings(deadline=None)
@given(seed=st.integers(0, 1000), num_rows=st.integers(4, 40))
def test_the_area_is_scikit_learn_s(seed: int, num_rows: int) -> None:
    """Tied scores, unknown labels and labels of one value included."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, (num_rows, 3)).astype(float)
    y = rng.integers(-1, 2, (num_rows, 3))
    expected = []
    for column, labels in zip(scores.T, y.T, strict=True):
        known = labels >= 0
        if len(set(labels[known])) == 2:
            expected.append(roc_auc_score(labels[known], column[known]))

    area = mean_auc(scores, y)

    assert area == pytest.approx(np.mean(expected)) if expected else math.isnan(area)


def test_each_task_has_its_metric() -> None:
    x, y = blobs(50, "train")
    model = CentroidLearner().fit(x, y, rng=np.random.default_rng(0))

    assert quality(model, *TEST, "single-label") == (model.predict(TEST[0]) == TEST[1]).mean()
    outputs = model.logits(TEST[0])
    assert quality(model, TEST[0], outputs + 2.0, "regression") == pytest.approx(4.0)
    assert quality(model, TEST[0], np.eye(3, dtype=int)[TEST[1]], "multi-label") > 0.9


@pytest.mark.parametrize(
    ("y", "task", "rule"),
    [
        (np.zeros(4, int), "multi-label", r"y must be of shape \(4, 3\)"),
        (np.full((4, 3), 2), "multi-label", "y must be an array of -1, 0 and 1"),
        (np.full((4, 3), -2), "multi-label", "y must be an array of -1, 0 and 1"),
        (np.zeros((4, 3)), "multi-label", "y must be an array of -1, 0 and 1"),
        (np.zeros((4, 3), int), "regression", "y must be floating-point numbers"),
        (np.full((4, 3), np.nan), "regression", "y must be finite"),
        (np.zeros((4, 2)), "regression", r"y must be of shape \(4, 3\)"),
        (np.zeros((4, 3), int), "single-label", "y must be a flat array of class indices"),
        (np.full(4, 3), "single-label", "y must be between 0 and 2"),
    ],
)
def test_wrong_targets_are_named(y: np.ndarray, task: str, rule: str) -> None:
    with pytest.raises(InvalidData, match=rule):
        check_targets("Party 0", "y", y, 4, 3, task)  # type: ignore[arg-type]


def test_the_right_targets_pass() -> None:
    check_targets("Party 0", "y", np.array([[1, -1, 0]]), 1, 3, "multi-label")
    check_targets("Party 0", "y", np.array([[0.5]]), 1, 1, "regression")
    check_targets("Party 0", "y", np.array([2]), 1, 3, "single-label")


def test_unknown_tasks_are_named() -> None:
    with pytest.raises(InvalidParameter, match="task must be one of"):
        check_task("Party 0", "ranking", 3)
    with pytest.raises(InvalidParameter, match="at least 2, got 1"):
        check_task("Party 0", "single-label", 1)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"loss": "hinge"}, "loss must be one of"),
        ({"link": "log"}, "link must be one of"),
        ({"loss": "cross-entropy"}, "link must be softmax or sigmoid for cross-entropy"),
        ({"temperature": 0.0}, "temperature must be finite and above 0"),
        ({"temperature": math.inf}, "temperature must be finite and above 0"),
        ({"temperature": 2.0}, "temperature must be 1 for the identity"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_a_bad_recipe_is_named(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(InvalidParameter, match=f"Recipe: {rule}"):
        Recipe(**changes)  # type: ignore[arg-type]


def test_scores_become_what_the_recipe_asks_for() -> None:
    """Scores stay, or become probabilities at a temperature."""
    scores = np.array([[0.0, 2.0]])
    soft = link_scores(scores, Recipe(loss="mse", link="softmax", temperature=2.0))
    each = link_scores(scores, Recipe(loss="mse", link="sigmoid"))

    assert link_scores(scores, Recipe()) is scores
    assert soft == pytest.approx(np.array([[1, math.e]]) / (1 + math.e))
    assert each == pytest.approx(np.array([[0.5, 1 / (1 + math.exp(-2))]]))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40))
def test_ranks_are_those_of_scipy(values: list[int]) -> None:
    assert _ranks(np.array(values)).tolist() == rankdata(values).tolist()


class Told:
    """A model that gives the scores it was made of, whatever the rows."""

    def __init__(self, scores: FloatArray) -> None:
        self.scores, self.num_classes = scores, scores.shape[1]

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> "Told":  # noqa: ARG002
        return self

    def logits(self, x: Array) -> FloatArray:  # noqa: ARG002
        return self.scores

    def predict(self, x: Array) -> IntArray:
        return self.logits(x).argmax(axis=1)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 40), num_classes=st.integers(2, 5))
def test_metrics_of_classes_are_scikit_learn_s(
    seed: int, num_rows: int, num_classes: int
) -> None:
    """Also where classes are never predicted, or predicted and never there."""
    rng = np.random.default_rng(seed)
    y, predicted = rng.integers(0, num_classes, (2, num_rows))
    y = np.minimum(y, rng.integers(num_classes))
    present = np.unique(y)
    recalls = np.mean([(predicted[y == label] == label).mean() for label in present])

    found = class_metrics(predicted, y)

    assert found["macro-f1"] == pytest.approx(f1_score(y, predicted, average="macro"))
    assert found["balanced-accuracy"] == pytest.approx(recalls)
    if len(present) > 1 and set(predicted) <= set(present):  # it warns otherwise
        assert recalls == pytest.approx(balanced_accuracy_score(y, predicted))


@settings(deadline=None)
@given(seed=st.integers(0, 1000), num_rows=st.integers(4, 40))
def test_two_classes_have_the_area_of_scikit_learn(seed: int, num_rows: int) -> None:
    """By the difference of the logits, with ties; NaN where the rows have one class."""
    rng = np.random.default_rng(seed)
    scores, y = rng.integers(0, 4, (num_rows, 2)).astype(float), rng.integers(0, 2, num_rows)

    area = evaluate_model(Told(scores), scores, y, "single-label").metrics["auc"]

    if len(set(y)) == 1:
        assert math.isnan(area)
    else:
        assert area == pytest.approx(roc_auc_score(y, scores[:, 1] - scores[:, 0]))


@pytest.mark.parametrize("task", TASKS)
def test_an_evaluation_has_the_metrics_of_its_task(task: Task) -> None:
    """Under their names, the first is the quality, and what the rows add has it as mean."""
    x, y = blobs(50, "train")
    model = CentroidLearner().fit(x, y, rng=np.random.default_rng(0))
    targets = {
        "single-label": TEST[1],
        "multi-label": np.where(TEST[1][:, None] == 2, -1, np.eye(3, dtype=int)[TEST[1]]),
        "regression": model.logits(TEST[0]) + 1.5,
    }[task]

    found = evaluate_model(model, TEST[0], targets, task)

    assert tuple(found.metrics) == metric_names(task, 3)
    expected = quality(model, TEST[0], targets, task)
    assert found.metrics[METRICS[task]] == expected
    assert found.shares.shape == (len(TEST[1]),)
    assert found.shares.mean() == pytest.approx(expected)


def test_the_spread_of_the_rows_is_the_sampling_error_of_the_area() -> None:
    """As 4,000 bootstrap samples of the rows have it, with unknown labels."""
    rng = np.random.default_rng(0)
    y = rng.integers(-1, 2, (300, 2))
    scores = rng.normal(size=(300, 2)).round(1) + y
    shares = evaluate_model(Told(scores), scores, y, "multi-label").shares

    samples = [rng.integers(300, size=300) for _ in range(4000)]
    areas = [mean_auc(scores[rows], y[rows]) for rows in samples]

    assert shares.std() / math.sqrt(300) == pytest.approx(np.std(areas), rel=0.05)


def test_a_constant_answer_has_no_merit_but_frequency() -> None:
    """The most frequent class of the training rows, measured on others."""
    trained, y = np.array([1, 1, 0]), np.array([0, 1, 1, 1, 0])
    numbers = np.array([[1.0], [3.0]])

    found = evaluate_constant(trained, y, 2, "single-label").metrics

    assert found["accuracy"] == 0.6
    assert found["balanced-accuracy"] == found["auc"] == 0.5
    assert found["macro-f1"] == pytest.approx(0.75 / 2)
    assert "auc" not in evaluate_constant(trained, y, 3, "single-label").metrics
    assert evaluate_constant(trained, y[:, None], 1, "multi-label").metrics == {"mean-auc": 0.5}
    squared = evaluate_constant(numbers, numbers + 1, 1, "regression").metrics
    assert squared == {"mean-squared-error": 2.0, "r2": -1.0, "rmse": math.sqrt(2), "mae": 1.0}


def test_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    """Of several targets R2 is the share of all their variance together."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(50, 2)) * [1.0, 5.0]
    scores = y + rng.normal(size=(50, 2))

    found = evaluate_model(Told(scores), scores, y, "regression")

    variance = sklearn.metrics.r2_score(y, scores, multioutput="variance_weighted")
    assert found.metrics == pytest.approx(
        {
            "mean-squared-error": sklearn.metrics.mean_squared_error(y, scores),
            "r2": variance,
            "rmse": np.sqrt(sklearn.metrics.mean_squared_error(y, scores)),
            "mae": sklearn.metrics.mean_absolute_error(y, scores),
        }
    )
    assert variance_explained(found, y).shares.mean() == pytest.approx(variance)


def test_targets_that_are_all_the_same_have_no_variance_to_explain() -> None:
    y = np.ones((3, 1))
    found = evaluate_model(Told(y + 1), y, y, "regression")
    assert math.isnan(found.metrics["r2"])
    assert np.isnan(variance_explained(found, y).shares).all()


def test_rows_of_one_kind_have_no_area() -> None:
    assert math.isnan(auc(np.array([1.0, 2.0]), np.array([True, True])))
    unknown = np.full((2, 1), -1)
    found = evaluate_model(Told(np.ones((2, 1))), unknown, unknown, "multi-label")
    assert np.isnan(found.shares).all()
