"""Everything that the author of a strategy needs, on one page; see docs/adding_a_strategy.md.

Names here are as stable as those of `fl_strategies` itself. What is imported from other modules
may change without notice.
"""

from fl_strategies._util import Array, FloatArray, IntArray, content_hash, derive_rng
from fl_strategies.aggregation.consensus import ExactSum, RobustConsensus, VoteCounts
from fl_strategies.aggregation.evidence import believed_sizes
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    PrivacyBudgetExceeded,
    UnsupportedLearner,
    require,
    require_known,
)
from fl_strategies.learners import (
    ContinuingLearner,
    Correction,
    FeatureLearner,
    Generated,
    GuidedLearner,
    HeadedLearner,
    Learner,
    LearnerFactory,
    Objective,
    PortableLearner,
    Prototypes,
    Proximal,
    Recipe,
    SoftLearner,
    StartingLearner,
    Task,
    check_task,
    link_scores,
    plan_of,
    require_features,
    require_guided,
    require_headed,
    require_portable,
    require_soft,
)
from fl_strategies.options import Options, group, option, variants
from fl_strategies.party.party import Party
from fl_strategies.party.role import (
    ArrayField,
    ArraysField,
    KnowledgeField,
    PartyRole,
    PartyState,
    ScalarField,
    charge_plan,
    check_num_classes,
    check_public_data,
    facts_of,
    finite_logits,
    fit_on_records,
    labels_of,
    public_model,
    read_round,
    read_seed,
    receive_model,
    require_finite,
    require_plan,
    trained,
)
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.privacy.mechanisms import GaussianSums, LaplaceCounts
from fl_strategies.privacy.noise import (
    NoiseSpec,
    ReleaseSpec,
    ScorePrivacy,
    VotePrivacy,
    calibrate_scale,
    calibrated_sums,
)
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.server.replies import PartyReply
from fl_strategies.server.run import State
from fl_strategies.server.strategy import (
    FederationOptions,
    KnowledgeStrategy,
    check_factories,
    public_array,
)
from fl_strategies.strategies.weights.options import WeightsOptions
from fl_strategies.strategies.weights.party import (
    CLASS_COUNTS,
    CountedParty,
    CountedWeights,
    WeightsParty,
    believed_counts,
    split_counts,
)
from fl_strategies.strategies.weights.restraint import LocalWeights
from fl_strategies.strategies.weights.server import (
    CountedStrategy,
    FlowerStrategy,
    WeightsState,
    flower_strategy,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar

__all__ = [
    # What can be set, and errors as sentences.
    "Options",
    "option",
    "group",
    "variants",
    "require",
    "require_known",
    "InvalidData",
    "InvalidParameter",
    "KnowledgeMismatch",
    "PrivacyBudgetExceeded",
    "UnsupportedLearner",
    # What is released, and what it costs.
    "AUDIENCES",
    "DEFAULT_DELTA",
    "GaussianSums",
    "LaplaceCounts",
    "NoiseSpec",
    "NonPrivateEvent",
    "Price",
    "PrivacyLedger",
    "ReleaseFacts",
    "ReleasePlan",
    "ReleaseSpec",
    "ScorePrivacy",
    "VotePrivacy",
    "calibrate_scale",
    "calibrated_sums",
    "open_charges",
    # What crosses the trust boundary.
    "Knowledge",
    "Metrics",
    "PartyReply",
    "Scalar",
    "keys",
    # The server side.
    "FederationOptions",
    "KnowledgeStrategy",
    "State",
    "check_factories",
    "check_task",
    "public_array",
    "Task",
    # The party side.
    "ArrayField",
    "ArraysField",
    "KnowledgeField",
    "Party",
    "PartyRole",
    "PartyState",
    "ScalarField",
    "charge_plan",
    "check_num_classes",
    "check_public_data",
    "facts_of",
    "finite_logits",
    "fit_on_records",
    "labels_of",
    "public_model",
    "read_round",
    "read_seed",
    "receive_model",
    "require_finite",
    "require_plan",
    "trained",
    # Learners, and what they minimise.
    "ContinuingLearner",
    "Correction",
    "FeatureLearner",
    "Generated",
    "GuidedLearner",
    "HeadedLearner",
    "Learner",
    "LearnerFactory",
    "Objective",
    "PortableLearner",
    "Prototypes",
    "Proximal",
    "Recipe",
    "SoftLearner",
    "StartingLearner",
    "link_scores",
    "plan_of",
    "require_features",
    "require_guided",
    "require_headed",
    "require_portable",
    "require_soft",
    # Combining answers.
    "ExactSum",
    "RobustConsensus",
    "VoteCounts",
    "believed_counts",
    "believed_sizes",
    # Strategies that average weights, and more.
    "CLASS_COUNTS",
    "CountedParty",
    "CountedStrategy",
    "CountedWeights",
    "FlowerStrategy",
    "LocalWeights",
    "WeightsOptions",
    "WeightsParty",
    "WeightsState",
    "flower_strategy",
    "split_counts",
    # Arrays and randomness.
    "Array",
    "FloatArray",
    "IntArray",
    "content_hash",
    "derive_rng",
]
