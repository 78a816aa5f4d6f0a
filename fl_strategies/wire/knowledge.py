"""Messages between server and parties, and readers that check types and limits.

`Knowledge` is the only thing a party sends besides metrics. The receiver treats every byte as
hostile: declared sizes are compared with the bytes received before anything is allocated, and
only plain numbers are accepted.

Small replies: packed votes, quantized scores, compression and half precision.

The server's request says which encodings it can read (`offer`). A party that does not know
them sends a plain reply, and a server that does not know them never offers any. A reply
declares its encoding; one that was not offered is refused, and so is a reply that would
expand beyond the plain reply it replaces, before anything is allocated for it.

zstd comes with pyarrow, which simulations and tables install; zlib is always available,
compresses as well and takes ten times as long. The size of a compressed reply depends on its
content, so nothing is offered where only the server may know that content.
"""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import InvalidData, KnowledgeMismatch, between, require, require_known
from fl_strategies.wire import keys

Scalar: TypeAlias = str | int | float | bool
Metrics: TypeAlias = dict[str, float]

MAX_REPLY_BYTES = 256 * 2**20
"""Largest message that is read by default."""
_MAX_DIMENSIONS = 8
_MAX_ITEMS = 2**40
_MAX_SHOWN = 200
# The header that numpy writes before plain numbers, and nothing else: numpy's own reader
# also evaluates other literals, and allocates what a header promises before looking at it.
# It is as short as numpy's: millions of sides would take hours to multiply.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00.."
    rb"\{'descr': '([<>|](?:b1|[iu][1248]|f[248]))', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?){0,%d}(?:\d{1,18})?)\), \} {0,64}\n" % _MAX_DIMENSIONS,
    re.DOTALL,
)


def decode_array(name: str, array: FlowerArray) -> Array:
    """Read one array that came over the wire, read-only and without copying.

    The size in the header must equal the bytes received, so a few bytes cannot claim
    terabytes, and only numbers of up to eight bytes are accepted.
    """
    match = _HEADER.match(array.data)
    if match is None:
        raise _not_plain(name, f"{array.data[:40]!r}")
    shape = tuple(int(side) for side in match[3].replace(b" ", b"").split(b",") if side)
    dtype, sent = np.dtype(match[1].decode()), len(array.data) - match.end()
    # An empty array costs no byte, so its sides need a bound of their own.
    if math.prod(max(side, 1) for side in shape) > _MAX_ITEMS or len(shape) > _MAX_DIMENSIONS:
        raise _not_plain(name, f"shape {shape}")
    if math.prod(shape) * dtype.itemsize != sent:
        raise _not_plain(name, f"{sent} bytes for shape {shape} of {dtype}")
    flat = np.frombuffer(array.data, dtype, offset=match.end()) if sent else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if match[2] == b"True" else "C")


def shown(value: object) -> str:
    """Return an untrusted value for an error, truncated: it must not fill the logs."""
    return f"{value!r:.{_MAX_SHOWN}}"


def mismatch(owner: str, name: str, rule: str, value: object) -> KnowledgeMismatch:
    """Return the error for an untrusted value that breaks a rule."""
    return KnowledgeMismatch(f"{owner}: {name} must be {rule}, got {shown(value)}.")


def _form(array: Array) -> str:
    return f"shape {array.shape} of {array.dtype}"


def party_of(knowledge: "Knowledge") -> int:
    """Return the partition id that accompanies knowledge, 0 if there is none."""
    return int(knowledge.meta.get(keys.PARTITION_ID, 0))


def _not_plain(name: str, found: str) -> KnowledgeMismatch:
    return KnowledgeMismatch(
        f"Knowledge: array {shown(name)} must be a plain array of numbers, got {found}."
    )


def decode_arrays(record: ArrayRecord, max_bytes: int) -> dict[str, Array]:
    """Read a whole record of at most `max_bytes`."""
    size = record.count_bytes()
    if size > max_bytes:
        raise KnowledgeMismatch(
            f"Knowledge: arrays must be at most {max_bytes} bytes, got {size}. "
            f"Raise max_reply_bytes if larger models are expected."
        )
    return {name: decode_array(name, array) for name, array in record.items()}


