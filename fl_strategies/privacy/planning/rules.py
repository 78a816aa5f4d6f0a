"""Settings that follow from public facts alone: how much to ask for under a given noise.

Strategies take their defaults from here and the planner plans with the same functions, so
that the two can never disagree. Nothing here depends on a record but their number.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from fl_strategies.privacy.noise import (
    VoteMechanism,
    chance_kept,
    chance_of_plurality,
    decided_by_votes,
)

RECORDS_PER_NOISE: Final = 7.0
"""How many deviations of its noise the records of a cell should be."""
ROWS_PER_CELL: Final = 5
FEWEST_CELLS: Final = 2

COMPONENTS_BY_NOISE: Final = 0.4
"""How many components are used, times the noise on one of them as a share of the signal."""
USUAL_STRENGTH: Final = 0.2
"""Length of the mean of features times labels, as a share of the longest possible."""
ROWS_PER_COMPONENT: Final = 5
FEWEST_COMPONENTS: Final = 2

VOTES_PER_NOISE: Final = 4
"""How many times the scale of its noise a unanimous vote should be."""
FEWEST_TEACHERS: Final = 5
MOST_TEACHERS: Final = 25
"""Bounds of the number of teachers at L2 unless it is given; 25 is the paper's."""

FEWEST_QUERIES_PER_CLASS: Final = 5
DECIDED_AT_SERVER: Final = 0.9
"""Share of labels that unanimous votes should decide where a model learns from them alone."""
DECIDED_AT_PARTY: Final = 0.6
"""The same where every party's student learns from its own labels: students average noise."""
USUAL_ROUNDS: Final = 1
"""Rounds of noisy labels: all rounds share one epsilon, and one can ask for as many rows."""
_COARSE: Final = 20


def usual_cells(num_public: int, num_records: int, noise: float) -> int:
    """Return how many cells to make: by records that stand out from noise, and public rows.

    Parameters
    ----------
    num_public, num_records : int
        Public rows, and records of all parties together.
    noise : float
        Deviation of the noise on a sum of counts.

    Examples
    --------
    >>> usual_cells(num_public=4000, num_records=24000, noise=24.0)
    142
    """
    audible = num_records / (RECORDS_PER_NOISE * max(noise, 1.0))
    return int(max(FEWEST_CELLS, min(audible, num_public / ROWS_PER_CELL)))


def usual_cells_of_parties(num_public: int, num_parties: int, noise: float) -> int:
    """Return how many cells to make where all parties weigh the same.

    The counts of a party are a vector of length 1, so in each of k cells it has one over the
    root of k. `noise` is on the sum over parties.

    Examples
    --------
    >>> usual_cells_of_parties(num_public=4000, num_parties=500, noise=6.0)
    141
    """
    audible = (num_parties / (RECORDS_PER_NOISE * max(noise, 1e-9))) ** 2
    return int(max(FEWEST_CELLS, min(audible, num_public / ROWS_PER_CELL)))


def drowned_cells(heard: float, noise: float, whose: str = "records") -> str:
    """Say how noise drowns what a cell has on average, or nothing if it does not.

    Examples
    --------
    >>> drowned_cells(heard=50.0, noise=60.0)
    '60 on 50 records of a cell'
    """
    return "" if heard >= noise else f"{noise:.3g} on {heard:.3g} {whose} of a cell"


