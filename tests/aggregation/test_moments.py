"""Models of moments against what independent routes make of the records themselves."""

import numpy as np
import pytest
from scipy.special import log_softmax
from sklearn.datasets import load_diabetes, load_iris
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, Ridge

from fl_strategies.aggregation import moments
from fl_strategies.aggregation.moments import Moments, Solution

CONSTANT = 0.5
IRIS_X, IRIS_Y = load_iris(return_X_y=True)
X = (IRIS_X - IRIS_X.mean(axis=0)) / IRIS_X.std(axis=0) / 4
ROWS = np.hstack([X, np.full((len(X), 1), CONSTANT)])
CODES = moments.coded(IRIS_Y, 3, "single-label")
LINEAR = [np.arange(4)]


def test_one_penalty_is_the_ridge_regression_of_the_records() -> None:
    found = moments.solve(Moments.of_records(ROWS, CODES), LINEAR, [0.01])

    other = Ridge(alpha=0.01 * len(X)).fit(X, CODES)
    assert found.weights[:-1] == pytest.approx(other.coef_.T, rel=1e-9)
    assert found.weights[-1] * CONSTANT == pytest.approx(other.intercept_, rel=1e-9)


def test_the_penalty_is_the_one_of_least_squared_error_on_left_out_folds() -> None:
    penalties = [1e-6, 1e-3, 1e-2, 1e-1, 1.0]
    folds = [np.arange(len(X)) % 5 == fold for fold in range(5)]

    def error(penalty: float) -> float:
        total = 0.0
        for fold in folds:
            model = Ridge(alpha=penalty * (~fold).sum()).fit(X[~fold], CODES[~fold])
            total += np.square(model.predict(X[fold]) - CODES[fold]).sum()
        return total

    known = Moments.of_records(ROWS, CODES, num_folds=5)

    assert moments.solve(known, LINEAR, penalties).penalty == min(penalties, key=error)


def test_features_that_only_add_noise_are_not_used() -> None:
    rng = np.random.default_rng(0)
    wide = np.hstack([X, rng.normal(size=(len(X), 100)) / 10, ROWS[:, -1:]])
    choices = [np.arange(4), np.arange(104)]

    found = moments.solve(Moments.of_records(wide, CODES, 5), choices)

    assert found.used.tolist() == [0, 1, 2, 3]
    assert not found.weights[4:-1].any()


def test_standard_errors_are_those_of_least_squares() -> None:
    x, y = load_diabetes(return_X_y=True)
    x, y = x * 10, (y - y.mean()) / 200
    rows = np.hstack([x, np.full((len(x), 1), CONSTANT)])
    known = Moments.of_records(rows, y[:, None])

    found = moments.standard_errors(known, moments.solve(known, [np.arange(10)], [0.0]))

    design = np.hstack([x, np.ones((len(x), 1))])
    fit = np.linalg.lstsq(design, y, rcond=None)
    variance = fit[1][0] / (len(x) - 11)
    expected = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    assert found is not None
    assert found[:-1, 0] == pytest.approx(expected[:-1], rel=1e-6)


def test_there_are_no_standard_errors_with_as_many_weights_as_records() -> None:
    known = Moments.of_records(ROWS[:4], CODES[:4])

    assert moments.standard_errors(known, Solution(np.zeros((5, 3)), 0.0, LINEAR[0])) is None


def test_lda_of_scores_is_linear_discriminant_analysis() -> None:
    """Without a penalty, fitted scores hold all that the features say about classes."""
    known = Moments.of_records(ROWS, CODES)
    solved = moments.solve(known, LINEAR, [0.0])

    weights, _ = moments.log_linear(
        known, solved, head="lda", constant=CONSTANT, num_classes=3, task="single-label"
    )

    other = LinearDiscriminantAnalysis(solver="lsqr").fit(X, IRIS_Y)
    assert log_softmax(ROWS @ weights, axis=1) == pytest.approx(
        other.predict_log_proba(X), abs=2e-2
    )


@pytest.mark.parametrize("classes", [2, 3])
def test_where_records_are_public_it_is_logistic_regression(
    classes: int,
) -> None:
    """Then the expectations over public rows are those over the records."""
    inside = classes > IRIS_Y
    x, y = X[inside], IRIS_Y[inside]
    means = x.T @ moments.coded(y, classes, "single-label") / len(x)

    found = moments.logistic_weights(x, means, 0.01, softmax_link=classes > 2)

    # Scores of two classes are plus and minus one score, whose squares count once.
    strength = 0.01 if classes > 2 else 0.01 / 4
    other = LogisticRegression(C=1 / (len(x) * strength), fit_intercept=False, tol=1e-8)
    expected = other.fit(x, y).coef_.T if classes > 2 else other.fit(x, y).coef_.T / 2
    assert found == pytest.approx(expected, abs=2e-3)


def test_probabilities_are_calibrated_by_folds() -> None:
    """No other multiple of the weights has a much better log-loss on unseen records."""
    order = np.random.default_rng(3).permutation(len(X))
    seen, unseen = order[:90], order[90:]
    known = Moments.of_records(ROWS[seen], CODES[seen], num_folds=5)

    weights, sharp = moments.log_linear(
        known,
        moments.solve(known, LINEAR),
        head="ridge",
        constant=CONSTANT,
        num_classes=3,
        task="single-label",
    )

    def loss(times: float) -> float:
        logs = log_softmax(times * ROWS[unseen] @ weights, axis=1)
        return -float(logs[np.arange(len(unseen)), IRIS_Y[unseen]].mean())

    assert sharp > 1
    assert loss(1.0) < min(map(loss, np.geomspace(0.2, 5, 21))) + 0.03


def test_two_classes_are_one_score_of_both_signs() -> None:
    codes = moments.coded(np.array([0, 1, 1]), 2, "single-label")
    rows = np.array([[1.0, 2], [3, 2], [5, 2]])
    known = Moments.of_records(rows, codes)

    assert codes.tolist() == [[-1], [1], [1]]
    assert moments.class_sums(known, 2).tolist() == [[1, 8], [2, 4]]
    assert moments.indicator_weights(np.array([[0.5], [0.25]]), 2.0, 2).tolist() == [
        [-0.25, 0.25],
        [0.125, 0.375],
    ]


def test_labels_and_numbers_are_coded() -> None:
    labels = np.array([[1, -1], [0, 1]])
    numbers = np.array([[0.26], [-7.0]])

    assert moments.coded(labels, 2, "multi-label").tolist() == [[1, 0], [-1, 1]]
    assert moments.coded(numbers, 1, "regression", levels=4).tolist() == [[1], [-4]]


def test_a_packed_matrix_is_the_matrix() -> None:
    gram = np.array([[1, 2, 3], [2, 4, 5], [3, 5, 6]])

    assert moments.pack(gram).tolist() == [1, 2, 3, 4, 5, 6]
    assert np.array_equal(moments.unpack(moments.pack(gram), 3), gram)


def test_noise_that_makes_directions_negative_does_no_harm() -> None:
    known = Moments.of_records(ROWS, CODES)
    noisy = Moments(
        known.targets, known.gram - 200 * np.eye(5), known.squares, known.num_records
    )

    assert np.isfinite(moments.solve_noisy(noisy, 0.1).weights).all()
    assert np.linalg.eigvalsh(moments.without_negative(noisy.gram[0])).min() > -1e-9
