import math

import pytest

from fl_strategies.aggregation.metrics import RULES, aggregate_metrics
from fl_strategies.wire import keys


def test_epsilon_is_never_averaged() -> None:
    """Of 1 and 50 the federation reports 50, whatever the sizes of the parties."""
    parties = [
        {keys.NUM_EXAMPLES: 990, keys.EPSILON_EXAMPLE: 1.0},
        {keys.NUM_EXAMPLES: 10, keys.EPSILON_EXAMPLE: 50.0},
    ]

    assert aggregate_metrics(parties)[keys.EPSILON_EXAMPLE] == 50.0


@pytest.mark.parametrize("missing", [{}, {keys.EPSILON_PARTY: math.nan}])
def test_a_party_without_epsilon_counts_as_unprotected(missing: dict[str, float]) -> None:
    """Silence is no guarantee."""
    parties = [
        {keys.NUM_EXAMPLES: 5, keys.EPSILON_PARTY: 1.0},
        {keys.NUM_EXAMPLES: 5, **missing},
    ]

    assert aggregate_metrics(parties)[keys.EPSILON_PARTY] == math.inf


@pytest.mark.parametrize(
    "key",
    [f"{figure}-{unit}" for figure in ("epsilon", "delta") for unit in ("party", "example")],
)
def test_every_privacy_key_has_the_maximum_rule(key: str) -> None:
    """No privacy figure falls back to the weighted mean."""
    assert RULES[key]([1.0, 3.0], [9.0, 1.0]) == 3.0


def test_accuracy_is_weighted_by_examples() -> None:
    """30 rows at 0.9 and 10 at 0.5 make 0.8; bytes and examples add up."""
    parties = [
        {keys.NUM_EXAMPLES: 10, keys.ACCURACY: 0.5, keys.NUM_BYTES_SENT: 3},
        {keys.NUM_EXAMPLES: 30, keys.ACCURACY: 0.9, keys.NUM_BYTES_SENT: 4},
    ]

    total = aggregate_metrics(parties)

    assert total[keys.ACCURACY] == pytest.approx(0.8)
    assert total[keys.NUM_EXAMPLES] == 40
    assert total[keys.NUM_BYTES_SENT] == 7


def test_a_party_without_test_rows_does_not_disturb_the_mean() -> None:
    """NaN with no examples is dropped."""
    parties = [
        {keys.NUM_EXAMPLES: 0, keys.ACCURACY: math.nan},
        {keys.NUM_EXAMPLES: 7, keys.ACCURACY: 0.5},
    ]

    assert aggregate_metrics(parties)[keys.ACCURACY] == 0.5


def test_a_mean_of_nothing_is_not_a_number() -> None:
    """Nobody measured, so nothing is claimed."""
    assert math.isnan(
        aggregate_metrics([{keys.NUM_EXAMPLES: 0, keys.ACCURACY: 0.3}])["accuracy"]
    )


def test_negative_weights_do_not_count() -> None:
    """A party cannot turn the mean around by a negative number of examples."""
    parties = [
        {keys.NUM_EXAMPLES: -100, keys.ACCURACY: 0.0},
        {keys.NUM_EXAMPLES: 10, keys.ACCURACY: 0.7},
    ]

    assert aggregate_metrics(parties)[keys.ACCURACY] == pytest.approx(0.7)
