from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies._util import IntArray
from fl_strategies.errors import InvalidData, InvalidParameter
from simulations.data.splits import SCHEMES, Deal, partition


def labels(num_rows: int, num_classes: int, seed: int = 0) -> IntArray:
    return np.random.RandomState(seed).randint(num_classes, size=num_rows)


def deal(
    y: Any, num_parties: int, scheme: str = "dirichlet", *, seed: int = 0, **options: Any
) -> list[IntArray]:
    """Deal rows with the generator of a seed; by default to as many classes as occur."""
    options = {"num_classes": int(np.max(y)) + 1, **options}
    rng = np.random.RandomState(seed)
    y = np.asarray(y)
    return partition(Deal(y=y, num_parties=num_parties, scheme=scheme, rng=rng, **options))


def sizes(parts: list[IntArray]) -> list[int]:
    return [len(part) for part in parts]


@settings(deadline=None, max_examples=60)
@given(
    scheme=st.sampled_from(SCHEMES),
    num_parties=st.integers(1, 12),
    num_classes=st.integers(2, 12),
    num_rows=st.integers(150, 400),
    beta=st.sampled_from([0.05, 0.5, 10.0]),
    seed=st.integers(0, 1000),
)
def test_every_row_goes_to_exactly_one_party(
    scheme: str, num_parties: int, num_classes: int, num_rows: int, beta: float, seed: int
) -> None:
    """The parts are disjoint, ascending and together hold all rows, whatever the scheme."""
    parts = deal(
        labels(num_rows, num_classes, seed),
        num_parties,
        scheme,
        beta=beta,
        min_records=0,
        seed=seed,
        num_classes=num_classes,
        balanced=seed % 2 == 0,
        mixing=seed / 1000,
        groups=labels(num_rows, 5, seed + 1),
    )
    assert len(parts) == num_parties
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_rows))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_generator_alone_decides(scheme: str) -> None:
    """Equal generators give equal parts and another generator gives others."""
    y, groups = labels(300, 3), labels(300, 9, seed=1)
    first, again, other = (
        [part.tolist() for part in deal(y, 2, scheme, seed=seed, mixing=0.5, groups=groups)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


# Dirichlet


def test_dirichlet_redraws_until_every_party_has_enough() -> None:
    """No party falls below the minimum, though a single draw often does."""
    y, single = labels(2000, 2), []
    for seed in range(20):
        assert min(sizes(deal(y, 20, min_records=10, seed=seed))) >= 10
        single.append(min(sizes(deal(y, 20, min_records=0, seed=seed))))
    assert sum(size < 10 for size in single) > 10


def test_a_full_party_gets_no_further_class() -> None:
    """A party that holds its fair share after some classes has nothing of the later ones."""
    y = np.repeat(np.arange(10), 100)
    for seed in range(10):
        for part in deal(y, 5, seed=seed):
            before = np.cumsum(np.bincount(y[part], minlength=10))
            is_full = before[:-1] >= len(y) / 5
            assert not np.diff(before)[is_full].any()


def test_beta_controls_how_unlike_the_parties_are() -> None:
    """With a small beta a party's commonest class outweighs the rest, with a large one not."""
    y = labels(5000, 10)

    def dominance(beta: float) -> float:
        parts = deal(y, 8, beta=beta)
        return float(np.mean([np.bincount(y[part]).max() / len(part) for part in parts]))

    assert dominance(0.1) > 0.35
    assert dominance(100.0) < 0.2


@pytest.mark.parametrize("scheme", ["dirichlet", "iid"])
def test_classes_without_rows_are_skipped(scheme: str) -> None:
    """A class list longer than the labels that occur is no obstacle."""
    assert sum(sizes(deal(np.repeat([0, 4], 100), 3, scheme, num_classes=6))) == 200


def test_a_minimum_that_no_draw_meets_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search for a partition is bounded and its end names the settings to change."""
    monkeypatch.setattr("simulations.data.splits.MAX_DRAWS", 50)
    with pytest.raises(InvalidParameter, match=r"no such draw in 50\. Raise beta, or lower"):
        deal(labels(200, 2), 19, beta=0.05)


def test_a_tiny_beta_still_deals_every_row() -> None:
    """Proportions that underflow to zero at all open parties lose no row and no number."""
    y = np.repeat(np.arange(10), 40)
    for seed in range(20):
        assert sum(sizes(deal(y, 4, beta=1e-4, min_records=0, seed=seed))) == 400


def test_without_balance_each_class_follows_its_own_draw() -> None:
    """Every party's share of a class is the drawn one, whatever it already holds."""
    y = np.repeat(np.arange(4), [10, 20, 30, 400])
    parts = deal(y, 3, min_records=0, balanced=False, seed=5)
    rng = np.random.RandomState(5)
    for label, size in enumerate([10, 20, 30, 400]):
        rng.permutation(size)
        drawn = rng.dirichlet(np.full(3, 0.5)) * size
        held = [np.sum(y[part] == label) for part in parts]
        assert np.abs(held - drawn).max() <= 1


def test_balance_is_what_keeps_parties_alike_in_size() -> None:
    """The largest party is much larger without balance, and the minimum still holds."""
    y = labels(2000, 10)
    free, balanced = (sizes(deal(y, 10, beta=0.1, balanced=each)) for each in (False, True))
    assert min(free + balanced) >= 10
    assert max(free) > 1.3 * max(balanced)


# Classes


def test_iid_parts_are_equal_and_alike() -> None:
    """Shares differ by at most one row and hold the classes in the same proportion."""
    y = labels(1003, 4)
    parts = deal(y, 4, "iid")
    assert max(sizes(parts)) - min(sizes(parts)) <= 1
    for part in parts:
        assert np.allclose(np.bincount(y[part]) / len(part), 0.25, atol=0.1)


@pytest.mark.parametrize(
    ("num_parties", "expected"),
    [
        (2, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        (5, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
        (6, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]),
        (12, [[c % 10] for c in range(12)]),
    ],
)
def test_by_label_gives_neighbouring_classes(
    num_parties: int, expected: list[list[int]]
) -> None:
    """Each party holds the fewest neighbouring classes that leave none out."""
    y = labels(1000, 10)
    parts = deal(y, num_parties, "by-label")
    assert [np.unique(y[part]).tolist() for part in parts] == expected


def test_parties_with_the_same_class_share_its_rows_evenly() -> None:
    """Three parties with four of ten classes each overlap in the first two classes."""
    y = np.repeat(np.arange(10), 61)
    counts = [np.bincount(y[part], minlength=10).tolist() for part in deal(y, 3, "by-label")]
    assert counts == [
        [31, 31, 61, 61, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 61, 61, 61, 61, 0, 0],
        [30, 30, 0, 0, 0, 0, 0, 0, 61, 61],
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "random"}, r"scheme must be one of dirichlet, iid, .*, got 'random'"),
        ({"num_parties": 0}, r"num-parties must be at least 1, got 0"),
        ({"num_parties": 31}, r"at most 300, the rows there are, got 31 x 10"),
        ({"beta": 0.0}, r"beta must be greater than 0, got 0.0"),
        (
            {"scheme": "by-label", "min_records": 59},
            r"min-records must be at most \d+, the rows of the smallest party, got 59",
        ),
        ({"scheme": "by-group"}, r"scheme must be another one for data without groups"),
        (
            {"scheme": "pooled-halves", "mixing": 1.1},
            r"mixing must be between 0 and 1, got 1.1",
        ),
        (
            {"scheme": "pooled-halves", "num_parties": 4},
            r"min-records must be at most 0, the rows of the smallest party, got 10",
        ),
        (
            {"scheme": "random-shares", "shares": (0.7, 0.2)},
            r"shares must be 5 numbers above 0 that sum to 1, got \(0.7, 0.2\)",
        ),
        (
            {"scheme": "random-shares", "shares": (0.7, 0.2), "num_parties": 2},
            r"shares must be 2 numbers above 0 that sum to 1",
        ),
        (
            {"scheme": "random-shares", "shares": (1.5, -0.5), "num_parties": 2},
            r"shares must be 2 numbers above 0 that sum to 1",
        ),
    ],
)
def test_a_bad_parameter_is_named(change: dict[str, Any], message: str) -> None:
    """Each broken rule gives one sentence with the setting and its value."""
    with pytest.raises(InvalidParameter, match=message):
        deal(labels(300, 3), **{"num_parties": 5, **change})


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        ([0, 1, 2], {"scheme": "iid", "min_records": 1}, "y must be between 0 and 1"),
        (np.full((20, 2), 2), {"scheme": "iid"}, "y must be an array of -1, 0 and 1"),
        (
            np.zeros(20, np.int64),
            {"scheme": "by-group", "groups": np.zeros(19, np.int64)},
            "groups must be 20 groups, one per row",
        ),
    ],
)
def test_labels_and_groups_must_fit_the_rows(
    y: Any, options: dict[str, Any], message: str
) -> None:
    """What the class list lacks, or has no group, would vanish from the federation."""
    with pytest.raises(InvalidData, match=message):
        deal(y, 1, num_classes=2, **options)


