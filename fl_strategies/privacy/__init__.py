"""Every release noised, accounted and limited as one act.

A mechanism returns values together with the event that describes them; a ledger composes
events, checks a budget before anything leaves, and says in plain words what is promised.
"""

from fl_strategies.privacy.accountant import METHODS, Claim, bounds, claim, delta_at
from fl_strategies.privacy.events import (
    DPSGDEvent,
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    OneVoteEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
    event_from_json,
    event_to_json,
)
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import (
    UNANSWERED,
    ConfidentNoisyMax,
    GaussianScores,
    LaplaceScores,
    NoisyMax,
    Release,
    SubsampleOnce,
)
from fl_strategies.privacy.noise import calibrate_scale
from fl_strategies.privacy.planning import DEFAULT_MARGINS, Plan, Plans, plan

__all__ = [
    # Events
    "PrivacyEvent",
    "NoisyMaxEvent",
    "OneVoteEvent",
    "ThresholdEvent",
    "LaplaceEvent",
    "GaussianEvent",
    "SubsampleEvent",
    "DPSGDEvent",
    "NonPrivateEvent",
    "event_to_json",
    "event_from_json",
    # Mechanisms
    "Release",
    "NoisyMax",
    "ConfidentNoisyMax",
    "UNANSWERED",
    "LaplaceScores",
    "GaussianScores",
    "SubsampleOnce",
    # Accounting
    "METHODS",
    "Claim",
    "bounds",
    "claim",
    "delta_at",
    "calibrate_scale",
    "PrivacyLedger",
    # Planning
    "DEFAULT_MARGINS",
    "Plan",
    "Plans",
    "plan",
]
