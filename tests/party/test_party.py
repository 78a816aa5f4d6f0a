from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fl_strategies._util.arrays import content_hash
from fl_strategies.errors import InvalidData, InvalidParameter
from tests.toys import toy_party, without_records

PARTY = toy_party(3)


def with_value(array: np.ndarray, position: Any, value: float) -> np.ndarray:
    changed = array.copy()
    changed[position] = value
    return changed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"public": with_value(PARTY.public, (9, 1), np.nan)}, "public must be finite"),
        ({"public_y": np.full(60, 3)}, "public_y must be class indices below 3, or names"),
        ({"public_y": np.arange(60) % 4}, "public_y must be between 0 and 2, .* got 15 others"),
        ({"x": PARTY.x[:, 0]}, "x must be an array of rows"),
        ({"x": PARTY.x[:, :1]}, r"x must be rows of shape \(2,\) like the public data"),
        ({"y": PARTY.y + 0.5}, "y must be class indices below 3"),
        ({"y": np.stack([PARTY.y] * 2, axis=1)}, "y must be a flat array of class indices"),
        ({"y": PARTY.y[:-1]}, "y must be 40 labels, one a row, got 39"),
        ({"y_test": None}, "x_test and y_test must be given together"),
        ({"x_test": PARTY.x[:, :1], "y_test": PARTY.y}, "x_test must be rows of shape"),
    ],
)
def test_bad_data_is_named(change: dict[str, Any], sentence: str) -> None:
    """Each fault of the data is one sentence that names the party and the array."""
    with pytest.raises(InvalidData, match=f"Party 3: {sentence}"):
        replace(PARTY, **change)


@pytest.mark.parametrize(
    ("value", "read"), [(np.nan, "median"), (np.inf, "bound"), (-1e300, "-bound")]
)
def test_an_invalid_value_becomes_a_public_default(
    value: float, read: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the party's own log it is counted, and not quoted; no error leaves."""
    party = replace(PARTY, x=with_value(PARTY.x, (4, 1), value))
    bound = 10 * np.abs(PARTY.public).max()
    defaults = {"median": np.median(PARTY.public[:, 1]), "bound": bound, "-bound": -bound}

    np.testing.assert_array_equal(party.x, with_value(PARTY.x, (4, 1), defaults[read]))
    counted = "1 values of x are no numbers; the public median stands in"
    assert (counted if read == "median" else "are cut to it") in caplog.text
    assert "1e+300" not in caplog.text


@pytest.mark.parametrize("label", [3, -1])
def test_an_unknown_label_becomes_the_commonest_public_class(
    label: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the first one, if public rows have no labels."""
    y = with_value(PARTY.y, 5, label)
    public_y = np.minimum(np.arange(60) % 4, 2)

    assert replace(PARTY, y=y).y.tolist() == with_value(PARTY.y, 5, 0).tolist()
    labelled = replace(PARTY, y=y, public_y=public_y)
    assert labelled.y.tolist() == with_value(PARTY.y, 5, 2).tolist()
    assert "1 labels of y are no class; class 2 stands in for each" in caplog.text


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
