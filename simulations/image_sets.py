"""Which image data sets there are, how their files are read, and their published scales.

Files keep images as bytes (n, height, width) or (n, height, width, 3).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from fl_strategies.arrays import Array, IntArray
from fl_strategies.core.tasks import Task, check_targets
from fl_strategies.exceptions import require_data
from simulations.splits import EMBEDDED_TRAIN_SHARE, Rows, halves, split_groups, split_rows

Arrays: TypeAlias = Mapping[str, Array]

SPLIT_KEYS: Final = ("x_train", "y_train", "x_test", "y_test")
COARSE_KEYS: Final = ("y_train_coarse", "y_test_coarse", "fine_names", "coarse_names")
DIGITS: Final = tuple("0123456789")
FEDMD_CLASSES: Final = (0, 2, 20, 63, 71, 82)
NUM_SUPERCLASSES: Final = 6
MNIST_SCALE: Final = ((0.1307,), (0.3081,))
FASHION_SCALE: Final = ((0.2860,), (0.3530,))
LETTERS_SCALE: Final = ((0.1722,), (0.3309,))
CIFAR10_SCALE: Final = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100_SCALE: Final = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
SVHN_SCALE: Final = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
CHEST_SCALE: Final = ((0.5,), (0.5,))


@dataclass(frozen=True, eq=False, kw_only=True)
class ImagePool:
    """All images of a file, and which of them are for training and for testing.

    Parameters
    ----------
    x, y : (n, height, width, channels) uint8, (n,) or (n, num_classes) int64
    classes : tuple of str
    task : "single-label" or "multi-label"
    parts : Rows, optional
        Rows of training, public (often none) and test images as the source splits them.
    groups : (n,), optional
        Writer, patient or the like of every image.
    keep_groups : bool
        Whether train, public and test may not share a group.
    """

    x: Array
    y: IntArray
    classes: tuple[str, ...]
    task: Task = "single-label"
    parts: Rows | None = None
    groups: IntArray | None = None
    keep_groups: bool = False

    def split(self, rng: np.random.RandomState, *, with_public: bool) -> Rows:
        """Return rows of train, public and test; without public rows, more of test."""
        if self.parts is None:
            train, public, test = self._drawn(rng)
            held_out = np.concatenate([public, test])
            return (train, public, test) if with_public else (train, public[:0], held_out)
        train, public, test = self.parts
        if with_public and not len(public):
            first, second = halves(len(test), rng)
            public, test = test[first], test[second]
        return train, public, test

    def _drawn(self, rng: np.random.RandomState) -> Rows:
        if self.keep_groups and self.groups is not None:
            return split_groups(self.groups, EMBEDDED_TRAIN_SHARE, rng)
        return split_rows(len(self.x), EMBEDDED_TRAIN_SHARE, rng)

    @property
    def training_rows(self) -> IntArray:
        """Rows that another data set may take as its public ones: all if none are set apart."""
        return np.arange(len(self.x)) if self.parts is None else self.parts[0]


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Where an image data set is kept, how its file is read, and its published scale."""

    file: str
    scale: tuple[tuple[float, ...], tuple[float, ...]]
    read: Callable[[str, Arrays], ImagePool]
    origin: str
    keys: tuple[str, ...] = SPLIT_KEYS
    optional: tuple[str, ...] = ()


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


def _split_pool(owner: str, arrays: Arrays) -> ImagePool:
    """Read x_train, y_train, x_test, y_test and, where there are any, x_val and y_val."""
    classes, xs, ys, ends = _classes(arrays), [], [], [0]
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


def _fine_pool(owner: str, arrays: Arrays) -> ImagePool:
    """Read CIFAR-100 with its fine classes, those that occur in the file."""
    pool = _split_pool(owner, {**arrays, "classes": arrays["fine_names"]})
    return _only(pool, pool.y, tuple(int(label) for label in np.unique(pool.y)), pool.classes)


def _fedmd_pool(owner: str, arrays: Arrays) -> ImagePool:
    """Read the six fine classes that FedMD calls its private ones."""
    pool = _split_pool(owner, {**arrays, "classes": arrays["fine_names"]})
    return _only(pool, pool.y, FEDMD_CLASSES, pool.classes)


