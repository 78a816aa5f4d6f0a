"""Smaller replies, where both sides can: compressed scores, and models in half precision.

The server says in its question what it can read (`offer`). A party that knows nothing of it
answers as ever, and a server that knows nothing of it never asks. What a reply holds, it
declares itself; what was not offered is refused, and so is whatever would be larger than the
plain reply that it stands for, before any room is made for it.

zstd comes with pyarrow, which simulations and tables bring; zlib is always there, packs as
well and takes ten times as long. The size of a compressed reply depends on what it says, so
nothing is offered where only the server may know that.
"""

import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import numpy as np
from flwr.app import Array as FlowerArray

from fl_strategies.arrays import Array
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.wire.knowledge import Knowledge, Scalar, decode_array, shown

SCORES: Final = "scores"
"""Name of the array that may be compressed."""
ENCODINGS: Final = "score-encodings"
ENCODING: Final = "scores-encoding"
PLAIN_BYTES: Final = "scores-bytes"
HALF_PRECISION: Final = "half-precision"

ZSTD, ZLIB = "zstd", "zlib"
LEAST_BYTES: Final = 1024
MOST_LEFT: Final = 0.95
"""Scores travel as they are if fewer, or if compression would leave more than this share."""
_LEVEL: Final = 3
# What numpy writes before the numbers of an array.
_MOST_HEADER: Final = 256
_LARGEST_HALF: Final = float(np.finfo(np.float16).max)


@cache
def _zstd() -> Any:
    """Return what compresses, or None where it is not installed."""
    try:
        from pyarrow import Codec
    except ImportError:
        return None
    return Codec(ZSTD, compression_level=_LEVEL) if Codec.is_available(ZSTD) else None


def readable() -> tuple[str, ...]:
    """Return the encodings that this side can write and read, the best first."""
    return (ZSTD, ZLIB) if _zstd() is not None else (ZLIB,)


def offer(most_score_bytes: int, *, half: bool, kept: bool) -> dict[str, Scalar]:
    """Return what a server's question says about smaller replies; nothing for no offer.

    What is kept on disk must be readable wherever the run is resumed, so it is never zstd.
    """
    encodings = ",".join((ZLIB,) if kept else readable()) if most_score_bytes else ""
    offered: dict[str, Scalar] = {ENCODINGS: encodings} if encodings else {}
    return {**offered, HALF_PRECISION: True} if half else offered


def as_offered(knowledge: Knowledge, config: Mapping[str, object]) -> Knowledge:
    """Return a party's reply in the smallest form that the server has offered to read."""
    if config.get(HALF_PRECISION) is True:
        knowledge = _halved(knowledge)
    offered = config.get(ENCODINGS)
    names = offered.split(",") if isinstance(offered, str) else ()
    known = [name for name in readable() if name in names]
    scores = knowledge.arrays.get(SCORES)
    if not known or scores is None or scores.nbytes < LEAST_BYTES:
        return knowledge
    plain = FlowerArray(np.asarray(scores)).data
    packed = _compressed(known[0], plain)
    if len(packed) > MOST_LEFT * len(plain):
        return knowledge
    arrays = {**knowledge.arrays, SCORES: np.frombuffer(packed, np.uint8)}
    declared: dict[str, Scalar] = {ENCODING: known[0], PLAIN_BYTES: len(plain)}
    return Knowledge(knowledge.kind, arrays, {**knowledge.meta, **declared})


def as_meant(knowledge: Knowledge, most_score_bytes: int, *, half: bool) -> Knowledge:
    """Return a reply as it was before `as_offered`; raise `KnowledgeMismatch` if it was not.

    Parameters
    ----------
    knowledge : Knowledge
        As an untrusted party declares it.
    most_score_bytes : int
        Bytes of the scores that were asked for; 0 if no encoding was offered.
    half : bool
        Whether half precision was offered.
    """
    if HALF_PRECISION in knowledge.meta:
        knowledge = _doubled(knowledge, offered=half)
    if ENCODING not in knowledge.meta:
        return knowledge
    arrays = {**knowledge.arrays, SCORES: _scores(knowledge, most_score_bytes)}
    return Knowledge(knowledge.kind, arrays, knowledge.meta)


def _scores(knowledge: Knowledge, most_score_bytes: int) -> Array:
    encoding, size = knowledge.meta[ENCODING], knowledge.meta.get(PLAIN_BYTES)
    if not most_score_bytes or encoding not in readable():
        raise KnowledgeMismatch(
            f"Reply: {ENCODING} must be one that was offered, got {shown(encoding)}."
        )
    most = most_score_bytes + _MOST_HEADER
    if type(size) is not int or not 0 < size <= most:
        raise KnowledgeMismatch(
            f"Reply: {PLAIN_BYTES} must be from 1 to {most}, got {shown(size)}."
        )
    packed = knowledge.arrays.get(SCORES, np.empty(0))
    if packed.dtype != np.uint8 or packed.ndim != 1 or packed.size > size:
        raise KnowledgeMismatch(
            f"Reply: compressed {SCORES} must be a row of at most {size} bytes (uint8), "
            f"got shape {packed.shape} of {packed.dtype}."
        )
    plain = _expanded(str(encoding), packed.tobytes(), size)
    return decode_array(SCORES, FlowerArray("", (), "", plain))


def _compressed(encoding: str, plain: bytes) -> bytes:
    if encoding == ZSTD:
        return bytes(_zstd().compress(plain, asbytes=True))
    # Scores hardly repeat: counting bytes and runs finds all there is, three times as fast.
    engine = zlib.compressobj(6, strategy=zlib.Z_RLE)
    return engine.compress(plain) + engine.flush()


def _expanded(encoding: str, packed: bytes, size: int) -> bytes:
    """Return exactly `size` bytes; nothing longer is ever made."""
    plain = b""
    try:
        if encoding == ZSTD:
            plain = _zstd().decompress(packed, decompressed_size=size, asbytes=True)
        else:
            engine = zlib.decompressobj()
            plain = engine.decompress(packed, size + 1)
            plain = plain if engine.eof and not engine.unused_data else b""
    except (OSError, ValueError, zlib.error) as error:
        raise _not_as_declared(encoding, size) from error
    if len(plain) != size:
        raise _not_as_declared(encoding, size)
    return plain


def _not_as_declared(encoding: str, size: int) -> KnowledgeMismatch:
    return KnowledgeMismatch(
        f"Reply: compressed {SCORES} must be {size} bytes by {encoding}, got others."
    )


def _halved(knowledge: Knowledge) -> Knowledge:
    """Return float32 arrays as float16, but for those that do not fit."""
    arrays = {
        name: a.astype(np.float16) if _fits_half(a) else a
        for name, a in knowledge.arrays.items()
    }
    return Knowledge(knowledge.kind, arrays, {**knowledge.meta, HALF_PRECISION: True})


def _fits_half(array: Array) -> bool:
    # NaN compares as false.
    small = array.dtype == np.float32 and bool((np.abs(array) <= _LARGEST_HALF).all())
    return small and array.size > 0


def _doubled(knowledge: Knowledge, *, offered: bool) -> Knowledge:
    if not offered or knowledge.meta[HALF_PRECISION] is not True:
        raise KnowledgeMismatch(
            f"Reply: {HALF_PRECISION} must be what was offered, "
            f"got {shown(knowledge.meta[HALF_PRECISION])}."
        )
    arrays = {
        name: a.astype(np.float32) if a.dtype == np.float16 else a
        for name, a in knowledge.arrays.items()
    }
    return Knowledge(knowledge.kind, arrays, knowledge.meta)
