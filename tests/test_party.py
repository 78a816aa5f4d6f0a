from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fl_strategies.arrays import content_hash
from fl_strategies.exceptions import InvalidData, InvalidParameter
from tests.toys import toy_party, without_records

PARTY = toy_party(3)


def with_value(array: np.ndarray, position: Any, value: float) -> np.ndarray:
    changed = array.copy()
    changed[position] = value
    return changed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": with_value(PARTY.x, (4, 0), np.nan)}, "x must be finite, .* in 1 of 40 rows"),
        ({"x": with_value(PARTY.x, (0, 1), np.inf)}, "x must be finite"),
        ({"public": with_value(PARTY.public, (9, 1), np.nan)}, "public must be finite"),
        ({"x": PARTY.x.astype(str)}, "x must be an array of numbers, got dtype"),
        ({"x": PARTY.x.astype(object)}, "x must be an array of numbers, got dtype object"),
        ({"x": PARTY.x[:, 0]}, "x must be an array of rows"),
        ({"x": PARTY.x[:, :1]}, r"x must be rows of shape \(2,\) like the public data"),
        ({"y": PARTY.y[:-1]}, "y must be 40 labels, one a row, got 39"),
        ({"y": PARTY.y + 0.5}, "y must be a flat array of class indices"),
        ({"y": with_value(PARTY.y, 0, 3)}, r"y must be between 0 and 2, .* got \[3\]"),
        ({"y": with_value(PARTY.y, 0, -1)}, "y must be between 0 and 2"),
        ({"y_test": None}, "x_test and y_test must be given together"),
        ({"x_test": PARTY.x[:, :1], "y_test": PARTY.y}, "x_test must be rows of shape"),
        ({"y_test": with_value(PARTY.y_test, 0, 9)}, "y_test must be between 0 and 2"),  # type: ignore[arg-type]
    ],
)
def test_bad_data_is_named(change: dict[str, Any], sentence: str) -> None:
    """Each fault of the data is one sentence that names the party and the array."""
    with pytest.raises(InvalidData, match=f"Party 3: {sentence}"):
        replace(PARTY, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ({"partition_id": -1}, "partition_id must be at least 0, got -1"),
    ],
)
def test_bad_numbers_are_named(change: dict[str, Any], sentence: str) -> None:
    """Each fault of a number is one sentence."""
    with pytest.raises(InvalidParameter, match=sentence):
        replace(PARTY, **change)


def test_a_party_may_be_empty() -> None:
    """Having no records is for the strategy to answer, not for the constructor."""
    assert len(without_records(PARTY).y) == 0


def test_a_party_may_have_no_test_rows() -> None:
    """Held-out rows are optional."""
    assert replace(PARTY, x_test=None, y_test=None).x_test is None


def test_content_hash_sees_type_shape_order_and_values() -> None:
    """Whatever would change a label on the public rows changes the fingerprint."""
    base = np.arange(6, dtype=np.float32).reshape(2, 3)
    others = [
        base.astype(np.float64),
        base.reshape(3, 2),
        base[::-1],
        base + np.float32(1e-6) * (base == 0),
    ]

    assert len({content_hash(a) for a in [base, *others]}) == 5


def test_content_hash_ignores_memory_layout() -> None:
    """The same values in another layout or byte order are the same data."""
    base = np.arange(6, dtype=np.float32).reshape(2, 3)

    assert content_hash(base) == content_hash(np.asfortranarray(base))
    assert content_hash(base) == content_hash(base.astype(">f4"))
