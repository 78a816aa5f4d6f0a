"""Parties whose evidence contradicts what most others say.

Two honest parties that know a class rank the public rows alike by their evidence for it, as
far as they know anything. A liar does not, whatever it claims to be: one that exchanges or
negates labels is against the others, and one that always names the same class ranks nothing.

Of each party the correlation with every other is taken, class by class around the class's
mean, over the classes that both know; and of these correlations the median, on which less
than half of all parties have no hold. A party far below what is typical is an outlier.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from fl_strategies.arrays import Array, FloatArray, IntArray

LEAST_OF_TYPICAL: Final = 0.25
"""A party is an outlier below this share of the median party's agreement."""
LEAST_OF_TYPICAL_LIMITED: Final = 0.1
"""The same where one party's influence on a row is limited: an honest party of few records
is lost for less."""
CONTRADICTION: Final = -0.25
"""A party whose agreement is below this share of the median party's contradicts the others; of
231 honest federations three had one (docs/results/robustness.md)."""
LEAST_TYPICAL: Final = 0.2
"""Where the median party agrees less than this with others, nobody knows enough to judge."""
FEWEST_COMPARED: Final = 3
"""Parties that can be compared with fewer others are not judged."""
MOST_COMPARED: Final = 100
"""A party is compared with so many others at most: time stays linear in the parties."""
_MOST_CELLS: Final = 1 << 24

Evidence: TypeAlias = Callable[[int], FloatArray]


def outliers(
    evidence: Evidence,
    known: FloatArray,
    fewest_common: IntArray,
    *,
    least_typical: float = LEAST_TYPICAL,
    least_of_typical: float = LEAST_OF_TYPICAL,
) -> dict[int, float]:
    """Return the positions of parties that do not agree with most others, ascending.

    With each its agreement as a multiple of the median party's: one below `CONTRADICTION`
    contradicts the others, any other may as well be honest and know little. Less than half
    of those that can be judged are outliers.

    Parameters
    ----------
    evidence : callable
        Gives the evidence (rows, classes) of the party at a position.
    known : (num_parties, num_classes)
        Above 0 where a party's evidence on a class counts.
    fewest_common : (num_parties,)
        How many common classes a comparison with a party takes: 2 for one that compares
        its classes only with each other, and so says nothing by one of them.
    least_typical : float
        Nobody is judged where the median party agrees less than this with others.
    least_of_typical : float
        A party is an outlier below this share of the median party's agreement.
    """
    agreed = agreements(evidence, known > 0, fewest_common)
    judged = ~np.isnan(agreed)
    typical = float(np.median(agreed[judged])) if judged.any() else 0.0
    if typical < least_typical:
        return {}
    found = np.flatnonzero(judged & (agreed < least_of_typical * typical))
    return {int(position): float(agreed[position]) / typical for position in found}


def agreements(evidence: Evidence, known: Array, fewest_common: IntArray) -> FloatArray:
    """Return how far each party agrees with most others, from -1 to 1, (num_parties,).

    NaN for a party that has too little in common with too many.
    """
    references = _references(len(known), evidence)
    others = np.stack([_centred(evidence(k), known[k]).ravel() for k in references])
    squares = (others**2).reshape(len(others), -1, known.shape[1]).sum(axis=1)
    agreed = np.full(len(known), np.nan)
    for k, classes in enumerate(known):
        own = _centred(evidence(k), classes)
        common = (known[references] & classes).sum(axis=1)
        needed = np.maximum(fewest_common[references], fewest_common[k])
        compared = (common >= needed) & (references != k)
        if compared.sum() >= FEWEST_COMPARED:
            norms = np.sqrt(known[references] @ (own**2).sum(axis=0) * (squares @ classes))
            products = others @ own.ravel()
            correlations = products / np.where(norms > 0, norms, np.inf)
            agreed[k] = np.median(correlations[compared])
    return agreed


def _references(num_parties: int, evidence: Evidence) -> IntArray:
    """Return the parties that all are compared with: all, or some that are spread evenly."""
    cells = evidence(0).size
    most = min(MOST_COMPARED, max(_MOST_CELLS // cells, 10 * FEWEST_COMPARED))
    return np.unique(np.linspace(0, num_parties - 1, min(num_parties, most)).astype(np.int64))


def _centred(evidence: FloatArray, known: Array) -> FloatArray:
    """Return how evidence differs from its mean, for the classes that are known."""
    centred = np.where(known, evidence - evidence.mean(axis=0), 0.0)
    return np.asarray(centred, dtype=np.float32)