def usual_components(num_public: int, num_values: int, noise: float) -> int:
    """Return how many components to use, for noise on one as a share of the whole signal.

    Examples
    --------
    >>> [usual_components(4000, 123, noise) for noise in (0.2, 0.02, 0.002)]
    [2, 20, 123]
    """
    most = min(num_values, num_public // ROWS_PER_COMPONENT)
    audible = math.ceil(COMPONENTS_BY_NOISE / max(noise, 1e-9))
    return max(1, min(most, max(FEWEST_COMPONENTS, audible)))


def drowned_components(noise: float) -> str:
    """Say how noise drowns even one component, or nothing if it does not.

    Examples
    --------
    >>> drowned_components(0.5)
    '50% of the sums, where 40% is the most'
    """
    if noise <= COMPONENTS_BY_NOISE:
        return ""
    return f"{noise:.0%} of the sums, where {COMPONENTS_BY_NOISE:.0%} is the most"


def teachers_for(noise_scale: float) -> int:
    """Return how many teachers stand out from noise of this scale, within the bounds.

    Examples
    --------
    >>> [teachers_for(scale) for scale in (0.1, 3.2, 100.0)]
    [5, 13, 25]
    """
    enough = math.ceil(VOTES_PER_NOISE * noise_scale)
    return min(max(enough, FEWEST_TEACHERS), MOST_TEACHERS)


def fewest_queries(num_classes: int, num_public: int) -> int:
    """Return with how few labels anything can be learned, five of each class."""
    return min(FEWEST_QUERIES_PER_CLASS * num_classes, num_public)


def queries_for(
    decided: Callable[[int], float], share: float, num_classes: int, num_public: int
) -> int:
    """Return how many labels to ask for under noise that is calibrated to their number.

    The most for which unanimous votes decide a share of the labels: fewer teach less, more
    are mostly noise. At least five of each class, whatever the noise.

    Parameters
    ----------
    decided : callable
        Maps a number of labels to the share of them that unanimous votes decide.
    share : float
    num_classes, num_public : int

    Examples
    --------
    >>> queries_for(lambda number: 1 / number**0.5, share=0.1, num_classes=2, num_public=4000)
    100
    """
    low = high = fewest_queries(num_classes, num_public)
    # Noise grows with about the root of the number, so quadrupling ends soon.
    while decided(high) >= share:
        if high == num_public:
            return num_public
        low, high = high, min(4 * high, num_public)
    while high - low > max(1, low // _COARSE):
        middle = (low + high) // 2
        low, high = (middle, high) if decided(middle) >= share else (low, middle)
    return low


def vote_queries(
    mechanism_of: Callable[[int], VoteMechanism], num_votes: int, share: float, num_public: int
) -> int:
    """Return the queries of so many voters, by the noise on a number of labels."""

    def decided(number: int) -> float:
        return decided_by_votes(mechanism_of(number), num_votes)

    num_classes = mechanism_of(1).event.num_classes
    return queries_for(decided, share, num_classes, num_public)


def answer_queries(
    scale_of: Callable[[int], float], num_parties: int, num_classes: int, num_public: int
) -> int:
    """Return the queries of parties whose own labels get Gumbel noise each."""

    def decided(number: int) -> float:
        kept = answer_kept(scale_of(number), num_classes)
        won, blind = chance_of_plurality([num_parties], kept, num_classes), 1 / num_classes
        return (won - blind) / (1 - blind)

    return queries_for(decided, DECIDED_AT_SERVER, num_classes, num_public)


def answer_kept(scale: float, num_classes: int) -> float:
    """Return how likely a label with Gumbel noise is the voter's own: randomised response.

    Examples
    --------
    >>> round(answer_kept(1.0, 2), 3)
    0.731
    """
    (kept,) = chance_kept("gumbel", np.ones((1, 1)), scale, np.array([num_classes - 1]))
    return float(kept)


def drowned_answers(scale: float, bound: float, num_parties: int) -> str:
    """Say how noise drowns a consensus of so many parties that all agree, or nothing.

    Noise of parties is independent, so that of their mean falls with the root of their
    number; the largest answer is `bound`.

    Examples
    --------
    >>> drowned_answers(scale=12.0, bound=1.0, num_parties=100)
    'scale 12 against answers up to 1 of 100 parties'
    """
    if scale <= bound * math.sqrt(num_parties):
        return ""
    return f"scale {scale:.3g} against answers up to {bound:g} of {num_parties} parties"
