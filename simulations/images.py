"""Image data sets by name, as (channels, height, width) rows.

Pixels are normalised by constants that are published with a data set, never by statistics
of private images.
"""

from typing import Final

import numpy as np

from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.exceptions import require
from simulations.downloads import FETCH_ERRORS, SOURCES, fetch_images
from simulations.files import local_file, read_npz, unreachable
from simulations.image_sets import IMAGE_SETS, ImagePool
from simulations.splits import Dataset, Request

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
    foreign = fit_images(source.x[public], pool.x.shape[1:])
    return Dataset(
        name=name,
        classes=classes,
        task=pool.task,
        x_train=normalise(pool.x[train], mean, deviation),
        y_train=pool.y[train],
        x_public=normalise(foreign, mean, deviation),
        y_public=y_public,
        x_test=normalise(pool.x[test], mean, deviation),
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
    offered, keys = source.file in SOURCES, ", ".join(source.keys)
    lost = unreachable(name, source.file, keys, source.origin, offered=offered)
    if not offered:
        raise lost
    try:
        arrays = fetch_images(name, source.file)
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
