"""Names for arrays, and what identifies their content."""

import hashlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
FloatArray: TypeAlias = NDArray[np.floating[Any]]
IntArray: TypeAlias = NDArray[np.int64]


def content_hash(array: Array) -> str:
    """Return a fingerprint of an array's type, shape and values.

    Server and parties compare it to be sure that they label the same rows.
    """
    plain = np.ascontiguousarray(array)
    plain = plain.astype(plain.dtype.newbyteorder("<"), copy=False)
    digest = hashlib.sha256(f"{plain.dtype.str}{plain.shape}".encode())
    digest.update(plain.data)
    return digest.hexdigest()
