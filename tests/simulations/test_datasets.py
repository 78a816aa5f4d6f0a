import functools
import gzip
import lzma
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
from scipy import sparse

from fl_strategies.exceptions import InvalidData, InvalidParameter, MissingExtra
from simulations import datasets
from simulations.datasets import ADULT, COD_RNA, DATA_VARIABLE, Dataset, load_dataset

ROOT = Path(__file__).parents[2]
EMBEDDED = ("digits", "breast-cancer")


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide data folders and caches of the machine."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sizes(data: Dataset) -> tuple[int, int, int]:
    return len(data.x_train), len(data.x_public), len(data.x_test)


def sorted_rows(*parts: Any) -> Any:
    rows = np.concatenate(parts)
    return rows[np.lexsort(rows.T)]


def tabular(num_rows: int, num_features: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(50, 20, size=(num_rows, num_features)).astype(np.float32)
    return x, rng.integers(2, size=num_rows).astype(np.uint8)


def write_split(path: Path, **changes: Any) -> Path:
    x, y = tabular(60, 4)
    arrays = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    arrays.update(changes)
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


# Embedded sets


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_set_has_typed_flat_rows(name: str) -> None:
    """Rows are finite float32 matrices, labels int64 positions in the class list."""
    data = load_dataset(name, rng=np.random.RandomState(0))
    for x in (data.x_train, data.x_public, data.x_test):
        assert x.dtype == np.float32
        assert x.shape[1:] == (data.num_features,)
        assert np.isfinite(x).all()
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        assert y.dtype == np.int64
        assert y.shape == (len(x),)
        assert set(np.unique(y)) == set(range(data.num_classes))


def test_digits_are_split_without_loss_or_overlap() -> None:
    """Train, public and test together are the original rows, each once."""
    data = load_dataset("digits", rng=np.random.RandomState(3))
    original = (sklearn.datasets.load_digits().data / 16).astype(np.float32)
    joined = sorted_rows(data.x_train, data.x_public, data.x_test)
    assert np.array_equal(joined, sorted_rows(original))
    assert sizes(data) == (1078, 359, 360)
    assert data.classes == tuple("0123456789")


def test_rows_keep_their_labels() -> None:
    """A split row has the label that the original set gives it."""
    data = load_dataset("digits", rng=np.random.RandomState(1))
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    labels = {row.tobytes(): label for row, label in zip((x / 16).astype("f4"), y, strict=True)}
    expected = [labels[row.tobytes()] for row in data.x_train]
    assert data.y_train.tolist() == expected


def test_breast_cancer_is_scaled_by_public_rows_alone() -> None:
    """The public rows have mean 0 and deviation 1; the private ones only nearly."""
    data = load_dataset("breast-cancer", rng=np.random.RandomState(0))
    assert np.allclose(data.x_public.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(data.x_public.std(axis=0), 1, atol=1e-4)
    assert np.abs(data.x_train.mean(axis=0)).max() > 0.01
    assert data.classes == ("malignant", "benign")


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_seed_alone_decides_the_split(name: str) -> None:
    """Equal seeds give equal rows and another seed gives others."""
    first, again, other = (
        load_dataset(name, rng=np.random.RandomState(seed)) for seed in (5, 5, 6)
    )
    assert np.array_equal(first.x_public, again.x_public)
    assert np.array_equal(first.y_test, again.y_test)
    assert not np.array_equal(first.x_public, other.x_public)


@pytest.mark.parametrize("name", ["imagenet", "", "rows.parquet", "Digits"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    """The answer names all data sets and the file endings."""
    with pytest.raises(InvalidParameter, match=r"digits, .*, mnist, or a file \(.npz, .csv"):
        load_dataset(name, rng=np.random.RandomState(0))


# Local folder


def test_adult_and_cod_rna_come_from_a_local_folder(tmp_path: Path) -> None:
    """Only the training file is read and split 75, 12.5 and 12.5 percent."""
    x, y = tabular(80, 8)
    np.savez(tmp_path / "a9a.npz", x_train=(x > 50).astype(np.uint8), y_train=y)
    np.savez(tmp_path / "cod_rna.npz", x_train=x, y_train=y)
    adult = load_dataset("adult", rng=np.random.RandomState(0), data_dir=str(tmp_path))
    cod_rna = load_dataset("cod-rna", rng=np.random.RandomState(0), data_dir=str(tmp_path))
    assert sizes(adult) == sizes(cod_rna) == (60, 10, 10)
    assert set(np.unique(adult.x_train)) == {0.0, 1.0}
    assert np.allclose(cod_rna.x_public.std(axis=0), 1, atol=1e-4)
    assert adult.classes == ("<=50K", ">50K")


def write_mnist(path: Path) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(50, 28, 28), dtype=np.uint8)
    labels = rng.integers(10, size=50, dtype=np.uint8)
    np.savez(
        path, x_train=images[:30], y_train=labels[:30], x_test=images[30:], y_test=labels[30:]
    )
    return images, labels


def test_mnist_keeps_all_training_images_and_halves_the_test_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder may be named by the environment; pixels are normalised and flat."""
    images, labels = write_mnist(tmp_path / "mnist.npz")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    data = load_dataset("mnist", rng=np.random.RandomState(0))
    assert sizes(data) == (30, 10, 10)
    expected = (images[:30].reshape(30, 784) / 255 - 0.1307) / 0.3081
    assert np.allclose(data.x_train, expected, atol=1e-5)
    assert data.y_train.tolist() == labels[:30].tolist()
    held_out = sorted_rows(data.x_public, data.x_test)
    original = (images[30:].reshape(20, 784) / 255 - 0.1307) / 0.3081
    assert np.allclose(held_out, original[np.lexsort(original.astype("f4").T)], atol=1e-5)


def test_the_argument_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A data folder that is asked for is the one that is read."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "elsewhere"))
    write_mnist(tmp_path / "mnist.npz")
    assert sizes(
        load_dataset("mnist", rng=np.random.RandomState(0), data_dir=str(tmp_path))
    ) == (30, 10, 10)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """A mistyped folder is an error, not a download."""
    with pytest.raises(InvalidParameter, match="data-dir must be a folder that exists"):
        load_dataset("adult", rng=np.random.RandomState(0), data_dir=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": np.zeros((20, 3))}, r"complete with x_train, y_train, got no y_train"),
        (
            {"x_train": np.zeros((20, 3)), "y_train": np.repeat([-1, 1], 10)},
            r"y_train must be between 0 and 1",
        ),
        (
            {"x_train": np.zeros((20, 3)), "y_train": np.zeros(19, int)},
            r"y_train must be 20 labels, one a row, got 19",
        ),
        (
            {"x_train": np.full((20, 3), np.nan), "y_train": np.zeros(20, int)},
            r"x_train must be finite, got NaN or infinity in 20 of 20 rows",
        ),
        ({"x_train": np.zeros((5, 3)), "y_train": np.zeros(5, int)}, r"at least 8 rows, got 5"),
    ],
)
def test_a_wrong_local_file_is_described(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    """Missing arrays, foreign labels, odd lengths and NaN each give one sentence."""
    np.savez(tmp_path / "a9a.npz", **arrays)
    with pytest.raises(InvalidData, match=message):
        load_dataset("adult", rng=np.random.RandomState(0), data_dir=str(tmp_path))


# Public sources


def openml_copy(source: datasets.LibsvmFile, name: str, **options: Any) -> Any:
    """Stand in for OpenML: training rows first, as sparse rows, labels as text."""
    assert name == source.openml
    assert options["version"] == 1
    rng = np.random.default_rng(0)
    x = (rng.random((source.num_rows + 50, source.num_features)) < 0.1).astype(float)
    y = np.full(len(x), "-1", dtype=object)
    y[: source.num_positive] = "1"
    return types.SimpleNamespace(data=sparse.csr_matrix(x), target=y)


@pytest.mark.parametrize(("name", "source"), [("adult", ADULT), ("cod-rna", COD_RNA)])
def test_a_set_that_is_not_local_comes_from_openml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, source: datasets.LibsvmFile
) -> None:
    """The first rows of OpenML's copy are taken, dense and with labels 0 and 1."""
    monkeypatch.setattr(
        sklearn.datasets, "fetch_openml", functools.partial(openml_copy, source)
    )
    data = load_dataset(name, rng=np.random.RandomState(0), data_dir=str(tmp_path))
    assert sum(sizes(data)) == source.num_rows
    assert data.num_features == source.num_features
    assert set(np.unique(data.y_train)) == {0, 1}


def test_an_openml_copy_with_other_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in another order than LIBSVM's are noticed by the count of positive labels."""

    def reordered(name: str, **options: Any) -> Any:
        copy = openml_copy(ADULT, name, **options)
        copy.target = copy.target[::-1]
        return copy

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", reordered)
    with pytest.raises(InvalidData, match=r"OpenML copy must be 32561 rows x 123 columns with"):
        load_dataset("adult", rng=np.random.RandomState(0))


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("no such set")])
def test_an_unreachable_source_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Offline, the answer names the variable, the file and the arrays in it."""

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise error

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fail)
    message = r"Set data-dir or FL_STRATEGIES_DATA to a folder that holds a9a.npz with x_train"
    with pytest.raises(InvalidData, match=message):
        load_dataset("adult", rng=np.random.RandomState(0))


class TorchvisionMnist:
    """Stand in for torchvision's MNIST, which needs a network."""

    def __init__(self, root: str, *, train: bool, download: bool) -> None:
        torch = pytest.importorskip("torch")
        assert download
        assert Path(root).is_dir()
        size = 30 if train else 20
        self.data = torch.full((size, 28, 28), 255, dtype=torch.uint8)
        self.targets = torch.arange(size) % 10


def with_torchvision(monkeypatch: pytest.MonkeyPatch, mnist: Callable[..., Any]) -> None:
    library = types.SimpleNamespace(datasets=types.SimpleNamespace(MNIST=mnist))
    monkeypatch.setattr(datasets, "import_torchvision", lambda _owner: library)


def test_mnist_comes_from_torchvision_when_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """The downloaded tensors pass through the same normalisation and split."""
    with_torchvision(monkeypatch, TorchvisionMnist)
    data = load_dataset("mnist", rng=np.random.RandomState(0))
    assert sizes(data) == (30, 10, 10)
    assert np.allclose(data.x_train, (1 - 0.1307) / 0.3081)
    assert data.y_train.tolist() == [label % 10 for label in range(30)]


def test_an_unreachable_mnist_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the answer names the file and its four arrays."""

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("Error downloading")

    with_torchvision(monkeypatch, fail)
    with pytest.raises(InvalidData, match=r"mnist.npz with x_train, y_train, x_test, y_test"):
        load_dataset("mnist", rng=np.random.RandomState(0))


def test_torchvision_imports_next_to_this_torch() -> None:
    """In a fresh process the data sets of torchvision can be reached, without a warning."""
    pytest.importorskip("torch")
    code = (
        "from simulations.models import import_torchvision as load;"
        "assert load('t').datasets.MNIST and load('t') is load('t')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


# Files


def test_an_npz_without_public_rows_gives_half_of_its_test_rows(tmp_path: Path) -> None:
    """All training rows stay private and the test rows are shared between two uses."""
    path = write_split(tmp_path / "rows.npz")
    data = load_dataset(str(path), rng=np.random.RandomState(0))
    assert sizes(data) == (40, 10, 10)
    assert data.name == "rows.npz"
    assert np.allclose(data.x_public.mean(axis=0), 0, atol=1e-5)


def test_an_npz_with_public_rows_keeps_its_test_rows(tmp_path: Path) -> None:
    """x_public is taken as it is, and it alone fixes the scale."""
    public = np.array([[0.0, 10, 0, 5], [2.0, 30, 1, 5]])
    path = write_split(tmp_path / "rows.npz", x_public=public)
    data = load_dataset(str(path), rng=np.random.RandomState(0))
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
    left, right = (
        load_dataset(str(path), rng=np.random.RandomState(0)) for path in (first, second)
    )
    assert np.array_equal(left.x_public, right.x_public)


def test_images_are_flattened_with_one_scale_for_all_pixels(tmp_path: Path) -> None:
    """A pixel that never varies in public images is not blown up."""
    images = np.random.default_rng(0).integers(256, size=(60, 5, 5, 3), dtype=np.uint8)
    images[:, 0, 0] = 0
    path = write_split(tmp_path / "images.npz", x_train=images[:40], x_test=images[40:])
    data = load_dataset(str(path), rng=np.random.RandomState(0))
    assert data.x_train.shape == (40, 75)
    assert data.x_public.mean() == pytest.approx(0, abs=1e-4)
    assert data.x_public.std() == pytest.approx(1, abs=1e-4)
    assert np.abs(data.x_train).max() < 4


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
    data = load_dataset(str(path), rng=np.random.RandomState(0))
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
        ({"x_train": np.zeros((40, 4)) / np.float64(1) + np.inf}, "x_train must be finite"),
        ({"x_train": np.zeros(40)}, "x_train must be an array of rows"),
        ({"x_train": np.zeros((40, 4), "U3")}, "x_train must be an array of numbers"),
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
        load_dataset(str(path), rng=np.random.RandomState(0))


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 broken"])
def test_a_broken_archive_is_described(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no archive give a sentence, not a traceback from deep inside."""
    path = tmp_path / "rows.npz"
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=r"rows.npz: the file must be an npz archive"):
        load_dataset(str(path), rng=np.random.RandomState(0))


