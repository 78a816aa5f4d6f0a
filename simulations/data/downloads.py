"""Image sets from their public sources, as the arrays that a local file of them holds.

Every archive is compared with its published checksum before it is read, by torchvision or
here. CIFAR comes in its binary version: the usual one is a pickle.
"""

import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from fl_strategies._util.arrays import Array
from simulations.data.files import cache_folder, read_npz
from simulations.libraries import import_torchvision

Arrays: TypeAlias = dict[str, Array]

PARTS: Final = ("train", "test")
MD5: Final = {
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "pneumoniamnist.npz": "28209eda62fecd6e6a2d98b1501bb15f",
}
"""As their owners publish them; torchvision knows those of the other sets."""
CIFAR: Final = "https://www.cs.toronto.edu/~kriz/"
CIFAR_SHAPE: Final = (3, 32, 32)
MEDMNIST: Final = "https://zenodo.org/records/10519652/files/"
FASHION: Final = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
LETTERS: Final = tuple("abcdef")
FETCH_ERRORS: Final = (OSError, ValueError, RuntimeError, tarfile.TarError, KeyError)
"""Failures of a download: no network, a wrong checksum, an unexpected file."""


def fetch_images(name: str, file: str) -> Arrays:
    """Return the arrays of a file of images from its public source.

    Raises one of `FETCH_ERRORS` if they cannot be had; `KeyError` if nobody offers them.
    """
    return SOURCES[file](import_torchvision(name).datasets, cache_folder())


def _digits(kind: str, classes: tuple[str, ...], library: Any, folder: Path) -> Arrays:
    """Read MNIST, or a set of the same format."""
    arrays: Arrays = {"classes": np.array(classes)} if classes else {}
    for part in PARTS:
        images = getattr(library, kind)(str(folder), train=part == "train", download=True)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = images.data.numpy(), images.targets.numpy()
    return arrays


def _letters(library: Any, folder: Path) -> Arrays:
    """Read the letters a to f of EMNIST, whose images lie on their side."""
    arrays: Arrays = {"classes": np.array(LETTERS)}
    for part in PARTS:
        images = library.EMNIST(
            str(folder), split="letters", train=part == "train", download=True
        )
        labels = images.targets.numpy() - 1  # a is 1
        kept = np.flatnonzero(labels < len(LETTERS))
        arrays[f"x_{part}"] = images.data.numpy()[kept].transpose(0, 2, 1)
        arrays[f"y_{part}"] = labels[kept]
    return arrays


def _house_numbers(library: Any, folder: Path) -> Arrays:
    arrays: Arrays = {}
    for part in PARTS:
        images = library.SVHN(str(folder / "svhn"), split=part, download=True)
        arrays[f"x_{part}"] = images.data.transpose(0, 2, 3, 1)
        arrays[f"y_{part}"] = images.labels
    return arrays


def _cifar10(library: Any, folder: Path) -> Arrays:
    archive = _download(library, folder, CIFAR, "cifar-10-binary.tar.gz")
    batches = [f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)]
    with tarfile.open(archive) as files:
        train, x_train = _records(files, batches, num_labels=1)
        test, x_test = _records(files, ["cifar-10-batches-bin/test_batch.bin"], num_labels=1)
        names = _names(files, "cifar-10-batches-bin/batches.meta.txt")
    return {
        "x_train": x_train,
        "y_train": train[:, 0],
        "x_test": x_test,
        "y_test": test[:, 0],
        "classes": names,
    }


def _cifar100(library: Any, folder: Path) -> Arrays:
    archive = _download(library, folder, CIFAR, "cifar-100-binary.tar.gz")
    arrays: Arrays = {}
    with tarfile.open(archive) as files:
        for part in PARTS:
            labels, x = _records(files, [f"cifar-100-binary/{part}.bin"], num_labels=2)
            arrays[f"x_{part}"], arrays[f"y_{part}"] = x, labels[:, 1]
            arrays[f"y_{part}_coarse"] = labels[:, 0]
        for kind in ("fine", "coarse"):
            arrays[f"{kind}_names"] = _names(files, f"cifar-100-binary/{kind}_label_names.txt")
    return arrays


def _download(library: Any, folder: Path, origin: str, file: str) -> Path:
    library.utils.download_url(f"{origin}{file}", str(folder), file, MD5[file])
    return folder / file


def _records(
    files: tarfile.TarFile, names: list[str], *, num_labels: int
) -> tuple[Array, Array]:
    """Return labels and images (n, height, width, channels) of some binary files."""
    length = num_labels + int(np.prod(CIFAR_SHAPE))
    content = b"".join(_member(files, name) for name in names)
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, length)
    images = rows[:, num_labels:].reshape(-1, *CIFAR_SHAPE).transpose(0, 2, 3, 1)
    return rows[:, :num_labels], np.ascontiguousarray(images)


def _names(files: tarfile.TarFile, name: str) -> Array:
    return np.array(_member(files, name).decode("ascii").split())


def _member(files: tarfile.TarFile, name: str) -> bytes:
    file = files.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()


def _pneumonia(library: Any, folder: Path) -> Arrays:
    file = _download(library, folder, MEDMNIST, "pneumoniamnist.npz")
    theirs = {part: (f"{part}_images", f"{part}_labels") for part in (*PARTS, "val")}
    found = read_npz(file, *(name for pair in theirs.values() for name in pair))
    arrays: Arrays = {"classes": np.array(["normal", "pneumonia"])}
    for part, (images, labels) in theirs.items():
        arrays[f"x_{part}"], arrays[f"y_{part}"] = found[images], found[labels].reshape(-1)
    return arrays


SOURCES: Final[Mapping[str, Callable[[Any, Path], Arrays]]] = MappingProxyType(
    {
        "mnist.npz": partial(_digits, "MNIST", ()),
        "fashion_mnist.npz": partial(_digits, "FashionMNIST", FASHION),
        "emnist_letters_af.npz": _letters,
        "svhn_test10k.npz": _house_numbers,
        "cifar10.npz": _cifar10,
        "cifar100_subset.npz": _cifar100,
        "pneumoniamnist.npz": _pneumonia,
    }
)
"""By the name that the file has in a local folder."""
