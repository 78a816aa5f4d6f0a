import gzip
import io
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_strategies.errors import InvalidData, InvalidParameter, MissingExtra
from tests.simulations.test_datasets import load, sizes, sorted_rows, tabular


def write_split(path: Path, **changes: Any) -> Path:
    x, y = tabular(60, 4)
    arrays = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    arrays.update(changes)
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


# Archives


def test_an_npz_without_public_rows_gives_half_of_its_test_rows(tmp_path: Path) -> None:
    """All training rows stay private and the test rows are shared between two uses."""
    path = write_split(tmp_path / "rows.npz")
    data = load(str(path))
    assert sizes(data) == (40, 10, 10)
    assert data.name == "rows.npz"
    assert np.allclose(data.x_public.mean(axis=0), 0, atol=1e-5)


def test_an_npz_with_public_rows_keeps_its_test_rows(tmp_path: Path) -> None:
    """x_public is taken as it is, and it alone fixes the scale."""
    public = np.array([[0.0, 10, 0, 5], [2.0, 30, 1, 5]])
    path = write_split(tmp_path / "rows.npz", x_public=public)
    data = load(str(path))
    assert sizes(data) == (40, 2, 20)
    assert np.allclose(data.x_public, [[-1, -1, 0, 0], [1, 1, 1, 0]])
    original = tabular(60, 4)[0]
    assert np.allclose(data.x_test[:, 1], (original[40:, 1] - 20) / 10, atol=1e-4)
    assert np.array_equal(data.x_test[:, 2], original[40:, 2])