def test_a_single_array_in_an_npz_file_is_described(tmp_path: Path) -> None:
    """A file of numpy's one-array format under the wrong name is recognised."""
    path = tmp_path / "rows.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros((4, 4)))
    with pytest.raises(InvalidData, match=r"rows.npz: the file must be an npz archive"):
        load_dataset(str(path), rng=np.random.RandomState(0))


def test_a_file_that_does_not_exist_is_named() -> None:
    """The path is repeated in the answer."""
    with pytest.raises(InvalidParameter, match=r"must be a file that exists, got 'no/where.c"):
        load_dataset("no/where.csv", rng=np.random.RandomState(0))


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
    data = load_dataset(
        write_text(tmp_path / "t.csv", table()), rng=np.random.RandomState(0), label="label"
    )
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
        data = load_dataset(path, rng=np.random.RandomState(seed), label="label")
        blank = sum((x[:, 1:-1].sum(axis=1) == 0).sum() for x in (data.x_train, data.x_test))
        assert (data.num_features, blank) in {(5, 1), (6, 0)}


def test_a_missing_category_counts_as_one(tmp_path: Path) -> None:
    """An empty text cell is a value of its own, so no row has to be dropped."""
    text = table().replace("red", "")
    data = load_dataset(
        write_text(tmp_path / "t.csv", text), rng=np.random.RandomState(0), label="label"
    )
    assert data.num_features == 5
    assert (data.x_train[:, 1:4].sum(axis=1) == 1).all()


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".csv.gz", gzip.compress), (".csv.xz", lzma.compress)]
)
def test_a_compressed_csv_is_the_same_table(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    """Compression changes neither rows nor labels."""
    plain = load_dataset(
        write_text(tmp_path / "t.csv", table()), rng=np.random.RandomState(0), label="label"
    )
    packed = tmp_path / f"t{suffix}"
    packed.write_bytes(compress(table().encode()))
    data = load_dataset(str(packed), rng=np.random.RandomState(0), label="label")
    assert sizes(data) == sizes(plain)
    columns = [
        sorted_rows(d.x_train[:, 1:], d.x_test[:, 1:], d.x_public[:, 1:]) for d in (data, plain)
    ]
    assert np.array_equal(*columns)


@pytest.mark.parametrize("label", ["", "Label", "income"])
def test_a_label_column_that_is_not_there_lists_the_columns(tmp_path: Path, label: str) -> None:
    """The answer repeats what was asked for and what there is."""
    path = write_text(tmp_path / "t.csv", table())
    with pytest.raises(
        InvalidParameter,
        match=rf"label must be one of the columns age, colour, is_member, label, got '{label}'",
    ):
        load_dataset(path, rng=np.random.RandomState(0), label=label)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            table() + ",red,True,n\n,red,True,y\n",
            "column 'age' must be complete, got 2 missing",
        ),
        (table() + "inf,red,True,n\n", "column 'age' must be complete, got 1 missing"),
        (table() + "30,red,True,\n", "column 'label' must be complete, got 1 missing"),
        ("label\n" + "a\nb\n" * 10, "the table must be a label and other columns"),
        ("x,label\n" + "1,a\n" * 20, "labels must be of at least 2 classes, got 1"),
        ("x,label\n" + "1,0.5\n2,1\n" * 20, "column 'label' must be class labels"),
        ("x,label\n1,a\n2,b\n", "at least 8 rows, got 2"),
        ("", "the file must be a CSV table"),
        ('a,label\n"1,2\n', "the file must be a CSV table"),
    ],
)
def test_a_wrong_csv_is_described(tmp_path: Path, text: str, message: str) -> None:
    """Missing values, lone columns and broken tables each give one sentence."""
    path = write_text(tmp_path / "t.csv", text)
    with pytest.raises(InvalidData, match=message):
        load_dataset(path, rng=np.random.RandomState(0), label="label")


def test_free_text_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A column with a value of its own in every row is no category."""
    monkeypatch.setattr("simulations.files.MAX_CATEGORIES", 9)
    lines = [f"name{row},{row % 2}" for row in range(100)]
    path = write_text(tmp_path / "t.csv", "\n".join(["name,label", *lines]))
    with pytest.raises(InvalidData, match="'name' must be numeric or of at most 9 categories"):
        load_dataset(path, rng=np.random.RandomState(0), label="label")


def test_a_csv_without_pandas_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What to install is said in the error."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    path = write_text(tmp_path / "t.csv", table())
    with pytest.raises(MissingExtra, match=r"pip install \"fl-strategies\[simulation\]\""):
        load_dataset(path, rng=np.random.RandomState(0), label="label")
