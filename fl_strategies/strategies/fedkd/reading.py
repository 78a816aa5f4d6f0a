"""What a FedKD party said, read as the word of an untrusted party."""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from fl_strategies.aggregation.evidence_pool import CONTRASTS, Contrast
from fl_strategies.arrays import Array, FloatArray
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.strategies.fedkd.options import CONTRAST, MAX_BOUND
from fl_strategies.wire.knowledge import Knowledge, shown

MAX_TIMES_MEDIAN: Final = 10.0
"""A party that states a larger scale than this many medians is not believed: its scale would
make everybody's steps too wide."""


@dataclass(frozen=True, eq=False)
class PartyScores:
    """What is kept of one party's reply until all are there.

    Levels or float32 logits (p * n, C), and class counts or None; neither of evidence, which
    is summed as it comes.
    """

    values: Array | None = None
    counts: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class PartyEvidence:
    """One party's evidence at its levels, class counts, and what it says of public rows."""

    values: Array
    counts: FloatArray
    contrast: Contrast


Said: TypeAlias = PartyScores | PartyEvidence | float


def read_contrast(knowledge: Knowledge) -> Contrast:
    """Return how a party says its records relate to public rows."""
    contrast = knowledge.meta.get(CONTRAST)
    if contrast not in CONTRASTS:
        raise KnowledgeMismatch(
            f"scores: {CONTRAST} must be one of {', '.join(CONTRASTS)}, got {shown(contrast)}."
        )
    return contrast  # type: ignore[return-value]


def read_scale(knowledge: Knowledge) -> float:
    """Return a party's largest logit."""
    scale = knowledge.arrays.get("scale", np.empty(0))
    if scale.dtype != np.float64 or scale.shape != (1,) or not 0 < scale[0] <= MAX_BOUND:
        raise KnowledgeMismatch(
            f"scale: the largest logit must be one number above 0, at most "
            f"{MAX_BOUND:g}, got {scale.ravel()[:4]} of {scale.dtype}."
        )
    return float(scale[0])
