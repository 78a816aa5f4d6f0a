"""Changed pictures: what moves, what stays, and that both sides see the same."""

from typing import Any

import numpy as np
import pytest

from fl_strategies import FedKDOptions
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch
from fl_strategies.strategies.fedkd.options import augmented, check_augmentation, crop

IMAGES = np.random.default_rng(0).random((30, 3, 12, 10)) + 1.0


def test_the_first_prediction_sees_the_rows_as_they_are() -> None:
    """Number 0 is the plain image, and so is every number without an augmentation."""
    assert augmented(IMAGES, "crop", 7, 0) is IMAGES
    assert augmented(IMAGES, "none", 7, 3) is IMAGES


def test_both_sides_change_rows_alike() -> None:
    """Seed and number decide the images; another number gives others."""
    first, again, other = (augmented(IMAGES, "crop-flip", 7, number) for number in (1, 1, 2))

    assert (first == again).all()
    assert (first != other).any()


def test_a_crop_is_a_shift_of_at_most_four_pixels() -> None:
    """Every changed image is the old one moved, with zeros where nothing was."""
    moved = crop(IMAGES, np.random.default_rng(1))

    assert moved.shape == IMAGES.shape
    padded = np.pad(IMAGES, [(0, 0), (0, 0), (4, 4), (4, 4)])
    shifts = set()
    for before, after in zip(padded, moved, strict=True):
        found = [
            (top, left)
            for top in range(9)
            for left in range(9)
            if (before[:, top : top + 12, left : left + 10] == after).all()
        ]
        assert len(found) == 1
        shifts.update(found)
    assert len(shifts) > 10


def test_about_half_of_the_images_are_mirrored() -> None:
    """With a wide margin nothing is cut off, so the order of columns tells the direction."""
    wide = np.pad(IMAGES, [(0, 0), (0, 0), (4, 4), (4, 4)])
    turned = augmented(wide, "crop-flip", 2, 1)

    def columns(image: np.ndarray) -> np.ndarray:
        sums = image.sum(axis=(0, 1))
        return sums[sums > 0]

    same = [np.allclose(columns(a), columns(b)) for a, b in zip(wide, turned, strict=True)]
    mirrored = [
        np.allclose(columns(a), columns(b)[::-1]) for a, b in zip(wide, turned, strict=True)
    ]
    assert all(a != b for a, b in zip(same, mirrored, strict=True))
    assert 5 < sum(mirrored) < 25


@pytest.mark.parametrize(
    ("name", "rows", "times", "error", "rule"),
    [
        ("none", IMAGES, 2, InvalidParameter, "augmentation must be given for more than one"),
        ("crop", IMAGES[:, 0, 0], 2, InvalidData, "public must be images"),
    ],
)
def test_impossible_wishes_are_named(
    name: str, rows: np.ndarray, times: int, error: type[Exception], rule: str
) -> None:
    """One sentence each."""
    with pytest.raises(error, match=rule):
        check_augmentation("FedKD", name, rows, times)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_predictions": 0}, "num_predictions must be from 1 to 1048576, got 0"),
        (
            {"num_predictions": 2, "augmentation": "blur"},
            "augmentation must be one of none, crop, crop-flip, got 'blur'",
        ),
    ],
)
def test_what_no_rows_allow_is_refused_before_there_are_any(
    changes: dict[str, Any], rule: str
) -> None:
    """By the options, on both sides."""
    with pytest.raises(InvalidParameter, match=f"FedKD: {rule}"):
        FedKDOptions(**changes)
    told = {name.replace("_", "-"): value for name, value in changes.items()}
    with pytest.raises(KnowledgeMismatch, match=f"Server: FedKD: {rule}"):
        FedKDOptions.received(told)
