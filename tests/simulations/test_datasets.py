import functools
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
from scipy import sparse

from fl_strategies.errors import InvalidData, InvalidParameter
from simulations.config import Settings
from simulations.data import sets as datasets
from simulations.data.sets import ADULT, COD_RNA, DATA_VARIABLE, Dataset, Request, load_dataset

ROOT = Path(__file__).parents[2]
EMBEDDED = ("digits", "breast-cancer")


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide data folders and caches of the machine."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(name: str, seed: int = 0, **options: Any) -> Dataset:
    return load_dataset(name, Request(rng=np.random.RandomState(seed), **options))


def sizes(data: Dataset) -> tuple[int, int, int]:
    return len(data.x_train), len(data.x_public), len(data.x_test)


def sorted_rows(*parts: Any) -> Any:
    rows = np.concatenate(parts)
    return rows[np.lexsort(rows.T)]


def tabular(num_rows: int, num_features: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(50, 20, size=(num_rows, num_features)).astype(np.float32)
    return x, rng.integers(2, size=num_rows).astype(np.uint8)


# Embedded sets


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_set_has_typed_flat_rows(name: str) -> None:
    """Rows are finite float32 matrices, labels int64 positions in the class list."""
    data = load(name)
    for x in (data.x_train, data.x_public, data.x_test):
        assert x.dtype == np.float32
        assert x.shape[1:] == (data.num_features,)
        assert np.isfinite(x).all()
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        assert y.dtype == np.int64
        assert y.shape == (len(x),)
        assert set(np.unique(y)) == set(range(data.num_classes))


@pytest.mark.parametrize("limit", [0, 25])
def test_breast_cancer_is_scaled_by_public_rows_alone(limit: int) -> None:
    """Those that are taken have mean 0 and deviation 1; the private ones only nearly."""
    data = load("breast-cancer", num_public=limit)
    assert np.allclose(data.x_public.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(data.x_public.std(axis=0), 1, atol=1e-4)
    assert np.abs(data.x_train.mean(axis=0)).max() > 0.01


@pytest.mark.parametrize(("name", "limit"), [*((name, 0) for name in EMBEDDED), ("digits", 20)])
def test_the_seed_alone_decides_the_split(name: str, limit: int) -> None:
    """Equal seeds give equal rows and another seed gives others, also of those limits take."""
    first, again, other = (load(name, seed=seed, num_public=limit) for seed in (5, 5, 6))
    assert np.array_equal(first.x_public, again.x_public)
    assert np.array_equal(first.y_test, again.y_test)
    assert not np.array_equal(first.x_public, other.x_public)


def reference_split(num_rows: int, train_share: float, seed: int) -> tuple[Any, Any, Any]:
    """Return the rows that the first release gave to train, public and test."""
    order = np.random.RandomState(seed).permutation(num_rows)
    held_out = math.ceil((1 - train_share) * num_rows)
    return order[held_out:], order[: held_out // 2], order[held_out // 2 : held_out]


@pytest.mark.parametrize("seed", [0, 7])
def test_digits_have_the_split_of_the_first_release(seed: int) -> None:
    """A seed names a split for ever, so new options must draw nothing when unused."""
    rng = np.random.RandomState(seed)
    data = load_dataset("digits", Request(rng=rng))
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    train, public, test = reference_split(len(y), 0.6, seed)
    assert np.array_equal(data.x_train, (x[train] / 16).astype(np.float32))
    assert np.array_equal(data.x_public, (x[public] / 16).astype(np.float32))
    assert np.array_equal(data.x_test, (x[test] / 16).astype(np.float32))
    assert (sizes(data), data.classes) == ((1078, 359, 360), tuple("0123456789"))
    assert np.array_equal(data.y_train, y[train])
    assert np.array_equal(data.y_test, y[test])
    twin = np.random.RandomState(seed)
    twin.permutation(len(y))
    assert rng.randint(10**6) == twin.randint(10**6)


CLASSES = {
    "breast-cancer": ("malignant", "benign"),
    "adult": ("<=50K", ">50K"),
    "cod-rna": ("-1", "1"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_tables_have_the_split_and_scale_of_the_first_release(
    tmp_path: Path, name: str
) -> None:
    """Rows, order and standardisation by the public rows are unchanged to the bit."""
    if name == "breast-cancer":
        x, y = sklearn.datasets.load_breast_cancer(return_X_y=True)
    else:
        x, y = tabular(80, 8)
        x[:, 3] = x[:, 3] > 50
        file = {"adult": "a9a.npz", "cod-rna": "cod_rna.npz"}[name]
        np.savez(tmp_path / file, x_train=x, y_train=y)
        x = x.astype(np.float64)
    data = load(name, seed=3, data_dir=str(tmp_path))
    rows = reference_split(len(y), 0.6 if name == "breast-cancer" else 0.75, 3)
    mean, deviation = x[rows[1]].mean(axis=0), x[rows[1]].std(axis=0)
    if name != "breast-cancer":
        mean[3], deviation[3] = 0, 1
    for part, mine in zip((data.x_train, data.x_public, data.x_test), rows, strict=True):
        assert np.array_equal(part, ((x[mine] - mean) / deviation).astype(np.float32))
    assert data.classes == CLASSES[name]
    assert np.array_equal(data.y_train, y[rows[0]])
    assert np.array_equal(data.y_public, y[rows[1]])
    assert np.array_equal(data.y_test, y[rows[2]])


# Limits


def test_limits_take_rows_at_random_with_their_labels() -> None:
    """Fewer rows of each kind are taken, all from the part they would be in anyway."""
    whole = load("digits", seed=2)
    some = load("digits", seed=2, num_train=70, num_public=30, num_test=1000)
    assert sizes(some) == (70, 30, 360)
    for part in ("train", "public"):
        x, y = getattr(whole, f"x_{part}"), getattr(whole, f"y_{part}")
        labels = {row.tobytes(): label for row, label in zip(x, y, strict=True)}
        mine = zip(getattr(some, f"x_{part}"), getattr(some, f"y_{part}"), strict=True)
        assert all(labels[row.tobytes()] == label for row, label in mine)
    assert not np.array_equal(some.x_train, whole.x_train[:70])
    assert np.array_equal(some.x_test, whole.x_test)


OTHER_IMAGES = "public must be empty, or with data one of mnist, .*, got"
KNOWN = r"digits, .*, mnist, .*, or a file \(.npz, .csv"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"num_train": -1}, r"num-train must be at least 0 \(0: all\), got -1"),
        ("digits", {"num_public": -1}, r"num-public must be at least 0 \(0: all\), got -1"),
        ("digits", {"num_test": -1}, r"num-test must be at least 0 \(0: all\), got -1"),
        *((name, {}, KNOWN) for name in ("imagenet", "", "rows.feather", "Digits")),
        # Tables and texts have none, and private images may not return as public ones.
        ("digits", {"public": "mnist"}, f"{OTHER_IMAGES} 'mnist'"),
        ("mnist", {"public": "digits"}, f"{OTHER_IMAGES} 'digits'"),
        ("sst2", {"public": "ag-news"}, OTHER_IMAGES),
        (
            "mnist",
            {"public": "mnist"},
            "public must be of another file than mnist, got 'mnist'",
        ),
        ("cifar100-fedmd", {"public": "cifar100"}, "of another file than cifar100-fedmd"),
        # A mistyped folder is an error, not a download.
        ("adult", {"data_dir": "/no/where"}, "data-dir must be a folder that exists"),
        ("no/where.csv", {}, r"must be a file that exists, got 'no/where.c"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    name: str, options: dict[str, Any], message: str
) -> None:
    """Limits, names, public sets, folders and files: the answer repeats what was asked for."""
    with pytest.raises(InvalidParameter, match=message):
        load(name, **options)


@pytest.mark.parametrize("name", ["mnist", "digits"])
def test_joint_classes_need_another_set(name: str) -> None:
    """Public rows of the data itself have its classes anyway; settings say so at once."""
    message = "joint-classes must be false unless public names another image set, got True"
    with pytest.raises(InvalidParameter, match=f"load_dataset: {message}"):
        load(name, joint_classes=True)
    with pytest.raises(InvalidParameter, match=f"Settings: {message}"):
        Settings.of(data=name, joint_classes=True)
    assert Settings.of(data="emnist-letters", public="mnist", joint_classes=True).joint_classes


# Local folder


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
            r"y_train must be 20 labels, one per row, got 19",
        ),
        (
            {"x_train": np.full((20, 3), np.nan), "y_train": np.zeros(20, int)},
            r"the public rows must be finite, got NaN or infinity in 2 of 2 rows",
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
        load("adult", data_dir=str(tmp_path))


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
    data = load(name, data_dir=str(tmp_path))
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
        load("adult")


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
        load("adult")


@pytest.mark.slow
def test_torchvision_imports_next_to_this_torch() -> None:
    """In a fresh process the data sets of torchvision can be reached, without a warning."""
    pytest.importorskip("torch")
    code = (
        "from clients.encoders.named import import_torchvision as load;"
        "assert load('t').datasets.MNIST and load('t') is load('t')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
