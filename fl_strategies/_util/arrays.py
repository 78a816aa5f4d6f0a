"""Array types, conversion to arrays, and fingerprints of their content."""

import hashlib
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_strategies.errors import InvalidData

Array: TypeAlias = NDArray[Any]
FloatArray: TypeAlias = NDArray[np.floating[Any]]
IntArray: TypeAlias = NDArray[np.int64]

NEARLY_CONSTANT: Final = 1e-6
"""A column whose relative spread is below this counts as constant."""


def plain(owner: str, name: str, value: Any) -> Any:
    """Return tensors, and sparse and masked arrays, as arrays; lists and frames as they are.

    They are recognised by their methods, so that no library is needed.
    """
    if isinstance(value, np.ma.MaskedArray):
        masked: Any = value.astype(np.float64) if value.dtype.kind in "biuf" else value
        return masked.filled(np.nan if masked.dtype.kind == "f" else None)
    if isinstance(value, np.ndarray | list | tuple) or hasattr(value, "columns"):
        return value
    try:
        if hasattr(value, "detach"):
            dense = value.detach().cpu()
            dense = dense.to_dense() if dense.is_sparse else dense
            # numpy has no such type of 16 bits.
            dense = dense.float() if str(dense.dtype) == "torch.bfloat16" else dense
            return np.asarray(dense)
        return np.asarray(value.toarray() if hasattr(value, "toarray") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_an_array(owner, name, value) from error


def to_array(owner: str, name: str, value: Any) -> Array:
    """Return a list, frame or tensor as an array; arrays stay the objects that they are."""
    if isinstance(value, np.ndarray):
        return value
    try:
        array = np.asarray(plain(owner, name, value))
        # Frames with columns of several types come as objects.
        return np.array(array.tolist()) if array.dtype == object and array.size else array
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_an_array(owner, name, value) from error


def _not_an_array(owner: str, name: str, value: Any) -> InvalidData:
    return InvalidData(
        f"{owner}: {name} must be an array, or a list, frame or tensor that numpy can "
        f"read, got {type(value).__name__}."
    )


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


def column_scales(rows: FloatArray) -> FloatArray:
    """Return the scale of each column: 1 if columns share a unit, otherwise 1 / spread.

    They do if most columns span about as much as the widest: pixels, indicators, frequencies.

    Examples
    --------
    >>> column_scales(np.array([[0.0, 100.0, 7.0], [2.0, 900.0, 7.0]]))
    array([1.    , 0.0025, 0.    ])
    """
    spans, spread = np.ptp(rows, axis=0), rows.std(axis=0)
    if np.median(spans) >= spans.max(initial=0.0) / 2:
        return np.ones(rows.shape[1])
    varies = spread > NEARLY_CONSTANT * np.abs(rows).max(axis=0, initial=0.0)
    return np.where(varies, 1.0 / np.where(varies, spread, 1.0), 0.0)


def content_hash(array: Array) -> str:
    """Return a fingerprint of an array's type, shape and values.

    Server and parties compare it to be sure that they label the same rows.
    """
    plain = np.ascontiguousarray(array)
    plain = plain.astype(plain.dtype.newbyteorder("<"), copy=False)
    digest = hashlib.sha256(f"{plain.dtype.str}{plain.shape}".encode())
    digest.update(plain.data)
    return digest.hexdigest()
