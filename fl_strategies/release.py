"""Declare once, for both sides, what leaves a party, what protects it and what it costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fl_strategies.learners import LearnerFactory, PrivateLearner, Task
from fl_strategies.options import Scalar
from fl_strategies.privacy.events import NonPrivateEvent, Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.mechanisms import Charges

_UNDECLARED: Final = "answers left the parties without noise"

AUDIENCES: Final[Mapping[str, str]] = {
    "L0": "nobody",
    "L1": "everybody who sees the final model, except the server, which is trusted",
    "L2": "the server, the other parties and everybody who sees the final model",
    "central": "everybody who sees the final model, except the server, which is trusted",
}
"""Against whom a guarantee holds, by where the noise is."""


def open_charges(*reasons: str, unit: Unit = "example") -> Charges:
    """Return the price of what leaves without noise, one event per reason."""
    return tuple((NonPrivateEvent(unit=unit, reason=reason), 1) for reason in reasons)


@dataclass(frozen=True, kw_only=True)
class PrivateVariant:
    """A strategy with noise that can keep to any budget, for `compare` and `curve` to run.

    Parameters
    ----------
    name : str
    unit : "party" or "example"
        Who is protected.
    decided : mapping
        The strategy and its kind of privacy, which users cannot change.
    usual : mapping
        Settings that suit it, unless users choose others.
    shares : mapping
        Settings that are a share of the budget, unless users choose others.
    sample : str
        Setting that, instead of noise, limits what a party learns from: as many records as
        the budget affords the smallest party.
    note : str
        What readers of its results must know.
    """

    name: str
    unit: Unit
    decided: Mapping[str, Scalar]
    usual: Mapping[str, Scalar] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    sample: str = ""
    note: str = ""

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return str(self.decided["strategy"])


def variants_at(strategy: str, *levels: str) -> tuple[PrivateVariant, ...]:
    """Return a strategy at levels of privacy, which say who adds the noise."""
    return tuple(
        PrivateVariant(
            name=f"{strategy} {level}",
            unit="party" if level == "L1" else "example",
            decided={"strategy": strategy, "privacy-level": level},
        )
        for level in levels
    )


def forms_at(
    levels: Sequence[str], price: Mapping[str, Scalar]
) -> Mapping[str, Mapping[str, Scalar]]:
    """Return what to set for each level of privacy; L0 has none, and so no price.

    Examples
    --------
    >>> forms_at(["L0", "L2"], {"target-epsilon": 1.0})
    {'L0': {}, 'L2': {'privacy-level': 'L2', 'target-epsilon': 1.0}}
    """
    return {
        level: {} if level == "L0" else {"privacy-level": level, **price} for level in levels
    }


@dataclass(frozen=True, kw_only=True)
class ReleaseFacts:
    """Public facts that, besides its options, decide what a strategy releases.

    Parameters
    ----------
    num_classes, num_public : int
    task : "single-label", "multi-label" or "regression"
    num_parties : int
        Of the federation, or as many as have answered; 0 where that is unknown.
    num_records : int
        Records of the party that is asked; 0 on the server.
    trainer : factory, optional
        What learns from records at the party that is asked.
    """

    num_classes: int
    num_public: int = 0
    task: Task = "single-label"
    num_parties: int = 0
    num_records: int = 0
    trainer: LearnerFactory | None = None


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one round costs, in the ledgers of both sides.

    Parameters
    ----------
    record : charges
        Of one answer, per record of the party: entered into its ledger and its journal before
        a record is looked at.
    whole_party : charges
        The same for a party that is replaced as a whole; none: it is unprotected.
    training : charges
        The part of `record` that private training spends by itself.
    unprotected : tuple of str
        Why nothing protects what the server receives, reason by reason.
    answers : charges
        Of one answer of every party, in the run's ledger; entered as often as the round was
        asked, also if it failed.
    published : charges
        Of the noise that a trusted server adds once; entered before it is drawn.
    """

    record: Charges = ()
    whole_party: Charges = ()
    training: Charges = ()
    unprotected: tuple[str, ...] = ()
    answers: Charges = ()
    published: Charges = ()


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """All that a strategy declares about privacy, made by a pure function of options and facts.

    Both sides make the same plan. The party's policy checks it before a record is touched;
    `fl_strategies.party.role.charge_plan` enters `price().record` into the party's ledger
    and journal. The server makes the run's ledger of `unit`, `delta` and `audience`, refuses
    noise that leaves no signal (`no_signal`), and `KnowledgeStrategy` enters the price of every
    round, also of one that fails. A strategy writes no charge anywhere else.

    The defaults are the worst: a strategy that declares nothing sends unprotected models.

    Parameters
    ----------
    name : str
        The strategy, and its level or release if it has several: ``"fedkt L2"``. A party's
        policy allows strategies by it.
    purpose : str
        The entry in a party's journal; the name if omitted.
    trainer : factory, optional
        Of what learns from records; if that trains privately, its answers are protected.
    models : bool
        Whether models leave, and not only answers about public rows.
    protected : bool
        Whether the party itself adds noise to what leaves, or uses a secret sample.
    trusted : bool
        Whether the server is trusted to add noise, which protects against everybody else.
    sample_delta : float
        Chance that a record is in that sample, where there is one.
    seeded : bool
        Whether that noise comes from the experiment's seed, which others know.
    tells_counts : bool
        Whether exact numbers of records leave as well, which private training is not about.
    epochs, fits, predictions : int
        Passes over data, models to be trained, and rows to be predicted by them.
    unit : "party" or "example"
        Who is protected, in the run's ledger.
    delta : float
        Of the run's ledger.
    record_delta : float
        Of the epsilon that a party states.
    audience : str
        Against whom the guarantee holds, in words.
    reason : str
        Why a whole party is not protected, where `Price.whole_party` is empty.
    reported : bool
        Whether the server can know a round's price only from its parties, which report what
        their training spends; see `KnowledgeStrategy.enter_reported`.
    price : callable
        Computes the `Price` of one round. It is asked for only once the policy agrees, since
        calibrating noise takes time.
    no_signal : callable
        Returns in words how the noise hides what it protects, or "".
    accepted : bool
        Whether that is accepted.
    advice : callable
        Returns what would help, or "".

    Examples
    --------
    A strategy whose parties answer with class counts under noise of their own::

        def plan_of(options: CountOptions, facts: ReleaseFacts) -> ReleasePlan:
            def price() -> Price:
                charges = options.noise().charges(facts.num_classes)
                return Price(record=charges, answers=charges)

            return ReleasePlan(
                name="counting", models=False, protected=True, fits=0, price=price
            )
    """

    name: str
    purpose: str = ""
    trainer: LearnerFactory | None = None
    models: bool = True
    protected: bool = False
    trusted: bool = False
    sample_delta: float = 0.0
    seeded: bool = False
    tells_counts: bool = False
    epochs: int = 0
    fits: int = 1
    predictions: int = 0
    unit: Unit = "example"
    delta: float = DEFAULT_DELTA
    record_delta: float = DEFAULT_DELTA
    audience: str = AUDIENCES["L0"]
    reason: str = _UNDECLARED
    reported: bool = False
    price: Callable[[], Price] = field(
        default=lambda: Price(record=open_charges(_UNDECLARED), unprotected=(_UNDECLARED,))
    )
    no_signal: Callable[[], str] = str
    accepted: bool = False
    advice: Callable[[], str] = str

    @property
    def promises(self) -> bool:
        """Whether a record or a party is promised anything, against whomever it is."""
        return (self.protected or self.trusted) and not self.seeded

    @property
    def trains_privately(self) -> bool:
        """Whether what learns from records promises them privacy by itself."""
        if self.tells_counts or self.trainer is None:
            return False
        return isinstance(self.trainer(), PrivateLearner)
