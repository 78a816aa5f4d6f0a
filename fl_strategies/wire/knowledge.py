"""Messages between server and parties, and readers that check types and limits.

`Knowledge` is the only thing a party sends besides metrics. The receiver treats every byte as
hostile: declared sizes are compared with the bytes received before anything is allocated, and
only plain numbers are accepted.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_strategies._util.arrays import Array
from fl_strategies.errors import KnowledgeMismatch, between
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
            raise KnowledgeMismatch(f"Knowledge: kind must be {kind!r}, got {shown(found)}.")
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
        raise KnowledgeMismatch(
            f"Server: {key} must be {between(minimum, maximum, 'a whole number')}, "
            f"got {shown(value)}."
        )
    return value


def config_float(config: ConfigRecord, key: str, *, minimum: float, maximum: float) -> float:
    """Read a number sent by the server, within the bounds that a party accepts."""
    value = config.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum:  # type: ignore[operator]
        raise KnowledgeMismatch(
            f"Server: {key} must be {between(minimum, maximum, 'a number')}, "
            f"got {shown(value)}."
        )
    return float(value)  # type: ignore[arg-type]


def config_choice(config: ConfigRecord, key: str, choices: Sequence[str]) -> str:
    """Read a string sent by the server, which must be one of a party's choices."""
    value = config.get(key)
    if not isinstance(value, str) or value not in choices:
        raise KnowledgeMismatch(
            f"Server: {key} must be one of {', '.join(choices)}, got {shown(value)}."
        )
    return value
