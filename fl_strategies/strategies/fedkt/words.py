"""What both halves of FedKT say to each other, and about each other."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias, get_args

from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import LaplaceCounts
from fl_strategies.privacy.events import NonPrivateEvent

Exchange: TypeAlias = Literal["votes", "models"]
PrivacyLevel: TypeAlias = Literal["L0", "L1", "L2"]
VoteWeights: TypeAlias = Literal["auto", "none", "counts", "noisy-counts"]

NUM_SPLITS = "num-splits"
NUM_TEACHERS = "num-teachers"
NUM_QUERIES = "num-queries"
PRIVACY_LEVEL = "privacy-level"
EXCHANGE = "exchange"
CORRECTED = "corrected"
VOTE_WEIGHTS = "vote-weights"
COUNT_EPSILON = "count-epsilon"
VOTE_TRIM = "vote-trim"
PRIVATE_DIAGNOSTICS = "private-diagnostics"
NUM_TRIMMED = "num-trimmed"

EXCHANGES: Sequence[str] = get_args(Exchange)
LEVELS: Sequence[str] = get_args(PrivacyLevel)
WEIGHTINGS: Sequence[str] = get_args(VoteWeights)
WEIGHTS_AT: Mapping[str, Sequence[VoteWeights]] = {
    "L0": ("counts", "noisy-counts", "none"),
    "L1": ("none",),
    "L2": ("none", "noisy-counts"),
}
"""Which weights of votes a level allows; the first is taken for ``"auto"``."""
WEIGHT_RULES: Mapping[str, str] = {
    "L0": f"one of auto, {', '.join(WEIGHTS_AT['L0'])}",
    "L1": "auto or none at L1, where the noise covers a party's votes and not their weight",
    "L2": "auto, none or noisy-counts at L2, where exact counts would be unprotected",
}
VOTE_INSTEAD = "Let it vote instead: exchange='votes'."

UNPROTECTED = "the labels of students left the party without noise"
EXACT_COUNTS = "exact class counts left the party"
OPEN_VOTES: Final[Sequence[Entry]] = ((NonPrivateEvent(unit="example", reason=UNPROTECTED), 1),)
NOBODY: Final = -1
"""Partition id that stands for parties whose answer nobody could read."""
COUNTED = "class counts protect examples, not parties"

# A server cannot make a party train without end.
MAX_SPLITS = 1_000
MAX_TEACHERS = 100_000

VOTES_PER_NOISE: Final = 4
"""How many times the scale of its noise a unanimous vote should be."""
FEWEST_TEACHERS: Final = 5
MOST_TEACHERS: Final = 25
"""Bounds of the number of teachers at L2 unless it is given; 25 is the paper's."""


def teachers_for(noise_scale: float) -> int:
    """Return how many teachers stand out from noise of this scale, within the bounds.

    Nothing here depends on a record.

    Examples
    --------
    >>> [teachers_for(scale) for scale in (0.1, 3.2, 100.0)]
    [5, 13, 25]
    """
    enough = math.ceil(VOTES_PER_NOISE * noise_scale)
    return min(max(enough, FEWEST_TEACHERS), MOST_TEACHERS)


def count_noise(epsilon: float) -> LaplaceCounts:
    """Return the noise on class counts, of which replacing one record moves two by one."""
    return LaplaceCounts(epsilon=epsilon, l1_sensitivity=2.0)
