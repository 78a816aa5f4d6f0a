"""What can be learned for an epsilon, from public facts, before anything is spent."""

from fl_strategies.privacy.planning.plans import DEFAULT_MARGINS, Facts, Plan, Plans, plan

__all__ = ["DEFAULT_MARGINS", "Facts", "Plan", "Plans", "plan"]