# Several labels a row


def test_a_row_with_several_labels_counts_as_its_rarest() -> None:
    """Label 1 is rarer than 0, 2 the rarest; a row without a yes is of a class of its own."""
    y = [[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0], [-1, -1, 0], [1, 0, -1]]
    parts = deal(y, 4, "by-label", min_records=0, num_classes=3)
    assert [part.tolist() for part in parts] == [[1, 5], [0], [2], [3, 4]]


def test_rows_with_several_labels_are_dealt_by_dirichlet() -> None:
    """The parts are those of the rows' rarest labels; here a higher label is always rarer."""
    chances = [0.5, 0.4, 0.2, 0.1, 0.03]
    y = (np.random.RandomState(0).random_sample((600, 5)) < chances).astype(np.int64)
    rarest = np.where(y.any(axis=1), 4 - y[:, ::-1].argmax(axis=1), 5)
    several = deal(y, 3, num_classes=5, seed=1)
    single = deal(rarest, 3, num_classes=6, seed=1)
    assert [part.tolist() for part in several] == [part.tolist() for part in single]


# Pooled halves, random shares and groups


def pooled(mixing: float, num_parties: int = 2, **options: Any) -> list[IntArray]:
    y = np.repeat(np.arange(10), 50)
    return deal(y, num_parties, "pooled-halves", mixing=mixing, **options)


