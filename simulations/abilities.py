"""Which learners can do what a strategy needs."""

from fl_strategies import Learner
from fl_strategies.core.protocols import LearnerFactory, PortableLearner, can_travel
from fl_strategies.exceptions import MissingExtra, StrategyError


def is_able(
    factory: LearnerFactory, needs: tuple[type, ...], *, if_missing: bool = False
) -> bool:
    """Tell whether a learner has what is needed; `if_missing`: where it is not installed."""
    try:
        learner = factory()
    except MissingExtra:
        return if_missing
    except StrategyError:
        return False
    return has_all(learner, needs)


def has_all(learner: Learner, needs: tuple[type, ...]) -> bool:
    """Tell whether a learner has all protocols, and can travel as it is set if it must."""
    at_hand = PortableLearner not in needs or can_travel(learner)
    return at_hand and all(isinstance(learner, need) for need in needs)
