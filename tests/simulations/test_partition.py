import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.exceptions import InvalidData, InvalidParameter
from fl_strategies.protocols import IntArray
from simulations.partition import SCHEMES, partition


def labels(num_rows: int, num_classes: int, seed: int = 0) -> IntArray:
    return np.random.RandomState(seed).randint(num_classes, size=num_rows)


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
    y = labels(num_rows, num_classes, seed)
    parts = partition(
        y,
        num_parties=num_parties,
        scheme=scheme,
        beta=beta,
        min_records=0,
        rng=np.random.RandomState(seed),
        num_classes=num_classes,
    )
    assert len(parts) == num_parties
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_rows))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_generator_alone_decides(scheme: str) -> None:
    """Equal generators give equal parts and another generator gives others."""
    y = labels(300, 3)

    def deal(seed: int) -> list[list[int]]:
        rng = np.random.RandomState(seed)
        parts = partition(y, num_parties=5, scheme=scheme, rng=rng, num_classes=3)
        return [part.tolist() for part in parts]

    assert deal(1) == deal(1)
    assert deal(1) != deal(2)


@pytest.mark.parametrize("seed", range(20))
def test_dirichlet_redraws_until_every_party_has_enough(seed: int) -> None:
    """No party falls below the minimum, though a single draw often does."""
    y = labels(2000, 2)
    rng = np.random.RandomState(seed)
    parts = partition(
        y, num_parties=20, scheme="dirichlet", beta=0.5, min_records=10, rng=rng, num_classes=2
    )
    assert min(sizes(parts)) >= 10


def test_a_single_dirichlet_draw_would_leave_parties_too_small() -> None:
    """Without a minimum some parties end up with fewer than ten rows, so the redraw matters."""
    y = labels(2000, 2)
    smallest = [
        min(
            sizes(
                partition(
                    y,
                    num_parties=20,
                    scheme="dirichlet",
                    beta=0.5,
                    min_records=0,
                    rng=np.random.RandomState(seed),
                    num_classes=2,
                )
            )
        )
        for seed in range(20)
    ]
    assert sum(size < 10 for size in smallest) > 10


def test_a_full_party_gets_no_further_class() -> None:
    """A party that holds its fair share after some classes has nothing of the later ones."""
    y = np.repeat(np.arange(10), 100)
    for seed in range(10):
        parts = partition(
            y,
            num_parties=5,
            scheme="dirichlet",
            beta=0.5,
            rng=np.random.RandomState(seed),
            num_classes=10,
        )
        for part in parts:
            before = np.cumsum(np.bincount(y[part], minlength=10))
            is_full = before[:-1] >= len(y) / 5
            assert not np.diff(before)[is_full].any()


def test_beta_controls_how_unlike_the_parties_are() -> None:
    """With a small beta a party's commonest class outweighs the rest, with a large one not."""
    y = labels(5000, 10)

    def dominance(beta: float) -> float:
        rng = np.random.RandomState(0)
        parts = partition(
            y, num_parties=8, scheme="dirichlet", beta=beta, rng=rng, num_classes=10
        )
        return float(np.mean([np.bincount(y[part]).max() / len(part) for part in parts]))

    assert dominance(0.1) > 0.35
    assert dominance(100.0) < 0.2


def test_classes_without_rows_are_skipped() -> None:
    """A class list longer than the labels that occur is no obstacle."""
    y = np.repeat([0, 4], 100)
    for scheme in ("dirichlet", "iid"):
        rng = np.random.RandomState(0)
        parts = partition(y, num_parties=3, scheme=scheme, rng=rng, num_classes=6)
        assert sum(sizes(parts)) == 200


def test_iid_parts_are_equal_and_alike() -> None:
    """Shares differ by at most one row and hold the classes in the same proportion."""
    y = labels(1003, 4)
    rng = np.random.RandomState(0)
    parts = partition(y, num_parties=4, scheme="iid", rng=rng, num_classes=4)
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
    rng = np.random.RandomState(0)
    parts = partition(y, num_parties=num_parties, scheme="by-label", rng=rng, num_classes=10)
    assert [np.unique(y[part]).tolist() for part in parts] == expected


def test_by_label_takes_the_number_of_classes_a_party_holds() -> None:
    """Three classes a party overlap between neighbours and their rows are shared evenly."""
    y = np.repeat(np.arange(4), 60)
    rng = np.random.RandomState(0)
    parts = partition(
        y, num_parties=4, scheme="by-label", labels_per_party=3, rng=rng, num_classes=4
    )
    held = [np.unique(y[part]).tolist() for part in parts]
    assert held == [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]
    assert sizes(parts) == [60, 60, 60, 60]


def test_too_few_rows_for_the_minimum_is_said_before_any_draw() -> None:
    """The error names both settings and the rows there are."""
    with pytest.raises(InvalidParameter, match=r"at most 30, the rows there are, got 4 x 10"):
        partition(
            labels(30, 2),
            num_parties=4,
            scheme="dirichlet",
            rng=np.random.RandomState(0),
            num_classes=2,
        )


def test_a_minimum_that_no_draw_meets_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search for a partition is bounded and its end names the settings to change."""
    monkeypatch.setattr("simulations.partition.MAX_DRAWS", 50)
    with pytest.raises(InvalidParameter, match=r"no such draw in 50\. Raise beta, or lower"):
        partition(
            labels(200, 2),
            num_parties=19,
            scheme="dirichlet",
            beta=0.05,
            rng=np.random.RandomState(0),
            num_classes=2,
        )


def test_a_tiny_beta_still_deals_every_row() -> None:
    """Proportions that underflow to zero at all open parties lose no row and no number."""
    y = np.repeat(np.arange(10), 40)
    for seed in range(20):
        parts = partition(
            y,
            num_parties=4,
            scheme="dirichlet",
            beta=1e-4,
            min_records=0,
            rng=np.random.RandomState(seed),
            num_classes=10,
        )
        assert sum(sizes(parts)) == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "random"}, r"scheme must be one of dirichlet, iid, by-label, got 'random'"),
        ({"num_parties": 0}, r"num-parties must be at least 1, got 0"),
        ({"beta": 0.0}, r"beta must be greater than 0, got 0.0"),
        (
            {"scheme": "by-label", "labels_per_party": 1, "num_parties": 2},
            r"labels-per-party must be between 2 and 3, got 1",
        ),
        (
            {"scheme": "by-label", "min_records": 59},
            r"min-records must be at most \d+, the rows of the smallest party, got 59",
        ),
    ],
)
def test_a_bad_parameter_is_named(change: dict[str, object], message: str) -> None:
    """Each broken rule gives one sentence with the setting and its value."""
    arguments: dict[str, object] = {"num_parties": 5, "scheme": "dirichlet", **change}
    with pytest.raises(InvalidParameter, match=message):
        partition(
            labels(300, 3),
            rng=np.random.RandomState(0),
            num_classes=3,
            **arguments,  # type: ignore[arg-type]
        )


def test_labels_outside_the_class_list_are_refused() -> None:
    """A label that the class list lacks would otherwise vanish from the federation."""
    with pytest.raises(InvalidData, match="y must be between 0 and 1"):
        partition(
            np.array([0, 1, 2]),
            num_parties=1,
            scheme="iid",
            min_records=1,
            rng=np.random.RandomState(0),
            num_classes=2,
        )
