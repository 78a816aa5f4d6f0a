"""Raw records, such as images and texts, as the rows that a frozen encoder makes of them.

Rows are alike in simulations and deployments. What the public rows say about scale holds for
all: a record that cannot be encoded has their median, and if columns are to be standardised,
it is by their mean and deviation.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from clients.encoders.encoder import Encoder, as_records, hash_of
from clients.encoders.named import check_encoder_name, find_encoder
from fl_strategies._util import Array, FloatArray, content_hash
from fl_strategies.errors import require, require_data
from fl_strategies.party.party import check_rows
from simulations.data.files import cache_folder, plain_scale, public_scale
from simulations.data.splits import Dataset

logger = logging.getLogger("flwr.fl_strategies")

FOLDER: Final = "encoded"
"""Where encoded rows are kept: below the cache of a simulation, beside the files of a node."""
STANDARDISED: Final = "+standardised"


@dataclass(frozen=True, eq=False)
class Encoding:
    """A frozen encoder, and whether its columns are standardised.

    Parameters
    ----------
    encoder : Encoder
    standardise : bool
        By the mean and deviation of public rows.
    """

    encoder: Encoder
    standardise: bool = False

    @classmethod
    def of(cls, name: str, *, standardise: bool = False) -> Self | None:
        """Return the encoding that a setting names; None without a name."""
        return cls(find_encoder(name), standardise) if name else None

    @property
    def hash(self) -> str:
        """What server and parties compare."""
        return f"{self.encoder.hash}{STANDARDISED if self.standardise else ''}"

    def learn(self, owner: str, public: FloatArray) -> Callable[[FloatArray], FloatArray]:
        """Return what scales encoded rows and fills their gaps, by the public ones."""
        check_rows(owner, "the encoded public rows", public)
        return (public_scale if self.standardise else plain_scale)(public)

    def describe(self, num_columns: int) -> str:
        """Say what was made of records."""
        name = f"{self.encoder.name} (hash {self.encoder.hash[:12]})"
        scaled = ", standardised" if self.standardise else ""
        return f"{name} makes {num_columns} numbers of each record{scaled}"


@dataclass(frozen=True, eq=False)
class EncodedFile:
    """A public file of raw records, and how those of other files become rows like its own.

    Encoded rows are kept beside each file, in a folder `encoded`.
    """

    encoding: Encoding
    raw: Array
    rows: FloatArray
    scale: Callable[[FloatArray], FloatArray]

    @classmethod
    def learn(cls, path: Path, raw: Array, encoding: Encoding) -> Self:
        """Encode the records of the public file."""
        rows = encoding.encoder.encode(raw, cache=path.parent / FOLDER)
        scale = encoding.learn(path.name, rows)
        return cls(encoding, raw, scale(rows), scale)

    def encode(self, path: Path, raw: Array) -> FloatArray:
        """Return the rows of another file's records."""
        records, encoder = as_public(path.name, self.raw, raw), self.encoding.encoder
        width = self.rows.shape[1]
        if records.shape[1:] != self.raw.shape[1:]:
            # Of a blank record: the shape is the file's, and no error may depend on a record.
            blank = np.zeros((1, *records.shape[1:]), records.dtype)
            got = encoder.encode(blank).shape[1]
            rule = f"of {width} encoded numbers like the public ones"
            require_data(got == width, path.name, "records", rule, got)
        return self.scale(encoder.encode(records, cache=path.parent / FOLDER, width=width))


def check_encoder(owner: str, name: str, *, standardise: bool) -> None:
    """Raise `InvalidParameter` unless settings name an encoder, or none; nothing is loaded."""
    require(bool(name) or not standardise, owner, "standardise", "false without encoder", True)
    if name:
        check_encoder_name(owner, name)


def encoded(data: Dataset, encoding: Encoding) -> Dataset:
    """Return a data set of raw records with rows of numbers in their place."""
    raw = data.x_train, data.x_public, data.x_test
    train, public, test = encode_parts(encoding.encoder, raw, cache_folder() / FOLDER)
    scale = encoding.learn(data.name, public)
    told = encoding.describe(public.shape[1])
    return replace(
        data,
        x_train=scale(train),
        x_public=scale(public),
        x_test=scale(test),
        understood=(*data.understood, told),
        encoding=encoding.hash,
    )


def encode_parts(encoder: Encoder, parts: Sequence[Any], cache: Path) -> list[FloatArray]:
    """Return encoded rows of several parts, which are kept together.

    Records are encoded in an order that does not depend on how they were dealt to the parts,
    each of them once: another split of the same records finds them in the same file.
    """
    records = [record for part in parts for record in as_records(part)]
    names = [_fingerprint(record) for record in records]
    _, first, places = np.unique(names, return_index=True, return_inverse=True)
    chosen: Any = [records[place] for place in first]
    if all(isinstance(part, np.ndarray) and part.dtype.kind != "O" for part in parts):
        chosen = np.stack(chosen)
    rows = encoder.encode(chosen, cache=cache)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return [rows[part] for part in np.split(places.reshape(-1), ends)]


def _fingerprint(record: Any) -> str:
    return hash_of(record if isinstance(record, str) else content_hash(np.asarray(record)))


def as_public(owner: str, public: Array, x: Array) -> Array:
    """Return records in the number type of the public ones, each by itself; texts as texts.

    One fraction among bytes would otherwise make fractions of all, which are read otherwise.
    """
    if public.dtype.kind in "OUS" or x.dtype.kind in "OUS" or x.dtype == public.dtype:
        return x
    if (public.dtype.kind == "f") != (x.dtype.kind == "f"):
        logger.warning(
            "%s: records are %s where public ones are %s, as which they are read.",
            owner,
            x.dtype,
            public.dtype,
        )
    if public.dtype.kind not in "iu":
        return x.astype(public.dtype)
    limits = np.iinfo(public.dtype)
    with np.errstate(invalid="ignore"):
        whole = np.rint(np.nan_to_num(x.astype(np.float64), nan=0.0))
    return np.clip(whole, limits.min, limits.max).astype(public.dtype)
