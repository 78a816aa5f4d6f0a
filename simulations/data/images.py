"""Image data sets by name: their sources and files, and rows (channels, height, width).

Files keep images as bytes (n, height, width) or (n, height, width, 3). Pixels are normalised
by constants that are published with a data set, never by statistics of private images.

What is not in a local folder is downloaded where its owners offer it. Every archive is
compared with its published checksum before it is read, by torchvision or here. CIFAR comes in
its binary version: the usual one is a pickle.
"""

import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from clients.encoders.named import import_torchvision
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import require, require_data
from fl_strategies.learners import Task, check_targets
from simulations.data.files import cache_folder, local_file, read_npz, unreachable
from simulations.data.splits import (
    EMBEDDED_TRAIN_SHARE,
    Dataset,
    Request,
    Rows,
    halves,
    split_groups,
    split_rows,
)

Arrays: TypeAlias = dict[str, Array]

# Public sources, as the arrays that a local file holds

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
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
LETTERS: Final = tuple("abcdef")
FETCH_ERRORS: Final = (OSError, ValueError, RuntimeError, tarfile.TarError, KeyError)
"""Failures of a download: no network, a wrong checksum, an unexpected file."""


def _digits(
    kind: str, classes: tuple[str, ...], library: Any, folder: Path, **options: Any
) -> Arrays:
    """Read MNIST, or a set of the same format."""
    arrays: Arrays = {"classes": np.array(classes)} if classes else {}
    for part in PARTS:
        train = part == "train"
        images = getattr(library, kind)(str(folder), train=train, download=True, **options)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = images.data.numpy(), images.targets.numpy()
    return arrays


def _letters(library: Any, folder: Path) -> Arrays:
    """Read the letters a to f of EMNIST, whose images lie on their side."""
    arrays = _digits("EMNIST", LETTERS, library, folder, split="letters")
    for part in PARTS:
        labels = arrays[f"y_{part}"] - 1  # a is 1
        kept = labels < len(LETTERS)
        arrays[f"x_{part}"] = arrays[f"x_{part}"][kept].transpose(0, 2, 1)
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
    files = _unpacked(library, folder, "cifar-10-binary.tar.gz")
    train = b"".join(files[f"data_batch_{number}.bin"] for number in range(1, 6))
    arrays: Arrays = {"classes": _names(files, "batches.meta.txt")}
    for part, content in (("train", train), ("test", files["test_batch.bin"])):
        labels, arrays[f"x_{part}"] = _labelled_images(content, num_labels=1)
        arrays[f"y_{part}"] = labels[:, 0]
    return arrays


def _both_cifar100(library: Any, folder: Path) -> Arrays:
    """Read CIFAR-100 with its classes and its superclasses."""
    files = _unpacked(library, folder, "cifar-100-binary.tar.gz")
    arrays = {
        f"{kind}_names": _names(files, f"{kind}_label_names.txt") for kind in ("fine", "coarse")
    }
    for part in PARTS:
        labels, arrays[f"x_{part}"] = _labelled_images(files[f"{part}.bin"], num_labels=2)
        arrays[f"y_{part}_coarse"], arrays[f"y_{part}"] = labels.T
    return arrays


def _pneumonia(library: Any, folder: Path) -> Arrays:
    file, parts = _download(library, folder, MEDMNIST, "pneumoniamnist.npz"), (*PARTS, "val")
    keys = [f"{part}_{kind}" for part in parts for kind in ("images", "labels")]
    found = read_npz(file, *keys)
    arrays: Arrays = {"classes": np.array(["normal", "pneumonia"])}
    for part in parts:
        arrays[f"x_{part}"] = found[f"{part}_images"]
        arrays[f"y_{part}"] = found[f"{part}_labels"].reshape(-1)
    return arrays


def _download(library: Any, folder: Path, origin: str, file: str) -> Path:
    library.utils.download_url(f"{origin}{file}", str(folder), file, MD5[file])
    return folder / file