@pytest.mark.parametrize(("num_parties", "num_held"), [(2, 5), (5, 2), (10, 1)])
def test_without_mixing_parties_hold_neighbouring_classes(
    num_parties: int, num_held: int
) -> None:
    """Two parties hold a half of the classes each, five hold pairs."""
    assert [part.tolist() for part in pooled(0.0, num_parties)] == [
        list(range(start, start + 50 * num_held)) for start in range(0, 500, 50 * num_held)
    ]


def test_mixing_deals_a_fraction_anew_and_keeps_the_sizes() -> None:
    """A fifth is pooled, so about a tenth changes its owner; all of it is a random split."""
    parts = pooled(0.2)
    assert sizes(parts) == [250, 250]
    foreign = np.sum(parts[0] >= 250)
    assert foreign == np.sum(parts[1] < 250)
    assert 10 <= foreign <= 40
    counts = np.bincount(pooled(1.0)[0] // 50, minlength=10)
    assert counts.min() >= 15
    assert counts.max() <= 35


def test_shares_decide_the_blocks_of_classes() -> None:
    """At 7 to 3 the first party starts with seven of ten classes."""
    parts = pooled(0.0, shares=(0.7, 0.3))
    assert sizes(parts) == [350, 150]
    assert parts[0].max() == 349


def test_random_shares_have_their_sizes_and_all_classes() -> None:
    """Rows are dealt 7 to 3 without regard to their class."""
    y = labels(1000, 4)
    parts = deal(y, 2, "random-shares", shares=(0.7, 0.3))
    assert sizes(parts) == [700, 300]
    assert np.allclose(np.bincount(y[parts[1]]) / 300, 0.25, atol=0.08)


def grouped(num_parties: int, groups: IntArray) -> list[list[int]]:
    y = np.zeros(len(groups), np.int64)
    parts = deal(y, num_parties, "by-group", min_records=1, groups=groups, num_classes=2)
    return [np.unique(groups[part]).tolist() for part in parts]


def test_parties_hold_whole_groups() -> None:
    """As many parties as groups hold one each, fewer hold several, none is divided."""
    groups = np.repeat([3, 7, 20, 21, 30], 12)
    one_each, several = grouped(5, groups), grouped(2, groups)
    assert sorted(one_each) == [[3], [7], [20], [21], [30]]
    assert sorted(map(len, several)) == [2, 3]
    assert sorted(several[0] + several[1]) == [3, 7, 20, 21, 30]


def test_more_parties_than_groups_share_the_rows_of_one() -> None:
    """Each party still sees a single group."""
    held = grouped(7, np.repeat([0, 1, 2], 12))
    assert [len(groups) for groups in held] == [1] * 7
    counts = np.bincount([groups[0] for groups in held])
    assert sorted(counts) == [2, 2, 3]
