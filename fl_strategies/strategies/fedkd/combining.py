"""How FedKD's server makes one score of all parties', where no noise is added to it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from fl_strategies.aggregation.class_weights import (
    believed_counts,
    class_weights,
    heard_parts,
    weighted_mean,
)
from fl_strategies.aggregation.consensus import (
    MAX_WEIGHT,
    ROBUST_RULES,
    ClassWeightedConsensus,
    MeanConsensus,
    RobustConsensus,
)
from fl_strategies.arrays import FloatArray, IntArray
from fl_strategies.strategies.fedkd.options import FedKDOptions
from fl_strategies.strategies.fedkd.reading import PartyScores, Said
from fl_strategies.wire.quantization import ScoreFormat
from fl_strategies.wire.replies import PartyReply

MOST_KEPT: Final = 1000
"""Scores of more parties are summed as they come, so that memory does not grow with them."""


def are_many(kept: Sequence[PartyReply[Said]], options: FedKDOptions) -> bool:
    """Tell whether scores are of so many parties that they must be summed, and can be.

    They can unless a median is sought, or noise added to them.
    """
    plain = options.consensus not in ROBUST_RULES and options.privacy is None
    scores = isinstance(kept[-1].knowledge, PartyScores) and not options.sends_evidence
    return len(kept) > MOST_KEPT and plain and scores


class SummedScores:
    """The weighted mean of parties' scores, kept as sums.

    Claims that are far from the others' are cut in groups a factor of two wide; see
    `aggregation.consensus`. Nobody counts for more than `MAX_WEIGHT` records of a class.

    Parameters
    ----------
    shape : (rows, classes)
    form : Quantizer or PlainScores
    options : FedKDOptions
    """

    def __init__(
        self, shape: tuple[int, int], form: ScoreFormat, options: FedKDOptions
    ) -> None:
        uniform = options.weights == "uniform"
        kind = MeanConsensus if uniform else ClassWeightedConsensus
        self._form = form
        self._sums = kind(shape, bound=form.bound, capped=True)

    def taken(self, reply: PartyReply[Said]) -> PartyReply[Said]:
        """Add the scores of a reply, and return it without them."""
        said = reply.knowledge
        if not isinstance(said, PartyScores) or said.values is None:
            return reply
        weights = None if said.counts is None else _whole(said.counts)
        self._sums.add(self._form.decode(said.values), weights)
        return replace(reply, knowledge=PartyScores())

    def result(self) -> tuple[FloatArray, int]:
        """Return the mean, and how many claims were cut."""
        return self._sums.result(), self._sums.num_capped


def _whole(counts: FloatArray) -> IntArray:
    weights: IntArray = np.minimum(np.rint(counts), MAX_WEIGHT).astype(np.int64)
    return weights


def combined_scores(
    sent: Sequence[PartyScores], form: ScoreFormat, options: FedKDOptions, num_classes: int
) -> tuple[FloatArray, int]:
    """Return the consensus of scores that were kept, and how many claims were cut."""
    values = [party.values for party in sent if party.values is not None]
    if options.consensus in ROBUST_RULES:
        robust = RobustConsensus(
            options.consensus, trim_fraction=options.trim_fraction, decode=form.decode
        )
        for scores in values:
            robust.add(scores)
        return robust.result(), 0
    counts, capped = believed_counts([party.counts for party in sent])
    weights, heard = class_weights(counts, num_classes), heard_parts(values, form)
    mean = weighted_mean(values, weights * heard[:, None], form)
    return mean, capped + int((heard < 1).sum())
