"""Options of FedGen."""

from dataclasses import dataclass
from typing import ClassVar

from fl_strategies.options import option
from fl_strategies.strategies.weights.options import WeightsOptions

MOST_GENERATED = 100_000


@dataclass(frozen=True, kw_only=True)
class FedGenOptions(WeightsOptions):
    """Options of `FedGen`; see also `WeightsOptions`.

    Parameters
    ----------
    strength : float
        Weight of generated features in a party's training; with 0 it is FedAvg.
    num_generated : int
        Features that a party generates in a round, all of which count in every step.
    generator_steps, generator_batch, generator_rate : int, int, float
        How the server trains the generator in a round: steps of Adam, features in each, and
        their size.
    generator_units, noise_units : int
        Its hidden units, and numbers of noise that it turns into features.
    diversity : float
        Weight of the term that keeps features of one class apart.
    """

    owner: ClassVar[str] = "FedGen"

    strength: float = option(1.0, "weight of generated features; 0: FedAvg", least=0, most=1e6)
    num_generated: int = option(
        256, "features that a party generates in a round", least=1, most=MOST_GENERATED
    )
    generator_steps: int = option(100, "steps of the generator in a round", least=1)
    generator_batch: int = option(32, "features in such a step", least=2, most=4096)
    generator_rate: float = option(0.001, "size of such a step", above=0)
    generator_units: int = option(128, "hidden units of the generator", least=1, most=10_000)
    noise_units: int = option(32, "numbers of its noise", least=1, most=5_000)
    diversity: float = option(1.0, "weight of keeping features apart", least=0)
