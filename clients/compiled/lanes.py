"""Vectors of float32 for compiled kernels: what stays in registers is declared, not hoped for.

Numba leaves the choice of vectors to LLVM, which checks before every short loop whether arrays
overlap and stores sums after every step. A kernel that holds `Lanes` does neither. They are of
16 numbers times the length of a tuple, the "strip": its type tells the compiler how many sums
to keep side by side. Processors with shorter registers use several for one.

Functions here are given types and say how to compute with them; kernels call them with numbers.
Nothing is checked: whoever calls `load` and `store` must know that the numbers are there.
"""

# ruff: noqa: ARG001

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.datamodel import models

from clients.compiled import ANY_ORDER

WIDTH: Final = 16
"""Numbers of one vector, as many as the widest registers hold."""

_extending, _utilities = cast("Any", extending), cast("Any", cgutils)
_operation: Callable[[Callable[..., Any]], Callable[..., Any]] = _extending.intrinsic
_FLOAT: Final = ir.FloatType()
_INDEX: Final = ir.IntType(32)
_VECTOR: Final = ir.VectorType(_FLOAT, WIDTH)
_ZEROS: Final = ir.Constant(_VECTOR, [ir.Constant(_FLOAT, 0.0)] * WIDTH)


class Lanes(types.Type):
    """The type of so many vectors side by side."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Lanes({count})")


@extending.register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        held = ir.ArrayType(_VECTOR, lanes.count)
        super().__init__(manager, lanes, held)  # type: ignore[no-untyped-call]


def _split(builder: Any, lanes: Lanes, value: Any) -> list[Any]:
    return [builder.extract_value(value, i) for i in range(lanes.count)]


def _joined(builder: Any, vectors: Sequence[Any]) -> Any:
    whole = ir.Constant(ir.ArrayType(_VECTOR, len(vectors)), ir.Undefined)
    for i, vector in enumerate(vectors):
        whole = builder.insert_value(whole, vector, i)
    return whole


def _spread(builder: Any, number: Any) -> Any:
    """Return a vector of one number."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(_INDEX, 0))
    everywhere = ir.Constant(ir.VectorType(_INDEX, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(one, nothing, everywhere)


def _vectors(builder: Any, kind: Any, value: Any, count: int) -> list[Any]:
    """Return the vectors of lanes, or so many of a number."""
    if isinstance(kind, Lanes):
        return _split(builder, kind, value)
    return [_spread(builder, value)] * count


def _addresses(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: int) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    first = builder.bitcast(builder.gep(data, [at]), _VECTOR.as_pointer())
    return [builder.gep(first, [ir.Constant(_INDEX, i)]) for i in range(count)]


@_operation
def load(_: Any, strip: Any, array: Any, at: Any) -> Any:
    """Return the numbers of a flat float32 array from an index on."""
    lanes = Lanes(strip.count)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, (_, data, index) = signature.args[1], args
        vectors = []
        for address in _addresses(context, builder, kind, data, index, lanes.count):
            vectors.append(builder.load(address))
            vectors[-1].align = 4
        return _joined(builder, vectors)

    return lanes(strip, array, types.intp), generate


@_operation
def take(_: Any, array: Any, at: Any) -> Any:
    """Return one number of a flat float32 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return types.float32(array, types.intp), generate


@_operation
def store(_: Any, array: Any, at: Any, value: Any) -> Any:
    """Write numbers into a flat float32 array from an index on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, (data, index, given) = signature.args[0], args
        addresses = _addresses(context, builder, kind, data, index, value.count)
        for address, vector in zip(addresses, _split(builder, value, given), strict=True):
            builder.store(vector, address).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


@_operation
def transpose(_: Any, source: Any, at: Any, gap: Any, target: Any, to: Any, step: Any) -> Any:
    """Copy 16 x 16 numbers between flat float32 arrays so that rows become columns.

    `gap` and `step` are the distances of rows in the two.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def row(array: int, i: int) -> Any:
            data, first, distance = args[array : array + 3]
            index = builder.add(first, builder.mul(distance, distance.type(i)))
            kind = signature.args[array]
            return _addresses(context, builder, kind, data, index, 1)[0]

        vectors = [builder.load(row(0, i)) for i in range(WIDTH)]
        for vector in vectors:
            vector.align = 4
        for i, vector in enumerate(_transposed(builder, vectors)):
            builder.store(vector, row(3, i)).align = 4
        return context.get_dummy_value()

    index = types.intp
    return types.void(source, index, index, target, index, index), generate


def _transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Exchange the corners of blocks of 2 x 2, of 4 x 4 and so on."""
    for size in (1, 2, 4, 8):
        lower = [i & ~size for i in range(WIDTH)]
        left = [i if not i & size else WIDTH + i - size for i in range(WIDTH)]
        right = [i + size if not i & size else WIDTH + i for i in range(WIDTH)]
        vectors = [
            builder.shuffle_vector(
                vectors[lower[i]],
                vectors[lower[i] + size],
                ir.Constant(ir.VectorType(_INDEX, WIDTH), right if i & size else left),
            )
            for i in range(WIDTH)
        ]
    return vectors


@_operation
def zeros(_: Any, strip: Any) -> Any:
    """Return zeros."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        return _joined(builder, [_ZEROS] * strip.count)

    return Lanes(strip.count)(strip), generate


@_operation
def root(_: Any, value: Any) -> Any:
    """Return square roots."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind, name = ir.FunctionType(_VECTOR, [_VECTOR]), f"llvm.sqrt.v{WIDTH}f32"
        function = _utilities.get_or_insert_function(builder.module, kind, name)
        vectors = _split(builder, value, args[0])
        return _joined(builder, [builder.call(function, [vector]) for vector in vectors])

    return value(value), generate


@_operation
def kept_above(_: Any, value: Any, criterion: Any, floor: Any, instead: Any) -> Any:
    """Return a value where its criterion is above the floor, and a number elsewhere.

    What is no number is kept.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        given, criteria, low, other = args
        lowest, others = _spread(builder, low), _spread(builder, other)
        chosen = [
            builder.select(builder.fcmp_unordered(">", own, lowest), vector, others)
            for vector, own in zip(
                _split(builder, value, given), _split(builder, criterion, criteria), strict=True
            )
        ]
        return _joined(builder, chosen)

    return value(value, criterion, types.float32, types.float32), generate


def _define(sign: Callable[[Any, Any], Any], instruction: str) -> None:
    """Give lanes an operator; a float32 on either side stands for a vector of it."""

    def result(_: Any) -> Callable[[Any, Any], Lanes | None]:
        return _result

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = signature.return_type.count
        sides = [
            _vectors(builder, kind, value, count)
            for kind, value in zip(signature.args, args, strict=True)
        ]
        each = partial(getattr(builder, instruction), flags=ANY_ORDER)
        return _joined(builder, [each(*pair) for pair in zip(*sides, strict=True)])

    _extending.type_callable(sign)(result)
    for kinds in (Lanes, Lanes), (Lanes, types.Float), (types.Float, Lanes):
        _extending.lower_builtin(sign, *kinds)(generate)


def _result(left: Any, right: Any) -> Lanes | None:
    """Return the lanes among two operands, nothing if there are none or what else there is."""
    lanes = [kind for kind in (left, right) if isinstance(kind, Lanes)]
    others = {left, right} - {*lanes, types.float32}
    return lanes[0] if lanes and not others else None


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")
_define(operator.truediv, "fdiv")
