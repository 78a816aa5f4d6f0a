"""Writes UBJSON as XGBoost does, so that tests have something to read back or to change."""

import struct
from typing import Any

import numpy as np

MARKERS = {"i1": b"i", "u1": b"U", "i4": b"l", "i8": b"L", "f4": b"d", "f8": b"D"}


def encode(value: Any) -> bytes:
    """Return the bytes of a nest of plain values and arrays of one number type."""
    match value:
        case None:
            return b"Z"
        case bool():
            return b"T" if value else b"F"
        case int():
            return integer(value)
        case float():
            return b"D" + struct.pack(">d", value)
        case str():
            return b"S" + text(value)
        case np.ndarray():
            wire = value.astype(value.dtype.newbyteorder(">")).tobytes()
            return b"[$" + MARKERS[value.dtype.str[1:]] + b"#" + integer(len(value)) + wire
        case list():
            return b"[#" + integer(len(value)) + b"".join(map(encode, value))
        case dict():
            items = b"".join(text(key) + encode(item) for key, item in value.items())
            return b"{" + items + b"}"
    raise TypeError(type(value))


def integer(value: int) -> bytes:
    return b"L" + struct.pack(">q", value)


def text(value: str) -> bytes:
    raw = value.encode()
    return integer(len(raw)) + raw