def _unpacked(library: Any, folder: Path, file: str) -> dict[str, bytes]:
    """Return the files in an archive of CIFAR, by their names."""
    with tarfile.open(_download(library, folder, CIFAR, file)) as archive:
        return {
            Path(member.name).name: content.read()
            for member in archive
            if (content := archive.extractfile(member)) is not None
        }


def _names(files: Mapping[str, bytes], name: str) -> Array:
    return np.array(files[name].decode("ascii").split())


def _labelled_images(content: bytes, *, num_labels: int) -> tuple[Array, Array]:
    """Return labels and images (n, height, width, channels) of a binary file."""
    length = num_labels + int(np.prod(CIFAR_SHAPE))
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, length)
    images = rows[:, num_labels:].reshape(-1, *CIFAR_SHAPE).transpose(0, 2, 3, 1)
    return rows[:, :num_labels], np.ascontiguousarray(images)


# Files

SPLIT_KEYS: Final = ("x_train", "y_train", "x_test", "y_test")
DIGITS: Final = tuple("0123456789")
FEDMD_CLASSES: Final = (0, 2, 20, 63, 71, 82)
NUM_SUPERCLASSES: Final = 6


@dataclass(frozen=True, eq=False, kw_only=True)
class ImagePool:
    """All images of a file, and which of them are for training and for testing."""

    x: Array
    """Bytes (n, height, width, channels)."""
    y: IntArray
    """Class indices (n,), or labels (n, num_classes)."""
    classes: tuple[str, ...]
    task: Task = "single-label"
    parts: Rows | None = None
    """Rows of training, public (often none) and test images as the source splits them."""
    groups: IntArray | None = None
    """Writer, patient or the like of every image."""
    keep_groups: bool = False
    """Whether train, public and test may not share a group."""

    def split(self, rng: np.random.RandomState, *, with_public: bool) -> Rows:
        """Return rows of train, public and test; without public rows, more of test."""
        if self.parts is None:
            if self.keep_groups and self.groups is not None:
                train, public, test = split_groups(self.groups, EMBEDDED_TRAIN_SHARE, rng)
            else:
                train, public, test = split_rows(len(self.x), EMBEDDED_TRAIN_SHARE, rng)
            held_out = np.concatenate([public, test])
            return (train, public, test) if with_public else (train, public[:0], held_out)
        train, public, test = self.parts
        if with_public and not len(public):
            first, second = halves(len(test), rng)
            public, test = test[first], test[second]
        return train, public, test

    @property
    def training_rows(self) -> IntArray:
        """Rows that another data set may take as its public ones: all if none are set apart."""
        return np.arange(len(self.x)) if self.parts is None else self.parts[0]

    def only(self, y: IntArray, names: tuple[str, ...], kept: tuple[int, ...]) -> "ImagePool":
        """Return the images of some classes of `names`, renumbered in the order of `kept`."""
        number = np.full(len(names), -1)
        number[list(kept)] = np.arange(len(kept))
        rows = np.flatnonzero(number[y] >= 0)
        require_data(len(rows) > 0, "load_dataset", "the file", f"with classes {kept}", "none")
        train, val, test = (
            np.flatnonzero(np.isin(rows, part)) for part in self.parts or ((), (), ())
        )
        return ImagePool(
            x=self.x[rows],
            y=number[y[rows]],
            classes=tuple(names[label] for label in kept),
            parts=(train, val, test),
            groups=None if self.groups is None else self.groups[rows],
        )


def _images(owner: str, name: str, x: Array) -> Array:
    """Return images as (n, height, width, channels) bytes."""
    is_image = x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)
    sound = is_image and x.dtype == np.uint8 and x.size > 0
    rule = "bytes (n, height, width) or (n, height, width, 3)"
    require_data(sound, owner, name, rule, f"{x.dtype} of shape {x.shape}")
    return x if x.ndim == 4 else x[..., np.newaxis]


def _labels(
    owner: str, name: str, y: Array, num_rows: int, classes: tuple[str, ...], task: Task
) -> IntArray:
    check_targets(owner, name, y, num_rows, len(classes), task)
    return y.astype(np.int64)


