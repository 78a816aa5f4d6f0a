"""Words that several strategies share on the wire or in metrics; others stay with theirs."""

from typing import Final

# Records of a message.
ARRAYS: Final = "arrays"
CONFIG: Final = "config"
METRICS: Final = "metrics"
META: Final = "knowledge-meta"

# Configuration that travels from server to party.
STRATEGY: Final = "strategy"
SERVER_ROUND: Final = "server-round"
SEED: Final = "seed"
RUN_NAME: Final = "run-name"
PUBLIC_HASH: Final = "public-hash"
NUM_CLASSES: Final = "num-classes"

# What accompanies knowledge.
KIND: Final = "kind"
LEARNER: Final = "learner"
PARTITION_ID: Final = "partition-id"
PARTITION_IDS: Final = "partition-ids"
NUM_PARTITIONS: Final = "num-partitions"
PRIVACY_EVENTS: Final = "privacy-events"

# Metrics.
NUM_EXAMPLES: Final = "num-examples"
NUM_PARTIES: Final = "num-parties"
NUM_REJECTED: Final = "num-rejected"
NUM_BYTES_SENT: Final = "num-bytes-sent"
NUM_BYTES_RECEIVED: Final = "num-bytes-received"
NUM_RELEASES: Final = "num-releases"
ACCURACY: Final = "accuracy"
LOCAL_FIGURE: Final = "local-figure"
"""How good a party's own model is after its own training, by the figure of the task."""
BALANCED_ACCURACY: Final = "balanced-accuracy"
MACRO_F1: Final = "macro-f1"
AUC: Final = "auc"
MEAN_AUC: Final = "mean-auc"
MEAN_SQUARED_ERROR: Final = "mean-squared-error"
BETTER_THAN_ALONE: Final = "better-than-alone"
"""Whether the final model beats the party's own on its held-out rows; see `clients.at_home`."""
EPSILON_PARTY: Final = "epsilon-party"
EPSILON_PARTY_DATA_DEPENDENT: Final = "epsilon-party-data-dependent"
EPSILON_EXAMPLE: Final = "epsilon-example"
DELTA_PARTY: Final = "delta-party"
DELTA_EXAMPLE: Final = "delta-example"
VOTE_AGREEMENT: Final = "vote-agreement"
CONSISTENT_FRACTION: Final = "consistent-fraction"
NUM_TEACHERS_MISSING: Final = "num-teachers-missing"
NUM_MODELS_REFUSED: Final = "num-models-refused"
NUM_UNLABELLED: Final = "num-unlabelled"
NUM_OUTLIERS: Final = "num-outliers"
"""Parties that are not counted because they contradict most others."""
NUM_CAPPED: Final = "num-capped"
"""Parties that count for less than they claim, or speak less loudly than they did."""

# Files.
UNBOUNDED: Final = "-unbounded"
"""Ending of a flag that stands beside a figure that is infinite, and therefore not written."""
