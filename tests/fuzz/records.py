"""Hypothesis strategies for records that are well formed and wrong."""

import math
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fl_strategies.wire import keys
from tests.fuzz.mutation import SHAPES, TYPES, npy, wrap
from tests.fuzz.trials import Trials

NUMBERS = ("?", "i1", "u1", "<i2", "<i4", "<i8", "<u8", ">i8", "<f2", "<f4", "<f8", ">f8")
OTHERS = ("c8", "c16", "U3", "S3", "M8[s]", "m8[s]", [("a", "i4"), ("b", "f8")])


def as_often_as(trials: Trials) -> settings:
    """Try as many examples as the test is given; the same ones every time."""
    return settings(
        max_examples=max(1, trials.num_inputs),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def dtypes() -> st.SearchStrategy[np.dtype]:
    return st.sampled_from([np.dtype(each) for each in (*NUMBERS, *OTHERS, "O")])


def numbers(max_side: int = 5) -> st.SearchStrategy[np.ndarray]:
    """Arrays of numbers of every type, of up to three sides, empty and 0-d ones included."""
    shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=max_side)
    plain = st.sampled_from([np.dtype(each) for each in NUMBERS])
    return plain.flatmap(lambda dtype: arrays_of.arrays(dtype, shapes))


def any_arrays() -> st.SearchStrategy[np.ndarray]:
    """Arrays that no wire carries as well: objects, text, structures, complex numbers."""
    shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    return dtypes().flatmap(
        lambda dtype: arrays_of.arrays(
            dtype, shapes, elements=st.integers() if dtype.hasobject else None
        )
    )


def wire_arrays() -> st.SearchStrategy[FlowerArray]:
    """Arrays as they arrive: real ones, ones with a forged header, and rubbish."""
    forged = st.builds(
        npy,
        st.sampled_from(TYPES),
        st.sampled_from(SHAPES) | st.lists(st.integers(-1, 10**18), max_size=9).map(str),
        st.binary(max_size=64),
        version=st.sampled_from((b"\x01\x00", b"\x02\x00", b"\x00\x00")),
    )
    stypes = st.sampled_from(("numpy.ndarray", "torch.Tensor", "pickle", ""))
    rubbish = st.builds(lambda data, stype: wrap(data, stype=stype), st.binary(), stypes)
    return numbers().map(FlowerArray) | forged.map(wrap) | rubbish


def scalars() -> st.SearchStrategy[Any]:
    one = st.integers(-(2**63), 2**63 - 1) | st.floats() | st.booleans()
    lists = st.lists(st.integers(-9, 9), max_size=3) | st.lists(st.text(max_size=3), max_size=3)
    return one | st.text(max_size=20) | st.binary(max_size=20) | lists


def replies(kinds: tuple[str, ...], names: tuple[str, ...]) -> st.SearchStrategy[RecordDict]:
    """Contents of replies with the right records, whose names are often the right ones too."""
    array_names = st.sampled_from(names) | st.text(max_size=5)
    meta_names = st.sampled_from((keys.PARTITION_ID, keys.LEARNER, "num-models", "sample-id"))
    metrics = st.integers(-(2**63), 2**63 - 1) | st.floats() | st.lists(st.floats(), max_size=2)
    meta = st.fixed_dictionaries(
        {keys.KIND: st.sampled_from(kinds) | scalars()},
        optional={keys.PARTITION_ID: st.integers(0, 9) | scalars()},
    )
    more = st.dictionaries(meta_names | st.text(max_size=5), scalars(), max_size=4)
    records = {
        keys.ARRAYS: st.dictionaries(array_names, wire_arrays(), max_size=4).map(ArrayRecord),
        keys.META: st.builds(lambda a, b: ConfigRecord({**a, **b}), more, meta),
        keys.METRICS: st.dictionaries(st.text(max_size=5), metrics, max_size=4).map(
            MetricRecord
        ),
    }
    wrong = st.sampled_from((ArrayRecord(), ConfigRecord(), MetricRecord()))
    whole = st.fixed_dictionaries(records)
    broken = st.dictionaries(st.sampled_from(tuple(records)) | st.text(max_size=5), wrong)
    return (whole | broken).map(RecordDict)


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        leaves | st.sampled_from((math.inf, 2**53, 10**30, 1)),
        lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=8), each),
        max_leaves=12,
    )
