"""Archives of rows and images, as plain arrays, and the scale that public rows define.

Archives are opened without pickle, so an untrusted file can hold numbers and text and
nothing that runs.
"""

import os
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import InvalidData, InvalidParameter, require_data
from fl_strategies.party.party import LARGEST_VALUE, cells_as_numbers

DATA_VARIABLE: Final = "FL_STRATEGIES_DATA"
COLOUR_CHANNELS: Final = (1, 3)
LARGEST: Final = 1e100
"""Numbers beyond are cut to it, so that squares of them are still numbers."""


def local_file(file: str, data_dir: str) -> Path | None:
    """Return the path of a file in the data folder, or None if it is not there."""
    folder = data_dir or os.environ.get(DATA_VARIABLE, "")
    if folder and not Path(folder).is_dir():
        raise InvalidParameter(
            f"load_dataset: data-dir must be a folder that exists, got {folder!r}."
        )
    path = Path(folder) / file
    return path if folder and path.is_file() else None


def cache_folder() -> Path:
    """Return the folder for downloads; make it if it is not there."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "fl-strategies"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def unreachable(
    name: str, file: str, content: str, origin: str, *, offered: bool = True
) -> InvalidData:
    """Return the error for data that are nowhere to be found.

    Parameters
    ----------
    name, file, content : str
        The data set, its file and what the file must hold.
    origin : str
        Where the data come from.
    offered : bool
        Whether they are downloaded where there is a network.
    """
    rule = (
        "in a local folder or downloadable, got neither"
        if offered
        else "in a local folder, got none"
    )
    return InvalidData(
        f"load_dataset: {name} must be {rule}. "
        f"Set data-dir or {DATA_VARIABLE} to a folder that holds {file} with {content}. "
        f"The data come from {origin}."
    )


def read_npz(path: Path, *required: str, optional: tuple[str, ...] = ()) -> dict[str, Array]:
    """Return the named arrays of an archive; refuse objects, which only pickle can hold."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [name for name in required if name not in archive]
            wanted = [name for name in (*required, *optional) if name in archive]
            arrays = {name: archive[name] for name in wanted}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidData(
            f"{path.name}: the file must be an npz archive of plain arrays, got {error}."
        ) from error
    rule = f"complete with {', '.join(required)}"
    require_data(not missing, path.name, "the archive", rule, f"no {', '.join(missing)}")
    return arrays


def flat_rows(owner: str, name: str, x: Array) -> FloatArray:
    """Return rows of any shape as (num_rows, num_features) numbers, or say what is wrong."""
    numbers = _numbers(owner, name, x)
    return numbers.reshape(len(x), -1).astype(np.float64 if x.ndim == 2 else np.float32)


def picture_rows(owner: str, name: str, x: Array) -> FloatArray:
    """Return images as (num_rows, channels, height, width), and other rows flat.

    Channels are the last axis if that has length 1 or 3, else the first one of a row.
    """
    numbers = _numbers(owner, name, x)
    if x.ndim == 3:
        return numbers[:, np.newaxis].astype(np.float32)
    if x.ndim == 4 and x.shape[3] in COLOUR_CHANNELS:
        return np.ascontiguousarray(numbers.transpose(0, 3, 1, 2), dtype=np.float32)
    if x.ndim == 4 and x.shape[1] in COLOUR_CHANNELS:
        return numbers.astype(np.float32)
    return flat_rows(owner, name, numbers)


def _numbers(owner: str, name: str, x: Array) -> Array:
    """Return rows as numbers, cell by cell; NaN for what is none, extremes cut to float32."""
    require_data(x.ndim >= 2, owner, name, "an array of rows (n, ...)", f"shape {x.shape}")
    require_data(len(x) > 0, owner, name, "at least one row", "none")
    if x.dtype.kind in "iu" and x.dtype.itemsize <= 2:
        return x
    # By float64, as whole numbers and fractions are to be rounded in one way.
    wide = cells_as_numbers(x)
    return wide if x.ndim == 2 else np.clip(wide, -LARGEST_VALUE, LARGEST_VALUE)