def _classes(arrays: Arrays, key: str = "classes") -> tuple[str, ...]:
    return tuple(str(name) for name in arrays[key]) if key in arrays else DIGITS


def _split_pool(owner: str, arrays: Arrays, *, names: str = "classes") -> ImagePool:
    """Read x_train, y_train, x_test, y_test and, where there are any, x_val and y_val."""
    classes, xs, ys, ends = _classes(arrays, names), [], [], [0]
    for part in ("train", "val", "test"):
        if part == "val" and "x_val" not in arrays:
            ends.append(ends[-1])
            continue
        x = _images(owner, f"x_{part}", arrays[f"x_{part}"])
        y = arrays[f"y_{part}"]
        ys.append(_labels(owner, f"y_{part}", y, len(x), classes, "single-label"))
        xs.append(x)
        ends.append(ends[-1] + len(x))
        rule = f"images of shape {xs[0].shape[1:]}"
        alike = x.shape[1:] == xs[0].shape[1:]
        require_data(alike, owner, f"x_{part}", rule, x.shape[1:])
    train, val, test = (np.arange(*pair) for pair in pairwise(ends))
    x, y = np.concatenate(xs), np.concatenate(ys)
    return ImagePool(x=x, y=y, classes=classes, parts=(train, val, test))


def _fine_pool(owner: str, arrays: Arrays, kept: tuple[int, ...] = ()) -> ImagePool:
    """Read CIFAR-100 with some of its fine classes, or with those that occur in the file."""
    pool = _split_pool(owner, arrays, names="fine_names")
    return pool.only(pool.y, pool.classes, kept or tuple(np.unique(pool.y).tolist()))


def _superclass_pool(owner: str, arrays: Arrays) -> ImagePool:
    """Read superclasses 0 to 5; the group is the number of a fine class in its superclass."""
    pool, names = (
        _split_pool(owner, arrays, names="fine_names"),
        _classes(arrays, "coarse_names"),
    )
    y = np.concatenate([arrays[f"y_{part}_coarse"] for part in PARTS])
    coarse = _labels(owner, "coarse", y, len(pool.x), names, "single-label")
    groups = np.zeros_like(coarse)
    for label in range(len(names)):
        _, groups[coarse == label] = np.unique(pool.y[coarse == label], return_inverse=True)
    return replace(pool, groups=groups).only(coarse, names, tuple(range(NUM_SUPERCLASSES)))


def _svhn_pool(owner: str, arrays: Arrays) -> ImagePool:
    """Read the whole set, or test images alone, which are then split at random."""
    if "x_train" in arrays:
        return _split_pool(owner, arrays)
    x = _images(owner, "x_test", arrays["x_test"])
    y = _labels(owner, "y_test", arrays["y_test"], len(x), DIGITS, "single-label")
    return ImagePool(x=x, y=y, classes=DIGITS)


def _grouped_pool(owner: str, arrays: Arrays, *, group: str, task: Task) -> ImagePool:
    x, classes = _images(owner, "x", arrays["x"]), _classes(arrays)
    y = _labels(owner, "y", arrays["y"], len(x), classes, task)
    names = arrays[group]
    require_data(names.shape == (len(x),), owner, group, f"{len(x)} names", names.shape)
    _, groups = np.unique(names, return_inverse=True)
    return ImagePool(
        x=x,
        y=y,
        classes=classes,
        task=task,
        groups=groups.astype(np.int64),
        keep_groups=group == "patient_id",
    )


# Sets

Scale: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class ImageSet:
    """An image data set: its file, the reader of it, and its published scale."""

    file: str
    origin: str
    scale: Scale
    """Mean and deviation of each channel."""
    keys: tuple[str, ...] = SPLIT_KEYS
    read: Callable[[str, Arrays], ImagePool] = _split_pool
    fetch: Callable[[Any, Path], Arrays] | None = None
    """Gets the arrays by torchvision; none where nobody offers them."""
    optional: tuple[str, ...] = ()


