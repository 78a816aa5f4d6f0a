"""Scores as few-bit whole numbers, on a grid that both sides know."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.exceptions import InvalidData, KnowledgeMismatch, require
from fl_strategies.wire.packing import pack_labels, packed_size, unpack_labels

Rounding: TypeAlias = Literal["nearest", "stochastic"]

ROUNDINGS: tuple[str, ...] = get_args(Rounding)
MAX_LEVELS = 2**16


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """`num_levels` equally spaced values from `-bound` to `bound`, ends included.

    This is the grid of Eq. 3 of the FedKD paper; its Eq. 4 has another step and leaves the
    upper end out. Values beyond the bound are moved to it.

    Parameters
    ----------
    num_levels : int
        The paper's S. A value takes ceil(log2 S) bits.
    bound : float
    rounding : "nearest" or "stochastic"
        Nearest errs by at most half a step, always to the same side for the same value.
        Stochastic errs by less than a step and is right on average.

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
    """Scores as float32, cut at a bound: what a `Quantizer` is compared with."""

    bound: float

    def to_wire(self, values: FloatArray, rng: np.random.Generator) -> Array:  # noqa: ARG002
        """Return the scores as they travel."""
        return np.clip(values, -self.bound, self.bound).astype(np.float32)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return how many bytes `to_wire` takes."""
        return 4 * math.prod(shape)

    def from_wire(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Read untrusted scores; raise `KnowledgeMismatch` unless they fit exactly."""
        if values.dtype != np.float32 or values.shape != shape:
            raise KnowledgeMismatch(
                f"scores: logits must be float32 of shape {shape}, "
                f"got shape {values.shape} of {values.dtype}."
            )
        if not np.isfinite(values).all():
            raise KnowledgeMismatch("scores: logits must be finite, got NaN or infinity.")
        return np.clip(values, -self.bound, self.bound)

    def decode(self, values: Array) -> FloatArray:
        """Return the scores."""
        return values


ScoreFormat: TypeAlias = Quantizer | PlainScores


def score_format(num_levels: int | None, bound: float, rounding: Rounding) -> ScoreFormat:
    """Return how scores travel: at so many levels, or as float32 for None or 0."""
    if not num_levels:
        return PlainScores(bound=bound)
    return Quantizer(num_levels=num_levels, bound=bound, rounding=rounding)
