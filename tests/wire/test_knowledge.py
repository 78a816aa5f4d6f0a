import io
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fl_strategies._compat import records_to_bytes
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    Knowledge,
    PlainScores,
    Quantizer,
    bits_per_label,
    config_choice,
    config_float,
    config_int,
    count_bytes,
    decode_array,
    join_arrays,
    pack_labels,
    packed_size,
    part_arrays,
    read_metrics,
    score_format,
    unpack_labels,
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
    original = data.draw(arrays(dtype, array_shapes(min_dims=1, min_side=0, max_side=4)))
    original = np.asarray(original, order=order)

    read = decode_array("a", Array(original))

    assert read.dtype == original.dtype
    assert read.shape == original.shape
    assert read.tobytes() == original.tobytes()


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_mutated_bytes_give_numbers_or_one_error(data: st.DataObject) -> None:
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
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**55},), }}"
    stream = io.BytesIO(npy(header).data)

    with pytest.raises((MemoryError, ValueError)):
        np.load(stream, allow_pickle=False)


def test_knowledge_survives_the_wire() -> None:
    sent = Knowledge(
        "votes", {"votes": np.arange(5, dtype=np.uint8)}, {"learner": "tree", "n": 3}
    )

    read = Knowledge.read(content_of(sent), kind="votes", max_bytes=10_000)

    assert read.meta == sent.meta
    np.testing.assert_array_equal(read.arrays["votes"], sent.arrays["votes"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RecordDict(), "must hold the records"),
        (RecordDict({keys.ARRAYS: ArrayRecord()}), "must hold the records"),
        (
            RecordDict({keys.ARRAYS: ConfigRecord(), keys.META: ConfigRecord()}),
            "must hold the records",
        ),
        (
            RecordDict({keys.ARRAYS: ArrayRecord(), keys.META: MetricRecord()}),
            "must hold the records",
        ),
        (content_of(Knowledge("scores", {})), "kind must be 'votes', got 'scores'"),
        (content_of(Knowledge("votes", {"v": np.zeros(1000)})), "at most 1000 bytes, got 8"),
    ],
)
def test_missing_records_another_kind_and_too_many_bytes_are_refused(
    content: RecordDict, message: str
) -> None:
    """The limit holds for the encoded record, before it is decoded."""
    with pytest.raises(KnowledgeMismatch, match=message):
        Knowledge.read(content, kind="votes", max_bytes=1000)


def test_models_join_and_part() -> None:
    models = [{"w": np.ones(2), "b": np.zeros(1)}, {"w": np.full(2, 3.0)}]

    parted = part_arrays(join_arrays(models), 2)

    assert [sorted(model) for model in parted] == [["b", "w"], ["w"]]
    np.testing.assert_array_equal(parted[1]["w"], [3.0, 3.0])


@pytest.mark.parametrize("name", ["2/w", "w", "/w", "-1/w", "x/w", "00000000000000000000001/w"])
def test_arrays_of_no_model_are_refused(name: str) -> None:
    with pytest.raises(KnowledgeMismatch, match="must belong to models 0 to 1"):
        part_arrays({name: np.ones(1)}, 2)


def test_metrics_are_numbers_only() -> None:
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
    config = ConfigRecord({} if value is None else {"n": value})  # type: ignore[dict-item]

    with pytest.raises(KnowledgeMismatch, match="n must be a whole number from 1 to 10"):
        config_int(config, "n", minimum=1, maximum=10)
    assert config_int(ConfigRecord({"n": 10}), "n", minimum=1, maximum=10) == 10


def test_a_party_checks_ranges_and_choices() -> None:
    config = ConfigRecord({"n": 4, "x": "b"})

    with pytest.raises(KnowledgeMismatch, match=r"n must be 3, got 4\."):
        config_int(config, "n", minimum=3, maximum=3)
    with pytest.raises(KnowledgeMismatch, match=r"n must be 3\.0, got 4\."):
        config_float(config, "n", minimum=3.0, maximum=3.0)
    with pytest.raises(KnowledgeMismatch, match="x must be one of a, c, got 'b'"):
        config_choice(config, "x", ["a", "c"])
    assert config_choice(config, "x", ["a", "b"]) == "b"


