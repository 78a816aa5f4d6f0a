"""What can be learned for an epsilon, from public facts, before anything is spent."""

from fl_strategies.privacy.planning.facts import DEFAULT_MARGINS, Facts
from fl_strategies.privacy.planning.plans import Plan, Plans, plan

__all__ = ["DEFAULT_MARGINS", "Facts", "Plan", "Plans", "plan"]