def _cifar100(read: Callable[[str, Arrays], ImagePool]) -> ImageSet:
    return ImageSet(
        "cifar100_subset.npz",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        (*SPLIT_KEYS, "y_train_coarse", "y_test_coarse", "fine_names", "coarse_names"),
        read,
        _both_cifar100,
    )


def _x_rays(file: str, origin: str) -> ImageSet:
    read = partial(_grouped_pool, group="patient_id", task="multi-label")
    return ImageSet(file, origin, CHEST_SCALE, ("x", "y", "patient_id", "classes"), read)


MNIST_SCALE: Final = ((0.1307,), (0.3081,))
CHEST_SCALE: Final = ((0.5,), (0.5,))
NAMED_KEYS: Final = (*SPLIT_KEYS, "classes")
IMAGE_SETS: Final[Mapping[str, ImageSet]] = MappingProxyType(
    {
        "mnist": ImageSet(
            "mnist.npz",
            "https://yann.lecun.com/exdb/mnist",
            MNIST_SCALE,
            fetch=partial(_digits, "MNIST", ()),
        ),
        "fashion-mnist": ImageSet(
            "fashion_mnist.npz",
            "https://github.com/zalandoresearch/fashion-mnist",
            ((0.2860,), (0.3530,)),
            NAMED_KEYS,
            fetch=partial(_digits, "FashionMNIST", FASHION),
        ),
        "emnist-letters": ImageSet(
            "emnist_letters_af.npz",
            "https://www.nist.gov/itl/products-and-services/emnist-dataset",
            ((0.1722,), (0.3309,)),
            NAMED_KEYS,
            fetch=_letters,
        ),
        "cifar10": ImageSet(
            "cifar10.npz",
            "https://www.cs.toronto.edu/~kriz/cifar.html",
            ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
            NAMED_KEYS,
            fetch=_cifar10,
        ),
        "cifar100": _cifar100(_fine_pool),
        "cifar100-fedmd": _cifar100(partial(_fine_pool, kept=FEDMD_CLASSES)),
        "cifar100-superclasses": _cifar100(_superclass_pool),
        "svhn": ImageSet(
            "svhn_test10k.npz",
            "http://ufldl.stanford.edu/housenumbers",
            ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
            ("x_test", "y_test"),
            _svhn_pool,
            _house_numbers,
            optional=("x_train", "y_train"),
        ),
        "chars74k": ImageSet(
            "chars74k_hnd.npz",
            "https://info-ee.surrey.ac.uk/CVSSP/demos/chars74k",
            MNIST_SCALE,
            ("x", "y", "writer", "classes"),
            partial(_grouped_pool, group="writer", task="single-label"),
        ),
        "pneumonia": ImageSet(
            "pneumoniamnist.npz",
            "https://medmnist.com",
            CHEST_SCALE,
            ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test", "classes"),
            fetch=_pneumonia,
        ),
        "nih-cxr": _x_rays("nih_cxr14_5k.npz", "https://nihcc.app.box.com/v/ChestXray-NIHCC"),
        "covid-cxr": _x_rays(
            "covid_cxr.npz", "https://github.com/ieee8023/covid-chestxray-dataset"
        ),
    }
)
LUMA: Final = np.array([0.299, 0.587, 0.114])
"""Share of red, green and blue in grey, as in ITU-R BT.601."""


