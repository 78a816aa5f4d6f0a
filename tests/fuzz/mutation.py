"""Damage to valid messages, in small steps that a seed decides.

A message that is wrong in one place gets further into a decoder than random bytes do.
"""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_strategies.errors import StrategyError
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import decode_array

LONG = "9" * 10_000
TEXTS = (
    *("", "x", "NaN", "0", "-1", "none", "L2", "softmax", "logits", "ldp", "nfdp", "laplace"),
    *("gaussian", "gumbel", "models", "../../etc/passwd", "\x00", "٣", "\u202e", "{}", "[]"),
    *("null", "é" * 300, LONG),
)
WHOLE = (0, 1, 2, 3, 4, -1, -2, 255, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
REAL = (0.0, -0.0, 0.5, 1.0, 1e-300, 1e-12, 1e12, 1e300, math.inf, -math.inf, math.nan)
LISTS: tuple[Any, ...] = ([], [1, 2], [0.5, math.nan], ["a", "b"], [b"a"], [True], b"\x80", b"")
TYPES = (
    *("|O", "|b1", "<i1", "|i1", "|u1", "<i2", "<i4", "<i8", "<u8", ">i8", ">f8", "<f2"),
    *("<f4", "<f8", "<f16", "<c8", "<c16", "<U4", "|S8", "|V8", "<M8[s]", "<m8", "=f8", "f8"),
    *("", "[('a', '<i4')]"),
)
SHAPES = (
    *("()", "(0,)", "(1,)", "(3,)", "(-1,)", "(1000000000000,)", "(999999999999999999,)"),
    "(999999999999999999, 999999999999999999)",
    *("(0, 999999999999999999)", "(1e3,)", "(True,)", "('a',)", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"),
    "(1" + ", 1" * 5_000 + ")",
    *("(2**9,)", "1", "(9999999999999999999999,)", "(3, 2", "(1000000, 1000000)", "(0x10,)"),
    "(1_000,)",
)
DTYPES = ("?", "i1", "u1", "i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">i8", ">f4", ">f8")


def npy(descr: str, shape: str, body: bytes, *, version: bytes = b"\x01\x00") -> bytes:
    """Return a file of numpy's format with any header, also one that numpy would not write."""
    kind = descr if descr.startswith("[") else f"'{descr}'"
    header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    width = 2 if version == b"\x01\x00" else 4
    return (
        b"\x93NUMPY" + version + (len(header) % 2**16).to_bytes(width, "little") + header + body
    )


def wrap(data: bytes, *, stype: str = "numpy.ndarray") -> FlowerArray:
    """Return bytes as an array of Flower, whatever they are."""
    return FlowerArray("float32", (2, 2), stype, data)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat or insert a few bytes."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        # Headers are at the front, and short.
        place = rng.randrange(len(raw) + 1 if rng.random() < 0.5 else min(len(raw), 128) + 1)
        step = rng.randrange(6)
        if step == 0 and raw:
            raw[min(place, len(raw) - 1)] ^= 1 << rng.randrange(8)
        elif step == 1 and raw:
            raw[min(place, len(raw) - 1)] = rng.randrange(256)
        elif step == 2:
            del raw[place:]
        elif step == 3:
            raw[place:place] = rng.randbytes(rng.choice((1, 4, 64)))
        elif step == 4:
            del raw[place : place + rng.choice((1, 2, 8))]
        else:
            raw[place:place] = raw[place : place + rng.choice((1, 8, 64))]
    return bytes(raw)


def mutate_text(rng: random.Random, text: str) -> str:
    """Damage JSON in its structure, or any text letter by letter."""
    if text[:1] in "{[" and text and rng.random() < 0.7:
        try:
            return json.dumps(mutate_json(rng, json.loads(text)))
        except (ValueError, RecursionError):
            pass
    return mutate_bytes(rng, text.encode()).decode("utf-8", errors="replace")


def mutate_json(rng: random.Random, value: Any) -> Any:
    """Change one place of a nest of dicts and lists."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        step = rng.random()
        if step < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if step < 0.2:
            return {**value, rng.choice(TEXTS): value[key]}
        return {**value, key: mutate_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        step = rng.random()
        if step < 0.1:
            return value[:place] + value[place + 1 :]
        if step < 0.2:
            return value * 2
        return [*value[:place], mutate_json(rng, value[place]), *value[place + 1 :]]
    odd = (*WHOLE, *REAL, *TEXTS[:12], None, True, False, [], {}, [[]], {"a": 1}, 10**400)
    nested: Any = rng.choice(odd)
    for _ in range(rng.choice((0, 0, 0, 1, 50))):
        nested = [nested]
    return nested


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Return another value for a setting: of another type, beyond a limit, or just wrong."""
    step = rng.random()
    if isinstance(value, str) and step < 0.5:
        return mutate_text(rng, value)
    if isinstance(value, int) and not isinstance(value, bool) and step < 0.4:
        return max(-(2**63), min(2**63 - 1, value + rng.choice((-1, 1, 2, -value, value))))
    if isinstance(value, float) and step < 0.4:
        return value * rng.choice((-1.0, 0.5, 2.0, 1e6, 1e-6))
    return rng.choice(rng.choice((TEXTS, WHOLE, REAL, LISTS, (True, False))))


def mutate_numbers(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """Return an array with a few other numbers, another type or another shape."""
    step = rng.randrange(10)
    changed = np.array(array)
    if step >= 8 and changed.size:
        raw = changed.reshape(-1).view(np.uint8)
        for _ in range(rng.choice((1, 1, 4))):
            raw[rng.randrange(raw.size)] ^= 1 << rng.randrange(8)
        return changed
    if step <= 2 and changed.size and changed.dtype.kind in "iuf":
        flat = changed.reshape(-1)
        if changed.dtype.kind == "f":
            largest = float(np.finfo(changed.dtype).max)
            values = (*REAL, largest, -largest, 10.0, -1.0)
            with np.errstate(over="ignore"):
                flat[rng.randrange(flat.size)] = rng.choice(values)
        else:
            info = np.iinfo(changed.dtype)
            near = int(flat[rng.randrange(flat.size)]) + rng.choice((-1, 1, 2))
            value = rng.choice((0, 1, -1, int(info.max), int(info.min), near))
            flat[rng.randrange(flat.size)] = min(max(value, int(info.min)), int(info.max))
        return changed
    if step == 3:
        with np.errstate(all="ignore"):
            return changed.astype(rng.choice(DTYPES))
    if step == 4:
        shape = rng.choice(((-1,), (-1, 1), (1, -1), (1, *changed.shape), changed.shape[::-1]))
        return changed.reshape(shape) if changed.size else changed[np.newaxis]
    if step == 5:
        return changed[:0] if changed.ndim else changed.reshape(1)
    if step == 6 and changed.ndim:
        return np.concatenate([changed, changed])
    return changed[1:] if changed.ndim and len(changed) > 1 else np.zeros((), changed.dtype)


def mutate_array(rng: random.Random, array: FlowerArray) -> FlowerArray:
    """Return another array in its place, mostly one that is nearly the same."""
    step = rng.random()
    if step < 0.45:
        try:
            return FlowerArray(mutate_numbers(rng, decode_array("valid", array)))
        except (StrategyError, ValueError):
            return wrap(b"")
    if step < 0.7:
        return wrap(mutate_bytes(rng, array.data))
    if step < 0.95:
        body = rng.choice((b"", b"\x00" * 8, array.data[-64:], array.data))
        version = rng.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\xff\x00"))
        return wrap(npy(rng.choice(TYPES), rng.choice(SHAPES), body, version=version))
    return wrap(rng.randbytes(rng.randrange(200)), stype=rng.choice(TEXTS))


def mutate_arrays(rng: random.Random, record: Mapping[str, FlowerArray]) -> ArrayRecord:
    """Change, drop, exchange or rename one array."""
    arrays = dict(record)
    step = rng.random()
    if not arrays:
        return ArrayRecord({"extra": wrap(npy("<f8", "(1,)", b"\x00" * 8))})
    name = rng.choice(sorted(arrays))
    if step < 0.75:
        arrays[name] = mutate_array(rng, arrays[name])
    elif step < 0.82:
        del arrays[name]
    elif step < 0.9:
        other = rng.choice(sorted(arrays))
        arrays[name], arrays[other] = arrays[other], arrays[name]
    elif step < 0.95:
        odd = (*TEXTS[:-1], "0/", "99999999/x", "0/" + name, "٣/x", "/", "-1/x")
        arrays[rng.choice(odd)] = arrays.pop(name)
    else:
        arrays[f"{name}x"] = arrays[name]
    return ArrayRecord(arrays)


def mutate_settings(rng: random.Random, record: Mapping[str, Any]) -> ConfigRecord:
    """Change, drop or add one setting."""
    values = dict(record)
    step = rng.random()
    if values and step < 0.8:
        name = rng.choice(sorted(values))
        values[name] = mutate_value(rng, values[name])
    elif values and step < 0.92:
        del values[rng.choice(sorted(values))]
    else:
        values[rng.choice((*TEXTS, "0/learner", "num-models"))] = mutate_value(rng, None)
    return ConfigRecord(values)


def mutate_metrics(rng: random.Random, record: Mapping[str, Any]) -> MetricRecord:
    """Change, drop or add one metric."""
    values = dict(record)
    known = (keys.EPSILON_EXAMPLE, keys.NUM_EXAMPLES, keys.NUM_REJECTED, "accuracy", "", LONG)
    name = rng.choice((*sorted(values), *known))
    values[name] = rng.choice((*WHOLE, *REAL, [], [1], [0.5, math.nan]))
    if rng.random() < 0.2:
        del values[rng.choice(sorted(values))]
    return MetricRecord(values)


def mutate_records(rng: random.Random, content: RecordDict) -> RecordDict:
    """Damage the content of a message in one to three places."""
    records: dict[str, Any] = dict(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not records:
            break
        name = rng.choice(sorted(records))
        step = rng.random()
        if step < 0.03:
            del records[name]
        elif step < 0.06:
            records[name] = rng.choice((ArrayRecord(), ConfigRecord(), MetricRecord()))
        elif step < 0.08:
            records[rng.choice(TEXTS)] = records[name]
        else:
            records[name] = _mutate_record(rng, records[name])
    return RecordDict(records)


def _mutate_record(rng: random.Random, record: Any) -> Any:
    steps: Sequence[tuple[type, Callable[[random.Random, Any], Any]]] = (
        (ArrayRecord, mutate_arrays),
        (MetricRecord, mutate_metrics),
        (ConfigRecord, mutate_settings),
    )
    return next(change(rng, record) for kind, change in steps if isinstance(record, kind))
