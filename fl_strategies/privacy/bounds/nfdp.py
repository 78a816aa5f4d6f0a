"""Noise-free differential privacy: training on a random sample of a party's records.

A record that is not drawn leaves no trace; one that is drawn is used in the clear. The
exact statement is therefore (0, delta), where delta is the chance to be drawn, for records
that replace one another and a public number of records. The theorems of FedMD-NFDP add a
positive epsilon that buys nothing: delta does not fall as epsilon grows. Both hold only if
nothing else touches the data, the sample stays fixed and its draw stays secret.

References
----------
Sun, Lyu (2021), Federated model distillation with noise-free differential privacy,
Theorems 1 and 2. The epsilons of its Table 2 are decimal logarithms; these are natural.
"""

import math
from typing import NamedTuple

from fl_strategies.errors import require
from fl_strategies.privacy._numeric import check_count


class Guarantee(NamedTuple):
    """One (epsilon, delta) statement."""

    epsilon: float
    delta: float


def _check(owner: str, records: int, samples: int, replacement: bool) -> None:
    check_count(owner, "records", records, least=1)
    check_count(owner, "samples", samples)
    fits = replacement or samples <= records
    require(fits, owner, "samples", f"at most {records}, the records", samples)


def nfdp_tight(
    records: int, samples: int, *, replacement: bool = True, runs: int = 1
) -> Guarantee:
    """Return the exact statement, (0, chance that a given record is ever drawn).

    Parameters
    ----------
    records, samples : int
        Size of the data set and of the sample.
    replacement : bool
        Whether a record may be drawn twice.
    runs : int
        Independent samples of the same records; each is one more chance to be drawn.

    Examples
    --------
    >>> nfdp_tight(100, 10, replacement=False)
    Guarantee(epsilon=0.0, delta=0.1)
    """
    _check("nfdp_tight", records, samples, replacement)
    check_count("nfdp_tight", "runs", runs)
    if not replacement and runs == 1:
        return Guarantee(0.0, samples / records)
    draws, missed = (samples * runs, 1 / records) if replacement else (runs, samples / records)
    if missed == 1:
        return Guarantee(0.0, float(draws > 0))
    return Guarantee(0.0, -math.expm1(draws * math.log1p(-missed)))


def nfdp_theorem(records: int, samples: int, *, replacement: bool = True) -> Guarantee:
    """Return (epsilon, delta) as the paper's theorems state them.

    Examples
    --------
    >>> nfdp_theorem(2880, 60).epsilon.__round__(6)
    0.02083
    """
    _check("nfdp_theorem", records, samples, replacement)
    delta = nfdp_tight(records, samples, replacement=replacement).delta
    if replacement:
        return Guarantee(samples * math.log1p(1 / records), delta)
    return Guarantee(-math.log1p(-samples / (records + 1)), delta)
