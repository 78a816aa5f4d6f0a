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

# What can be set, and errors as sentences.
__all__ = ["Options", "option", "group", "variants", "require", "require_known", "InvalidData"]
__all__ += ["InvalidParameter", "KnowledgeMismatch", "PrivacyBudgetExceeded"]
__all__ += ["UnsupportedLearner"]
# What is released, and what it costs.
__all__ += ["AUDIENCES", "DEFAULT_DELTA", "GaussianSums", "LaplaceCounts", "NoiseSpec"]
__all__ += ["NonPrivateEvent", "Price", "PrivacyLedger", "ReleaseFacts", "ReleasePlan"]
__all__ += ["ReleaseSpec", "ScorePrivacy", "VotePrivacy", "calibrate_scale", "calibrated_sums"]
__all__ += ["open_charges"]
# What crosses the trust boundary.
__all__ += ["Knowledge", "Metrics", "PartyReply", "Scalar", "keys"]
# The server side.
__all__ += ["FederationOptions", "KnowledgeStrategy", "State", "check_factories", "check_task"]
__all__ += ["public_array", "Task"]
# The party side.
__all__ += ["ArrayField", "ArraysField", "KnowledgeField", "Party", "PartyRole", "PartyState"]
__all__ += ["ScalarField", "charge_plan", "check_num_classes", "check_public_data", "facts_of"]
__all__ += ["finite_logits", "fit_on_records", "labels_of", "public_model", "read_round"]
__all__ += ["read_seed", "receive_model", "require_finite", "require_plan", "trained"]
# Learners, and what they minimise.
__all__ += ["ContinuingLearner", "Correction", "FeatureLearner", "Generated", "GuidedLearner"]
__all__ += ["HeadedLearner", "Learner", "LearnerFactory", "Objective", "PortableLearner"]
__all__ += ["Prototypes", "Proximal", "Recipe", "SoftLearner", "StartingLearner", "link_scores"]
__all__ += ["plan_of", "require_features", "require_guided", "require_headed"]
__all__ += ["require_portable", "require_soft"]
# Combining answers.
__all__ += ["ExactSum", "RobustConsensus", "VoteCounts", "believed_counts", "believed_sizes"]
# Strategies that average weights, and more.
__all__ += ["CLASS_COUNTS", "CountedParty", "CountedStrategy", "CountedWeights"]
__all__ += ["FlowerStrategy", "LocalWeights", "WeightsOptions", "WeightsParty", "WeightsState"]
__all__ += ["flower_strategy", "split_counts"]
# Arrays and randomness.
__all__ += ["Array", "FloatArray", "IntArray", "content_hash", "derive_rng"]
