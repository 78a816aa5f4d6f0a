"""How much may be spent: an epsilon at a delta, and a chance to be in a sample."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_strategies.exceptions import require
from fl_strategies.privacy._numeric import check_delta, check_positive
from fl_strategies.privacy.accountant import Entry, delta_at
from fl_strategies.privacy.events import SubsampleEvent, Unit
from fl_strategies.privacy.ledger import PrivacyLedger

_OWNER = "Allowance"


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """A limit on what records pay.

    A sample that is used in the clear spends delta whatever epsilon is, and far more of it
    than noise is ever allowed. So it has a limit of its own: up to `sample_delta`, the
    chance to be in a sample comes on top of `delta`, and noise gains nothing by it. A larger
    chance must fit into `delta` itself.

    Parameters
    ----------
    max_epsilon : float, optional
        None: no limit.
    delta : float
    sample_delta : float
        Largest chance that a record is ever in a sample; all samples compose.

    Examples
    --------
    >>> sample = SubsampleEvent(records=100, samples=10, replacement=False)
    >>> Allowance(max_epsilon=1.0, sample_delta=0.1).delta_of([(sample, 1)])
    0.100009
    >>> Allowance(max_epsilon=1.0, sample_delta=0.1).delta_of([(sample, 2)])
    1e-05
    """

    max_epsilon: float | None = None
    delta: float = 1e-5
    sample_delta: float = 0.0

    def __post_init__(self) -> None:
        """Check the limits."""
        check_delta(_OWNER, self.delta)
        if self.max_epsilon is not None:
            check_positive(_OWNER, "max_epsilon", self.max_epsilon)
        share = self.sample_delta
        require(0 <= share < 1, _OWNER, "sample_delta", "at least 0 and below 1", share)

    def delta_of(self, entries: Sequence[Entry]) -> float:
        """Return the delta at which these releases are judged."""
        samples = [entry for entry in entries if isinstance(entry[0], SubsampleEvent)]
        drawn = delta_at(samples, 0.0)
        within = 0 < drawn <= self.sample_delta
        return drawn + (1 - drawn) * self.delta if within else self.delta

    def ledger(
        self, unit: Unit, past: Sequence[Sequence[Entry]], planned: Sequence[Entry] = ()
    ) -> PrivacyLedger:
        """Return a ledger of past releases that is ready to charge what is planned."""
        entries = [entry for release in past for entry in release]
        delta = self.delta_of([*entries, *planned])
        ledger = PrivacyLedger(unit, delta=delta, max_epsilon=self.max_epsilon)
        for release in past:
            ledger.compose_all(release)
        return ledger
