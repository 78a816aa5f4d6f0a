"""How sure students are of the classes, as it travels and as it counts.

What a student of noisy labels says of a row is timid or bold by its kind and its settings,
and how often it names a class has more to do with noise than with the row. So only the
differences between rows count, on one scale for all parties; class shares come from counts.
"""

from typing import Final

import numpy as np

from fl_strategies.arrays import Array, FloatArray
from fl_strategies.wire.quantization import Quantizer

SCORES: Final = Quantizer(num_levels=256, bound=12.0)
"""A byte for each row and class."""
SCORE_STRENGTH: Final = 1.5
"""Root of the mean square of a party's evidence, chosen on rows cut from training data."""


def one_scale(scores: FloatArray) -> FloatArray:
    """Return scores (rows, classes) of mean 0 by row and by class, and of the usual strength.

    A student that says the same of all rows has no opinion, 0.

    Examples
    --------
    >>> one_scale(np.array([[0.0, 2.0], [0.0, 8.0], [4.0, 4.0]])).round(2)
    array([[ 0.59, -0.59],
           [-2.06,  2.06],
           [ 1.47, -1.47]])
    """
    centred = scores - scores.mean(axis=1, keepdims=True)
    centred = centred - centred.mean(axis=0)
    strength = float(np.sqrt(np.mean(centred**2)))
    if strength < 1e-9 * max(1.0, float(np.abs(scores).max())):
        return np.zeros(scores.shape)
    scaled = SCORE_STRENGTH / strength * centred
    return np.asarray(np.clip(scaled, -SCORES.bound, SCORES.bound))


def score_evidence(codes: Array, counts: FloatArray) -> FloatArray:
    """Return received scores as evidence (rows, classes); 0 for classes without records."""
    seen = counts > 0
    evidence = np.zeros(codes.shape)
    evidence[:, seen] = one_scale(SCORES.decode(codes[:, seen]))
    return evidence