def encode_arrays(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Write named arrays as one Flower record."""
    return ArrayRecord({name: FlowerArray(np.asarray(a)) for name, a in arrays.items()})


def join_arrays(models: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Join the arrays of several models in one record, named ``<index>/<name>``."""
    return {f"{i}/{name}": a for i, model in enumerate(models) for name, a in model.items()}


def part_arrays(arrays: Mapping[str, Array], count: int) -> list[dict[str, Array]]:
    """Undo `join_arrays` for exactly `count` models."""
    models: list[dict[str, Array]] = [{} for _ in range(count)]
    for full_name, array in arrays.items():
        index, _, name = full_name.partition("/")
        if not (index.isdecimal() and len(index) < 10 and int(index) < count):
            raise KnowledgeMismatch(
                f"Knowledge: arrays must belong to models 0 to {count - 1}, "
                f"got {shown(full_name)}."
            )
        models[int(index)][name] = array
    return models


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Arrays and metadata that one side sends to the other.

    Parameters
    ----------
    kind : str
        Meaning of the arrays, for example ``"votes"`` or ``"models"``.
    arrays : mapping of name to array of numbers
    meta : mapping of name to scalar
        Everything needed to read the arrays, for example the learner's name.
    """

    kind: str
    arrays: Mapping[str, Array]
    meta: Mapping[str, Scalar] = field(default_factory=dict)

    def write(self, content: RecordDict) -> None:
        """Add this knowledge to the content of a message."""
        content[keys.ARRAYS] = encode_arrays(self.arrays)
        content[keys.META] = ConfigRecord({keys.KIND: self.kind, **self.meta})

    @classmethod
    def read(cls, content: RecordDict, *, kind: str, max_bytes: int) -> "Knowledge":
        """Read knowledge of the expected kind from the content of a message."""
        arrays, meta = content.get(keys.ARRAYS), content.get(keys.META)
        if not isinstance(arrays, ArrayRecord) or not isinstance(meta, ConfigRecord):
            raise KnowledgeMismatch(
                f"Knowledge: the message must hold the records {keys.ARRAYS!r} and "
                f"{keys.META!r}, got {shown(sorted(content))}."
            )
        found = meta.get(keys.KIND)
        if found != kind:
            raise mismatch("Knowledge", "kind", repr(kind), found)
        scalars = {
            name: value
            for name, value in meta.items()
            if name != keys.KIND and isinstance(value, str | int | float | bool)
        }
        return cls(kind, decode_arrays(arrays, max_bytes), scalars)


def write_messages(
    kind: str, content: Mapping[int, Knowledge | None], config: Mapping[str, object]
) -> list[Message]:
    """Return one message per node; content for several nodes is encoded once."""
    encoded: dict[int, RecordDict] = {}
    messages = []
    for node, knowledge in content.items():
        records = encoded.setdefault(id(knowledge), RecordDict())
        if knowledge is not None and not records:
            knowledge.write(records)
        record = ConfigRecord(dict(config))  # type: ignore[arg-type]
        parts = RecordDict({keys.CONFIG: record, **records})
        messages.append(Message(parts, dst_node_id=node, message_type=kind))
    return messages


def read_metrics(content: RecordDict) -> Metrics:
    """Return the plain numbers among a message's metrics; lists and the rest are dropped."""
    record = content.get(keys.METRICS)
    if not isinstance(record, MetricRecord):
        raise KnowledgeMismatch(
            f"Knowledge: the message must hold the record {keys.METRICS!r}, "
            f"got {shown(sorted(content))}."
        )
    return {name: value for name, value in record.items() if isinstance(value, int | float)}


def count_bytes(content: RecordDict) -> int:
    """Return the encoded size of all records of a message, as Flower counts it."""
    return sum(_count_record(record) for record in content.values())


def _count_record(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    if not isinstance(record, ConfigRecord):
        return record.count_bytes()
    # Flower itself raises for an empty text or list, which an untrusted party may send.
    full = {name: value for name, value in record.items() if value not in ("", b"", [])}
    empty = sum(len(name) for name in record if name not in full)
    return ConfigRecord(full).count_bytes() + empty


def config_int(config: ConfigRecord, key: str, *, minimum: int, maximum: int) -> int:
    """Read an integer sent by the server, within the bounds that a party accepts."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise mismatch("Server", key, between(minimum, maximum, "a whole number"), value)
    return value


def config_float(config: ConfigRecord, key: str, *, minimum: float, maximum: float) -> float:
    """Read a number sent by the server, within the bounds that a party accepts."""
    value = config.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum:  # type: ignore[operator]
        raise mismatch("Server", key, between(minimum, maximum, "a number"), value)
    return float(value)  # type: ignore[arg-type]


def config_choice(config: ConfigRecord, key: str, choices: Sequence[str]) -> str:
    """Read a string sent by the server, which must be one of a party's choices."""
    value = config.get(key)
    if not isinstance(value, str) or value not in choices:
        raise mismatch("Server", key, f"one of {', '.join(choices)}", value)
    return value


def bits_per_label(num_classes: int) -> int:
    """Return the bits one label needs; a single class still takes one."""
    return max(1, (num_classes - 1).bit_length())


def packed_size(num_labels: int, num_classes: int) -> int:
    """Return the bytes that `num_labels` packed labels take."""
    return math.ceil(num_labels * bits_per_label(num_classes) / 8)


def pack_labels(labels: Array, num_classes: int) -> Array:
    """Pack labels of any shape into a flat uint8 array.

    Examples
    --------
    >>> pack_labels(np.array([[0, 1, 1], [1, 0, 1]]), num_classes=2)
    array([116], dtype=uint8)
    """
    width = bits_per_label(num_classes)
    if width > 8:
        flat = np.asarray(labels, dtype=np.uint32).reshape(-1, 1)
        shifts = np.arange(width - 1, -1, -1, dtype=np.uint32)
        return np.packbits(((flat >> shifts) & 1).astype(np.uint8))
    few = np.asarray(labels, dtype=np.uint8).reshape(-1)
    if width in (1, 8):
        return np.packbits(few) if width == 1 else few
    if width == 4:
        return _pairs(few)
    return _words(few, width)[: packed_size(few.size, num_classes)]


def _pairs(labels: Array) -> Array:
    """Return two labels per byte, the first in the upper half."""
    packed = labels[::2] << 4
    packed[: labels.size // 2] |= labels[1::2] & 15
    return packed


def _words(labels: Array, width: int) -> Array:
    """Pack eight labels of n bits into n bytes, by words of 64 bits."""
    padded = np.zeros((math.ceil(labels.size / 8), 8), dtype=np.uint8)
    padded.reshape(-1)[: labels.size] = labels
    words = np.zeros(len(padded), dtype=np.uint64)
    for place in range(8):
        words <<= np.uint64(width)
        words |= padded[:, place]
    return words.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - width :].reshape(-1)


def unpack_labels(
    packed: Array, shape: tuple[int, ...], num_classes: int, *, name: str = "votes"
) -> IntArray:
    """Undo `pack_labels`; refuse bytes that cannot have come from it.

    The size is checked before anything is allocated, so a hostile sender cannot make
    the receiver allocate more than the answer it asked for.
    """
    count, width = math.prod(shape), bits_per_label(num_classes)
    expected = packed_size(count, num_classes)
    fits = packed.dtype == np.uint8 and packed.shape == (expected,)
    rule = f"{expected} bytes (uint8) for {shape} values"
    require_known(fits, name, "what was packed", rule, _form(packed))
    labels = _unpacked(packed, count, width)
    largest = labels.max(initial=0)
    require_known(largest < num_classes, name, "values", f"below {num_classes}", largest)
    return labels.reshape(shape)


def _unpacked(packed: Array, count: int, width: int) -> IntArray:
    if width == 8:
        return packed.astype(np.int64)
    if width == 1:
        return np.unpackbits(packed, count=count).astype(np.int64)
    if width > 8:
        bits = np.unpackbits(packed, count=count * width).reshape(count, width)
        weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
        return np.asarray(bits @ weights)
    num_words = math.ceil(count / 8)
    bytes_of_words = np.zeros((num_words, 8), dtype=np.uint8)
    padded = np.zeros(num_words * width, dtype=np.uint8)
    padded[: packed.size] = packed
    bytes_of_words[:, 8 - width :] = padded.reshape(num_words, width)
    words = bytes_of_words.view(">u8").reshape(-1).astype(np.uint64)
    labels = np.empty((num_words, 8), dtype=np.int64)
    for place in range(8):
        labels[:, place] = (words >> np.uint64(width * (7 - place))) & np.uint64(2**width - 1)
    return labels.reshape(-1)[:count]


Rounding: TypeAlias = Literal["nearest", "stochastic"]

ROUNDINGS: tuple[str, ...] = get_args(Rounding)
MAX_LEVELS = 2**16


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """`num_levels` equally spaced values from `-bound` to `bound`, ends included.

    This is the grid of Eq. 3 of the FedKD paper; its Eq. 4 has a different step and omits the
    upper end. Values beyond the bound are clipped to it.

    Parameters
    ----------
    num_levels : int
        The paper's S. A value takes ceil(log2 S) bits.
    bound : float
    rounding : "nearest" or "stochastic"
        The error of nearest is at most half a step, with the same sign for the same value.
        That of stochastic is less than a step, and zero on average.

    Examples
    --------
    >>> quantizer = Quantizer(num_levels=5, bound=2.0)
    >>> codes = quantizer.encode(np.array([-9.0, -0.6, 0.0, 1.4]))
    >>> codes, quantizer.decode(codes)
    (array([0, 1, 2, 3]), array([-2., -1.,  0.,  1.]))
    """

    num_levels: int
    bound: float
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        """Check the settings."""
        levels, bound = self.num_levels, self.bound
        rule = f"from 2 to {MAX_LEVELS}"
        require(2 <= levels <= MAX_LEVELS, "Quantizer", "num_levels", rule, levels)
        finite = 0 < bound <= float(np.finfo(np.float32).max)
        require(finite, "Quantizer", "bound", "finite and above 0", bound)
        known = self.rounding in ROUNDINGS
        require(known, "Quantizer", "rounding", "'nearest' or 'stochastic'", self.rounding)

    @property
    def step(self) -> float:
        """Distance of two neighbouring values."""
        return 2 * self.bound / (self.num_levels - 1)

    def encode(self, values: FloatArray, rng: np.random.Generator | None = None) -> IntArray:
        """Return the number of each value's level, 0 .. num_levels - 1."""
        if not np.isfinite(values).all():
            raise InvalidData("Quantizer: scores must be finite, got NaN or infinity.")
        clipped = np.clip(np.asarray(values, dtype=np.float64), -self.bound, self.bound)
        position = (clipped + self.bound) / self.step
        if self.rounding == "stochastic":
            if rng is None:
                raise InvalidData("Quantizer: rng must be given to round at random, got none.")
            position = np.floor(position + rng.random(position.shape))
        codes: IntArray = np.rint(position).astype(np.int64)
        return np.clip(codes, 0, self.num_levels - 1)

    def decode(self, codes: Array) -> FloatArray:
        """Return the values of levels."""
        values: FloatArray = codes * self.step - self.bound
        return values

    def to_wire(self, values: FloatArray, rng: np.random.Generator) -> Array:
        """Return the levels as bytes, ceil(log2 num_levels) bits each."""
        return pack_labels(self.encode(values, rng), self.num_levels)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return how many bytes `to_wire` takes."""
        return packed_size(math.prod(shape), self.num_levels)

    def from_wire(self, packed: Array, shape: tuple[int, ...]) -> Array:
        """Read untrusted levels; raise `KnowledgeMismatch` unless they fit exactly."""
        codes = unpack_labels(packed, shape, self.num_levels, name="scores")
        return codes.astype(np.uint8 if self.num_levels <= 256 else np.uint16)


@dataclass(frozen=True, kw_only=True)
class PlainScores:
    """Scores as float32, clipped at a bound: the alternative to a `Quantizer`."""

    bound: float

    def to_wire(self, values: FloatArray, rng: np.random.Generator) -> Array:  # noqa: ARG002
        """Return the scores as sent."""
        return np.clip(values, -self.bound, self.bound).astype(np.float32)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return how many bytes `to_wire` takes."""
        return 4 * math.prod(shape)

    def from_wire(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Read untrusted scores; raise `KnowledgeMismatch` unless they fit exactly."""
        fits = values.dtype == np.float32 and values.shape == shape
        require_known(fits, "scores", "logits", f"float32 of shape {shape}", _form(values))
        finite = bool(np.isfinite(values).all())
        require_known(finite, "scores", "logits", "finite", "NaN or infinity")
        return np.clip(values, -self.bound, self.bound)

    def decode(self, values: Array) -> FloatArray:
        """Return the scores."""
        return values


ScoreFormat: TypeAlias = Quantizer | PlainScores


def score_format(num_levels: int | None, bound: float, rounding: Rounding) -> ScoreFormat:
    """Return the format of scores: this number of levels, or float32 for None or 0."""
    if not num_levels:
        return PlainScores(bound=bound)
    return Quantizer(num_levels=num_levels, bound=bound, rounding=rounding)


SCORES: Final = "scores"
"""Name of the array that may be compressed."""
ENCODINGS: Final = "score-encodings"
ENCODING: Final = "scores-encoding"
PLAIN_BYTES: Final = "scores-bytes"
HALF_PRECISION: Final = "half-precision"

ZSTD, ZLIB = "zstd", "zlib"
LEAST_BYTES: Final = 1024
MOST_LEFT: Final = 0.95
"""Scores are not compressed if fewer, or if more than this share of them would be left."""
_LEVEL: Final = 3
# What numpy writes before the numbers of an array.
_MOST_HEADER: Final = 256
_LARGEST_HALF: Final = float(np.finfo(np.float16).max)


@cache
def _zstd() -> Any:
    """Return the zstd codec, or None if it is not installed."""
    try:
        from pyarrow import Codec
    except ImportError:
        return None
    return Codec(ZSTD, compression_level=_LEVEL) if Codec.is_available(ZSTD) else None


def readable() -> tuple[str, ...]:
    """Return the encodings that this side can write and read, the best first."""
    return (ZSTD, ZLIB) if _zstd() is not None else (ZLIB,)


def offer(most_score_bytes: int, *, half: bool, kept: bool) -> dict[str, Scalar]:
    """Return the offer of encodings in a server's request; empty for no offer.

    Replies kept on disk must be readable wherever the run is resumed, so they never use zstd.
    """
    encodings = ",".join((ZLIB,) if kept else readable()) if most_score_bytes else ""
    offered: dict[str, Scalar] = {ENCODINGS: encodings} if encodings else {}
    return {**offered, HALF_PRECISION: True} if half else offered


def as_offered(knowledge: Knowledge, config: Mapping[str, object]) -> Knowledge:
    """Return a party's reply in the smallest encoding that the server has offered."""
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
    """Undo `as_offered`; raise `KnowledgeMismatch` for a reply that cannot come from it.

    Parameters
    ----------
    knowledge : Knowledge
        As an untrusted party declares it.
    most_score_bytes : int
        Bytes of the scores that were requested; 0 if no encoding was offered.
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
        raise mismatch("Reply", ENCODING, "one that was offered", encoding)
    most = most_score_bytes + _MOST_HEADER
    if type(size) is not int or not 0 < size <= most:
        raise mismatch("Reply", PLAIN_BYTES, f"from 1 to {most}", size)
    packed = knowledge.arrays.get(SCORES, np.empty(0))
    fits = packed.dtype == np.uint8 and packed.ndim == 1 and packed.size <= size
    rule = f"a row of at most {size} bytes (uint8)"
    require_known(fits, "Reply", f"compressed {SCORES}", rule, _form(packed))
    plain = _expanded(str(encoding), packed.tobytes(), size)
    return decode_array(SCORES, FlowerArray("", (), "", plain))


def _compressed(encoding: str, plain: bytes) -> bytes:
    if encoding == ZSTD:
        return bytes(_zstd().compress(plain, asbytes=True))
    # Scores hardly repeat: counting bytes and runs finds all there is, three times as fast.
    engine = zlib.compressobj(6, strategy=zlib.Z_RLE)
    return engine.compress(plain) + engine.flush()


def _expanded(encoding: str, packed: bytes, size: int) -> bytes:
    """Return exactly `size` bytes; nothing longer is ever allocated."""
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
    """Return float32 arrays as float16, except those that are empty or would overflow."""
    arrays = dict(knowledge.arrays)
    for name, array in knowledge.arrays.items():
        # NaN compares as false.
        if array.dtype == np.float32 and array.size and np.abs(array).max() <= _LARGEST_HALF:
            arrays[name] = array.astype(np.float16)
    return Knowledge(knowledge.kind, arrays, {**knowledge.meta, HALF_PRECISION: True})


def _doubled(knowledge: Knowledge, *, offered: bool) -> Knowledge:
    declared = knowledge.meta[HALF_PRECISION]
    if not offered or declared is not True:
        raise mismatch("Reply", HALF_PRECISION, "what was offered", declared)
    arrays = {
        name: a.astype(np.float32) if a.dtype == np.float16 else a
        for name, a in knowledge.arrays.items()
    }
    return Knowledge(knowledge.kind, arrays, knowledge.meta)
