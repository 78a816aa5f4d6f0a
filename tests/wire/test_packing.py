import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.wire.formats import bits_per_label, pack_labels, packed_size, unpack_labels


@pytest.mark.parametrize(
    ("num_classes", "bits"),
    [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (10, 4), (256, 8), (257, 9)],
)
def test_bits_are_the_ceiling_of_the_logarithm(num_classes: int, bits: int) -> None:
    """A label takes ceil(log2 C) bits and never none."""
    assert bits_per_label(num_classes) == bits


@settings(deadline=None, max_examples=80)
@given(data=st.data(), num_classes=st.integers(2, 1000), num_rows=st.integers(0, 70))
def test_labels_survive_packing(data: st.DataObject, num_classes: int, num_rows: int) -> None:
    """Unpacking gives back the labels, from the promised number of bytes."""
    label = st.integers(0, num_classes - 1)
    flat = data.draw(st.lists(label, min_size=2 * num_rows, max_size=2 * num_rows))
    labels = np.array(flat, dtype=np.int64).reshape(2, num_rows)

    packed = pack_labels(labels, num_classes)

    assert packed.size == packed_size(2 * num_rows, num_classes)
    np.testing.assert_array_equal(unpack_labels(packed, labels.shape, num_classes), labels)


def test_adult_votes_take_one_bit_each() -> None:
    """4070 binary labels fit into 509 bytes."""
    assert pack_labels(np.ones(4070, dtype=int), 2).nbytes == 509


@pytest.mark.parametrize(
    "packed",
    [
        np.zeros(2, np.uint8),
        np.zeros(4, np.uint8),
        np.zeros(3, np.int8),
        np.zeros((3, 1), np.uint8),
        np.zeros(3, np.float32),
    ],
)
def test_other_sizes_and_types_are_refused(packed: np.ndarray) -> None:
    """Only exactly the bytes that were asked for are read."""
    with pytest.raises(KnowledgeMismatch, match="must be 3 bytes"):
        unpack_labels(packed, (2, 5), num_classes=3)


def test_labels_outside_the_class_list_are_refused() -> None:
    """Two bits can say 3, but three classes end at 2."""
    with pytest.raises(KnowledgeMismatch, match="must be below 3, got 3"):
        unpack_labels(pack_labels(np.array([0, 3]), 4), (2,), num_classes=3)


def test_a_hostile_size_is_refused_before_anything_is_allocated() -> None:
    """A promise of 10^15 labels fails at once instead of exhausting memory."""
    with pytest.raises(KnowledgeMismatch):
        unpack_labels(np.zeros(1, np.uint8), (10**15,), num_classes=2)
