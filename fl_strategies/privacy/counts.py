"""Private counts and sums of records."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import require, require_data
from fl_strategies.privacy import secure
from fl_strategies.privacy._numeric import check_positive
from fl_strategies.privacy.events import GaussianEvent, LaplaceEvent, Unit
from fl_strategies.privacy.mechanisms import Charges, Release, _charge
from fl_strategies.privacy.noise import calibrate_scale

MOST_SUMS = 2**20
"""Largest number of values in one release."""
# Counts, as multiples of the noise's unit, must fit into 63 bits.
_LARGEST_COUNT = 2**31
_MOST_ADDED = 2**20
SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-7, 2.0**24
_MOST_COUNTS = 2**12


@dataclass(frozen=True, kw_only=True)
class LaplaceCounts:
    """Release the number of examples per label, with discrete Laplace noise.

    Other whole numbers from 0 to 2**31 will do, at most 4096 at once; they are clipped there.
    For sums of columns, clip each to a box and count whole steps from its lower end: with s
    steps per box, an example that changes its label moves up to 2s steps per column.

    Parameters
    ----------
    epsilon : float
        Cost of the whole vector of counts if an example is replaced. Where `halved`, a ledger
        states half of it, the cost if one is blanked, and its statement says so.
    l1_sensitivity : float
        The most by which replacing one example moves the counts: 2 if an example has one
        label, the number of labels if it may have any of them.
    halved : bool
        Whether blanking an example moves the counts half as far as replacing it. It does
        not if a replacement can only add labels, or only remove them.

    Examples
    --------
    >>> counts = LaplaceCounts(epsilon=100.0, l1_sensitivity=2.0)
    >>> np.rint(counts.release(np.array([4, 0, 9])).values)
    array([4., 0., 9.])
    """

    epsilon: float
    l1_sensitivity: float
    halved: bool = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_positive("LaplaceCounts", "epsilon", self.epsilon)
        check_positive("LaplaceCounts", "l1_sensitivity", self.l1_sensitivity)
        ratio = self.l1_sensitivity / self.epsilon
        possible = SMALLEST_SCALE <= ratio <= _LARGEST_SCALE
        rule = "from sensitivity / 2**24 to sensitivity * 2**7"
        require(possible, "LaplaceCounts", "epsilon", rule, self.epsilon)

    @property
    def scale(self) -> float:
        """Scale of the noise on every count: a power of two, so that counts lie on its grid.

        It is the next one from ``l1_sensitivity / epsilon``, so up to twice that.
        """
        return float(2.0 ** np.ceil(np.log2(self.l1_sensitivity / self.epsilon)))

    def charges(self, *, seeded: bool = False) -> Charges:
        """Return the charges for one vector of counts."""
        # One unit of the grid more makes continuous noise worse than what is drawn.
        moved = self.l1_sensitivity * (1 + self.scale / secure.GRID)
        event = LaplaceEvent(
            unit="example",
            relation="add-remove-one" if self.halved else "replace-one",
            scale=self.scale,
            l1_sensitivity=moved / 2 if self.halved else moved,
            num_values=_MOST_COUNTS,
        )
        return (_charge(event, 1, seeded),)

    def release(self, counts: Array, rng: np.random.Generator | None = None) -> Release:
        """Return noisy counts, none below 0, as float64 of the same shape."""
        whole = counts.dtype.kind in "iu" and counts.size > 0
        rule = "whole numbers, such as steps of a box in place of real ones"
        require_data(whole, "LaplaceCounts", "counts", rule, counts.dtype)
        few = counts.size <= _MOST_COUNTS
        require_data(few, "LaplaceCounts", "counts", f"at most {_MOST_COUNTS}", counts.size)
        # Clipped, not refused: a refusal could depend on a record; clipping moves no two apart.
        inside = np.clip(counts, 0, _LARGEST_COUNT - 1).astype(np.int64)
        units_per_record = int(secure.GRID / self.scale)
        noisy = inside * units_per_record
        noisy += secure.discrete_laplace(counts.size, rng).reshape(counts.shape)
        values = np.maximum(noisy, 0) / units_per_record
        return Release(values, self.charges(seeded=rng is not None))


@dataclass(frozen=True, kw_only=True)
class GaussianSums:
    """Release integers, such as a histogram, with discrete Gaussian noise on each.

    Parameters
    ----------
    scale : float
        Requested standard deviation; the drawn noise is as large or slightly larger, so that
        one is a multiple of the noise's unit and nothing has to be rounded.
    l2_sensitivity : float
        The most by which replacing one unit moves the values: the square root of 2 if a record
        leaves one count and enters another.
    unit : "party" or "example"

    Examples
    --------
    >>> counts = GaussianSums(scale=0.01, l2_sensitivity=2**0.5, unit="example")
    >>> np.rint(counts.release(np.array([4, 1, -9])).values)
    array([ 4.,  1., -9.])
    """

    scale: float
    l2_sensitivity: float
    unit: Unit

    def __post_init__(self) -> None:
        """Check the settings."""
        check_positive("GaussianSums", "l2_sensitivity", self.l2_sensitivity)
        possible, rule = SMALLEST_SCALE <= self.scale <= secure.GRID, "from 2**-7 to 2**24"
        require(possible, "GaussianSums", "scale", rule, self.scale)

    @property
    def _units_per_one(self) -> int:
        return int(secure.GRID / self.scale)

    @property
    def drawn_scale(self) -> float:
        """Standard deviation of the noise that is drawn."""
        return secure.GRID / self._units_per_one

    def charges(self, num_sums: int, *, seeded: bool = False) -> Charges:
        """Return the charges for one release, which do not depend on its values."""
        event = GaussianEvent(
            unit=self.unit,
            relation="replace-one",
            scale=self.drawn_scale,
            l2_sensitivity=self.l2_sensitivity,
            num_values=num_sums,
        )
        return (_charge(event, 1, seeded),)

    @property
    def grain(self) -> float:
        """The unit of which the noise is an integer multiple."""
        return 1 / self._units_per_one

    def in_units(self, fractions: FloatArray) -> IntArray:
        """Return numbers from 0 to 1 as the nearest whole multiples of the noise's unit."""
        return np.asarray(np.rint(fractions * self._units_per_one), dtype=np.int64)

    def release(
        self,
        sums: Array,
        rng: np.random.Generator | None = None,
        *,
        units: IntArray | None = None,
    ) -> Release:
        """Return noisy numbers as float64 of the same shape; beyond 2**31 they are cut.

        Parameters
        ----------
        sums : whole numbers
        rng : Generator, optional
            Only for noise that protects nobody.
        units : array of the shape of `sums`, optional
            Whole units of the noise to be added, 0 to 2**20 times those of one, where
            numbers are no whole ones.
        """
        owner, whole = "GaussianSums", sums.dtype.kind in "iu" and sums.size > 0
        require_data(whole, owner, "sums", "whole numbers", sums.dtype)
        few, most = sums.size <= MOST_SUMS, f"at most {MOST_SUMS}"
        require_data(few, owner, "sums", most, sums.size)
        # Clipped, not refused: a refusal could depend on a record; clipping moves no two apart.
        near = _LARGEST_COUNT + (0 if units is None else _MOST_ADDED)
        noisy = np.clip(sums, -near, near).astype(np.int64) * self._units_per_one
        if units is not None:
            largest = _LARGEST_COUNT * self._units_per_one
            noisy = np.clip(noisy + units, -largest, largest)
        noisy += secure.discrete_gaussian(sums.size, rng).reshape(sums.shape)
        charges = self.charges(sums.size, seeded=rng is not None)
        return Release(noisy / self._units_per_one, charges)


@lru_cache(maxsize=256)
def calibrated_sums(
    target_epsilon: float,
    delta: float,
    *,
    l2_sensitivity: float,
    unit: Unit,
    num_sums: int = MOST_SUMS,
) -> GaussianSums:
    """Return the smallest noise on this many sums that meets a target.

    The cost of a release does not depend on their number, except for imperfect sampling.

    Examples
    --------
    >>> counts = calibrated_sums(1.0, 1e-5, l2_sensitivity=2**0.5, unit="example")
    >>> round(counts.scale, 2)
    5.28
    """

    def entries(scale: float) -> Charges:
        event = GaussianEvent(
            unit=unit,
            relation="replace-one",
            scale=scale,
            l2_sensitivity=l2_sensitivity,
            num_values=num_sums,
        )
        return ((event, 1),)

    scale = calibrate_scale(entries, target_epsilon, delta, least=SMALLEST_SCALE)
    return GaussianSums(scale=scale, l2_sensitivity=l2_sensitivity, unit=unit)