@pytest.mark.parametrize(
    ("num_classes", "bits"),
    [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (10, 4), (256, 8), (257, 9)],
)
def test_bits_are_the_ceiling_of_the_logarithm(num_classes: int, bits: int) -> None:
    assert bits_per_label(num_classes) == bits


@settings(deadline=None, max_examples=80)
@given(data=st.data(), num_classes=st.integers(2, 1000), num_rows=st.integers(0, 70))
def test_labels_survive_packing(data: st.DataObject, num_classes: int, num_rows: int) -> None:
    label = st.integers(0, num_classes - 1)
    flat = data.draw(st.lists(label, min_size=2 * num_rows, max_size=2 * num_rows))
    labels = np.array(flat, dtype=np.int64).reshape(2, num_rows)

    packed = pack_labels(labels, num_classes)

    assert packed.size == packed_size(2 * num_rows, num_classes)
    np.testing.assert_array_equal(unpack_labels(packed, labels.shape, num_classes), labels)


@pytest.mark.parametrize(
    ("packed", "shape", "message"),
    [
        (np.zeros(2, np.uint8), (2, 5), "must be 3 bytes"),
        (np.zeros(4, np.uint8), (2, 5), "must be 3 bytes"),
        (np.zeros(3, np.int8), (2, 5), "must be 3 bytes"),
        (np.zeros((3, 1), np.uint8), (2, 5), "must be 3 bytes"),
        (np.zeros(3, np.float32), (2, 5), "must be 3 bytes"),
        (pack_labels(np.array([0, 3]), 4), (2,), "must be below 3, got 3"),
        (np.zeros(1, np.uint8), (10**15,), "must be 250000000000000 bytes"),
    ],
)
def test_other_sizes_types_and_labels_are_refused(
    packed: np.ndarray, shape: tuple[int, ...], message: str
) -> None:
    """Before anything is allocated."""
    with pytest.raises(KnowledgeMismatch, match=message):
        unpack_labels(packed, shape, num_classes=3)


bounds = st.floats(min_value=1e-6, max_value=1e6)
levels = st.integers(min_value=2, max_value=2**16)


def values_within(bound: float, size: int = 50) -> np.ndarray:
    return np.random.default_rng(0).uniform(-bound, bound, size)


@given(bound=bounds, num_levels=levels, share=st.floats(-1, 1))
def test_nearest_errs_by_half_a_step(bound: float, num_levels: int, share: float) -> None:
    quantizer = Quantizer(num_levels=num_levels, bound=bound)
    value = np.array([share * bound])

    moved = np.abs(quantizer.decode(quantizer.encode(value)) - value)

    assert moved[0] <= quantizer.step * (0.5 + 1e-9)


@given(bound=bounds, num_levels=levels, share=st.floats(-1, 1), seed=st.integers(0, 99))
def test_stochastic_errs_by_less_than_a_step(
    bound: float, num_levels: int, share: float, seed: int
) -> None:
    quantizer = Quantizer(num_levels=num_levels, bound=bound, rounding="stochastic")
    value = np.array([share * bound])

    codes = quantizer.encode(value, np.random.default_rng(seed))

    assert 0 <= codes[0] < num_levels
    assert np.abs(quantizer.decode(codes) - value)[0] <= quantizer.step * (1 + 1e-9)


def test_stochastic_is_right_on_average() -> None:
    value, many = 0.3, 40_000
    fair = Quantizer(num_levels=3, bound=1.0, rounding="stochastic")
    near = Quantizer(num_levels=3, bound=1.0)
    rng = np.random.default_rng(1)

    mean = fair.decode(fair.encode(np.full(many, value), rng)).mean()

    # The deviation of one rounding is below 1/2, that of the mean below 0.0025.
    assert abs(mean - value) < 0.0125
    assert near.decode(near.encode(np.full(1, value)))[0] == 0.0


