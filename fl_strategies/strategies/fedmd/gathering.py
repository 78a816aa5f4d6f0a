"""What FedMD's server keeps of the answers of a round, and the consensus it makes of them."""

import logging
from collections.abc import Mapping
from typing import Protocol, cast

import numpy as np
import scipy

from fl_strategies.aggregation.consensus import (
    MAX_WEIGHT,
    VoteCounts,
    make_consensus,
    to_probabilities,
)
from fl_strategies.aggregation.evidence import vote_evidence
from fl_strategies.aggregation.evidence_pool import (
    CONTRASTS,
    ClassShare,
    Contrast,
    EvidencePool,
)
from fl_strategies.aggregation.voting import plurality
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.strategies.fedmd.party import CLASS_COUNTS, CONTRAST
from fl_strategies.strategies.fedmd.settings import EVIDENCE_LIMIT, FedMDSettings
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics, Scalar, shown

logger = logging.getLogger("flwr.fl_strategies")


class Gathering(Protocol):
    """Answers of many parties on their way to one; nothing else is kept of them."""

    @property
    def outliers(self) -> tuple[int, ...]:
        """Partition ids of parties that were not counted."""

    def add(
        self, answers: Array, counts: IntArray | None, contrast: Contrast, party: int
    ) -> None:
        """Take a party's answers, class counts and partition id, checked before."""

    def result(self, ties: np.random.Generator) -> Array:
        """Return the consensus: labels, or scores of the payload's kind."""

    def report(self) -> Metrics:
        """Return how many parties were not counted, or not in full."""


class LabelGathering:
    """Votes for labels, each worth the voter's records of its class if counts are given."""

    outliers: tuple[int, ...] = ()

    def __init__(self, shape: tuple[int, int]) -> None:
        self._plain, self._weighted = VoteCounts(shape), VoteCounts(shape)

    def add(
        self,
        answers: Array,
        counts: IntArray | None,
        contrast: Contrast,  # noqa: ARG002
        party: int,  # noqa: ARG002
    ) -> None:
        """Count one party's labels."""
        self._plain.add(answers)
        self._weighted.add(answers, counts)

    def result(self, ties: np.random.Generator) -> Array:
        """Return the label with most votes."""
        plain, weighted = self._plain.counts, self._weighted.counts
        # Where only parties vote that have no record of the class, all count the same.
        votes = np.where(weighted.any(axis=1, keepdims=True), weighted, plain)
        return plurality(votes, ties)

    def report(self) -> Metrics:
        """Return how many parties count for less than they claim."""
        return _report_capped(self._weighted.num_capped)


class ScoreGathering:
    """Scores, combined by one of the rules of `aggregation.consensus`."""

    outliers: tuple[int, ...] = ()

    def __init__(self, settings: FedMDSettings) -> None:
        self._settings = settings
        shape, bound = (settings.num_public, settings.num_classes), settings.replies.high
        self._scores = make_consensus(
            settings.rule,  # type: ignore[arg-type]
            shape,
            bound=bound,
            capped=settings.payload == "logits",
            trim_fraction=settings.options.trim_fraction,
        )

    def add(
        self,
        answers: Array,
        counts: IntArray | None,
        contrast: Contrast,  # noqa: ARG002
        party: int,  # noqa: ARG002
    ) -> None:
        """Add one party's scores."""
        self._scores.add(answers, counts)

    def result(self, ties: np.random.Generator) -> Array:  # noqa: ARG002
        """Return the combined scores."""
        scores = self._scores.result()
        return to_probabilities(scores) if self._settings.payload == "softmax" else scores

    def report(self) -> Metrics:
        """Return how many parties count for less than they claim."""
        return _report_capped(self._scores.num_capped)


class EvidenceGathering:
    """Answers without their parties' class shares; see `aggregation.evidence`.

    A vote for a class of which the voter has no record is no opinion on any.
    """

    def __init__(
        self, settings: FedMDSettings, share: ClassShare, *, exclude_outliers: bool
    ) -> None:
        self._votes = settings.payload == "argmax"
        self._smallest = np.min_scalar_type(settings.num_classes)
        shape = settings.num_public, settings.num_classes
        self._pool = EvidencePool(
            shape,
            bound=EVIDENCE_LIMIT,
            task="single-label",
            share=share,
            decode=vote_evidence if self._votes else _known_evidence,
            exclude_outliers=exclude_outliers,
        )

    def add(
        self, answers: Array, counts: IntArray | None, contrast: Contrast, party: int
    ) -> None:
        """Add one party's evidence, or what its votes say."""
        said = answers.astype(self._smallest) if self._votes else answers
        self._pool.add(said, np.asarray(counts, dtype=np.float64), contrast, party)

    def result(self, ties: np.random.Generator) -> Array:  # noqa: ARG002
        """Return what the evidence comes to."""
        scores: FloatArray = self._pool.result()
        return np.asarray(
            scores.argmax(axis=1) if self._votes else scipy.special.softmax(scores, axis=1)
        )

    @property
    def outliers(self) -> tuple[int, ...]:
        """Partition ids of parties that were not counted."""
        return self._pool.outliers

    def report(self) -> Metrics:
        """Return how many parties were not counted, or not in full."""
        return self._pool.report("FedMD")


def _known_evidence(answers: Array, counts: FloatArray) -> FloatArray:
    return np.where(counts > 0, answers, 0.0)


def _report_capped(num_capped: int) -> Metrics:
    if num_capped:
        logger.warning(
            "FedMD counts %s claims of parties for less, which are far from the others'.",
            num_capped,
        )
    return {keys.NUM_CAPPED: num_capped}


def gathering(settings: FedMDSettings, *, share: ClassShare) -> Gathering:
    """Return room for the answers of a round, combined by their rule."""
    if settings.evidence:
        exclude = settings.options.exclude_outliers
        return EvidenceGathering(settings, share, exclude_outliers=exclude)
    if settings.payload == "argmax":
        return LabelGathering((settings.num_public, settings.num_classes))
    return ScoreGathering(settings)


def read_counts(arrays: Mapping[str, Array], settings: FedMDSettings) -> IntArray | None:
    """Return a party's class counts, if it sends any; refuse those that cannot be."""
    if not settings.counted:
        return None
    counts, num_classes = arrays[CLASS_COUNTS], settings.num_classes
    plain = counts.dtype == np.int64 and counts.shape == (num_classes,)
    if not plain or not ((counts >= 0) & (counts <= MAX_WEIGHT)).all():
        raise KnowledgeMismatch(
            f"FedMD: {CLASS_COUNTS} must be {num_classes} whole numbers (int64) from 0 to "
            f"{MAX_WEIGHT}, got shape {counts.shape} of {counts.dtype} or others."
        )
    if settings.evidence and not counts.any():
        raise KnowledgeMismatch(f"FedMD: {CLASS_COUNTS} must count a record, got none.")
    return counts


def read_contrast(meta: Mapping[str, Scalar], settings: FedMDSettings) -> Contrast:
    """Return how a party's records relate to the public rows, if it says so."""
    contrast = meta.get(CONTRAST) if settings.evidence else "none"
    if contrast not in CONTRASTS:
        known = ", ".join(CONTRASTS)
        raise KnowledgeMismatch(
            f"FedMD: {CONTRAST} must be one of {known}, got {shown(contrast)}."
        )
    return cast(Contrast, contrast)
