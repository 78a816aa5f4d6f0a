"""References that are no federation, each against a computation by hand."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier

from fl_strategies._util import Array, derive_rng
from fl_strategies.errors import InvalidParameter
from simulations.config import Settings
from simulations.federation import Federation, load_federation
from simulations.results.verdict import (
    evaluate_baselines,
    evaluate_pate,
    evaluate_public,
    num_pate_teachers,
)

SETTINGS = Settings.of(
    strategy="fedkt",
    num_parties=3,
    num_teachers=4,
    learner="k-nearest-neighbours",
    final_learner="k-nearest-neighbours",
    train_rows=240,
    seed=3,
)


def nearest(x: Array, y: Array, asked: Array) -> Array:
    """Return the label of the nearest row, by distances of plain numpy."""
    distances = ((asked[:, None].astype(np.float64) - x[None]) ** 2).sum(axis=2)
    labels: Array = y[distances.argmin(axis=1)]
    return labels


def accuracy(labels: Array, federation: Federation) -> float:
    return float((labels == federation.dataset.y_test).mean())


def test_pate_is_a_vote_of_teachers_on_pooled_rows() -> None:
    """Twelve disjoint subsets of all rows vote on the public rows, which train the student."""
    federation = load_federation(SETTINGS)
    data = federation.dataset
    order = derive_rng(3, "pate", "split").permutation(len(data.y_train))
    votes = np.zeros((len(data.x_public), 10))
    for rows in np.array_split(order, 3 * 4):
        named = nearest(data.x_train[rows], data.y_train[rows], data.x_public)
        votes[np.arange(len(named)), named] += 1
    clear = np.sort(votes, axis=1)[:, -1] > np.sort(votes, axis=1)[:, -2]
    by_hand = nearest(data.x_public, votes.argmax(axis=1), data.x_test)
    nearest_row = nearest(data.x_public, np.arange(len(votes)), data.x_test)

    evaluation = evaluate_pate(federation)

    # Rows with a tie may get either label, so only the others are sure.
    right = by_hand == data.y_test
    ties = ~clear[nearest_row]
    assert 0 < ties.mean() < 0.2
    np.testing.assert_array_equal(evaluation.shares[~ties] > 0, right[~ties])
    assert abs(evaluation.metrics["accuracy"] - right.mean()) <= ties.mean()


def test_pate_has_the_teachers_of_one_partition() -> None:
    """Parties times t, one per party where a strategy has no teachers, never without a row."""
    assert num_pate_teachers(load_federation(SETTINGS)) == 12
    other = Settings.of(strategy="fedkd", num_parties=3, train_rows=240)
    assert num_pate_teachers(load_federation(other)) == 3
    many = SETTINGS.but(num_teachers=1000)
    assert num_pate_teachers(load_federation(many)) == 240


def test_public_only_trains_on_labelled_public_rows() -> None:
    """The final learner with the public rows' own labels, and nothing private."""
    federation = load_federation(SETTINGS)
    data = federation.dataset
    assert data.y_public is not None

    evaluation = evaluate_public(federation)

    by_hand = nearest(data.x_public, data.y_public, data.x_test)
    assert evaluation.metrics["accuracy"] == pytest.approx(accuracy(by_hand, federation))


def test_pooled_data_may_have_a_learner_of_their_own() -> None:
    """`pooled-learner` replaces the final learner there, and only there."""
    settings = SETTINGS.but(pooled_learner="decision-tree", max_depth=1, solo=False)
    federation = load_federation(settings)
    data = federation.dataset
    stump = DecisionTreeClassifier(max_depth=1).fit(data.x_train, data.y_train)

    found = evaluate_baselines(federation).evaluations

    by_hand = accuracy(stump.predict(data.x_test), federation)
    assert found["pooled"].metrics["accuracy"] == pytest.approx(by_hand, abs=0.03)
    assert by_hand < 0.3 < load_federation(SETTINGS).evaluate_pooled().metrics["accuracy"]
    assert federation.final_learner == "k-nearest-neighbours"


def test_references_need_labels() -> None:
    """Public rows without labels are refused in one sentence."""
    federation = load_federation(SETTINGS)
    bare = replace(federation, dataset=replace(federation.dataset, y_public=None))

    with pytest.raises(InvalidParameter, match="public-only must be false unless public rows"):
        evaluate_public(bare)
