"""Frozen encoders: functions that turn raw records into rows of numbers, kept on disk.

An encoder sees one record at a time, so a row depends on its own record alone: to the last
bit, whatever else is encoded, and in which order. That is what privacy needs, as one record
then changes one row. Libraries for networks do not promise it for batches: with 8 and with 32
images at a time, PyTorch's convolutions round in different ways.

No record ends the work. One that the function fails on becomes a row of NaN, which a `Party`
reads as the public median, and the party's own log counts such records.
"""

import copy
import hashlib
import importlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import numpy as np

from fl_strategies._util import (
    Array,
    FloatArray,
    content_hash,
    counted,
    make_folder,
    plain,
    replace_file,
)
from fl_strategies.errors import InvalidData, StrategyError, require, require_data

logger = logging.getLogger("flwr.fl_strategies")

EncodeRecord: TypeAlias = Callable[[Any], Any]
"""Takes one record and returns its numbers, in an array of any shape."""

SECONDS_BETWEEN_LINES: Final = 10.0
BYTE: Final = 255
SUFFIX: Final = ".rows"
_HASH_CHARACTERS: Final = 32
"""Of each hash in the name of a file; its checksum covers the whole ones."""
_NUMBERS: Final = "biuf"
_NUMBER: Final = np.dtype("<f4")
_START: Final = 128
"""Where numbers begin in a file, in their place for any processor."""
_HEADER: Final = _START - 65
"""Bytes between the checksum and the numbers."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen function from raw records to rows of numbers; make one with `Encoder.of`.

    It must not have learned from private records: what it has seen is in every row.

    Parameters
    ----------
    name : str
        What reports call it.
    hash : str
        Of weights and code. Server and parties compare it (`Party(encoding=...)`).
    load : callable
        Returns the function for one record; called when a record is first encoded.

    Examples
    --------
    >>> encoder = Encoder.of(lambda text: [len(text), text.count(" ")], "sizes", version="1")
    >>> encoder.encode(["one two", "three"])
    array([[7., 1.],
           [5., 0.]], dtype=float32)
    """

    name: str
    hash: str
    load: Callable[[], EncodeRecord] = field(repr=False)

    @classmethod
    def of(cls, fn: Any, name: str, *, version: str = "") -> Self:
        """Return an encoder made of a function of one record, or of a torch module.

        Parameters
        ----------
        fn : callable or torch.nn.Module
            A function takes one record and returns its numbers. A module is copied, in
            evaluation mode, and takes a batch of one: bytes as images (channels, height,
            width) between 0 and 1, other numbers as they are.
        name : str
        version : str
            Of the function. It stands for the code in the hash, so it must change when the
            numbers do; modules have the hash of their weights as well.
        """
        require(bool(name), cls.__name__, "name", "given", name)
        if hasattr(fn, "state_dict"):
            frozen = copy.deepcopy(fn).eval()
            parts = (version, *module_parts(frozen))
            return cls(name, hash_of(name, *parts), lambda: module_function(frozen))
        require(callable(fn), cls.__name__, "fn", "a function or a torch module", fn)
        require(bool(version), cls.__name__, "version", "given for a function", version)
        return cls(name, hash_of(name, version), lambda: fn)

    def encode(
        self, rows: Any, *, cache: str | Path | None = None, width: int | None = None
    ) -> FloatArray:
        """Return a row of numbers for each record, float32 (n, k).

        Parameters
        ----------
        rows : array, sequence of texts, or sequence of anything
        cache : path, optional
            Folder that keeps encoded rows: the same rows are not encoded again. A file that
            is damaged is ignored and made anew. It says about a record what its row does, so
            it belongs where the records are.
        width : int, optional
            How many numbers a row has, as public rows say. A record that gives another number
            of them cannot be encoded, whatever the others do; so no row depends on them.
            Without it the commonest number counts.

        Raises
        ------
        InvalidData
            If no record at all can be encoded, and no width is given.
        """
        records = as_records(rows)
        require_data(len(records) > 0, self.name, "rows", "at least one record", "none")
        if cache is None:
            return self._encoded(records, width)
        place = f"{self.hash} {records_hash(self.name, records)} {width or 'any'}"
        name = "-".join(each[:_HASH_CHARACTERS] for each in place.split())
        path = Path(cache) / f"{name}{SUFFIX}"
        known = read_cached(path, place, len(records))
        if known is not None:
            return known
        encoded = self._encoded(records, width)
        write_cached(path, place, encoded)
        return encoded

    def _encoded(self, records: Sequence[Any] | Array, width: int | None) -> FloatArray:
        function = self.load()
        found: list[FloatArray | None] = []
        failure, last = "none", time.monotonic()
        for place in counted(range(len(records)), f"rows encoded by {self.name}"):
            try:
                found.append(as_numbers(function(records[place])))
            except StrategyError:
                raise
            except Exception as error:  # a record may be anything
                found.append(None)
                failure = f"{type(error).__name__}: {error}"
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                logger.info("%s: %d of %d rows encoded", self.name, len(found), len(records))
        return self._complete(found, width, failure)

    def _complete(
        self, found: list[FloatArray | None], width: int | None, failure: str
    ) -> FloatArray:
        """Return all rows; those without numbers, or of another length, are NaN.

        What was found is let go of row by row, since all of it may be half of the memory.
        """
        widths = [len(row) for row in found if row is not None]
        if width is None and not widths:
            raise InvalidData(
                f"{self.name}: rows must be records that it can encode, got none: {failure}."
            )
        width = max({*widths}, key=widths.count) if width is None else width
        rows = np.empty((len(found), width), dtype=np.float32)
        for place, row in enumerate(found):
            rows[place] = row if row is not None and len(row) == width else np.nan
            found[place] = None
        failed = len(found) - widths.count(width)
        if failed:
            logger.warning("%s: %d of %d records are no rows.", self.name, failed, len(found))
        return rows


