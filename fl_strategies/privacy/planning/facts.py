"""What a planner is given and what it returns: facts of a federation, drafts of a release."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from fl_strategies._util.arrays import Array, FloatArray
from fl_strategies.errors import require
from fl_strategies.privacy._numeric import check_count, check_delta, check_positive
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import UNITS, Noise, Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.votes import chance_kept, chance_of_plurality

Margins: TypeAlias = Sequence[float] | Sequence[Sequence[float]]

DEFAULT_MARGINS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Leads of the leading class over the second, equally likely, as shares of all votes."""
_OWNER: Final = "plan"
_MOST_MARGINS: Final = 1_000_000
_LARGEST_MARGIN: Final = 1000.0
_BISECTIONS: Final = 50
# All classes beyond are taken for as near as this one, which few votes ever are for.
_MOST_RANKS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public facts about a federation, and what it may spend.

    Parameters
    ----------
    target_epsilon, delta : float
    num_parties : int
    num_records : int
        Records of one party.
    num_classes, num_public : int
    num_columns : int, optional
        Values of a row; unknown if omitted.
    unit : "party" or "example"
        Who is to be protected.
    margins : sequence of float
        Leads of the leading class over the second, all equally likely, as shares of the votes
        on a row; for histograms as shares of the records of an average cell, so that
        a cell with more than others may have a lead above 1. Of further classes each has
        the same fraction of the votes of the one before it. Or, instead of a number, the
        leads over every other class.
    """

    target_epsilon: float
    num_parties: int
    num_records: int
    num_classes: int
    num_public: int
    unit: Unit = "example"
    num_columns: int | None = None
    delta: float = DEFAULT_DELTA
    margins: Margins = DEFAULT_MARGINS

    def __post_init__(self) -> None:
        """Check the facts."""
        check_positive(_OWNER, "target_epsilon", self.target_epsilon)
        check_delta(_OWNER, self.delta)
        for name, least in (
            ("num_parties", 1),
            ("num_records", 1),
            ("num_classes", 2),
            ("num_public", 1),
        ):
            check_count(_OWNER, name, getattr(self, name), least=least)
        if self.num_columns is not None:
            check_count(_OWNER, "num_columns", self.num_columns, least=1)
        require(self.unit in UNITS, _OWNER, "unit", " or ".join(UNITS), self.unit)
        object.__setattr__(self, "margins", self._checked_margins())

    def _checked_margins(self) -> Margins:
        some, rule = 0 < len(self.margins) <= _MOST_MARGINS, "from 1 to a million"
        require(some, _OWNER, "margins", rule, len(self.margins))
        leads = np.asarray(self.margins, dtype=np.float64)
        shaped = leads.ndim == 1 or leads.shape[1:] == (self.num_classes - 1,)
        rule = "numbers, or one number for every class but the first"
        require(shaped, _OWNER, "margins", rule, leads.shape)
        inside = bool(((leads >= 0) & (leads <= _LARGEST_MARGIN)).all())
        rule = f"from 0 to {_LARGEST_MARGIN:g}"
        require(inside, _OWNER, "margins", rule, (leads.min(), leads.max()))
        kept = leads.tolist()
        return tuple(kept) if leads.ndim == 1 else tuple(map(tuple, kept))

    def _gaps(self) -> tuple[FloatArray, FloatArray, Array]:
        """Return different leads over other classes, how many each is for, and how often."""
        leads, counts = np.unique(np.asarray(self.margins), axis=0, return_counts=True)
        if leads.ndim == 1:
            return (*spread_gaps(leads, self.num_classes), counts)
        return leads, np.ones(leads.shape[1]), counts

    @property
    def all_records(self) -> int:
        """Records of all parties."""
        return self.num_parties * self.num_records

    def right_labels(self, noise: Noise, scale: float, num_votes: float) -> float:
        """Return the share of labels that are as they would be without noise.

        Exact for the mechanism on the stated margins of so many votes or records.
        """
        gaps, times, counts = self._gaps()
        kept = chance_kept(noise, num_votes * gaps, scale, times)
        return float(np.average(kept, weights=counts))

    def right_pluralities(self, kept: float) -> float:
        """Return the same where every party's own vote is kept with a chance."""
        gaps, _, counts = self._gaps()
        gaps = np.minimum(gaps, 1)
        chances = [
            chance_of_plurality(_whole_votes(row, self.num_parties), kept, self.num_classes)
            for row in gaps
        ]
        return float(np.average(chances, weights=counts))

    def worth(self, num_labels: int, right: float) -> float:
        """Return how many labels without noise so many noisy ones are worth.

        A label that is right beyond chance in a share s of all cases says as much about a
        linear model as s squared of a label without noise.
        """
        beyond = (right - 1 / self.num_classes) / (1 - 1 / self.num_classes)
        return num_labels * max(beyond, 0.0) ** 2


def spread_gaps(margins: Array, num_classes: int) -> tuple[FloatArray, FloatArray]:
    """Return how far all other classes are behind the first, and how many each gap is for.

    Shares of classes fall by the same factor from each to the next, by the one that gives
    the second its margin; where the margin is all votes or more, no other class has any.

    Parameters
    ----------
    margins : (n,)
    num_classes : int

    Returns
    -------
    gaps : (n, num_gaps)
    times : (num_gaps,)

    Examples
    --------
    >>> gaps, times = spread_gaps(np.array([0.2]), 4)
    >>> gaps.round(2), times
    (array([[0.2 , 0.32, 0.38]]), array([1., 1., 1.]))
    """
    leads = np.asarray(margins, dtype=np.float64)[:, None]
    low, high = np.zeros_like(leads), np.ones_like(leads)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        first = 1 / (middle ** np.arange(num_classes)).sum(axis=1, keepdims=True)
        larger = first * (1 - middle) > leads
        low, high = np.where(larger, middle, low), np.where(larger, high, middle)
    ranks = np.arange(1, min(num_classes, _MOST_RANKS))
    first = 1 / (low ** np.arange(num_classes)).sum(axis=1, keepdims=True)
    times = np.ones(len(ranks))
    times[-1] = num_classes - len(ranks)
    return np.where(leads < 1, first * (1 - low**ranks), leads), times


def _whole_votes(gaps: FloatArray, num_votes: int) -> Sequence[int]:
    """Return whole votes of the first classes, nearest to shares with such gaps."""
    behind = np.concatenate([[0.0], gaps])
    shares = np.maximum((1 + behind.sum()) / len(behind) - behind, 0.0)
    wanted = num_votes * shares / shares.sum()
    whole = np.floor(wanted).astype(int)
    nearest = np.argsort(whole - wanted, kind="stable")[: num_votes - int(whole.sum())]
    whole[nearest] += 1
    return [int(number) for number in whole]


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


@runtime_checkable
class Adjustable(Planner, Protocol):
    """A planner with knobs of its own."""

    def with_knob(self, facts: Facts, knob: str, value: float) -> tuple[Planner, Facts]:
        """Return planner and facts with another value of a knob that is none of the facts."""
