"""Which settings of FedKT go together; see `FedKT` for what they mean."""

from fl_strategies.aggregation.evidence_pool import ClassShare, read_class_share
from fl_strategies.exceptions import require
from fl_strategies.privacy.strength import require_audible
from fl_strategies.privacy.votes import VoteMechanism, drowned_votes
from fl_strategies.strategies.fedkt import words

OWNER = "FedKT"


def check_level(level: words.PrivacyLevel, exchange: words.Exchange, trim: float) -> None:
    """Raise unless level and exchange are known, and votes may be trimmed there."""
    require(level in words.LEVELS, OWNER, words.PRIVACY_LEVEL, "L0, L1 or L2", level)
    known = exchange in words.EXCHANGES
    require(known, OWNER, words.EXCHANGE, "'votes' or 'models'", exchange)
    require(0 <= trim < 0.5, OWNER, words.VOTE_TRIM, "at least 0 and below 0.5", trim)
    rule = "0 at L1, where whether a party's votes count must not depend on other parties"
    require(level != "L1" or not trim, OWNER, words.VOTE_TRIM, rule, trim)


def check_number(name: str, value: int, most: int) -> int:
    """Return how many models a party trains; raise unless it would agree to them."""
    require(1 <= value <= most, OWNER, name, f"from 1 to {most}", value)
    return value


def check_counts(count_epsilon: float, target_epsilon: float | None) -> None:
    """Raise if noisy counts cannot be made, or cost more than everything may."""
    words.count_noise(count_epsilon)
    left = target_epsilon is None or count_epsilon < target_epsilon
    require(left, OWNER, "count_epsilon", "below target_epsilon", count_epsilon)


def check_noise(mechanism: VoteMechanism, num_votes: int, *, accepted: bool) -> None:
    """Raise if noise drowns all votes together, unless that is accepted."""
    require_audible(OWNER, drowned_votes(mechanism, num_votes), accepted=accepted)


def read_weights(weights: words.VoteWeights, level: words.PrivacyLevel) -> words.VoteWeights:
    """Return the weights of votes that are meant; raise for those that the level forbids."""
    allowed = words.WEIGHTS_AT[level]
    chosen = allowed[0] if weights == "auto" else weights
    require(chosen in allowed, OWNER, "vote_weights", words.WEIGHT_RULES[level], weights)
    return chosen


def read_share(share: ClassShare, num_classes: int, *, weighted: bool) -> ClassShare:
    """Return a checked rule of class shares; without weights there is no step to choose."""
    rule = read_class_share(OWNER, share, num_classes, "single-label")
    fits = weighted or rule in ("auto", "none")
    require(fits, OWNER, "class_share", "auto or none unless votes are weighted", share)
    return rule
