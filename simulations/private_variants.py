"""What can promise privacy: every strategy and level, by whom it protects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from simulations.fitting import Draft, Given

Unit: TypeAlias = Literal["example", "party"]

SERVER_MODEL: Final = "the server's model, because parties keep the figures of theirs at home"


@dataclass(frozen=True)
class Variant:
    """A strategy at a level that keeps to any budget.

    Parameters
    ----------
    name : str
    unit : "example" or "party"
        Whom it protects.
    decided : mapping
        The strategy, and what makes it private; nobody can change it.
    usual : mapping
        Settings that suit it, unless the user chose others.
    shares : mapping
        Settings that are a share of the budget, unless the user chose others.
    note : str
        What readers of its figure must know.
    """

    name: str
    unit: Unit
    decided: Given
    usual: Given = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return str(self.decided["strategy"])

    def draft(self, budget: float, *, apart: bool = False) -> Draft:
        """Return what spends a budget; named for it where there are several to tell apart."""
        shares = {key: share * budget for key, share in self.shares.items()}
        return Draft(
            f"{self.name} at {budget:g}" if apart else self.name,
            {**self.decided, "target-epsilon": budget},
            {**self.usual, **shares},
            budget=budget,
            note=self.note,
        )


def _of_level(strategy: str, level: str, unit: Unit) -> Variant:
    """Return a strategy whose levels say whose noise it is."""
    return Variant(f"{strategy} {level}", unit, {"strategy": strategy, "privacy-level": level})


VARIANTS: Final = (
    _of_level("fedhistogram", "L2", "example"),
    _of_level("fedhistogram", "central", "example"),
    _of_level("fedregression", "L2", "example"),
    _of_level("fedregression", "central", "example"),
    _of_level("fedkt", "L2", "example"),
    Variant(
        "fedmd ldp",
        "example",
        {"strategy": "fedmd", "release": "ldp"},
        {"num-server-rounds": 1},
        note=SERVER_MODEL,
    ),
    Variant(
        "fedkd noise, noisy counts",
        "example",
        {"strategy": "fedkd", "weights": "noisy-counts"},
        {"noise": "gaussian"},
        {"count-epsilon": 0.5},
    ),
    _of_level("fedhistogram", "L1", "party"),
    _of_level("fedregression", "L1", "party"),
    _of_level("fedkt", "L1", "party"),
    Variant(
        "fedkd noise",
        "party",
        {"strategy": "fedkd", "weights": "uniform"},
        {"noise": "gaussian"},
    ),
)
