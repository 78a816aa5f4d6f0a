"""Feature maps: bounded, by record, the same for everybody, and hostile when received."""

from dataclasses import replace

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


@pytest.mark.parametrize("width", [5, 13, 64, 300])
def test_a_row_at_the_edge_of_rounding_has_the_same_features_in_any_batch(width: int) -> None:
    """Libraries add up in another order for other numbers of rows, which the edge shows."""
    rng = np.random.default_rng(width)
    rows = rng.normal(size=(64, width))
    plain = FeatureMap.of_rows(rows)
    for made in (plain.with_components(rows, 5), plain.with_cosines(rows, 9, rng)):
        edges = rows.copy()
        for place, feature in enumerate(rng.integers(made.num_features - 1, size=len(rows))):
            low, high = (rows[place : place + 1].copy() for _ in range(2))
            high[0, 0] += 3.0
            before, after = made(low)[0, feature], made(high)[0, feature]
            for _ in range(60 if before != after else 0):
                middle = (low + high) / 2
                low, high = (
                    (middle, high) if made(middle)[0, feature] == before else (low, middle)
                )
            edges[place] = high[0]
        alone = np.vstack([made(row[None]) for row in edges])

        for step in (2, 3, 7, 16, 33, 64):
            parts = [made(edges[at : at + step]) for at in range(0, len(edges), step)]
            assert np.array_equal(np.vstack(parts), alone)


@pytest.mark.parametrize("width", [1, 5, 64, 784])
def test_products_of_rows_and_maps_are_exact_in_any_order(width: int) -> None:
    """Against whole numbers of any size; also for weights of all sizes, and rows at the cut."""
    rng = np.random.default_rng(width)
    rows = rng.normal(size=(20, width)) * 10.0 ** rng.uniform(-3, 3, (20, 1))
    weights = rng.normal(size=(width, 7)) * 10.0 ** rng.uniform(-30, 30, 7)
    made = replace(
        FeatureMap.of_bounds(-np.ones(width), np.ones(width)),
        turn=weights,
    ).settled()
    whole = np.rint(made.placed(rows) * 2**20)
    exact = whole.astype(int).astype(object) @ made._whole_turn.astype(int).astype(object)

    assert (whole @ made._whole_turn == exact).all()
    assert max(abs(value) for value in exact.ravel()) < 2**53
    rounded = made._whole_turn * made._turn_grains
    assert (np.abs(rounded - made.turn) <= 1e-5 * np.abs(made.turn).max(axis=0)).all()


def test_cosines_do_not_look_at_their_neighbours() -> None:
    """Compiled loops over several numbers at once give each what it has alone."""
    rng = np.random.default_rng(0)
    angles = rng.normal(size=999) * 10.0 ** rng.uniform(-300, 300, 999)
    angles[:500] = rng.normal(size=500) * 10.0 ** rng.uniform(-3, 6, 500)
    together = np.cos(angles)

    assert [np.cos(one[None])[0] for one in angles] == together.tolist()
    assert np.array_equal(np.cos(angles[3:]), together[3:])


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


def test_a_map_of_more_numbers_than_a_party_holds_is_refused() -> None:
    width = 2**15
    arrays = FeatureMap.of_bounds(-np.ones(width), np.ones(width)).to_arrays()
    arrays["columns"] = np.zeros(0, np.float32)
    arrays["turn"] = np.broadcast_to(np.float32(0), (width, 2**11 + 1))

    with pytest.raises(KnowledgeMismatch, match="Server: features must be"):
        FeatureMap.from_arrays("Server", arrays, width)


def test_bands_without_cosines_are_refused() -> None:
    arrays = FeatureMap.of_rows(ROWS).to_arrays()
    arrays["height"] = np.zeros(10**6, np.float32)

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
