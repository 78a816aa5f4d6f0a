"""Means and signed sums of models: mathematics, arrays and distillation."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.special import softmax

from clients.tabular.kernel import RidgeLearner
from fl_strategies._util import FloatArray, derive_rng
from fl_strategies.aggregation.consensus import to_probabilities
from fl_strategies.aggregation.ensembles import (
    MeanEnsemble,
    RememberedScores,
    SignedEnsemble,
    outputs,
)
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, UnsupportedLearner
from fl_strategies.learners import Learner, PortableLearner
from fl_strategies.server.replies import RULES, aggregate_metrics
from fl_strategies.wire import keys
from tests.toys import TEST, CentroidLearner, blobs

RNG = np.random.default_rng(0)


def fitted(number: int) -> CentroidLearner:
    x, y = blobs(60, "committee", number)
    return CentroidLearner().fit(x, y, rng=derive_rng(0, "fit", number))


def signed(signs: tuple[int, ...] = (1, 1, -1)) -> SignedEnsemble:
    members = [fitted(number) for number in range(len(signs))]
    names = ["centroid"] * len(signs)
    return SignedEnsemble(
        members,
        signs,
        names,
        num_classes=3,
        task="single-label",
        model_fns={"centroid": CentroidLearner},
    )


def test_a_signed_sum_adds_and_subtracts_probabilities() -> None:
    ensemble = signed()
    one, two, three = (softmax(m.logits(TEST[0]), axis=1) for m in ensemble.members)

    np.testing.assert_allclose(ensemble.logits(TEST[0]), one + two - three)
    total = one.copy()
    assert ensemble.add_from(1, TEST[0], total) == []
    np.testing.assert_allclose(total, one + two - three)
    expected = (one + two - three).argmax(axis=1)
    np.testing.assert_array_equal(ensemble.predict(TEST[0]), expected)
    assert isinstance(ensemble, Learner)
    assert isinstance(ensemble, PortableLearner)


def test_a_mean_of_probabilities_is_given_as_logarithms() -> None:
    """exp(logits) is the mean, which sums to one."""
    members = [fitted(0), fitted(1)]
    mean = np.mean([softmax(m.logits(TEST[0]), axis=1) for m in members], axis=0)

    ensemble = MeanEnsemble(members, num_classes=3, task="single-label")

    np.testing.assert_allclose(np.exp(ensemble.logits(TEST[0])), mean, atol=2e-12)


def test_outputs_of_a_regression_are_taken_as_they_are() -> None:
    x, y = RNG.normal(size=(20, 3)), RNG.normal(size=(20, 2))
    models = [
        RidgeLearner(num_classes=2, task="regression").fit(x[rows], y[rows], rng=RNG)
        for rows in (slice(0, 10), slice(10, 20))
    ]
    one, two = (model.logits(x) for model in models)

    mean = MeanEnsemble(models, num_classes=2, task="regression")
    difference = SignedEnsemble(
        models, (1, -1), ("a", "a"), num_classes=2, task="regression", model_fns={}
    )

    np.testing.assert_allclose(mean.logits(x), (one + two) / 2)
    np.testing.assert_allclose(difference.logits(x), one - two)


def test_a_saved_ensemble_is_the_same_to_the_bit() -> None:
    """Arrays carry signs, names and members; factories come from the receiver."""
    ensemble = signed()
    blank = SignedEnsemble(
        num_classes=3, task="single-label", model_fns={"centroid": CentroidLearner}
    )

    twin = blank.from_arrays(ensemble.to_arrays())

    assert twin.signs == ensemble.signs
    assert twin.logits(TEST[0]).tobytes() == ensemble.logits(TEST[0]).tobytes()


def text(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


@pytest.mark.parametrize(
    "changes",
    [
        {"signs": np.array([1, 1, 2], dtype=np.int8)},
        {"signs": np.array([1, 1, -1])},
        {"signs": np.array([1, 1], dtype=np.int8)},
        {"signs": np.empty(0, dtype=np.int8)},
        {"names": np.array([255, 254], dtype=np.uint8)},
        {"names": text({"a": 1})},
        {"names": text(["centroid", "centroid", 3])},
        {"names": text(["centroid", "centroid", "other"])},
        {"names": text(["centroid", "centroid"])},
        {"names": np.zeros(2**20 + 1, dtype=np.uint8)},
        {"names": np.frombuffer(b"[" * 10_000, dtype=np.uint8)},
        {"2/centroids": np.zeros((4, 2))},
        {"3/centroids": np.zeros((3, 2))},
        {"stray": np.zeros(1)},
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, np.ndarray]) -> None:
    ensemble = signed()

    with pytest.raises(KnowledgeMismatch):
        ensemble.from_arrays({**ensemble.to_arrays(), **changes})


def test_missing_arrays_are_refused() -> None:
    ensemble = signed()
    whole = ensemble.to_arrays()

    for name in whole:
        with pytest.raises(KnowledgeMismatch):
            ensemble.from_arrays({key: a for key, a in whole.items() if key != name})


def test_members_of_another_class_list_are_refused() -> None:
    """A factory of the right name with other classes does not make a member."""
    ensemble = signed()
    ensemble.num_classes = 4

    with pytest.raises(KnowledgeMismatch, match="must have 4 classes or outputs, got 3"):
        ensemble.from_arrays(ensemble.to_arrays())


scores = arrays(
    np.float64,
    array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
    elements=st.floats(-50, 50),
)


@given(scores=scores, shift=st.floats(-5, 5))
def test_nearest_probabilities(scores: FloatArray, shift: float) -> None:
    """They are probabilities, no vertex is nearer, and a shift of a row changes nothing."""
    found = to_probabilities(scores)

    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    np.testing.assert_allclose(to_probabilities(scores + shift), found, atol=1e-9)
    # Optimal on a convex set: no vertex lies on the other side of the tangent plane.
    towards = (scores - found) @ np.eye(scores.shape[1])
    assert (towards <= ((scores - found) * found).sum(axis=1)[:, None] + 1e-8).all()


class Odd(CentroidLearner):
    """A model that answers what it was given."""

    def __init__(self, answer: FloatArray) -> None:
        super().__init__()
        self.answer = answer

    def logits(self, x: Any) -> FloatArray:  # noqa: ARG002 - whatever is asked
        return self.answer


@pytest.mark.parametrize("shape", [(2, 3), (4, 2)])
def test_odd_answers_of_a_received_model_are_refused(shape: tuple[int, int]) -> None:
    sentence = re.escape(f"logits must be of shape (4, 3), got {shape}")
    with pytest.raises(KnowledgeMismatch, match=sentence):
        outputs(Odd(np.zeros(shape)), np.zeros((4, 2)), "single-label")


def test_impossible_classes_may_have_infinite_logits() -> None:
    """The logarithm of zero is a fair answer."""
    answer = np.array([[0.0, -np.inf, 0.0]])

    found = outputs(Odd(answer), np.zeros((1, 2)), "single-label")

    np.testing.assert_allclose(found, [[0.5, 0.0, 0.5]])


def test_committees_cannot_be_fitted_and_need_members() -> None:
    with pytest.raises(UnsupportedLearner, match="SignedEnsemble: members must be fitted"):
        signed().fit(*TEST, rng=RNG)
    with pytest.raises(InvalidParameter, match="members must be at least one model"):
        MeanEnsemble([], num_classes=3, task="single-label")
    with pytest.raises(InvalidParameter, match="signs must be 1 and -1"):
        signed((1, 0))
    with pytest.raises(InvalidParameter, match="members must be as many as signs"):
        SignedEnsemble([fitted(0)], num_classes=3, task="single-label", model_fns={})
    with pytest.raises(InvalidParameter, match="x must be the same rows"):
        RememberedScores(np.zeros((3, 2))).logits(np.zeros((4, 1)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_rows_without_a_prediction_count_as_nothing(bad: float) -> None:
    """Even odds or zero in that row, clipped numbers in regression, all others as they are."""
    answer = np.array([[1.0, 2.0, 3.0], [bad, bad, bad]])

    odds = outputs(Odd(answer), np.zeros((2, 2)), "single-label")
    numbers = outputs(Odd(answer), np.zeros((2, 2)), "regression")

    np.testing.assert_allclose(odds, [softmax(answer[0]), [1 / 3] * 3])
    np.testing.assert_allclose(numbers, [answer[0], [1e30 if bad == 1e300 else 0.0] * 3])


class Raising(CentroidLearner):
    """A model that cannot predict."""

    def logits(self, x: Any) -> FloatArray:
        raise ValueError(f"patient 4711 in {x}")


def overflowing() -> CentroidLearner:
    return Odd(np.full((len(TEST[0]), 3), np.inf))


@pytest.mark.parametrize("broken", [overflowing(), Raising()], ids=["overflow", "raises"])
def test_one_broken_member_spoils_nobody_elses_prediction(broken: CentroidLearner) -> None:
    good = fitted(0)
    expected = good.predict(TEST[0])
    total = SignedEnsemble(
        [good, broken], (1, -1), ("a", "a"), num_classes=3, task="single-label", model_fns={}
    )
    mean = MeanEnsemble([good, broken], num_classes=3, task="single-label")

    np.testing.assert_array_equal(total.predict(TEST[0]), expected)
    np.testing.assert_array_equal(mean.predict(TEST[0]), expected)


def test_rows_that_no_member_can_predict_are_an_error_that_does_not_quote_them() -> None:
    """Zeros for everything would look like a prediction."""
    members = [Raising(), Raising()]
    total = SignedEnsemble(
        members, (1, -1), ("a", "a"), num_classes=3, task="single-label", model_fns={}
    )

    for ensemble in (total, MeanEnsemble(members, num_classes=3, task="single-label")):
        with pytest.raises(KnowledgeMismatch, match="got none of 2: ValueError") as caught:
            ensemble.logits(TEST[0])
        assert "4711" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [f"{figure}-{unit}" for figure in ("epsilon", "delta") for unit in ("party", "example")],
)
def test_every_privacy_key_has_the_maximum_rule(key: str) -> None:
    assert RULES[key]([1.0, 3.0], [9.0, 1.0]) == 3.0


@pytest.mark.parametrize(
    ("key", "first", "second", "combined"),
    [
        (keys.EPSILON_EXAMPLE, (990, 1.0), (10, 50.0), 50.0),
        (keys.EPSILON_PARTY, (5, 1.0), (5, None), math.inf),
        (keys.EPSILON_PARTY, (5, 1.0), (5, math.nan), math.inf),
        (keys.NUM_BYTES_SENT, (10, 3), (30, 4), 7),
        (keys.ACCURACY, (10, 0.5), (30, 0.9), 0.8),
        (keys.ACCURACY, (0, math.nan), (7, 0.5), 0.5),
        (keys.ACCURACY, (0, 0.3), (0, 0.3), math.nan),
        (keys.ACCURACY, (-100, 0.0), (10, 0.7), 0.7),
    ],
)
def test_two_parties_metrics_are_combined_by_their_meaning(
    key: str, first: tuple[int, Any], second: tuple[int, Any], combined: float
) -> None:
    """Numbers of examples and values: privacy by the worst, counts by their total, the rest
    by the mean weighted by examples, of which a negative number weighs nothing.
    """
    parties = [
        {keys.NUM_EXAMPLES: number} | ({} if value is None else {key: value})
        for number, value in (first, second)
    ]

    total = aggregate_metrics(parties)

    assert total[key] == pytest.approx(combined, nan_ok=True)
    assert total[keys.NUM_EXAMPLES] == first[0] + second[0]
