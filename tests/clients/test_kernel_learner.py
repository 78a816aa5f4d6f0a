"""Ridge regression by kernels, lines and random features, against textbook formulas."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

from clients.tabular.kernel import (
    KERNELS,
    RIDGES,
    KernelRidgeLearner,
    RandomFeaturesLearner,
    RidgeLearner,
    solve_ridge,
    solve_shifted,
)
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    UnsupportedLearner,
)

RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(30, 4)), RNG.normal(size=(7, 4))
Y = RNG.normal(size=(30, 2))


def kernel_ridge(x: Array = X, y: Array = Y, **own: Any) -> KernelRidgeLearner:
    settings = {"reveal_rows": True, **own}
    learner = KernelRidgeLearner(num_classes=y.shape[1], task="regression", **settings)
    return learner.fit(x, y, rng=np.random.default_rng(0))


def ridge(x: Array = X, y: Array = Y, **own: Any) -> RidgeLearner:
    learner = RidgeLearner(num_classes=y.shape[1], task="regression", **own)
    return learner.fit(x, y, rng=np.random.default_rng(0))


def similarity(kernel: str, a: FloatArray, b: FloatArray) -> float:
    """Return the kernel of one pair as the docstring defines it, with gamma 0.3."""
    match kernel:
        case "linear":
            return float(a @ b)
        case "rbf":
            return float(np.exp(-0.3 * ((a - b) ** 2).sum()))
        case "polynomial":
            return float((0.3 * (a @ b) + 2.0) ** 2)
    return float(np.exp(-0.3 * np.abs(a - b).sum()))


def gram(kernel: str, one: FloatArray, other: FloatArray) -> FloatArray:
    return np.array([[similarity(kernel, a, b) for b in other] for a in one])


# --- kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("c", [1e-3, 0.5])
def test_predictions_are_those_of_the_paper(kernel: Any, c: float) -> None:
    """K and k_x are divided by the number of rows, c is not multiplied by it."""
    matrix, vectors = gram(kernel, X, X) / 30, gram(kernel, NEW, X) / 30
    expected = vectors @ np.linalg.solve(c * np.eye(30) + matrix, Y)

    actual = kernel_ridge(kernel=kernel, ridge=c, gamma=0.3, degree=2, offset=2.0)

    assert np.allclose(actual.predict(NEW), expected, rtol=0, atol=1e-10)


def test_the_ridge_counts_per_row() -> None:
    """A training set that is there twice gives the same predictor."""
    once, twice = (
        kernel_ridge(ridge=0.1),
        kernel_ridge(np.tile(X, (2, 1)), np.tile(Y, (2, 1)), ridge=0.1),
    )

    assert np.allclose(once.predict(NEW), twice.predict(NEW), atol=1e-10)


@pytest.mark.parametrize("kernel", ["rbf", "laplace"])
def test_without_ridge_the_data_are_fitted(kernel: Any) -> None:
    """With c = 0 predictions of distinct training rows are their targets."""
    actual = kernel_ridge(kernel=kernel, ridge=0.0, gamma=1.0)

    assert np.allclose(actual.predict(X), Y, atol=1e-10)


def test_without_ridge_equal_rows_share_their_mean() -> None:
    """Rows that contradict each other are no division by zero but a least-squares fit."""
    x = np.concatenate([X, X[:5]])
    y = np.concatenate([Y, Y[:5] + 2.0])

    actual = kernel_ridge(x, y, ridge=0.0, gamma=1.0).predict(X)

    assert np.allclose(actual[:5], Y[:5] + 1.0, atol=1e-8)
    assert np.allclose(actual[5:], Y[5:], atol=1e-8)


@pytest.mark.parametrize("width", [4, 50])
def test_without_ridge_a_line_has_least_norm(width: int) -> None:
    """The linear kernel gives the pseudo-inverse for more rows and for more columns."""
    x = RNG.normal(size=(30, width))
    expected = x @ np.linalg.pinv(x) @ Y

    actual = kernel_ridge(x, kernel="linear", ridge=0.0)

    assert np.allclose(actual.predict(x), expected, atol=1e-10)
    assert np.allclose(ridge(x, ridge=0.0, intercept=False).predict(x), expected, atol=1e-10)


def test_a_vanishing_ridge_is_no_ridge() -> None:
    """A ridge below rounding has the limit of smaller and smaller ones, not noise."""
    x = np.concatenate([X, X])
    y = np.concatenate([Y, Y])

    tiny = kernel_ridge(x, y, kernel="linear", ridge=1e-25)

    assert np.allclose(tiny.predict(NEW), NEW @ np.linalg.pinv(x) @ y, atol=1e-9)


def test_self_distillation_shrinks_as_the_paper_says() -> None:
    """Learning one's own predictions t times gives (K (c I + K)^-1)^t y on the rows."""
    c, matrix = 0.05, gram("rbf", X, X) / 30
    step = matrix @ np.linalg.inv(c * np.eye(30) + matrix)
    learner = KernelRidgeLearner(num_classes=2, ridge=c, gamma=0.3)
    scores: FloatArray = Y

    for _ in range(4):
        scores = learner.distill(X, scores, rng=np.random.default_rng(0)).logits(X)

    assert np.allclose(scores, np.linalg.matrix_power(step, 4) @ Y, atol=1e-10)