def test_the_split_of_a_file_does_not_depend_on_its_folder(tmp_path: Path) -> None:
    """Server and parties may keep the same file in different places."""
    first = write_split(tmp_path / "rows.npz")
    (tmp_path / "other").mkdir()
    second = write_split(tmp_path / "other" / "rows.npz")
    left, right = (load(str(path)) for path in (first, second))
    assert np.array_equal(left.x_public, right.x_public)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 6), (1, 5, 6)),
        ((5, 6, 3), (3, 5, 6)),
        ((5, 6, 1), (1, 5, 6)),
        ((3, 5, 6), (3, 5, 6)),
        ((5, 6, 2), (60,)),
        ((2, 3, 4, 5), (120,)),
    ],
)
def test_images_of_a_file_become_channels_of_pixels(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Grey and coloured images are recognised by their shape; anything else is laid flat."""
    images = np.random.default_rng(0).integers(256, size=(60, *shape), dtype=np.uint8)
    path = write_split(tmp_path / "images.npz", x_train=images[:40], x_test=images[40:])
    data = load(str(path))
    assert data.row_shape == data.x_public.shape[1:] == data.x_test.shape[1:] == expected
    if shape == (5, 6, 3):
        colours = [
            np.corrcoef(data.x_train[:, c].ravel(), images[:40, ..., c].ravel())[0, 1]
            for c in range(3)
        ]
        assert np.allclose(colours, 1)


def test_images_of_a_file_have_one_scale_for_all_pixels(tmp_path: Path) -> None:
    """A pixel that never varies in public images is not blown up."""
    images = np.random.default_rng(0).integers(256, size=(60, 5, 5, 3), dtype=np.uint8)
    images[:, 0, 0] = 0
    path = write_split(tmp_path / "images.npz", x_train=images[:40], x_test=images[40:])
    data = load(str(path))
    assert data.x_public.mean() == pytest.approx(0, abs=1e-4)
    assert data.x_public.std() == pytest.approx(1, abs=1e-4)
    assert np.abs(data.x_train).max() < 4


def test_images_of_a_file_must_be_alike(tmp_path: Path) -> None:
    """Equally many pixels in another arrangement are other images."""
    path = write_split(
        tmp_path / "rows.npz", x_train=np.zeros((40, 4, 6)), x_test=np.zeros((20, 6, 4))
    )
    with pytest.raises(InvalidData, match=r"x_test must be rows of shape \(1, 4, 6\)"):
        load(str(path))


@pytest.mark.parametrize(
    ("train", "test", "classes"),
    [
        (np.repeat([3, 7], 20), np.repeat([5], 20), ("3", "5", "7")),
        (np.repeat([2.0, 10.0], 20), np.repeat([2.0], 20), ("2", "10")),
        (np.repeat(["cat", "ant"], 20), np.repeat(["bee"], 20), ("ant", "bee", "cat")),
        (np.repeat([b"no", b"yes"], 20), np.repeat([b"no"], 20), ("no", "yes")),
        (np.repeat([[1], [0]], 20, axis=0), np.zeros((20, 1), bool), ("0", "1")),
    ],
)
def test_labels_become_positions_in_the_sorted_class_list(
    tmp_path: Path, train: Any, test: Any, classes: tuple[str, ...]
) -> None:
    """Numbers are sorted as numbers, text as text, over train and test together."""
    path = write_split(tmp_path / "rows.npz", y_train=train, y_test=test)
    data = load(str(path))
    assert data.classes == classes
    names = [classes[label] for label in data.y_train]
    plain = [label.decode() if isinstance(label, bytes) else label for label in train.ravel()]
    assert names == [str(label if isinstance(label, str) else int(label)) for label in plain]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "complete with x_train, .*, got no y_test"),
        ({"y_train": np.array([None] * 40)}, "must be an npz archive of plain arrays"),
        ({"x_train": np.zeros((40, 4), object)}, "must be an npz archive of plain arrays"),
        ({"x_train": np.zeros((40, 3))}, "x_test must be 3 values a row like x_train, got 4"),
        ({"x_public": np.zeros((9, 5))}, "x_public must be 4 values a row like x_train, got 5"),
        ({"y_train": np.zeros(39, int)}, "y_train must be 40 labels, one for each row of x_tr"),
        ({"y_train": np.zeros((40, 2), int)}, "y_train must be one label a row"),
        ({"y_train": np.linspace(0, 1, 40)}, r"y_train must be class labels .* got \[0.02"),
        ({"y_train": np.zeros(40), "y_test": np.full(20, np.nan)}, "y_test must be class lab"),
        ({"y_train": np.zeros(40, complex)}, "y_train must be whole numbers or text"),
        ({"y_train": np.repeat(["a", "b"], 20)}, "labels must be all numbers or all text"),
        ({"y_train": np.ones(40, int), "y_test": np.ones(20, int)}, "of at least 2 classes"),
        ({"x_test": np.full((20, 4), np.inf)}, "x_test must be finite"),
        ({"x_train": np.zeros(40)}, "x_train must be an array of rows"),
        ({"x_test": np.zeros((20, 4), "U3")}, "x_test must be finite"),
        (
            {"x_test": np.zeros((0, 4)), "y_test": np.zeros(0, int)},
            "x_test must be at least on",
        ),
        (
            {"x_test": np.zeros((1, 4)), "y_test": np.zeros(1, int)},
            "x_test must be at least 2 rows without x_public",
        ),
    ],
)
def test_a_wrong_npz_is_described(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Each way an archive can be wrong gives one sentence that names file and array."""
    path = write_split(tmp_path / "rows.npz", **changes)
    with pytest.raises(InvalidData, match=rf"rows.npz: .*{message}"):
        load(str(path))


def one_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((4, 4)))
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 broken", one_array()])
def test_a_broken_archive_is_described(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no archive, or a single array, give a sentence and no traceback."""
    path = tmp_path / "rows.npz"
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=r"rows.npz: the file must be an npz archive"):
        load(str(path))


# Tables


def table(num_rows: int = 240) -> str:
    rng = np.random.default_rng(0)
    lines = ["age,colour,is_member,label"]
    for row in range(num_rows):
        colour = ("red", "green", "blue")[row % 3]
        lines.append(f"{rng.integers(18, 90)},{colour},{row % 2 == 0},{'ny'[row % 2]}")
    return "\n".join(lines) + "\n"


def write_text(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_csv_is_encoded_in_a_constant_order(tmp_path: Path) -> None:
    """Numbers are standardised, other columns one-hot with sorted categories, in file order."""
    data = load(write_text(tmp_path / "t.csv", table()), label="label")
    assert sizes(data) == (180, 30, 30)
    assert data.classes == ("n", "y")
    assert data.num_features == 1 + 3 + 1
    assert data.x_public[:, 0].mean() == pytest.approx(0, abs=1e-5)
    assert (data.x_train[:, 1:4].sum(axis=1) == 1).all()
    assert np.array_equal(data.x_train[:, 4], 1 - data.y_train)


def test_a_category_that_no_public_row_has_is_all_zeros(tmp_path: Path) -> None:
    """Private rows cannot add columns: the table's shape tells nothing about them."""
    text = table() + "40,violet,True,n\n"
    path = write_text(tmp_path / "t.csv", text)
    for seed in range(8):
        data = load(path, seed=seed, label="label")
        blank = sum((x[:, 1:-1].sum(axis=1) == 0).sum() for x in (data.x_train, data.x_test))
        assert (data.num_features, blank) in {(5, 1), (6, 0)}


def test_a_missing_category_counts_as_one(tmp_path: Path) -> None:
    """An empty text cell is a value of its own, so no row has to be dropped."""
    text = table().replace("red", "")
    data = load(write_text(tmp_path / "t.csv", text), label="label")
    assert data.num_features == 5
    assert (data.x_train[:, 1:4].sum(axis=1) == 1).all()


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".csv.gz", gzip.compress), (".csv.xz", lzma.compress)]
)
def test_a_compressed_csv_is_the_same_table(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    """Compression changes neither rows nor labels."""
    plain = load(write_text(tmp_path / "t.csv", table()), label="label")
    packed = tmp_path / f"t{suffix}"
    packed.write_bytes(compress(table().encode()))
    data = load(str(packed), label="label")
    assert sizes(data) == sizes(plain)
    columns = [
        sorted_rows(d.x_train[:, 1:], d.x_test[:, 1:], d.x_public[:, 1:]) for d in (data, plain)
    ]
    assert np.array_equal(*columns)


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("", r"label must be given \(--label COLUMN on the command line\), got none. "),
        ("Label", "got 'Label', which is missing. Did you mean 'label'\\? "),
        ("colr", "got 'colr', which is missing. Did you mean 'colour'\\? "),
        ("income", "got 'income', which is missing. "),
    ],
)
def test_a_label_column_that_is_not_there_lists_the_columns(
    tmp_path: Path, label: str, answer: str
) -> None:
    """The answer repeats what was asked for, what is near to it and what there is."""
    path = write_text(tmp_path / "t.csv", table())
    told = f"{answer}The columns are age, colour, is_member, label."
    with pytest.raises(InvalidParameter, match=told):
        load(path, label=label)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label\n" + "a\nb\n" * 10, "the table must be a label and other columns"),
        ("x,label\n" + "1,a\n" * 20, "labels must be of at least 2 classes, got 1"),
        ("x,label\n1,a\n2,b\n", "at least 8 rows, got 2"),
        ("", "the file must be a table"),
        ('a,label\n"1,2\n', "got 'label' without a single value"),
    ],
)
def test_a_wrong_csv_is_described(tmp_path: Path, text: str, message: str) -> None:
    """Lone columns, too few rows and broken tables each give one sentence."""
    path = write_text(tmp_path / "t.csv", text)
    with pytest.raises(InvalidData, match=message):
        load(path, label="label")


def test_a_csv_without_pandas_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What to install is said in the error."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    path = write_text(tmp_path / "t.csv", table())
    with pytest.raises(MissingExtra, match=r"pip install \"fl-strategies\[simulation\]\""):
        load(path, label="label")
