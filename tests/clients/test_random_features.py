"""RandomFeaturesLearner: the closed form, the kernel it stands for, and forged models."""

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from clients.tabular.kernel import RIDGES, RandomFeaturesLearner, solve_ridge
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch

RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(80, 4)), RNG.normal(size=(7, 4))
Y = np.stack([np.sin(2 * X[:, 0]) + X[:, 1], X[:, 2] * X[:, 3]], axis=1)


def learner(x: Array = X, y: Array = Y, seed: int = 0, **own: Any) -> RandomFeaturesLearner:
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
    model = learner(num_features=num_features, ridge=ridge)
    arrays = model.to_arrays()
    expected = Ridge(alpha=ridge * len(X)).fit(features(arrays, X), Y)

    actual = model.predict(NEW)

    assert np.allclose(actual, expected.predict(features(arrays, NEW)), atol=1e-3)


def test_products_of_features_are_a_kernel() -> None:
    """Of rows at the median distance, its mean is exp(-1/2); of a row with itself, 1."""
    arrays = learner(num_features=20_000, ridge=0.1).to_arrays()
    made = features(arrays, X)

    distances = np.linalg.norm(X[:, np.newaxis] - X, axis=2) * arrays["scales"][0]

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

    smooth, noisy = learner(y=Y[:, :1]), learner(y=noise)

    assert np.square(smooth.predict(X) - Y[:, :1]).mean() < 0.1 * Y[:, 0].var()
    assert np.square(noisy.predict(X) - noise).mean() > 0.7 * noise.var()


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6, 1e30])
def test_units_have_no_effect(factor: float) -> None:
    """Rows in other units, and far from zero, give the same model of themselves."""
    expected = learner(ridge=1e-3).predict(NEW)

    assert np.allclose(
        learner(X * factor, ridge=1e-3).predict(NEW * factor), expected, atol=1e-3
    )


def test_columns_of_one_unit_keep_it() -> None:
    """Pixels are not blown up; columns of different kinds are scaled by their spread."""
    pixels = learner().to_arrays()["scales"]
    mixed = learner(X * np.array([1.0, 1e3, 1.0, 1.0])).to_arrays()["scales"]

    assert len(set(pixels)) == 1
    assert mixed[1] / mixed[0] == pytest.approx(1e-3, rel=0.5)


def test_equal_rows_teach_a_constant() -> None:
    """Where no distance can be measured, the answer is the mean."""
    model = learner(np.ones((5, 4)), np.arange(10.0).reshape(5, 2))

    assert np.allclose(model.predict(np.ones((1, 4))), [[4.0, 5.0]], atol=1e-6)


def test_only_the_generator_is_random() -> None:
    """The same generator gives the same model to the bit, another other features."""
    first, again, other = (learner(seed=seed).to_arrays() for seed in (0, 0, 1))

    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["frequencies"], other["frequencies"])


def test_rows_are_answered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many values are held at once has no effect beyond the last bits."""
    together = learner().predict(NEW)

    monkeypatch.setattr("clients.tabular.kernel._VALUES_AT_ONCE", 100)

    assert np.allclose(learner().predict(NEW), together, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("centre", np.zeros(3)),
        ("scales", np.full(4, np.inf)),
        ("frequencies", np.zeros((4, 50))),
        ("frequencies", np.zeros((4, 51), dtype=np.float32)),
        ("frequencies", np.broadcast_to(np.float32(1), (4, 50))),
        ("phases", np.zeros(51, dtype=np.float32)),
        ("coefficients", np.zeros((50, 3))),
        ("intercepts", np.zeros(3)),
    ],
)
def test_forged_models_are_refused(name: str, value: Array) -> None:
    """Numbers of features and outputs are the receiver's own."""
    receiver = RandomFeaturesLearner(num_classes=2, task="regression", num_features=50)

    with pytest.raises(KnowledgeMismatch, match=f"{name} must be"):
        receiver.from_arrays({**learner().to_arrays(), name: value})


@pytest.mark.parametrize("name", ["centre", "scales", "frequencies", "phases"])
def test_huge_received_features_stay_finite(name: str) -> None:
    """Cosines of what overflows say nothing, instead of NaN."""
    arrays = learner().to_arrays()
    huge = np.full_like(arrays[name], np.finfo(arrays[name].dtype).max)
    receiver = RandomFeaturesLearner(num_classes=2, task="regression", num_features=50)

    twin = receiver.from_arrays({**arrays, name: huge})

    assert np.isfinite(twin.predict(NEW)).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_features", 0), ("ridge", 0.0), ("ridge", -1.0), ("ridge", np.inf)],
)
def test_bad_settings_are_refused(setting: str, value: Any) -> None:
    """A setting outside its range is named with its value."""
    with pytest.raises(InvalidParameter, match=f"RandomFeaturesLearner: {setting} must be"):
        learner(**{setting: value})
