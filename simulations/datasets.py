"""Data sets by name, each split into private, public and test rows.

Nothing here learns from private rows. Scaling and one-hot columns are fixed by the public
rows alone, which everybody holds: a mean over the pooled private rows would be a release
that no privacy analysis of a strategy accounts for.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from fl_strategies.exceptions import InvalidData, InvalidParameter, require_data
from fl_strategies.party import check_labels
from fl_strategies.protocols import Array, FloatArray, IntArray
from simulations.files import (
    class_indices,
    encode_columns,
    flat_rows,
    image_scale,
    public_scale,
    read_csv,
    read_npz,
)
from simulations.models import import_library, import_torchvision

DATA_VARIABLE: Final = "FL_STRATEGIES_DATA"
PAPER_TRAIN_SHARE: Final = 0.75
EMBEDDED_TRAIN_SHARE: Final = 0.6
MNIST_MEAN: Final = 0.1307
MNIST_DEVIATION: Final = 0.3081
DIGITS: Final = tuple("0123456789")
SPLIT_KEYS: Final = ("x_train", "y_train", "x_test", "y_test")
FILE_SUFFIXES: Final = (".npz", ".csv", ".csv.gz", ".csv.xz")


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """One classification task, ready to be dealt out to parties.

    Parameters
    ----------
    name : str
        What reports call it.
    x_train, y_train : (num_train, num_features) float32, (num_train,) int64
        Rows that become the parties' private records.
    x_public : (num_public, num_features) float32
        Unlabelled rows that everybody holds.
    x_test, y_test : (num_test, num_features) float32, (num_test,) int64
        Rows that measure accuracy and nothing else.
    classes : tuple of str
        Name of each class index.
    """

    name: str
    x_train: FloatArray
    y_train: IntArray
    x_public: FloatArray
    x_test: FloatArray
    y_test: IntArray
    classes: tuple[str, ...]

    @property
    def num_features(self) -> int:
        """Length of a row."""
        return int(self.x_train.shape[1])

    @property
    def num_classes(self) -> int:
        """Length of the class list."""
        return len(self.classes)


@dataclass(frozen=True)
class LibsvmFile:
    """A two-class file of the LIBSVM collection and where to find it.

    OpenML's copy holds the collection's training file followed by its test file. The shape
    and the number of positive rows tell that what arrived is the training file.
    """

    file: str
    openml: str
    num_rows: int
    num_features: int
    num_positive: int
    classes: tuple[str, str]


ADULT: Final = LibsvmFile("a9a.npz", "a9a", 32_561, 123, 7_841, ("<=50K", ">50K"))
COD_RNA: Final = LibsvmFile("cod_rna.npz", "codrna", 59_535, 8, 19_845, ("-1", "1"))


def load_dataset(
    name: str, *, rng: np.random.RandomState, data_dir: str = "", label: str = ""
) -> Dataset:
    """Load and split a data set; the same arguments give the same rows everywhere.

    Parameters
    ----------
    name : str
        `digits` or `breast-cancer` (embedded in scikit-learn; 60 % train, 20 % public,
        20 % test), `adult` or `cod-rna` (LIBSVM training files; 75 %, 12.5 %, 12.5 %, as in
        the FedKT paper), `mnist` (all training images; half of the test images public, half
        test), or a file: `FILE.npz` with x_train, y_train, x_test, y_test and, if half of
        x_test is not to become public, x_public; or `FILE.csv`, also .csv.gz and .csv.xz
        (75 %, 12.5 %, 12.5 %).
    rng : RandomState
        Decides the split. Numpy promises that this generator, unlike its newer one, gives
        the same numbers in every release, so a seed names a split for ever.
    data_dir : str
        Folder with `a9a.npz`, `cod_rna.npz`, `mnist.npz` (x_train, y_train, x_test, y_test);
        the environment variable `FL_STRATEGIES_DATA` if empty. A set that is not there is
        downloaded.
    label : str
        Column of a CSV file that holds the class.

    Returns
    -------
    Dataset
        Digits lie between 0 and 1, MNIST is normalised as usual, columns of zeros and ones
        stay, and other columns are standardised by mean and deviation of the public rows.

    Examples
    --------
    >>> digits = load_dataset("digits", rng=np.random.RandomState(0))
    >>> digits.x_train.shape, digits.x_public.shape, digits.x_test.shape
    ((1078, 64), (359, 64), (360, 64))
    """
    check_dataset_name("load_dataset", name)
    if name in LOADERS:
        return LOADERS[name](rng, data_dir)
    if not Path(name).is_file():
        raise InvalidParameter(f"load_dataset: data must be a file that exists, got {name!r}.")
    if name.endswith(".npz"):
        return _load_npz(Path(name), rng)
    return _load_csv(Path(name), rng, label)


def check_dataset_name(owner: str, name: str) -> None:
    """Raise `InvalidParameter` unless `name` is a known data set or looks like a file."""
    if name not in LOADERS and not name.endswith(FILE_SUFFIXES):
        raise InvalidParameter(
            f"{owner}: data must be one of {', '.join(LOADERS)}, or a file "
            f"({', '.join(FILE_SUFFIXES)}), got {name!r}."
        )


# Splitting and scaling


def _split(
    num_rows: int, train_share: float, rng: np.random.RandomState
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the row numbers of train, public and test.

    Held-out rows come first from the permutation, and their first half is public: for
    the same seed these are the very rows that FedKT's authors train and test on.
    """
    require_data(num_rows >= 8, "load_dataset", "the data", "at least 8 rows", num_rows)
    order, held_out = rng.permutation(num_rows), math.ceil((1 - train_share) * num_rows)
    return order[held_out:], order[: held_out // 2], order[held_out // 2 : held_out]


def _from_table(
    name: str, x: Array, y: IntArray, classes: tuple[str, ...],
    rows: tuple[IntArray, IntArray, IntArray],
) -> Dataset:  # fmt: skip
    train, public, test = rows
    scale = public_scale(x[public])
    return Dataset(
        name=name, classes=classes,
        x_train=scale(x[train]), y_train=y[train],
        x_public=scale(x[public]),
        x_test=scale(x[test]), y_test=y[test],
    )  # fmt: skip


# Embedded and public data sets


def _load_digits(rng: np.random.RandomState, _data_dir: str) -> Dataset:
    data = import_library("digits", "sklearn.datasets", "sklearn").load_digits()
    rows = _split(len(data.data), EMBEDDED_TRAIN_SHARE, rng)
    x, y = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    train, public, test = rows
    return Dataset(
        name="digits", classes=DIGITS,
        x_train=x[train], y_train=y[train], x_public=x[public], x_test=x[test], y_test=y[test],
    )  # fmt: skip


def _load_breast_cancer(rng: np.random.RandomState, _data_dir: str) -> Dataset:
    name = "breast-cancer"
    data = import_library(name, "sklearn.datasets", "sklearn").load_breast_cancer()
    rows = _split(len(data.data), EMBEDDED_TRAIN_SHARE, rng)
    classes = tuple(str(target) for target in data.target_names)
    return _from_table(name, data.data, data.target.astype(np.int64), classes, rows)


def _load_adult(rng: np.random.RandomState, data_dir: str) -> Dataset:
    return _load_libsvm("adult", ADULT, rng, data_dir)


def _load_cod_rna(rng: np.random.RandomState, data_dir: str) -> Dataset:
    return _load_libsvm("cod-rna", COD_RNA, rng, data_dir)


def _load_libsvm(
    name: str, source: LibsvmFile, rng: np.random.RandomState, data_dir: str
) -> Dataset:
    local = _local_file(source.file, data_dir)
    if local:
        arrays = read_npz(local, "x_train", "y_train")
        x, y = flat_rows(source.file, "x_train", arrays["x_train"]), arrays["y_train"]
    else:
        x, y = _fetch_libsvm(name, source)
    check_labels(source.file, "y_train", y, len(x), num_classes=2)
    rows = _split(len(x), PAPER_TRAIN_SHARE, rng)
    return _from_table(name, x, y.astype(np.int64), source.classes, rows)


def _fetch_libsvm(name: str, source: LibsvmFile) -> tuple[Array, IntArray]:
    """Download the training file from OpenML through scikit-learn."""
    library = import_library(name, "sklearn.datasets", "sklearn")
    try:
        data = library.fetch_openml(
            source.openml, version=1, as_frame=False, data_home=str(_cache_folder())
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable(name, source.file, "x_train, y_train") from error
    x = data.data[: source.num_rows]
    x = np.asarray(x.toarray() if hasattr(x, "toarray") else x, dtype=np.float32)
    y = (data.target[: source.num_rows].astype(np.float64) > 0).astype(np.int64)
    expected = (source.num_rows, source.num_features, source.num_positive)
    require_data(
        (*x.shape, y.sum()) == expected, name, "the OpenML copy",
        "{} rows x {} columns with {} positive".format(*expected),
        "{} x {} with {}".format(*x.shape, y.sum()),
    )  # fmt: skip
    return x, y


def _load_mnist(rng: np.random.RandomState, data_dir: str) -> Dataset:
    local = _local_file("mnist.npz", data_dir)
    arrays = read_npz(local, *SPLIT_KEYS) if local else _fetch_mnist()
    x_train, y_train = _normalised_digits("train", arrays)
    x_test, y_test = _normalised_digits("test", arrays)
    public, test = _halves(len(x_test), rng)
    return Dataset(
        name="mnist", classes=DIGITS, x_train=x_train, y_train=y_train,
        x_public=x_test[public], x_test=x_test[test], y_test=y_test[test],
    )  # fmt: skip


def _normalised_digits(part: str, arrays: Mapping[str, Array]) -> tuple[FloatArray, IntArray]:
    x = flat_rows("mnist", f"x_{part}", arrays[f"x_{part}"]).astype(np.float32, copy=False)
    y = arrays[f"y_{part}"]
    check_labels("mnist", f"y_{part}", y, len(x), len(DIGITS))
    x /= 255
    x -= MNIST_MEAN
    x /= MNIST_DEVIATION
    return x, y.astype(np.int64)


def _halves(num_rows: int, rng: np.random.RandomState) -> tuple[IntArray, IntArray]:
    public, test = np.split(rng.permutation(num_rows), [num_rows // 2])
    return public, test


def _fetch_mnist() -> dict[str, Array]:
    """Download MNIST through torchvision."""
    mnist = import_torchvision("mnist").datasets.MNIST
    arrays: dict[str, Array] = {}
    for part in ("train", "test"):
        try:
            images = mnist(str(_cache_folder()), train=part == "train", download=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise _unreachable("mnist", "mnist.npz", ", ".join(SPLIT_KEYS)) from error
        arrays[f"x_{part}"], arrays[f"y_{part}"] = images.data.numpy(), images.targets.numpy()
    return arrays


def _local_file(file: str, data_dir: str) -> Path | None:
    folder = data_dir or os.environ.get(DATA_VARIABLE, "")
    if folder and not Path(folder).is_dir():
        raise InvalidParameter(
            f"load_dataset: data-dir must be a folder that exists, got {folder!r}."
        )
    path = Path(folder) / file
    return path if folder and path.is_file() else None


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "fl-strategies"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _unreachable(name: str, file: str, keys: str) -> InvalidData:
    return InvalidData(
        f"load_dataset: {name} must be in a local folder or downloadable, got neither. "
        f"Set data-dir or {DATA_VARIABLE} to a folder that holds {file} with {keys}."
    )


# Files


def _load_npz(path: Path, rng: np.random.RandomState) -> Dataset:
    arrays = read_npz(path, *SPLIT_KEYS, optional=("x_public",))
    rows = {key: flat_rows(path.name, key, x) for key, x in arrays.items() if key[0] == "x"}
    for key, x in rows.items():
        _require_same_width(path.name, key, x, rows["x_train"])
        if key != "x_public":
            _require_same_length(path.name, key, x, arrays[key.replace("x", "y", 1)])
    classes, (y_train, y_test) = class_indices(
        path.name, ("y_train", arrays["y_train"]), ("y_test", arrays["y_test"])
    )
    public, test = _public_and_test(path.name, rows, rng)
    scale = (image_scale if arrays["x_train"].ndim > 2 else public_scale)(public)
    return Dataset(
        name=path.name, classes=classes, x_train=scale(rows["x_train"]), y_train=y_train,
        x_public=scale(public), x_test=scale(rows["x_test"][test]), y_test=y_test[test],
    )  # fmt: skip


def _public_and_test(
    name: str, rows: Mapping[str, FloatArray], rng: np.random.RandomState
) -> tuple[FloatArray, IntArray]:
    """Return the public rows and the numbers of the rows that stay in the test set."""
    if "x_public" in rows:
        return rows["x_public"], np.arange(len(rows["x_test"]))
    public, test = _halves(len(rows["x_test"]), rng)
    require_data(len(public) > 0, name, "x_test", "at least 2 rows without x_public", 1)
    return rows["x_test"][public], test


def _require_same_width(owner: str, name: str, x: Array, like: Array) -> None:
    expected, got = like.shape[1], x.shape[1]
    require_data(expected == got, owner, name, f"{expected} values a row like x_train", got)


def _require_same_length(owner: str, name: str, x: Array, y: Array) -> None:
    require_data(
        y.ndim > 0 and len(x) == len(y), owner, name.replace("x", "y", 1),
        f"{len(x)} labels, one for each row of {name}", f"shape {y.shape}",
    )  # fmt: skip


def _load_csv(path: Path, rng: np.random.RandomState, label: str) -> Dataset:
    frame, classes, y = read_csv(path, label)
    rows = _split(len(y), PAPER_TRAIN_SHARE, rng)
    return _from_table(path.name, encode_columns(path.name, frame, rows[1]), y, classes, rows)


LOADERS: Final[Mapping[str, Callable[[np.random.RandomState, str], Dataset]]] = (
    MappingProxyType(
        {
            "digits": _load_digits,
            "breast-cancer": _load_breast_cancer,
            "adult": _load_adult,
            "cod-rna": _load_cod_rna,
            "mnist": _load_mnist,
        }
    )
)