def class_indices(
    owner: str, *labels: tuple[str, Array]
) -> tuple[tuple[str, ...], list[IntArray]]:
    """Return sorted class names and, for every named label array, its class indices.

    Examples
    --------
    >>> class_indices("pets.npz", ("y_train", np.array([7, 3])), ("y_test", np.array([3])))
    (('3', '7'), [array([1, 0]), array([0])])
    """
    plain = [_plain_labels(owner, name, y) for name, y in labels]
    kinds = {y.dtype.kind for y in plain}
    require_data(len(kinds) == 1, owner, "labels", "all numbers or all text", "both")
    classes, indices = np.unique(np.concatenate(plain), return_inverse=True)
    require_data(len(classes) >= 2, owner, "labels", "of at least 2 classes", len(classes))
    ends = np.cumsum([len(y) for y in plain])[:-1]
    return tuple(str(name) for name in classes), np.split(indices.astype(np.int64), ends)


def _plain_labels(owner: str, name: str, y: Array) -> Array:
    """Return labels as a flat array of whole numbers or of text."""
    flat = y.reshape(-1) if y.ndim == 2 and y.shape[1] == 1 else y
    require_data(flat.ndim == 1, owner, name, "one label a row", f"shape {y.shape}")
    if flat.dtype.kind == "f":
        is_whole = np.isfinite(flat) & (flat == np.round(flat))
        whole = bool(is_whole.all())
        rule = "class labels (whole numbers or text)"
        require_data(whole, owner, name, rule, flat[~is_whole][:1])
    kind = flat.dtype.kind
    require_data(kind in "biufUS", owner, name, "whole numbers or text", f"dtype {y.dtype}")
    return flat.astype(np.str_ if kind in "US" else np.int64)


def public_scale(public: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Return the standardisation of columns that the public rows define.

    Columns that hold only zeros and ones are left alone: scaled, a rare one would become
    a huge number.

    Examples
    --------
    >>> scale = public_scale(np.array([[1.0, 0.0], [3.0, 1.0]]))
    >>> scale(np.array([[5.0, 1.0]]))
    array([[3., 1.]], dtype=float32)
    """
    public = np.clip(public.astype(np.float64), -LARGEST, LARGEST)
    mean, deviation = public.mean(axis=0), public.std(axis=0)
    is_binary = ((public == 0) | (public == 1)).all(axis=0)
    mean[is_binary] = 0.0
    deviation[is_binary | (deviation == 0)] = 1.0
    return partial(_scaled, public=public, mean=mean, deviation=deviation)


def plain_scale(public: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Return what fills gaps by the public rows, and leaves numbers as they are."""
    return partial(_filled, public=public)


def _filled(x: FloatArray, *, public: FloatArray) -> FloatArray:
    if np.abs([x.min(initial=0), x.max(initial=0)]).max() <= LARGEST_VALUE:  # NaN is not
        return x
    return _scaled(x, public=public, mean=np.float32(0), deviation=np.float32(1))


def image_scale(public: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Return one scale for all pixels; alone, a pixel at the edge hardly ever varies."""
    mean = np.float32(public.mean(dtype=np.float64))
    deviation = np.float32(public.std(dtype=np.float64)) or np.float32(1)
    return partial(_scaled, public=public, mean=mean, deviation=deviation)


def _scaled(x: FloatArray, *, public: FloatArray, mean: Any, deviation: Any) -> FloatArray:
    """Return finite numbers: gaps get the public median, and extremes are cut, twice."""
    gaps = np.isnan(x)
    if gaps.any():
        x = np.where(gaps, np.median(public, axis=0), x).astype(x.dtype)
    largest = LARGEST if x.dtype == np.float64 else LARGEST_VALUE
    with np.errstate(over="ignore"):
        scaled = (np.clip(x, -largest, largest) - mean) / deviation
        cut: FloatArray = np.clip(scaled, -LARGEST_VALUE, LARGEST_VALUE).astype(np.float32)
        return cut
