"""Weights of untrusted parties, and how far one of them can pull the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import numpy as np

from fl_strategies._util import Array
from fl_strategies.aggregation.evidence import believed_sizes
from fl_strategies.errors import KnowledgeMismatch, require_known
from fl_strategies.privacy.accountant import Entry
from fl_strategies.server.replies import read_charges
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, shown

MOST_TIMES_DISTANCE: Final = 2.0
"""Weights are at most so many times as far from the middle as those of the median party."""
MAX_RECORDS: Final = 2**40
"""Most that a party may claim."""
# Beyond it squares overflow, and no honest network has such weights.
LARGEST_WEIGHT: Final = 1e30
# Means of larger whole numbers would not fit into their type again.
LARGEST_COUNT: Final = 2**53
FEWEST_RESTRAINED: Final = 3

Layout: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]


def layout_of(arrays: Mapping[str, Array]) -> Layout:
    """Return names, types and shapes."""
    return tuple((name, array.dtype.str, array.shape) for name, array in sorted(arrays.items()))


def as_layout(arrays: Mapping[str, Array], model: Mapping[str, Array]) -> dict[str, Array]:
    """Return averaged arrays in the order and types of a model's; whole numbers are rounded.

    Raises `KnowledgeMismatch` for other names or shapes, and numbers that are not finite.
    """
    same, rule = arrays.keys() == model.keys(), f"those of the model ({shown(sorted(model))})"
    require_known(same, "Weights", "arrays", rule, shown(sorted(arrays)))
    typed = {}
    for name, like in model.items():
        array = np.asarray(arrays[name])
        rule = f"finite, of shape {like.shape}"
        fits = array.shape == like.shape and bool(np.isfinite(array).all())
        require_known(fits, "Weights", f"array {shown(name)}", rule, array.shape)
        whole = like.dtype.kind in "iu" and array.dtype.kind == "f"
        typed[name] = (np.rint(array) if whole else array).astype(like.dtype)
    return typed


def read_num_records(meta: Mapping[str, object]) -> int:
    """Return how many records a party claims that its weights have seen."""
    num_records = meta.get(keys.NUM_EXAMPLES)
    if type(num_records) is not int or not 1 <= num_records <= MAX_RECORDS:
        raise KnowledgeMismatch(
            f"Reply: {keys.NUM_EXAMPLES} must be a whole number from 1 to {MAX_RECORDS}, "
            f"got {shown(num_records)}."
        )
    return num_records


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """What a party sent: weights, how many records they saw, and what that cost a record."""

    arrays: Mapping[str, Array]
    num_records: int
    charges: Sequence[Entry]


W = TypeVar("W", bound=LocalWeights)


def read_weights(knowledge: Knowledge) -> LocalWeights:
    """Return what a party sent; raise `KnowledgeMismatch` for what cannot be averaged."""
    num_records = read_num_records(knowledge.meta)
    check_sizes(knowledge.arrays)
    charges = read_charges(knowledge.meta.get(keys.PRIVACY_EVENTS))
    return LocalWeights(knowledge.arrays, num_records, charges)


def check_sizes(arrays: Mapping[str, Array]) -> None:
    """Raise `KnowledgeMismatch` for numbers that are not finite, or beyond all reason."""
    for name, array in arrays.items():
        most = LARGEST_WEIGHT if array.dtype.kind == "f" else LARGEST_COUNT
        # NaN compares as false, so it is refused as well.
        if not ((array <= most) & (array >= -most)).all():
            raise KnowledgeMismatch(
                f"Reply: array {name[:80]!r} must be finite and at most {most:g} in "
                f"magnitude, got others."
            )


def restrained(weights: Sequence[W]) -> tuple[list[W], int]:
    """Return weights that one party cannot pull wherever it likes, and how many were changed.

    Weights that are much farther from the middle, the median of each number, than those of
    the median party are moved towards it; and numbers of records are those of
    `believed_sizes`. Fewer than three parties have no middle.
    """
    if len(weights) < FEWEST_RESTRAINED:
        return list(weights), 0
    sizes = believed_sizes(np.array([part.num_records for part in weights], dtype=np.float64))
    names = [name for name, array in weights[0].arrays.items() if array.dtype.kind == "f"]
    middle = {name: np.median([p.arrays[name] for p in weights], axis=0) for name in names}
    away = np.array([_distance(part.arrays, middle) for part in weights])
    most = MOST_TIMES_DISTANCE * float(np.median(away))
    restrained_, changed = [], 0
    for part, size, distance in zip(weights, sizes, away, strict=True):
        pull = min(1.0, most / distance) if distance > 0 else 1.0
        changed += int(pull < 1 or size < part.num_records)
        arrays = dict(part.arrays)
        for name in names if pull < 1 else ():
            moved = middle[name] + pull * (arrays[name] - middle[name])
            arrays[name] = np.asarray(moved, dtype=arrays[name].dtype)
        restrained_.append(replace(part, arrays=arrays, num_records=max(round(size), 1)))
    return restrained_, changed


def _distance(arrays: Mapping[str, Array], middle: Mapping[str, Array]) -> float:
    squares = [np.square(arrays[name] - middle[name].astype(np.float64)) for name in middle]
    return float(np.sqrt(sum(part.sum() for part in squares)))