def test_gamma_is_one_over_the_columns() -> None:
    """Without gamma, kernels take the number of columns as their scale."""
    assert np.array_equal(kernel_ridge().predict(NEW), kernel_ridge(gamma=0.25).predict(NEW))


def test_distant_data_lose_no_digits() -> None:
    """Distances are differences, so that a common shift of all rows has no effect."""
    shifted = kernel_ridge(X + 2.0**20).predict(NEW + 2.0**20)

    assert np.allclose(shifted, kernel_ridge().predict(NEW), atol=1e-6)


@given(
    rank=st.integers(1, 6),
    shift=st.sampled_from([0.0, 1e-6, 1e-2, 10.0]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_the_solution_is_the_pseudo_inverse(rank: int, shift: float, seed: int) -> None:
    """Also singular matrices are solved, as numpy's pseudo-inverse does."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(6, 6)))[0][:, :rank]
    matrix = basis @ np.diag(rng.uniform(0.1, 10, rank)) @ basis.T
    targets = rng.normal(size=(6, 2))
    inverse = np.linalg.pinv(matrix + shift * np.eye(6), rcond=1e-10, hermitian=True)

    actual = solve_shifted((matrix + matrix.T) / 2, shift, targets)

    expected = inverse @ targets
    assert np.linalg.norm(actual - expected) <= 1e-8 * np.linalg.norm(expected)


# --- linear -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [4, 50])
@pytest.mark.parametrize("c", [1e-3, 0.5])
def test_ridge_without_intercept_is_the_linear_kernel(width: int, c: float) -> None:
    """Both forms of the same regression give the same numbers."""
    x, new = RNG.normal(size=(30, width)), RNG.normal(size=(7, width))

    primal = ridge(x, ridge=c, intercept=False).predict(new)

    assert np.allclose(
        primal, kernel_ridge(x, kernel="linear", ridge=c).predict(new), atol=1e-10
    )


@pytest.mark.parametrize("width", [4, 50])
def test_the_intercept_is_not_penalised(width: int) -> None:
    """Coefficients solve the normal equations in which the constant has no ridge."""
    x, c = RNG.normal(size=(30, width)) + 3.0, 0.2
    design = np.column_stack([x, np.ones(30)])
    penalty = np.diag([c * 30.0] * width + [0.0])
    expected = np.linalg.solve(design.T @ design + penalty, design.T @ Y)

    arrays = ridge(x, ridge=c).to_arrays()

    assert np.allclose(arrays["coefficients"], expected[:-1], atol=1e-10)
    assert np.allclose(arrays["intercepts"], expected[-1], atol=1e-10)


def test_repeated_and_empty_columns_are_no_trouble() -> None:
    """Without a ridge, equal columns share their weight and zeros get none."""
    x = np.column_stack([X[:, 0], X[:, 0], np.zeros(30)])

    arrays = ridge(x, 3.0 * X[:, :1] + 1.0, ridge=0.0).to_arrays()

    assert np.allclose(arrays["coefficients"][:, 0], [1.5, 1.5, 0.0], atol=1e-10)
    assert np.allclose(arrays["intercepts"], [1.0], atol=1e-10)


@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(3, 12))
@settings(max_examples=100, deadline=None)
def test_dependent_columns_give_the_least_norm(seed: int, num_rows: int) -> None:
    """A column that is the sum of others up to rounding gets no weight of its own."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(num_rows, 2)), rng.normal(size=(num_rows, 1))
    x = np.column_stack([x, x @ rng.normal(size=2)])

    arrays = ridge(x, y, ridge=0.0, intercept=False).to_arrays()

    expected = np.linalg.pinv(x, rcond=1e-10) @ y
    error = np.linalg.norm(arrays["coefficients"] - expected)
    assert error <= 1e-6 * (1 + np.linalg.norm(expected))


def test_coefficients_are_all_that_travels() -> None:
    """A linear model holds one number per column and class, however many rows it saw."""
    arrays = ridge(np.tile(X, (9, 1)), np.tile(Y, (9, 1))).to_arrays()

    own = {name: arrays[name].shape for name in ("coefficients", "intercepts")}

    assert own == {"coefficients": (4, 2), "intercepts": (2,)}
    assert len(arrays) == 5


# --- travel and refusals ------------------------------------------------------------------


def test_rows_stay_at_home_unless_told_otherwise() -> None:
    """A kernel model is its rows: by default it does not travel, but still receives."""
    assert np.array_equal(kernel_ridge().to_arrays()["support-rows"], X)
    received = KernelRidgeLearner(num_classes=2, task="regression").from_arrays(
        kernel_ridge().to_arrays()
    )

    assert np.array_equal(received.predict(NEW), kernel_ridge().predict(NEW))
    for learner in (received, kernel_ridge(reveal_rows=False)):
        with pytest.raises(UnsupportedLearner, match=r"reveal_rows must be True .* 30 train"):
            learner.to_arrays()


@pytest.mark.parametrize(
    "other", [{"kernel": "laplace"}, {"gamma": 0.7}, {"degree": 4}, {"offset": 0.0}]
)
def test_another_kernel_is_refused(other: dict[str, Any]) -> None:
    """A model is not read by a learner that would compare rows in another way."""
    receiver = KernelRidgeLearner(num_classes=2, task="regression", **other)

    with pytest.raises(KnowledgeMismatch, match=r"kernel must be .* as here"):
        receiver.from_arrays(kernel_ridge().to_arrays())


def test_rows_that_overflow_the_kernel_are_refused() -> None:
    """A power that leaves the range of numbers is named instead of giving NaN."""
    with pytest.raises(InvalidData, match="x must be small enough for the kernel"):
        kernel_ridge(X * 1e30, kernel="polynomial", degree=9)


# --- random features ----------------------------------------------------------------------


COLUMNS = np.random.default_rng(0).normal(size=(80, 4))
CURVES = np.stack(
    [np.sin(2 * COLUMNS[:, 0]) + COLUMNS[:, 1], COLUMNS[:, 2] * COLUMNS[:, 3]], axis=1
)


def waves(
    x: Array = COLUMNS, y: Array = CURVES, seed: int = 0, **own: Any
) -> RandomFeaturesLearner:
    settings = {"num_features": 50, **own}
    made = RandomFeaturesLearner(num_classes=y.shape[1], task="regression", **settings)
    return made.fit(x, y, rng=np.random.default_rng(seed))


def features(arrays: dict[str, Array], x: Array) -> FloatArray:
    """Return the features as the docstring defines them, in float64."""
    placed = (x - arrays["centre"]) * arrays["scales"]
    waves = placed @ arrays["frequencies"].astype(np.float64) + arrays["phases"]
    return np.asarray(np.sqrt(2 / waves.shape[1]) * np.cos(waves))


@pytest.mark.parametrize("num_features", [50, 300])
@pytest.mark.parametrize("ridge", [1e-4, 0.1])
def test_predictions_are_those_of_ridge_regression(num_features: int, ridge: float) -> None:
    """More rows than features or fewer: scikit-learn finds the same on the same features."""
    model = waves(num_features=num_features, ridge=ridge)
    arrays = model.to_arrays()
    expected = Ridge(alpha=ridge * len(COLUMNS)).fit(features(arrays, COLUMNS), CURVES)

    actual = model.predict(NEW)

    assert np.allclose(actual, expected.predict(features(arrays, NEW)), atol=1e-3)


def test_products_of_features_are_a_kernel() -> None:
    """Of rows at the median distance, its mean is exp(-1/2); of a row with itself, 1."""
    arrays = waves(num_features=20_000, ridge=0.1).to_arrays()
    made = features(arrays, COLUMNS)

    distances = np.linalg.norm(COLUMNS[:, np.newaxis] - COLUMNS, axis=2) * arrays["scales"][0]

    assert np.abs(made @ made.T - np.exp(-(distances**2) / 2)).max() < 0.05
    assert np.median(distances[distances > 0]) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("width", [20, 150])
@pytest.mark.parametrize("noise", [0.0, 1.0, 30.0])
def test_the_ridge_is_that_of_cross_validation(width: int, noise: float) -> None:
    """By a second route: residuals and freedom of the matrix that maps targets to fits."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, width))
    x -= x.mean(axis=0)
    targets = x[:, :3] + noise * rng.normal(size=(80, 3))
    targets -= targets.mean(axis=0)

    def error(ridge: float) -> float:
        inner = np.linalg.inv(x.T @ x + 80 * ridge * np.eye(width))
        hat = x @ inner @ x.T + np.ones((80, 80)) / 80
        return float(np.square(targets - hat @ targets).sum() / np.trace(np.eye(80) - hat) ** 2)

    best = min(RIDGES, key=error)

    expected = Ridge(alpha=80 * best).fit(x, targets).coef_.T
    assert np.allclose(solve_ridge(x, targets, RIDGES), expected, atol=1e-8)


def test_noise_raises_the_ridge() -> None:
    """Targets of noise alone are hardly fitted; those of a smooth function are."""
    noise = RNG.normal(size=(80, 1))

    smooth, noisy = waves(y=CURVES[:, :1]), waves(y=noise)

    assert np.square(smooth.predict(COLUMNS) - CURVES[:, :1]).mean() < 0.1 * CURVES[:, 0].var()
    assert np.square(noisy.predict(COLUMNS) - noise).mean() > 0.7 * noise.var()


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6, 1e30])
def test_units_have_no_effect(factor: float) -> None:
    """Rows in other units, and far from zero, give the same model of themselves."""
    expected = waves(ridge=1e-3).predict(NEW)

    assert np.allclose(
        waves(COLUMNS * factor, ridge=1e-3).predict(NEW * factor), expected, atol=1e-3
    )


def test_columns_of_one_unit_keep_it() -> None:
    """Pixels are not blown up; columns of different kinds are scaled by their spread."""
    pixels = waves().to_arrays()["scales"]
    mixed = waves(COLUMNS * np.array([1.0, 1e3, 1.0, 1.0])).to_arrays()["scales"]

    assert len(set(pixels)) == 1
    assert mixed[1] / mixed[0] == pytest.approx(1e-3, rel=0.5)


def test_equal_rows_teach_a_constant() -> None:
    """Where no distance can be measured, the answer is the mean."""
    model = waves(np.ones((5, 4)), np.arange(10.0).reshape(5, 2))

    assert np.allclose(model.predict(np.ones((1, 4))), [[4.0, 5.0]], atol=1e-6)


def test_only_the_generator_is_random() -> None:
    """The same generator gives the same model to the bit, another other features."""
    first, again, other = (waves(seed=seed).to_arrays() for seed in (0, 0, 1))

    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["frequencies"], other["frequencies"])


@pytest.mark.parametrize(
    ("make", "limit", "most", "atol"),
    [(kernel_ridge, "_PAIRS_AT_ONCE", 65, 1e-12), (waves, "_VALUES_AT_ONCE", 100, 1e-5)],
)
def test_how_much_is_held_at_once_has_no_effect(
    make: Any, limit: str, most: int, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither pairs of rows nor features, beyond the last bits."""
    together = make().predict(NEW)

    monkeypatch.setattr(f"clients.tabular.kernel.{limit}", most)

    assert np.allclose(make().predict(NEW), together, atol=atol)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (kernel_ridge, "support-rows", np.zeros((0, 4))),
        (kernel_ridge, "support-rows", np.zeros((30, 3))),
        (kernel_ridge, "support-rows", np.zeros(30)),
        (kernel_ridge, "support-rows", np.float64(1.0)),
        (kernel_ridge, "dual-coefficients", np.zeros((29, 2))),
        (kernel_ridge, "dual-coefficients", np.zeros((30, 3))),
        (kernel_ridge, "kernel", np.zeros(3)),
        (waves, "centre", np.zeros(3)),
        (waves, "scales", np.full(4, np.inf)),
        (waves, "frequencies", np.zeros((4, 50))),
        (waves, "frequencies", np.zeros((4, 51), dtype=np.float32)),
        (waves, "frequencies", np.broadcast_to(np.float32(1), (4, 50))),
        (waves, "phases", np.zeros(51, dtype=np.float32)),
        (waves, "coefficients", np.zeros((50, 3))),
        (waves, "intercepts", np.zeros(3)),
    ],
)
def test_forged_models_are_refused(make: Any, name: str, value: Array) -> None:
    """Rows, coefficients and features must fit each other, the width and the receiver."""
    model = make()

    with pytest.raises(KnowledgeMismatch, match=f"{name} must be"):
        model.from_arrays({**model.to_arrays(), name: value})


