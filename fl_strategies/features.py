"""Public maps from rows to whole numbers of bounded length, for sums that add up exactly.

A map is made of public rows or of declared bounds, never of records, and travels as arrays.
Its features are whole numbers, so that sums of them are the same in any order and for any
division of the records among parties; and every row of them is at most `FeatureMap.longest`
long, whatever arrays a server sends, so that one record moves a sum by a known distance.

Features of a row are a function of it, not of the rows beside it: libraries add products up in
an order that depends on how many rows there are, so both factors are rounded so far that no
sum of products is rounded, in any order.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray, column_scales, one_blas_thread
from fl_strategies.errors import KnowledgeMismatch, require

MOST_FEATURES: Final = 2**12
MOST_VALUES: Final = 2**26
"""Most numbers of a map that a party accepts."""
MOST_LEVELS: Final = 2**8
"""Length of a row of features in rounded units, unless sums would exceed 32 bits."""
FEWEST_LEVELS: Final = 2**4
BANDWIDTHS: Final = (0.5, 1.0, 2.0)
"""Scales of random cosines, as multiples of the median distance between public rows."""
_CONSTANT: Final = 0.2
"""The entry that every row has, for an intercept, before rows have length 1."""
_FARTHEST: Final = 5.0
"""Columns are cut at so many deviations, or times their bound."""
_PAIRS: Final = 1000
_INSIDE: Final = 0.9
"""Share of public rows that are not shortened."""
_BEYOND: Final = 1.25
"""Largest expected length of a row, as a multiple of the longest public one."""
_FINEST_NOISE: Final = 2**19
"""Noise of this deviation is drawn with a scale that is right to three percent."""
_A_LITTLE_MORE: Final = 1 + 2.0**-40
_LEAST_VARIANCE: Final = 1e-9
_AT_ONCE: Final = 2**22
_GRAIN: Final = 2.0**-20
"""Placed rows are rounded to multiples of it where they are multiplied by a matrix."""
_EXACT: Final = 2.0**51
"""Sums of whole numbers up to this one are exact, whatever their order."""


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Columns, components, products and cosines of a row, and a constant.

    Rows less `centre`, times `scale`, are cut at five. Their features are `columns` times
    themselves, their projections on `turn`, the products of `pairs` of them, and the cosines
    of their projections on `waves` plus `phases`. The whole is shortened to length 1 where it
    is longer, a constant is appended, and everything is rounded to multiples of 1 / `levels`.

    Parameters
    ----------
    centre, scale : (num_values,)
    columns : (num_values,), or (0,) for none
        Weight of every column among the features.
    turn : (num_values, num_components)
    pairs : (num_products, 2)
        Columns to multiply.
    products : (num_products,)
        Weights of these products.
    waves, phases : (num_values, num_cosines), (num_cosines,)
    height : (num_bands,)
        Amplitude of the cosines of each bandwidth; all have as many.
    levels : int
        Length of a row in rounded units.

    Examples
    --------
    >>> rows = np.random.default_rng(0).normal(size=(100, 3))
    >>> features = FeatureMap.of_rows(rows)(rows)
    >>> features.shape, bool((np.linalg.norm(features, axis=1) < 258).all())
    ((100, 4), True)
    """

    centre: FloatArray
    scale: FloatArray
    columns: FloatArray
    turn: FloatArray
    pairs: IntArray
    products: FloatArray
    waves: FloatArray
    phases: FloatArray
    height: FloatArray
    levels: int = MOST_LEVELS

    # How maps are made

    @classmethod
    def of_bounds(cls, low: Array, high: Array, *, length: float | None = None) -> Self:
        """Return the columns of rows between declared bounds.

        A column is centred at 0 where its bounds include it, as those of indicators do, and in
        the middle otherwise. Rows longer than `length` are shortened; by default none is.
        """
        owner = "FeatureMap"
        low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        require(
            low.ndim == 1 and low.shape == high.shape,
            owner,
            "bounds",
            "two of equal length",
            low.shape,
        )
        require(bool((low <= high).all()), owner, "bounds", "in order", "low above high")
        inside = (low <= 0) & (high >= 0)
        centre = np.where(inside, 0.0, (low + high) / 2)
        reach = np.maximum(high - centre, centre - low)
        scale = np.where(reach > 0, 1 / np.where(reach > 0, reach, 1.0), 0.0)
        longest = math.sqrt(max(1, int((reach > 0).sum()))) if length is None else length
        require(0 < longest < math.inf, owner, "length", "finite and above 0", length)
        return cls._plain(centre, scale, np.full(len(low), 1 / longest))

    @classmethod
    def of_rows(cls, rows: Array, *, length: float | None = None, tight: bool = False) -> Self:
        """Return the columns of rows by the spread of public ones.

        Rows longer than `length` are shortened; by default nearly none is, or a tenth if what
        counts is to be `tight`, as under noise.
        """
        flat = rows.reshape(len(rows), -1).astype(np.float64)
        scale = column_scales(flat)
        centre = flat.mean(axis=0)
        lengths = np.linalg.norm((flat - centre) * scale, axis=1)
        known = np.quantile(lengths, _INSIDE) if tight else _BEYOND * lengths.max()
        usual = float(known) if length is None else length
        usual = usual if usual > 0 else 1.0
        return cls._plain(centre, scale, np.full(flat.shape[1], 1 / usual))

    @classmethod
    def _plain(cls, centre: FloatArray, scale: FloatArray, columns: FloatArray) -> Self:
        width, none = len(centre), np.empty(0)
        empty = np.empty((width, 0))
        no_pairs = np.empty((0, 2), dtype=np.int64)
        return cls(centre, scale, columns, empty, no_pairs, none, empty, none, none)

    @one_blas_thread()
    def with_components(self, rows: Array, number: int) -> Self:
        """Return a map to the principal components of public rows, instead of columns.

        Each is divided by the square root of its deviation, half way between unscaled rows
        and components of equal spread.
        """
        placed = self.placed(rows)
        placed = placed - placed.mean(axis=0)
        variances, axes = np.linalg.eigh(placed.T @ placed / len(placed))
        variances, axes = variances[::-1][:number], axes[:, ::-1][:, :number]
        # The sign of an axis is the solver's choice; this one is the same everywhere.
        highest = axes[np.abs(axes).argmax(axis=0), range(axes.shape[1])]
        axes = axes * np.where(highest < 0, -1, 1)
        turn = axes * np.maximum(variances, _LEAST_VARIANCE) ** -0.25
        lengths = np.linalg.norm(self.placed(rows) @ turn, axis=1)
        longest = float(np.quantile(lengths, _INSIDE))
        return replace(self, columns=np.empty(0), turn=turn / (longest if longest > 0 else 1.0))

    def with_cosines(self, rows: Array | None, number: int, rng: np.random.Generator) -> Self:
        """Return the map with cosines of random directions, as many of each bandwidth.

        Rahimi and Recht (NIPS 2007): products of such features approximate Gaussian kernels.
        Bandwidths are multiples of the median distance of public rows; without any, of that
        of rows spread evenly between their bounds.
        """
        each, bands = max(1, number // len(BANDWIDTHS)), len(BANDWIDTHS)
        width = len(self.centre)
        spread = rng.uniform(-1, 1, size=(_PAIRS, width)) * (self.scale > 0)
        usual = _usual_distance(spread if rows is None else self.placed(rows), rng)
        waves = [rng.standard_normal((width, each)) / (usual * band) for band in BANDWIDTHS]
        # Linear part and every band have about the same length, and all of them 1.
        share = 1 / math.sqrt(bands + 1)
        return replace(
            self,
            columns=self.columns * share,
            turn=self.turn * share,
            waves=np.hstack(waves),
            phases=rng.uniform(0, 2 * math.pi, each * bands),
            height=np.full(bands, share * math.sqrt(2 / each)),
        )

    def with_products(self, most: int) -> Self:
        """Return the map with products of columns: squares first, then by their distance."""
        width = len(self.centre)
        pairs = [(i, i + gap) for gap in range(width) for i in range(width - gap)][:most]
        return replace(
            self,
            columns=self.columns / math.sqrt(2),
            pairs=np.array(pairs, dtype=np.int64).reshape(-1, 2),
            products=np.full(len(pairs), 1 / math.sqrt(2 * max(1, len(pairs)))),
        )

    def for_records(self, number: int, *, scale: float = 0.0) -> Self:
        """Return the map with levels for which sums of so many products fit into 31 bits.

        Where noise of this deviation hides what moves a sum by one, sums are multiplied by 7
        at most before it is added, and move by twelve squared lengths or less. Then noise on
        them is not larger than it must be for want of bits.
        """
        most = math.isqrt(2**31 // ((8 if scale else 1) * max(1, number)))
        if scale:
            most = min(most, math.isqrt(int(_FINEST_NOISE / (12 * scale))))
        return replace(self, levels=int(np.clip(most, FEWEST_LEVELS, MOST_LEVELS)))

    # What it makes of rows

    @property
    def num_values(self) -> int:
        """Values of a row."""
        return len(self.centre)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Number of features: linear ones, products, and the cosines of each bandwidth."""
        linear = len(self.columns) + self.turn.shape[1]
        bands = len(self.height)
        return linear, len(self.pairs), *([len(self.phases) // bands] * bands if bands else [])

    @property
    def num_features(self) -> int:
        """All features, with the constant, which is the last."""
        return sum(self.blocks) + 1

    @property
    def reach(self) -> float:
        """Length of the features of a row, rounding and the constant aside."""
        return 1 / math.hypot(1.0, _CONSTANT)

    @property
    def constant(self) -> int:
        """The last feature of every row."""
        return round(self.levels * _CONSTANT * self.reach)

    @property
    def longest(self) -> float:
        """The most that the features of a row are long: rounding moves each by a half."""
        return self.levels + math.sqrt(self.num_features) / 2

    def placed(self, rows: Array) -> FloatArray:
        """Return rows, (n, ...), as columns about zero, (n, num_values)."""
        flat = rows.reshape(len(rows), -1).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            placed = np.clip((flat - self.centre) * self.scale, -_FARTHEST, _FARTHEST)
        return np.where(np.isfinite(placed), placed, 0.0)

    @one_blas_thread()
    def __call__(self, rows: Array) -> IntArray:
        """Return the features of rows, (n, num_features), as whole numbers."""
        nothing = np.empty((0, self.num_features), dtype=np.int64)
        return np.concatenate([nothing, *self._parts(rows)])

    @one_blas_thread()
    def times(self, rows: Array, weights: FloatArray) -> FloatArray:
        """Return features of length 1 times weights, (n, columns), holding few at once."""
        nothing = np.empty((0, weights.shape[1]))
        parts = (part / self.levels @ weights for part in self._parts(rows))
        return np.concatenate([nothing, *parts])

    def _parts(self, rows: Array) -> Iterator[IntArray]:
        step = max(1, _AT_ONCE // max(self.num_values, self.num_features))
        return (self._features(rows[at : at + step]) for at in range(0, len(rows), step))

    def _features(self, rows: Array) -> IntArray:
        placed = self.placed(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            whole = np.rint(placed / _GRAIN)
            parts = [whole @ self._whole_turn * (self._turn_grains * _GRAIN)]
            if len(self.columns):
                parts.insert(0, placed * self.columns)
            if len(self.pairs):
                one, other = placed[:, self.pairs[:, 0]], placed[:, self.pairs[:, 1]]
                parts.append(one * other * self.products)
            if len(self.phases):
                heights = np.repeat(self.height, len(self.phases) // len(self.height))
                angles = whole @ self._whole_waves * (self._wave_grains * _GRAIN)
                parts.append(np.cos(angles + self.phases) * heights)
            found = np.hstack(parts)
            # One after the other, which a sum over rows of any layout would not be.
            squares = np.cumsum(np.square(found), axis=1)
            lengths = np.sqrt(squares[:, -1:])
            found = found / np.maximum(lengths * _A_LITTLE_MORE, 1.0)
        # Rows beyond all numbers are taken for the centre; they too have one place.
        found = np.where(np.isfinite(found).all(axis=1, keepdims=True), found, 0.0)
        rounded = np.rint(found * (self.levels * self.reach))
        constant = np.full((len(rows), 1), self.constant)
        return np.hstack([rounded.astype(np.int64), constant])

    @cached_property
    def _whole_turn(self) -> FloatArray:
        return np.rint(self.turn / self._turn_grains)

    @cached_property
    def _turn_grains(self) -> FloatArray:
        return _grains(self.turn)

    @cached_property
    def _whole_waves(self) -> FloatArray:
        return np.rint(self.waves / self._wave_grains)

    @cached_property
    def _wave_grains(self) -> FloatArray:
        return _grains(self.waves)

    # How it travels

    def to_arrays(self) -> dict[str, Array]:
        """Return what parties need to compute the same features."""
        arrays: dict[str, Array] = {
            name: getattr(self, name).astype(np.float32) for name in _NUMBERS
        }
        return {
            **arrays,
            "pairs": self.pairs.astype(np.int32),
            "levels": np.array([self.levels], dtype=np.int32),
        }

    @classmethod
    def from_arrays(cls, owner: str, arrays: Mapping[str, Array], num_values: int) -> Self:
        """Read received arrays; raise `KnowledgeMismatch` for anything unreasonable."""
        if not _is_sound(arrays, num_values):
            raise KnowledgeMismatch(
                f"{owner}: features must be {', '.join(_NAMES)} for rows of {num_values} "
                f"values, at most {MOST_FEATURES}, finite, as float32 and int32, got others."
            )
        numbers = {name: arrays[name].astype(np.float64) for name in _NUMBERS}
        pairs = arrays["pairs"].astype(np.int64)
        return cls(**numbers, pairs=pairs, levels=int(arrays["levels"][0]))

    def settled(self) -> Self:
        """Return the map as everybody has it who receives it, the sender too."""
        return self.from_arrays("FeatureMap", self.to_arrays(), self.num_values)


_NUMBERS: Final = (
    *("centre", "scale", "columns", "turn"),
    *("products", "waves", "phases", "height"),
)
_NAMES: Final = (*_NUMBERS, "pairs", "levels")


def _is_sound(arrays: Mapping[str, Array], width: int) -> bool:
    if set(arrays) != set(_NAMES):
        return False
    whole = [arrays["pairs"], arrays["levels"]]
    numbers = [arrays[name] for name in _NUMBERS]
    if any(a.dtype != np.int32 for a in whole) or any(a.dtype != np.float32 for a in numbers):
        return False
    centre, scale, columns, turn, products, waves, phases, height = numbers
    pairs, levels = whole
    fits = (
        centre.shape == scale.shape == (width,)
        and columns.shape in ((0,), (width,))
        and turn.ndim == waves.ndim == 2
        and len(turn) == len(waves) == width
        and pairs.shape == (*products.shape, 2)
        and phases.shape == waves.shape[1:]
        and height.ndim == 1
        and levels.shape == (1,)
    )
    if not fits:
        return False
    cosines, bands = len(phases), len(height)
    even = cosines % bands == 0 if 0 < bands <= cosines else bands == cosines == 0
    few = len(columns) + turn.shape[1] + len(pairs) + cosines < MOST_FEATURES
    few = few and turn.size + waves.size <= MOST_VALUES
    inside = bool(((pairs >= 0) & (pairs < width)).all())
    sizes = FEWEST_LEVELS <= int(levels[0]) <= MOST_LEVELS
    finite = all(bool(np.isfinite(array).all()) for array in numbers)
    return even and few and inside and sizes and finite


def _grains(weights: FloatArray) -> FloatArray:
    """Return the power of two for each column of which weights are taken as multiples.

    Placed rows are at most five, in grains; sums of products with them are exact then.
    """
    lengths = np.abs(weights).sum(axis=0)
    usual = np.where(lengths > 0, lengths, 1.0) * (_FARTHEST / _GRAIN + 1)
    return np.asarray(2.0 ** np.ceil(np.log2(usual / _EXACT)))


def _usual_distance(rows: FloatArray, rng: np.random.Generator) -> float:
    """Return the median distance of some pairs of rows; 1 where rows are the same."""
    one, other = rng.integers(len(rows), size=(2, _PAIRS))
    distances = np.linalg.norm(rows[one] - rows[other], axis=1)
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 1.0