def _superclass_pool(owner: str, arrays: Arrays) -> ImagePool:
    """Read superclasses 0 to 5; the group is the number of a fine class in its superclass."""
    pool = _split_pool(owner, {**arrays, "classes": arrays["fine_names"]})
    names = _classes(arrays, "coarse_names")
    parts = (arrays[f"y_{part}_coarse"] for part in ("train", "test"))
    coarse = _labels(
        owner, "coarse", np.concatenate([*parts]), len(pool.x), names, "single-label"
    )
    groups = np.zeros_like(coarse)
    for label in range(len(names)):
        _, groups[coarse == label] = np.unique(pool.y[coarse == label], return_inverse=True)
    return _only(pool, coarse, tuple(range(NUM_SUPERCLASSES)), names, groups)


def _only(
    pool: ImagePool,
    y: IntArray,
    kept: tuple[int, ...],
    names: tuple[str, ...],
    groups: IntArray | None = None,
) -> ImagePool:
    """Return the images of some classes, renumbered in the order of `kept`."""
    number = np.full(len(names), -1)
    number[list(kept)] = np.arange(len(kept))
    rows = np.flatnonzero(number[y] >= 0)
    require_data(len(rows) > 0, "load_dataset", "the file", f"with classes {kept}", "none")
    train, val, test = (
        np.flatnonzero(np.isin(rows, part)) for part in pool.parts or ((), (), ())
    )
    return ImagePool(
        x=pool.x[rows],
        y=number[y[rows]],
        classes=tuple(names[label] for label in kept),
        parts=(train, val, test),
        groups=None if groups is None else groups[rows],
    )


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


_writer_pool = partial(_grouped_pool, group="writer", task="single-label")
_patient_pool = partial(_grouped_pool, group="patient_id", task="multi-label")


def _cifar100(read: Callable[[str, Arrays], ImagePool]) -> ImageSet:
    return ImageSet(
        file="cifar100_subset.npz",
        scale=CIFAR100_SCALE,
        read=read,
        keys=(*SPLIT_KEYS, *COARSE_KEYS),
        origin="https://www.cs.toronto.edu/~kriz/cifar.html",
    )


IMAGE_SETS: Final[Mapping[str, ImageSet]] = MappingProxyType(
    {
        "mnist": ImageSet(
            file="mnist.npz",
            scale=MNIST_SCALE,
            read=_split_pool,
            origin="https://yann.lecun.com/exdb/mnist",
        ),
        "fashion-mnist": ImageSet(
            file="fashion_mnist.npz",
            scale=FASHION_SCALE,
            read=_split_pool,
            keys=(*SPLIT_KEYS, "classes"),
            origin="https://github.com/zalandoresearch/fashion-mnist",
        ),
        "emnist-letters": ImageSet(
            file="emnist_letters_af.npz",
            scale=LETTERS_SCALE,
            read=_split_pool,
            keys=(*SPLIT_KEYS, "classes"),
            origin="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        ),
        "cifar10": ImageSet(
            file="cifar10.npz",
            scale=CIFAR10_SCALE,
            read=_split_pool,
            keys=(*SPLIT_KEYS, "classes"),
            origin="https://www.cs.toronto.edu/~kriz/cifar.html",
        ),
        "cifar100": _cifar100(_fine_pool),
        "cifar100-fedmd": _cifar100(_fedmd_pool),
        "cifar100-superclasses": _cifar100(_superclass_pool),
        "svhn": ImageSet(
            file="svhn_test10k.npz",
            scale=SVHN_SCALE,
            read=_svhn_pool,
            keys=("x_test", "y_test"),
            optional=("x_train", "y_train"),
            origin="http://ufldl.stanford.edu/housenumbers",
        ),
        "chars74k": ImageSet(
            file="chars74k_hnd.npz",
            scale=MNIST_SCALE,
            read=_writer_pool,
            keys=("x", "y", "writer", "classes"),
            origin="https://info-ee.surrey.ac.uk/CVSSP/demos/chars74k",
        ),
        "pneumonia": ImageSet(
            file="pneumoniamnist.npz",
            scale=CHEST_SCALE,
            read=_split_pool,
            keys=("x_train", "y_train", "x_val", "y_val", "x_test", "y_test", "classes"),
            origin="https://medmnist.com",
        ),
        "nih-cxr": ImageSet(
            file="nih_cxr14_5k.npz",
            scale=CHEST_SCALE,
            read=_patient_pool,
            keys=("x", "y", "patient_id", "classes"),
            origin="https://nihcc.app.box.com/v/ChestXray-NIHCC",
        ),
        "covid-cxr": ImageSet(
            file="covid_cxr.npz",
            scale=CHEST_SCALE,
            read=_patient_pool,
            keys=("x", "y", "patient_id", "classes"),
            origin="https://github.com/ieee8023/covid-chestxray-dataset",
        ),
    }
)
