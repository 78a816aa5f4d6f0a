"""What can be set about FENS."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from fl_strategies.options import Options, option

Aggregator: TypeAlias = Literal["linear", "network", "mean"]

# A server cannot make a party train without end, or something of any size.
MAX_EPOCHS: Final = 10_000
MAX_HIDDEN: Final = 4096


@dataclass(frozen=True, kw_only=True)
class FENSOptions(Options):
    """Options of `FENS`.

    Parameters
    ----------
    aggregator : "linear", "network" or "mean"
        "linear": one weight a model and class; "network": also a hidden layer over the
        scores of all models; both begin as the mean of log-probabilities. "mean" of
        probabilities is not trained, so one round is all.
    num_hidden : int
        Units of the hidden layer.
    aggregator_epochs : int
        Passes of a party over its held-back records in a round.
    aggregator_rate : float
        Step size.
    holdback : float
        Share of a party's records that its own model does not see: on records that it has
        learned, it would look better than all others.
    restrain : bool
        Limit how far one party can pull the average of aggregators; see
        `strategies.weights.restraint`.
    """

    owner: ClassVar[str] = "FENS"

    aggregator: Aggregator = option("linear", "what combines the scores of all models")
    num_hidden: int = option(32, "units of the network", least=1, most=MAX_HIDDEN)
    aggregator_epochs: int = option(5, "passes a round", least=1, most=MAX_EPOCHS)
    aggregator_rate: float = option(0.05, "step size of the aggregator", above=0, most=10)
    holdback: float = option(0.1, "share of records for the aggregator", above=0, below=1)
    restrain: bool = option(True, "limit how far one party can pull the average")

    @property
    def is_trained(self) -> bool:
        """Whether the aggregator learns from records."""
        return self.aggregator != "mean"

    @property
    def hidden_units(self) -> int:
        """Units of the hidden layer, 0 where there is none."""
        return self.num_hidden if self.aggregator == "network" else 0
