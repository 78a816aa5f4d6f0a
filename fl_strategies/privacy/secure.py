"""Cryptographic randomness from the operating system: integer noise, vectorised.

The noise of a release must be unpredictable, so it comes from the operating system's
cryptographic generator and never from the seed of an experiment. Every function also takes
a numpy generator, for tests and simulations; what is drawn from it protects nobody.

Two kinds of noise are made here.

Continuous noise, by inverse distribution functions of 64 random bits, serves comparisons
only: which count is largest, whether a count reaches a threshold. Its low bits would betray
the noised value (Mironov, 2012), so it must never be released.

Discrete noise is added to whole multiples of a grid and may be released, because a whole
number plus a whole number has no low bits that depend on the noise (the geometric
mechanism of Ghosh, Roughgarden and Sundararajan, 2009; the discrete Gaussian of Canonne,
Kamath and Steinke, 2020). Its scale is always `GRID` units: callers that need another
scale choose another unit.
"""

import decimal
import math
import os
from functools import cache
from typing import TypeAlias

import numpy as np
import scipy
from numpy.typing import NDArray

from fl_strategies._util import FloatArray, IntArray
from fl_strategies.errors import require
from fl_strategies.privacy._numeric import check_count

Words: TypeAlias = NDArray[np.uint64]

GRID = 2**24
"""Scale of discrete noise, in its own units."""

# A geometric variable of scale GRID exceeds 2 ** 30 with chance exp(-64), about 1e-28.
_GEOMETRIC_BITS = 30


def random_words(size: int, rng: np.random.Generator | None = None) -> Words:
    """Return `size` independent uniform 64-bit words, (size,).

    Parameters
    ----------
    size : int
    rng : Generator, optional
        By default the operating system's cryptographic generator.
    """
    if rng is not None:
        return rng.integers(0, 2**64 - 1, size=size, dtype=np.uint64, endpoint=True)
    return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def _split_sign(words: Words) -> tuple[FloatArray, FloatArray]:
    """Return a sign, +1 or -1, and a uniform number in (0, 1] made of the other 63 bits."""
    sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
    # The half keeps zero out; small numbers keep all their bits, so tails are reached.
    return sign, ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-63


def continuous_laplace(size: int, rng: np.random.Generator | None = None) -> FloatArray:
    """Return Laplace noise of scale 1, (size,); for comparisons, never to be released.

    Its distribution function is exact to 2**-52.
    """
    sign, uniform = _split_sign(random_words(size, rng))
    return np.asarray(sign * -np.log(uniform))


def continuous_gaussian(size: int, rng: np.random.Generator | None = None) -> FloatArray:
    """Return standard Gaussian noise, (size,); for comparisons, never to be released.

    Its distribution function is exact to 2**-50.
    """
    sign, uniform = _split_sign(random_words(size, rng))
    return np.asarray(sign * -scipy.special.ndtri(uniform / 2))


@cache
def _bit_thresholds() -> tuple[int, ...]:
    """Return, for each binary digit, 2**64 times the chance that it is one.

    The digits of a geometric variable are independent: digit i is one with chance
    ``1 / (1 + exp(2**i / GRID))``. Forty decimals leave an error of 2**-64 per digit.
    """
    with decimal.localcontext(prec=40):
        exponents = [decimal.Decimal(2**i) / GRID for i in range(_GEOMETRIC_BITS)]
        return tuple(int(2**64 / (1 + exponent.exp())) for exponent in exponents)


def _geometric(size: int, rng: np.random.Generator | None) -> IntArray:
    """Return whole numbers k >= 0 with chance proportional to ``exp(-k / GRID)``."""
    total = np.zeros(size, dtype=np.int64)
    for digit, threshold in enumerate(_bit_thresholds()):
        ones = random_words(size, rng) < np.uint64(threshold)
        total |= ones.astype(np.int64) << digit
    return total


def discrete_laplace(size: int, rng: np.random.Generator | None = None) -> IntArray:
    """Return whole numbers k with chance proportional to ``exp(-|k| / GRID)``, (size,).

    The total variation distance to the exact distribution is below 2**-57 per number.
    """
    return _geometric(size, rng) - _geometric(size, rng)


def _accepted(proposals: IntArray, rng: np.random.Generator | None) -> IntArray:
    """Thin discrete Laplace out to discrete Gaussian numbers (Canonne et al., Alg. 3)."""
    excess = np.abs(proposals) / GRID - 1
    _, uniform = _split_sign(random_words(proposals.size, rng))
    return proposals[uniform <= np.exp(-excess * excess / 2)]


def discrete_gaussian(size: int, rng: np.random.Generator | None = None) -> IntArray:
    """Return whole numbers k with chance proportional to ``exp(-(k / GRID)**2 / 2)``, (size,).

    The total variation distance to the exact distribution, and to Gaussian noise rounded
    to the grid, is below 2**-50 per number. Rounding is post-processing, so accounting for
    exact Gaussian noise is right to that distance.
    """
    found: list[IntArray] = []
    missing = size
    while missing > 0:
        # Three of four proposals are accepted.
        proposals = discrete_laplace(math.ceil(1.4 * missing) + 16, rng)
        found.append(_accepted(proposals, rng)[:missing])
        missing -= found[-1].size
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def random_choice(log_weights: FloatArray, rng: np.random.Generator | None = None) -> IntArray:
    """Return one column per row, with chance proportional to exp(log_weight), (n,).

    The same as the largest of the entries plus Gumbel noise, but one 63-bit whole number is
    compared with whole thresholds: no logarithm of a uniform number, no ties. The chances
    are exact to 2**-50 per column in total variation.

    Parameters
    ----------
    log_weights : (n, num_columns)
        At most 0, and 0 at least once in every row.
    rng : Generator, optional
    """
    shares = np.cumsum(np.exp(log_weights), axis=1)
    thresholds = (shares[:, :-1] / shares[:, -1:] * 2.0**63).astype(np.uint64)
    words = random_words(len(log_weights), rng) >> np.uint64(1)
    columns: IntArray = np.sum(words[:, None] >= thresholds, axis=1, dtype=np.int64)
    return columns


def random_rows(
    records: int, samples: int, *, replacement: bool, rng: np.random.Generator | None = None
) -> IntArray:
    """Return positions of randomly drawn records, (samples,), in random order.

    Every choice is equally likely up to a distance of ``records**2 / 2**64``.
    """
    check_count("random_rows", "records", records, least=1)
    check_count("random_rows", "samples", samples)
    fits = replacement or samples <= records
    require(fits, "random_rows", "samples", f"at most {records}, the records", samples)
    if replacement:
        return (random_words(samples, rng) % np.uint64(records)).astype(np.int64)
    return np.argsort(random_words(records, rng), kind="stable")[:samples]
