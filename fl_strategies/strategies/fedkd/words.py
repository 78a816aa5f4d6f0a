"""What both halves of FedKD say to each other, and about each other."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from fl_strategies.core.tasks import Task
from fl_strategies.privacy.counts import LaplaceCounts

Weights: TypeAlias = Literal["evidence", "noisy-evidence", "counts", "noisy-counts", "uniform"]
Scale: TypeAlias = Literal["clip", "max"]
DistillationLoss: TypeAlias = Literal["l1", "l2", "mse", "kl"]

WEIGHTS: Sequence[str] = get_args(Weights)
EVIDENCE: Sequence[str] = ("evidence", "noisy-evidence")
"""Weights with which parties send evidence instead of logits; see `aggregation.evidence`."""
NOISY: Sequence[str] = ("noisy-evidence", "noisy-counts")
"""Weights by class counts with noise, which cost an example `count_epsilon`."""
SCALES: Sequence[str] = get_args(Scale)
LOSSES: Sequence[str] = get_args(DistillationLoss)

NUM_LEVELS = "num-levels"
BOUND = "bound"
ROUNDING = "rounding"
WEIGHTING = "weights"
COUNT_EPSILON = "count-epsilon"
NUM_PREDICTIONS = "num-predictions"
AUGMENTATION = "augmentation"
PUBLIC_LABELS = "public-labels"
CONTRAST = "contrast"
NUM_UNCOVERED = "num-uncovered"
"""Metric: parties that find the public rows unlike their records."""
TASK = "task"
REQUEST = "request"
REQUESTS: Sequence[str] = ("scale", "scores")
LOGITS = "logits"

MAX_BOUND = 1e6
MAX_TIMES_MEDIAN = 10.0
"""A party that states a larger scale than this many medians is not believed: its scale would
make everybody's steps too wide."""

SEEDED_NOISE = "seeded-noise"

UNPROTECTED = "logits left the party without noise"
EXACT_COUNTS = "exact class counts left the party"
PRIVATE_SCALE = "the quantization scale is the largest logit of all private models"
COUNTED = "class counts protect examples, not parties"
AUDIENCE = "everybody who sees the final model, except the server, which is trusted"


def count_mechanism(
    task: Task, num_classes: int, epsilon: float, weights: Weights
) -> LaplaceCounts:
    """Return the noise on class counts, for the most by which one record can move them.

    With one class a record leaves one count and enters another. With several labels it may
    change all positives; where negatives are counted too, those as well.
    """
    per_label = 2 if weights in EVIDENCE else 1
    moved = per_label * num_classes if task == "multi-label" else 2
    # Of positives alone, a record that has them all moves as many by coming as by changing.
    halved = task != "multi-label" or per_label == 2
    return LaplaceCounts(epsilon=epsilon, l1_sensitivity=float(moved), halved=halved)
