"""What a planner of one strategy is, and what it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import Noise, Unit
from fl_strategies.privacy.planning.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a strategy would do under some facts.

    Parameters
    ----------
    noise : "gumbel", "laplace" or "gaussian"
    scale : float
        Scale of Laplace or Gumbel noise, standard deviation of Gaussian noise, where it is
        drawn.
    asked, num_asked : str, int
        What gets a label, queries or cells, and how many.
    voters : str
        Whose votes or records decide a label, in words.
    right : float
        Expected share of labels that are as they would be without noise.
    batches : sequence of sequence of (event, count)
        What one run releases, batch after batch.
    settings : str
        What repeats it on the command line.
    worth : float, optional
        As how many labels without noise it counts, if not by `Facts.worth`.
    """

    noise: Noise
    scale: float
    asked: str
    num_asked: int
    voters: str
    right: float
    batches: Sequence[Sequence[Entry]]
    settings: str
    worth: float | None = None


class Planner(Protocol):
    """What a strategy says of itself."""

    @property
    def name(self) -> str:
        """Name of the strategy and of what makes it private."""

    @property
    def unit(self) -> Unit:
        """Who is protected."""

    @property
    def trusts_server(self) -> bool:
        """Whether the server sees what is protected."""

    @property
    def knobs(self) -> Sequence[str]:
        """Which facts may be changed where nothing works."""

    def problem(self, facts: Facts) -> str:
        """Say why no setting can work; nothing if one can."""

    def draft(self, facts: Facts) -> Draft:
        """Return the best setting."""
