"""Feature maps: bounded, by record, the same for everybody, and hostile when received."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidParameter, KnowledgeMismatch
from fl_strategies.features import FEWEST_LEVELS, MOST_FEATURES, MOST_LEVELS, FeatureMap

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(60, 5)) * [1, 10, 0.1, 1, 3] + [0, 5, 0, -2, 0]
LOW, HIGH = np.array([-5.0, 0, -1, 2, 7]), np.array([5.0, 40, 1, 6, 7])


def maps() -> dict[str, FeatureMap]:
    plain = FeatureMap.of_rows(ROWS)
    return {
        "columns": plain,
        "bounds": FeatureMap.of_bounds(LOW, HIGH),
        "components": plain.with_components(ROWS, 3),
        "cosines": plain.with_cosines(ROWS, 30, np.random.default_rng(1)),
        "bounds and cosines": FeatureMap.of_bounds(LOW, HIGH).with_cosines(
            None, 30, np.random.default_rng(1)
        ),
        "products": plain.with_products(9),
    }


@pytest.mark.parametrize("name", maps())
def test_no_row_is_longer_than_the_map_says(name: str) -> None:
    """Not even one of absurd numbers, so that a record's effect on sums has a bound."""
    made = maps()[name].settled()
    extreme = np.array([[1e308, -1e308, 5e-324, np.inf, np.nan], [1e30] * 5, [0.0] * 5])

    found = made(np.vstack([ROWS, extreme]))

    assert found.dtype == np.int64
    assert found.shape == (63, made.num_features)
    assert np.linalg.norm(found.astype(float), axis=1).max() <= made.longest
    assert set(found[:, -1]) == {made.constant}


@given(st.lists(st.floats(width=32), min_size=5, max_size=5), st.integers(0, 59))
@settings(max_examples=50, deadline=None)
def test_a_record_changes_its_own_features_alone(values: list[float], place: int) -> None:
    changed = ROWS.copy()
    changed[place] = values
    for made in maps().values():
        differs = (made(changed) != made(ROWS)).any(axis=1)
        assert not np.delete(differs, place).any()


def test_features_are_the_documented_ones() -> None:
    """Against each formula by itself, in floats."""
    made = maps()["cosines"].settled()
    placed = np.clip((ROWS - made.centre) * made.scale, -5, 5)
    waves = np.cos(placed @ made.waves + made.phases) * np.repeat(made.height, 10)
    plain = np.hstack([placed * made.columns, waves])
    plain /= np.maximum(np.linalg.norm(plain, axis=1, keepdims=True), 1)

    found = made(ROWS)[:, :-1] / (made.levels * made.reach)

    assert np.abs(found - plain).max() <= 0.5001 / (made.levels * made.reach)


def test_products_of_cosines_are_near_a_gaussian_kernel() -> None:
    made = FeatureMap.of_rows(ROWS).with_cosines(ROWS, 3000, np.random.default_rng(2))
    placed = made.placed(ROWS)
    first = np.cos(placed @ made.waves[:, :1000] + made.phases[:1000]) * np.sqrt(2 / 1000)
    distances = np.square(placed[:, None] - placed[None]).sum(axis=2)
    pairs = np.random.default_rng(2).integers(len(ROWS), size=(2, 1000))
    apart = np.linalg.norm(placed[pairs[0]] - placed[pairs[1]], axis=1)
    usual = np.median(apart[apart > 0])

    kernel = np.exp(-distances / (2 * (0.5 * usual) ** 2))

    assert np.abs(first @ first.T - kernel).max() < 0.2
    assert made.height.tolist() == pytest.approx([0.5 * np.sqrt(2 / 1000)] * 3)


def test_declared_bounds_place_columns_without_any_row() -> None:
    made = FeatureMap.of_bounds(LOW, HIGH)

    assert made.centre.tolist() == [0, 0, 0, 4, 7]
    assert made.scale.tolist() == [1 / 5, 1 / 40, 1, 1 / 2, 0]
    assert np.abs(made.placed(np.array([LOW, HIGH]))).max() == 1


@pytest.mark.parametrize(
    ("low", "high", "length"),
    [
        ([0.0], [0.0, 1], None),
        ([1.0], [0.0], None),
        ([np.nan], [1.0], None),
        ([0.0], [1.0], 0.0),
    ],
)
def test_bounds_that_are_none_are_refused(
    low: list[float], high: list[float], length: float | None
) -> None:
    with pytest.raises(InvalidParameter, match="FeatureMap: "):
        FeatureMap.of_bounds(np.array(low), np.array(high), length=length)


def test_levels_leave_room_for_sums() -> None:
    made = FeatureMap.of_rows(ROWS)

    assert made.for_records(1000).levels == MOST_LEVELS
    assert made.for_records(10**12).levels == FEWEST_LEVELS
    assert made.for_records(10**6).levels ** 2 * 10**6 <= 2**31
    assert 8 * made.for_records(10**5, scale=5.0).levels ** 2 * 10**5 <= 2**31
    assert 12 * made.for_records(100, scale=37.0).levels ** 2 * 37 <= 2**19


@pytest.mark.parametrize("name", maps())
def test_a_map_travels_to_the_bit(name: str) -> None:
    made = maps()[name].settled()

    again = FeatureMap.from_arrays("Server", made.to_arrays(), 5)

    assert np.array_equal(again(ROWS), made(ROWS))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("centre", np.zeros(4, np.float32)),
        ("scale", np.full(5, np.inf, np.float32)),
        ("scale", np.zeros(5)),
        ("columns", np.zeros(3, np.float32)),
        ("turn", np.zeros((5, MOST_FEATURES), np.float32)),
        ("turn", np.zeros((4, 2), np.float32)),
        ("pairs", np.array([[0, 5]], np.int32)),
        ("pairs", np.array([[0, -1]], np.int32)),
        ("phases", np.zeros(29, np.float32)),
        ("height", np.zeros(4, np.float32)),
        ("height", np.zeros(0, np.float32)),
        ("levels", np.array([2**20], np.int32)),
        ("levels", np.array([1], np.int32)),
        ("levels", np.array([64, 64], np.int32)),
        ("other", np.zeros(1, np.float32)),
    ],
)
def test_a_map_that_a_hostile_server_made_is_refused(name: str, value: np.ndarray) -> None:
    arrays = {**maps()["cosines"].to_arrays(), name: value}

    with pytest.raises(KnowledgeMismatch, match="Server: features must be"):
        FeatureMap.from_arrays("Server", arrays, 5)


def test_a_map_of_extreme_numbers_still_bounds_rows() -> None:
    """Whatever finite numbers a server sends, no record adds more than is accounted."""
    arrays = maps()["cosines"].to_arrays()
    for name in ("scale", "columns", "waves", "height"):
        arrays[name] = np.full_like(arrays[name], 3e38)
    made = FeatureMap.from_arrays("Server", arrays, 5)

    with np.errstate(all="raise"):
        found = made(ROWS)

    assert np.linalg.norm(found.astype(float), axis=1).max() <= made.longest