@pytest.mark.parametrize("name", ["centre", "scales", "frequencies", "phases"])
def test_huge_received_features_stay_finite(name: str) -> None:
    """Cosines of what overflows say nothing, instead of NaN."""
    arrays = waves().to_arrays()
    huge = np.full_like(arrays[name], np.finfo(arrays[name].dtype).max)
    receiver = RandomFeaturesLearner(num_classes=2, task="regression", num_features=50)

    twin = receiver.from_arrays({**arrays, name: huge})

    assert np.isfinite(twin.predict(NEW)).all()


RANGES = {
    kernel_ridge: [
        *(("ridge", value) for value in (-0.1, np.inf, np.nan)),
        *(("gamma", value) for value in (0.0, np.inf)),
        *(("kernel", "cosine"), ("degree", 0), ("offset", -1.0)),
    ],
    ridge: [("ridge", value) for value in (-0.1, np.inf, np.nan)],
    waves: [("num_features", 0), *(("ridge", value) for value in (0.0, -1.0, np.inf))],
}


@pytest.mark.parametrize(
    ("make", "setting", "value"), [(make, *wrong) for make in RANGES for wrong in RANGES[make]]
)
def test_bad_settings_are_refused(make: Any, setting: str, value: Any) -> None:
    """A setting outside its range is named with its value."""
    with pytest.raises(InvalidParameter, match=f"^{type(make()).__name__}: {setting} must be"):
        make(**{setting: value})
