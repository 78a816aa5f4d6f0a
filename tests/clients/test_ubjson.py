"""The UBJSON reader: complete for what XGBoost writes, closed to everything else."""

import contextlib
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_iris

from clients.ubjson import decode
from fl_strategies.exceptions import KnowledgeMismatch
from tests.clients.ubjson_writer import encode, text


def booster(num_class: int) -> xgboost.Booster:
    x, y = load_iris(return_X_y=True)
    kept = y < num_class
    objective: dict[str, Any] = {"objective": "binary:logistic"}
    if num_class > 2:
        objective = {"objective": "multi:softprob", "num_class": num_class}
    data = xgboost.DMatrix(x[kept], label=y[kept], nthread=1)
    return xgboost.train({**objective, "max_depth": 2, "nthread": 1}, data, 2)


def same(ours: Any, theirs: Any) -> bool:
    """Compare with parsed JSON, which spells float32 by its shortest decimal."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, np.ndarray)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float):
        return bool(np.float32(ours) == np.float32(theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("num_class", [2, 3])
def test_a_model_reads_as_its_json(num_class: int) -> None:
    """The binary form of a booster holds what XGBoost's JSON of it says."""
    model = booster(num_class)

    ours = decode(bytes(model.save_raw("ubj")))

    assert same(ours, json.loads(bytes(model.save_raw("json"))))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_reading_undoes_writing(value: Any) -> None:
    """Any nest of plain values comes back equal and of the same types."""
    assert repr(decode(encode(value), max_depth=20)) == repr(value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"i\xff", -1),
        (b"U\xff", 255),
        (b"I\x01\x00", 256),
        (b"l\xff\xff\xff\xfe", -2),
        (b"L" + struct.pack(">q", -(2**62)), -(2**62)),
        (b"d" + struct.pack(">f", 0.5), 0.5),
        (b"D" + struct.pack(">d", 0.1), 0.1),
        (b"Si\x02ab", "ab"),
        (b"[i\x01[T]Z]", [1, [True], None]),
        (b"[#i\x02FT", [False, True]),
        (b"{i\x01a[]i\x00{}}", {"a": [], "": {}}),
    ],
)
def test_every_kind_of_value_is_read(data: bytes, expected: Any) -> None:
    """Each marker gives its value, with or without a count."""
    actual = decode(data)

    assert actual == expected
    assert type(actual) is type(expected)


@pytest.mark.parametrize(
    ("marker", "dtype"),
    [
        (b"i", "i1"),
        (b"U", "u1"),
        (b"I", "i2"),
        (b"l", "i4"),
        (b"L", "i8"),
        (b"d", "f4"),
        (b"D", "f8"),
    ],
)
def test_typed_arrays_become_native_arrays(marker: bytes, dtype: str) -> None:
    """An array of one number type is read at once, in the order of this machine."""
    expected = np.array([0, 1, 100], dtype=dtype)
    wire = expected.astype(expected.dtype.newbyteorder(">")).tobytes()

    actual = decode(b"[$" + marker + b"#i\x03" + wire)

    assert actual.dtype == np.dtype(dtype)
    assert actual.dtype.isnative
    assert np.array_equal(actual, expected)
    assert actual.flags.writeable


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "at most 0 bytes"),
        (b"i", "at most 0 bytes"),
        (b"Q", "the start of a value"),
        (b"i\x01i\x02", "one value, got bytes after it"),
        (b"Si\x05ab", "at most 2 bytes, got 5"),
        (b"Si\xffab", "got -1"),
        (b"Sd\x00\x00\x00\x00", "an integer length"),
        (b"SU\x02\xff\xfe", "text must be UTF-8"),
        (b"{i\x01ai\x01i\x01ai\x02}", "a new key, got 'a'"),
        (b"{i\x01ai\x01", "at most 0 bytes"),
        (b"[i\x01", "at most 0 bytes"),
        (b"[#i\x05i\x01", "a count of at most 2, got 5"),
        (b"[#i\xff", "a count of at most 0, got -1"),
        (b"[#L\x7f\xff\xff\xff\xff\xff\xff\xff", "a count of at most 0"),
        (b"[$l#L\x7f\xff\xff\xff\xff\xff\xff\xff", "at most 0 bytes"),
        (b"[$l#i\x02\x00\x00\x00\x00", "at most 4 bytes, got 8"),
        (b"[$l#i\xff", "got -4"),
        (b"[$Z#i\x02", "a number type"),
        (b"[$S#i\x01i\x01a", "a number type"),
        (b"[$[#i\x01", "a number type"),
        (b"[$li\x01\x00\x00\x00\x00", "a count, got none"),
        (b"{$i#i\x01i\x01a\x01", "an integer length"),
        (b"N", "the start of a value"),
        (b"H", "the start of a value"),
    ],
)
def test_broken_bytes_are_refused(data: bytes, message: str) -> None:
    """Whatever XGBoost does not write is a mismatch that names the place."""
    with pytest.raises(KnowledgeMismatch, match=message):
        decode(data)


@pytest.mark.parametrize("opening", [b"[", b"{i\x01a", b"[#i\x01"])
def test_depth_is_bounded(opening: bytes) -> None:
    """A deep nest is refused at the limit, not by the interpreter's stack."""
    with pytest.raises(KnowledgeMismatch, match="within the depth"):
        decode(opening * 100_000)
    with pytest.raises(KnowledgeMismatch, match="within the depth"):
        decode(b"[" * 4 + b"]" * 4, max_depth=3)

    assert decode(b"[" * 4 + b"]" * 4, max_depth=4) == [[[[]]]]


def test_the_number_of_values_is_bounded() -> None:
    """Values are counted wherever they stand, typed arrays as one."""
    data = b"[" + b"Z" * 9 + b"]"

    assert len(decode(data, max_items=10)) == 9
    with pytest.raises(KnowledgeMismatch, match="number of items"):
        decode(data, max_items=9)
    assert len(decode(b"[$U#U\xff" + bytes(255), max_items=1)) == 255


def test_a_claimed_size_allocates_nothing() -> None:
    """A huge count in a few bytes is refused before memory is taken for it."""
    count = struct.pack(">q", 2**40)
    tracemalloc.start()
    for opening in (b"[$d#L", b"[#L", b"SL"):
        with pytest.raises(KnowledgeMismatch):
            decode(opening + count + bytes(16))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1_000_000


def test_errors_are_short() -> None:
    """A stranger's text cannot fill a log through an error message."""
    long = b"{" + text("k" * 10_000) + b"Z" + text("k" * 10_000) + b"Z}"

    with pytest.raises(KnowledgeMismatch) as caught:
        decode(long)

    assert len(str(caught.value)) < 200


MODEL = bytes(booster(3).save_raw("ubj"))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_mutations_are_read_or_refused(data: st.DataObject) -> None:
    """Damaged bytes of a model raise a mismatch or still read, and nothing else."""
    raw = bytearray(MODEL)
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(raw))] * 2)))
    match data.draw(st.sampled_from(["keep", "cut", "repeat"])):
        case "cut":
            del raw[start:end]
        case "repeat":
            raw[start:start] = raw[start:end]

    try:
        value = decode(bytes(raw), max_items=5000)
    except KnowledgeMismatch:
        return

    assert isinstance(value, dict)


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_noise_is_read_or_refused(data: bytes) -> None:
    """No bytes at all raise anything but a mismatch."""
    with contextlib.suppress(KnowledgeMismatch):
        decode(data)
