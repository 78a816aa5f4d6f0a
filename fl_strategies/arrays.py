"""Names for arrays, what becomes one, and what identifies their content."""

import hashlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_strategies.exceptions import InvalidData

Array: TypeAlias = NDArray[Any]
FloatArray: TypeAlias = NDArray[np.floating[Any]]
IntArray: TypeAlias = NDArray[np.int64]


def to_array(owner: str, name: str, value: Any) -> Array:
    """Return a list, frame or tensor as an array; arrays stay the objects that they are.

    Frames and tensors are known by their methods, so that neither library is needed.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        plain = value.detach().cpu() if hasattr(value, "detach") else value
        array = np.asarray(plain)
        # Frames with columns of several types come as objects.
        return np.array(array.tolist()) if array.dtype == object and array.size else array
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidData(
            f"{owner}: {name} must be an array, or a list, frame or tensor that numpy can "
            f"read, got {type(value).__name__}."
        ) from error


def to_rows(owner: str, name: str, value: Any) -> Array:
    """Return rows as an array; truth values become numbers, and texts in a frame are named."""
    array = to_array(owner, name, value)
    if array.dtype.kind in "OUST" and hasattr(value, "columns"):
        wrong = [repr(str(c)) for c in value.columns if not _is_numeric(value[c])]
        raise InvalidData(
            f"{owner}: {name} must be an array of numbers, got text or gaps in the columns "
            f"{', '.join(wrong[:10])}. Make numbers of them, alike at all parties: "
            "docs/own_data.md shows how."
        )
    return array.astype(np.float32) if array.dtype.kind == "b" else array


def _is_numeric(column: Any) -> bool:
    array = np.asarray(column)
    plain = np.array(array.tolist()) if array.dtype == object else array
    return plain.dtype.kind in "biuf"


def content_hash(array: Array) -> str:
    """Return a fingerprint of an array's type, shape and values.

    Server and parties compare it to be sure that they label the same rows.
    """
    plain = np.ascontiguousarray(array)
    plain = plain.astype(plain.dtype.newbyteorder("<"), copy=False)
    digest = hashlib.sha256(f"{plain.dtype.str}{plain.shape}".encode())
    digest.update(plain.data)
    return digest.hexdigest()
