import io
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fl_strategies._compat import records_to_bytes
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    Knowledge,
    config_choice,
    config_float,
    config_int,
    count_bytes,
    decode_array,
    join_arrays,
    part_arrays,
    read_metrics,
)

NUMBERS = st.sampled_from([np.uint8, np.int64, np.float32, np.float64, np.bool_])


def content_of(knowledge: Knowledge) -> RecordDict:
    content = RecordDict()
    knowledge.write(content)
    return content


def npy(header: str, body: bytes = b"") -> Array:
    """Build an array message from a hand-written header."""
    text = header.encode() + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body
    return Array(dtype="float64", shape=(1,), stype="numpy.ndarray", data=data)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), dtype=NUMBERS, order=st.sampled_from("CF"))
def test_arrays_survive_the_wire(data: st.DataObject, dtype: type, order: str) -> None:
    """What is read equals what was written: type, shape and every bit."""
    original = data.draw(arrays(dtype, array_shapes(min_dims=1, min_side=0, max_side=4)))
    original = np.asarray(original, order=order)

    read = decode_array("a", Array(original))

    assert read.dtype == original.dtype
    assert read.shape == original.shape
    assert read.tobytes() == original.tobytes()


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_mutated_bytes_give_numbers_or_one_error(data: st.DataObject) -> None:
    """Flipping, cutting or inserting bytes never raises anything but the typed error."""
    blob = bytearray(Array(np.arange(6, dtype=np.int32).reshape(2, 3)).data)
    position = data.draw(st.integers(0, len(blob) - 1))
    action = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    if action == "flip":
        blob[position] = data.draw(st.integers(0, 255))
    elif action == "cut":
        del blob[position:]
    else:
        blob[position:position] = data.draw(st.binary(max_size=9))
    hostile = Array(dtype="int32", shape=(2, 3), stype="numpy.ndarray", data=bytes(blob))

    try:
        read = decode_array("a", hostile)
    except KnowledgeMismatch:
        return

    assert read.nbytes <= len(blob)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (10**15,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '|S8', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,), }",
        "__import__('os').system('true')",
        "(" * 5000,
        "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1000000000000000000000), }",
    ],
)
def test_hostile_headers_are_refused(header: str) -> None:
    """Objects, text, records, code and false promises end in one sentence."""
    with pytest.raises(KnowledgeMismatch, match="array 'a' must be a plain array of numbers"):
        decode_array("a", npy(header, b"\0" * 8))


def test_numpy_itself_would_allocate_what_a_header_promises() -> None:
    """Why the header is read here: numpy.load trusts it, and fails only for want of memory."""
    stream = io.BytesIO(
        npy(
            "{'descr': '<f8', 'fortran_order': False, 'shape': (2**55,), }".replace(
                "2**55", str(2**55)
            )
        ).data
    )

    with pytest.raises((MemoryError, ValueError)):
        np.load(stream, allow_pickle=False)


def test_knowledge_survives_the_wire() -> None:
    """Kind, arrays and meta arrive as they were sent."""
    sent = Knowledge(
        "votes", {"votes": np.arange(5, dtype=np.uint8)}, {"learner": "tree", "n": 3}
    )

    read = Knowledge.read(content_of(sent), kind="votes", max_bytes=10_000)

    assert read.meta == sent.meta
    np.testing.assert_array_equal(read.arrays["votes"], sent.arrays["votes"])


def test_another_kind_is_refused() -> None:
    """Scores are not votes."""
    with pytest.raises(KnowledgeMismatch, match="kind must be 'votes', got 'scores'"):
        Knowledge.read(content_of(Knowledge("scores", {})), kind="votes", max_bytes=100)


def test_too_many_bytes_are_refused() -> None:
    """The limit holds for the encoded record, before it is decoded."""
    content = content_of(Knowledge("votes", {"v": np.zeros(1000)}))

    with pytest.raises(KnowledgeMismatch, match="at most 1000 bytes, got 8"):
        Knowledge.read(content, kind="votes", max_bytes=1000)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({keys.ARRAYS: ArrayRecord()}),
        RecordDict({keys.ARRAYS: ConfigRecord(), keys.META: ConfigRecord()}),
        RecordDict({keys.ARRAYS: ArrayRecord(), keys.META: MetricRecord()}),
    ],
)
def test_missing_records_are_refused(content: RecordDict) -> None:
    """A message without the two records is not knowledge."""
    with pytest.raises(KnowledgeMismatch, match="must hold the records"):
        Knowledge.read(content, kind="votes", max_bytes=100)


def test_models_join_and_part() -> None:
    """Arrays of several models travel under one roof and come apart again."""
    models = [{"w": np.ones(2), "b": np.zeros(1)}, {"w": np.full(2, 3.0)}]

    parted = part_arrays(join_arrays(models), 2)

    assert [sorted(model) for model in parted] == [["b", "w"], ["w"]]
    np.testing.assert_array_equal(parted[1]["w"], [3.0, 3.0])


@pytest.mark.parametrize("name", ["2/w", "w", "/w", "-1/w", "x/w", "00000000000000000000001/w"])
def test_arrays_of_no_model_are_refused(name: str) -> None:
    """Only models 0 and 1 were asked for."""
    with pytest.raises(KnowledgeMismatch, match="must belong to models 0 to 1"):
        part_arrays({name: np.ones(1)}, 2)


def test_metrics_are_numbers_only() -> None:
    """Lists are dropped, and without the record there is one sentence."""
    content = RecordDict({keys.METRICS: MetricRecord({"a": 1, "b": math.inf, "c": [1.0]})})

    assert read_metrics(content) == {"a": 1, "b": math.inf}
    with pytest.raises(KnowledgeMismatch, match="must hold the record 'metrics'"):
        read_metrics(RecordDict())


def test_counted_bytes_are_close_to_the_encoded_message() -> None:
    """The count is the payload; Flower's own framing adds little to it."""
    content = content_of(Knowledge("votes", {"votes": np.zeros(5000, np.uint8)}))

    counted, encoded = count_bytes(content), len(records_to_bytes(content))

    assert 5000 < counted <= encoded < counted + 300


@pytest.mark.parametrize("value", [0, 11, True, 3.0, "3", None])
def test_a_party_checks_the_servers_numbers(value: object) -> None:
    """Only whole numbers within the party's own bounds are taken."""
    config = ConfigRecord({} if value is None else {"n": value})  # type: ignore[dict-item]

    with pytest.raises(KnowledgeMismatch, match="n must be a whole number from 1 to 10"):
        config_int(config, "n", minimum=1, maximum=10)
    assert config_int(ConfigRecord({"n": 10}), "n", minimum=1, maximum=10) == 10


def test_a_range_of_one_number_is_that_number() -> None:
    """Nobody is told that 4 should be from 3 to 3."""
    config = ConfigRecord({"n": 4})

    with pytest.raises(KnowledgeMismatch, match=r"n must be 3, got 4\."):
        config_int(config, "n", minimum=3, maximum=3)
    with pytest.raises(KnowledgeMismatch, match=r"n must be 3\.0, got 4\."):
        config_float(config, "n", minimum=3.0, maximum=3.0)


def test_a_party_checks_the_servers_choices() -> None:
    """A word that the party does not know is refused."""
    with pytest.raises(KnowledgeMismatch, match="x must be one of a, b, got 'c'"):
        config_choice(ConfigRecord({"x": "c"}), "x", ["a", "b"])
    assert config_choice(ConfigRecord({"x": "b"}), "x", ["a", "b"]) == "b"