@pytest.mark.parametrize("num_levels", [2, 3, 200, 256, 257, 1000])
def test_ends_are_levels_and_what_is_beyond_is_moved_there(num_levels: int) -> None:
    quantizer = Quantizer(num_levels=num_levels, bound=2.5)

    decoded = quantizer.decode(quantizer.encode(np.array([-1e300, -2.5, 2.5, 1e300])))

    assert decoded == pytest.approx([-2.5, -2.5, 2.5, 2.5], abs=1e-12)


@pytest.mark.parametrize(("num_levels", "bits"), [(2, 1), (16, 4), (200, 8), (257, 9)])
def test_the_wire_takes_the_bits_it_should(num_levels: int, bits: int) -> None:
    """A value takes ceil(log2 S) bits, and arrives as the level it left as."""
    quantizer = Quantizer(num_levels=num_levels, bound=1.0)
    values = values_within(1.0, 70).reshape(7, 10)

    packed = quantizer.to_wire(values, np.random.default_rng(0))
    received = quantizer.from_wire(packed, (7, 10))

    assert packed.dtype == np.uint8
    assert packed.size == math.ceil(70 * bits / 8)
    assert (received == quantizer.encode(values)).all()


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (np.zeros(9, np.uint8), "must be 10 bytes"),
        (np.zeros(11, np.uint8), "must be 10 bytes"),
        (np.zeros((2, 5), np.uint8), "must be 10 bytes"),
        (np.zeros(10, np.int8), "must be 10 bytes"),
        (np.full(10, 200, np.uint8), "values must be below 200, got 200"),
    ],
)
def test_other_bytes_are_refused(packed: np.ndarray, reason: str) -> None:
    with pytest.raises(KnowledgeMismatch, match=reason):
        Quantizer(num_levels=200, bound=1.0).from_wire(packed, (2, 5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_must_be_finite_and_rounding_at_random_needs_a_generator(bad: float) -> None:
    with pytest.raises(InvalidData, match="must be finite"):
        Quantizer(num_levels=5, bound=1.0).encode(np.array([0.0, bad]))
    with pytest.raises(InvalidData, match="rng must be given"):
        Quantizer(num_levels=5, bound=1.0, rounding="stochastic").encode(np.zeros(2))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_levels": 1}, "num_levels must be from 2"),
        ({"num_levels": 2**17}, "num_levels must be from 2"),
        ({"bound": 0.0}, "bound must be finite and above 0"),
        ({"bound": math.nan}, "bound must be finite and above 0"),
        ({"bound": math.inf}, "bound must be finite and above 0"),
        ({"rounding": "up"}, "rounding must be 'nearest' or 'stochastic'"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(InvalidParameter, match=rule):
        Quantizer(**{"num_levels": 5, "bound": 1.0, **changes})  # type: ignore[arg-type]


def test_plain_scores_travel_as_float32_within_the_bound() -> None:
    plain = score_format(None, 2.0, "nearest")
    assert isinstance(plain, PlainScores)
    sent = plain.to_wire(np.array([[0.5, 7.0]]), np.random.default_rng(0))

    assert plain.decode(plain.from_wire(sent, (1, 2))).tolist() == [[0.5, 2.0]]
    with pytest.raises(KnowledgeMismatch, match=r"float32 of shape \(1, 3\)"):
        plain.from_wire(sent, (1, 3))
    with pytest.raises(KnowledgeMismatch, match="finite"):
        plain.from_wire(np.array([[np.nan, 0]], np.float32), (1, 2))
    hostile = plain.from_wire(np.array([[1e30, 0]], np.float32), (1, 2))
    assert hostile.max() == 2.0