def load_images(name: str, request: Request) -> Dataset:
    """Load an image set, with public images of its own or of the set `request.public`.

    Sets with a test part of their own keep all training images private; half of the test
    images are public, but for `pneumonia`, whose validation images are. Others are split at
    random: 60 % train, 20 % public, 20 % test. With `request.public`, no image of the set
    itself is public and all held-out images are test images; they have no labels then,
    unless `request.joint_classes` lists the classes of both sets.
    """
    pool = read_images(name, request.data_dir)
    train, public, test = pool.split(request.rng, with_public=not request.public)
    source = read_images(request.public, request.data_dir) if request.public else pool
    if request.public:
        public = source.training_rows
    train, public, test = request.limit((train, public, test))
    classes, y_public = pool.classes, None if request.public else pool.y[public]
    if request.joint_classes:
        classes, numbers = join_classes(pool, source)
        y_public = numbers[source.y[public]]
    mean, deviation = IMAGE_SETS[name].scale

    def prepared(images: Array) -> Array:
        return images if request.raw else normalise(images, mean, deviation)

    foreign = fit_images(source.x[public], pool.x.shape[1:])
    return Dataset(
        name=name,
        classes=classes,
        task=pool.task,
        x_train=prepared(pool.x[train]),
        y_train=pool.y[train],
        x_public=prepared(foreign),
        y_public=y_public,
        x_test=prepared(pool.x[test]),
        y_test=pool.y[test],
        groups=None if pool.groups is None else pool.groups[train],
        num_public_classes=len(classes) - len(pool.classes),
    )


def join_classes(own: ImagePool, public: ImagePool) -> tuple[tuple[str, ...], IntArray]:
    """Return the classes of both sets, the own first, and the number of each public class.

    A class of the same name is the same class.
    """
    single = own.task == public.task == "single-label"
    rule = "false unless each image of both sets has one label"
    require(single, "load_dataset", "joint-classes", rule, True)
    new = tuple(name for name in public.classes if name not in own.classes)
    classes = own.classes + new
    return classes, np.array([classes.index(name) for name in public.classes])


def read_images(name: str, data_dir: str) -> ImagePool:
    """Return all images of a named set, from a local file or else from their public source."""
    source = IMAGE_SETS[name]
    local = local_file(source.file, data_dir)
    if local:
        arrays = read_npz(local, *source.keys, optional=source.optional)
        return source.read(source.file, arrays)
    keys, offered = ", ".join(source.keys), source.fetch is not None
    lost = unreachable(name, source.file, keys, source.origin, offered=offered)
    if source.fetch is None:
        raise lost
    try:
        arrays = source.fetch(import_torchvision(name).datasets, cache_folder())
    except FETCH_ERRORS as error:
        raise lost from error
    return source.read(source.file, arrays)


def normalise(
    images: Array, mean: tuple[float, ...], deviation: tuple[float, ...]
) -> FloatArray:
    """Return bytes (n, height, width, channels) as float32 (n, channels, height, width).

    Examples
    --------
    >>> white = np.full((1, 1, 1, 3), 255, dtype=np.uint8)
    >>> normalise(white, (0.5, 0.5, 0.5), (0.5, 0.5, 0.25)).ravel()
    array([1., 1., 2.], dtype=float32)
    """
    x = np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)
    x /= 255
    x -= np.array(mean, dtype=np.float32).reshape(-1, 1, 1)
    x /= np.array(deviation, dtype=np.float32).reshape(-1, 1, 1)
    return x


def fit_images(images: Array, shape: tuple[int, ...]) -> Array:
    """Return bytes (n, height, width, channels) in another height, width and colouring.

    Larger images lose their border, smaller ones get a black one. Grey is repeated in three
    channels; colours become grey by their luminance.

    Examples
    --------
    >>> fit_images(np.full((1, 1, 1, 1), 7, dtype=np.uint8), (3, 3, 1))[0, :, :, 0]
    array([[0, 0, 0],
           [0, 7, 0],
           [0, 0, 0]], dtype=uint8)
    """
    height, width, channels = shape
    if images.shape[3] == 3 and channels == 1:
        images = np.rint(images @ LUMA)[..., np.newaxis].astype(np.uint8)
    elif images.shape[3] == 1 and channels == 3:
        images = np.repeat(images, 3, axis=3)
    for axis, length in ((1, height), (2, width)):
        surplus = images.shape[axis] - length
        if surplus > 0:
            images = images.take(np.arange(length) + surplus // 2, axis=axis)
        elif surplus < 0:
            border = [(0, 0)] * 4
            border[axis] = (-surplus // 2, -surplus - -surplus // 2)
            images = np.pad(images, border)
    return images