def as_numbers(numbers: Any) -> FloatArray:
    """Return what a function returned as a flat row."""
    with np.errstate(over="ignore"):
        return np.asarray(plain("", "", numbers), dtype=np.float32).reshape(-1)


def as_records(rows: Any) -> Sequence[Any] | Array:
    """Return rows as an array of numbers if they are one, or else as a list of records."""
    if hasattr(rows, "columns"):
        table = np.asarray(rows)
        rows = table[:, 0] if table.shape[1] == 1 else table
    array = plain("Encoder", "rows", rows)
    if isinstance(array, np.ndarray):
        return array if array.dtype.kind in _NUMBERS else array.tolist()
    # Not made one array of: the type of one record would decide how others are read.
    return list(array)


def records_hash(owner: str, records: Sequence[Any] | Array) -> str:
    """Return a fingerprint of records that are numbers or texts."""
    if isinstance(records, np.ndarray):
        return content_hash(records)
    others = {type(one).__name__ for one in records if not isinstance(one, str | np.ndarray)}
    rule = "arrays of numbers or texts to be kept"
    require_data(not others, owner, "rows", rule, ", ".join(sorted(others)))
    return hash_of(
        *(f"text {one}" if isinstance(one, str) else content_hash(one) for one in records)
    )


def hash_of(*parts: str | bytes) -> str:
    """Return a hash of several parts, which keeps them apart."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()


# Modules of torch


def module_parts(module: Any) -> list[str]:
    """Return what makes a module the one that it is: its layers and its weights."""
    state = module.state_dict()
    weights = [f"{name} {content_hash(plain('', '', state[name]))}" for name in sorted(state)]
    return [repr(module), *weights]


def module_function(module: Any, prepare: Callable[[Any], Any] | None = None) -> EncodeRecord:
    """Return the function of a module for one record.

    Parameters
    ----------
    module : torch.nn.Module
        In evaluation mode.
    prepare : callable, optional
        Makes the module's input, a tensor, of a record.
    """
    torch = importlib.import_module("torch")
    isolated = importlib.import_module("clients.networks.training").isolated

    def encode(record: Any) -> Any:
        with isolated(), torch.inference_mode():
            tensor = as_tensor(torch, record) if prepare is None else prepare(record)
            return module(tensor[None])[0]

    return encode


def as_tensor(torch: Any, record: Any) -> Any:
    """Return a record as a tensor; bytes are those of an image."""
    array = np.asarray(plain("", "", record))
    if array.dtype == np.uint8:
        return torch.from_numpy(as_image(array))
    whole = array.dtype.kind in "iu"
    return torch.from_numpy(array.astype(np.int64 if whole else np.float32))


def as_image(record: Any) -> FloatArray:
    """Return an image as float32 (channels, height, width) between 0 and 1.

    Whole numbers are bytes, from 0 to 255; fractions lie between 0 and 1. The last axis has
    the channels if its length is 1 or 3, or else the first one; a flat row is a grey square.

    Examples
    --------
    >>> as_image(np.full((2, 2, 3), 255, dtype=np.uint8)).shape
    (3, 2, 2)
    """
    image = np.asarray(plain("", "", record))
    if image.ndim == 1:
        side = round(len(image) ** 0.5)
        image = image.reshape(side, side)
    if image.ndim == 2:
        image = image[np.newaxis]
    elif image.shape[-1] in (1, 3):
        image = np.moveaxis(image, -1, 0)
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(f"an image must have 1 or 3 channels, got shape {image.shape}")
    largest = 1 if image.dtype.kind in "bf" else BYTE
    if not (np.min(image) >= 0 and np.max(image) <= largest):
        raise ValueError(
            "pixels must be bytes or lie between 0 and 1, got some from "
            f"{np.min(image):.4g} to {np.max(image):.4g}"
        )
    return np.ascontiguousarray(image, dtype=np.float32) / np.float32(largest)


# Files


def write_cached(path: Path, place: str, rows: FloatArray) -> None:
    """Write rows behind a checksum; a disk that does not take them is no reason to stop."""
    header = f"{rows.shape[0]} {rows.shape[1]}".ljust(_HEADER - 1).encode() + b"\n"
    body = np.ascontiguousarray(rows, dtype=_NUMBER).data
    checksum = f"{_checksum(place, header, body)}\n".encode()
    try:
        make_folder(path.parent)
        replace_file(path, b"".join((checksum, header, body)))
    except OSError as error:
        logger.warning("Encoded rows are not kept in %s: %s.", path.parent, error.strerror)


def read_cached(path: Path, place: str, num_rows: int) -> FloatArray | None:
    """Return rows as they were written for this place, or None."""
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError:
        return None
    start = _START - _HEADER
    if data[:start].tobytes() != f"{_checksum(place, data[start:].data)}\n".encode():
        logger.warning("%s is damaged; its rows are encoded anew.", path.name)
        return None
    shape = [int(length) for length in data[start:_START].tobytes().split()]
    rows = data[_START:].view(_NUMBER).reshape(shape)
    return rows if len(rows) == num_rows else None


def _checksum(place: str, *parts: bytes | memoryview) -> str:
    digest = hashlib.sha256(f"{place}\n".encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
