"""A strict reader of the part of UBJSON that XGBoost writes.

A model from a stranger must not reach native code before it was looked at, and looking
at it takes a reader that cannot itself be led astray: every size is compared with the
bytes that are left before anything is allocated, depth and number of values are bounded,
an object may not name a key twice, and nothing may follow the value.
"""

import struct
from typing import Any, Final

import numpy as np

from fl_strategies.exceptions import KnowledgeMismatch

# Both struct and numpy spell the number types by these letters.
_CODES: Final = dict(zip(b"iUIlLdD", "bBhiqfd", strict=True))
_NUMBERS: Final = {marker: struct.Struct(f">{code}") for marker, code in _CODES.items()}
_TYPED: Final = {marker: np.dtype(f">{code}") for marker, code in _CODES.items()}
_LENGTHS: Final = frozenset(b"iUIlL")
_CONSTANTS: Final[dict[int, bool | None]] = {ord("T"): True, ord("F"): False, ord("Z"): None}


def decode(data: bytes, *, max_depth: int = 16, max_items: int = 1_000_000) -> Any:
    r"""Return the one value that `data` holds.

    Parameters
    ----------
    data : bytes
    max_depth : int
        How deep objects and arrays may nest.
    max_items : int
        How many values all objects and untyped arrays may hold together. Arrays of one
        number type are bounded by their bytes and count once.

    Returns
    -------
    value : dict, list, numpy array, str, int, float, bool or None
        Arrays whose bytes name one number type come as numpy arrays in native order.

    Raises
    ------
    KnowledgeMismatch
        If the bytes are anything else.

    Examples
    --------
    >>> decode(b"{U\x01ai\x07}")
    {'a': 7}
    """
    reader = _Reader(data, max_items)
    value = reader.value(reader.byte(), max_depth)
    reader.require(reader.position == len(data), "one value", "bytes after it")
    return value


class _Reader:
    """A position in the bytes, and how many values may still be read."""

    def __init__(self, data: bytes, max_items: int) -> None:
        self.data = data
        self.position = 0
        self.items_left = max_items

    def require(self, holds: bool, rule: str, value: object) -> None:
        if not holds:
            raise KnowledgeMismatch(
                f"UBJSON: byte {self.position} must be {rule}, got {str(value)[:80]}."
            )

    def take(self, size: int) -> bytes:
        left = len(self.data) - self.position
        self.require(0 <= size <= left, f"followed by at most {left} bytes", size)
        start, self.position = self.position, self.position + size
        return self.data[start : self.position]

    def byte(self) -> int:
        return self.take(1)[0]

    def peek(self, marker: bytes) -> bool:
        """Step over `marker` if it is next, and tell whether it was."""
        found = self.data[self.position : self.position + 1] == marker
        self.position += found
        return found

    def value(self, marker: int, depth: int) -> Any:
        self.items_left -= 1
        self.require(self.items_left >= 0, "within the number of items", "one more")
        if marker in _NUMBERS:
            return self.number(marker)
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        if marker == ord("S"):
            return self.text()
        self.require(marker in b"[{", "the start of a value", bytes([marker]))
        self.require(depth > 0, "within the depth", "one more level")
        return self.array(depth - 1) if marker == ord("[") else self.mapping(depth - 1)

    def number(self, marker: int) -> Any:
        form = _NUMBERS[marker]
        return form.unpack(self.take(form.size))[0]

    def length(self) -> int:
        marker = self.byte()
        self.require(marker in _LENGTHS, "an integer length", bytes([marker]))
        return int(self.number(marker))

    def text(self) -> str:
        raw = self.take(self.length())
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise KnowledgeMismatch(f"UBJSON: text must be UTF-8, got {error}.") from error

    def mapping(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not self.peek(b"}"):
            key = self.text()
            self.require(key not in result, "a new key", repr(key))
            result[key] = self.value(self.byte(), depth)
        return result

    def array(self, depth: int) -> Any:
        if self.peek(b"$"):
            return self.typed_array(self.byte())
        if self.peek(b"#"):
            return self.counted_array(self.length(), depth)
        result = []
        while not self.peek(b"]"):
            result.append(self.value(self.byte(), depth))
        return result

    def counted_array(self, count: int, depth: int) -> list[Any]:
        left = len(self.data) - self.position
        self.require(0 <= count <= left, f"a count of at most {left}", count)
        return [self.value(self.byte(), depth) for _ in range(count)]

    def typed_array(self, marker: int) -> np.ndarray[Any, Any]:
        self.require(marker in _TYPED, "a number type", bytes([marker]))
        self.require(self.peek(b"#"), "a count", "none")
        dtype = _TYPED[marker]
        raw = self.take(self.length() * dtype.itemsize)
        return np.frombuffer(raw, dtype=dtype).astype(dtype.newbyteorder("="))
