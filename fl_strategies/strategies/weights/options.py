"""Options of strategies that average weights, also of those that are Flower's own."""

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import Any, ClassVar, Final

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fl_strategies.learners import plan_of
from fl_strategies.options import Options, option
from fl_strategies.privacy.mechanisms import Charges
from fl_strategies.release import Price, ReleaseFacts, ReleasePlan, open_charges

# A server cannot make a party train without end.
MAX_EPOCHS: Final = 10_000
TASK: Final = "task"
WEIGHTS: Final = "weights"
MODEL: Final = "model"
PROXIMAL_MU: Final = "proximal-mu"

SETTINGS: Final[Mapping[type[Strategy], Mapping[str, float]]] = {
    flower.FedProx: {"proximal_mu": 0.1},
    flower.FedAvgM: {"server_learning_rate": 1.0, "server_momentum": 0.9},
    flower.FedAdagrad: {"eta": 0.1, "eta_l": 0.1, "tau": 1e-3},
    flower.FedAdam: {"eta": 0.1, "eta_l": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3},
    flower.FedYogi: {"eta": 0.01, "eta_l": 0.0316, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3},
    flower.FedTrimmedAvg: {"beta": 0.2},
    flower.Krum: {"num_malicious_nodes": 0},
    flower.MultiKrum: {"num_malicious_nodes": 0, "num_nodes_to_select": 1},
    flower.Bulyan: {"num_malicious_nodes": 0},
}
"""Settings of Flower's classes beyond those of its FedAvg. The defaults are Flower's, except
for `proximal_mu` and `server_momentum`: with Flower's 0 both would be no more than FedAvg."""
_RENAMED: Final = {"beta": "trim_fraction"}
"""Flower's names that mean something else in a run configuration."""


@dataclass(frozen=True, kw_only=True)
class WeightsOptions(Options):
    """What all strategies that average weights share.

    Parameters
    ----------
    local_epochs : int
        Passes of a party over its records in a round; five, as FedAvg's paper often has.
    restrain : bool
        Limit how far the weights of one party can be from the others', and how many records
        it can claim, before Flower's class sees them; see `restrained`.
    """

    owner: ClassVar[str] = "FlowerStrategy"
    flower_names: ClassVar[Mapping[str, str]] = {}
    """What Flower's class calls those of these options that are its own."""

    local_epochs: int = option(
        5, "passes of a party over its records in a round", least=1, most=MAX_EPOCHS
    )
    restrain: bool = option(True, "limit how far one party can pull the average")


@dataclass(frozen=True, kw_only=True)
class FedAvgOptions(WeightsOptions):
    """Options of `FedAvg`; see `WeightsOptions`."""

    owner: ClassVar[str] = "FedAvg"


AUDIENCE: Final = "the server, the other parties and everybody who sees a model"
UNPROTECTED_WEIGHTS: Final = "weights left the party that were trained without noise"


def release_plan(
    name: str,
    options: WeightsOptions,
    facts: ReleaseFacts,
    *,
    also_leaves: tuple[str, ...] = (),
    purpose: str = "",
) -> ReleasePlan:
    """Return what one round releases: weights, protected by private training alone.

    Only parties know what their training spends, so they report it. `also_leaves` says why
    training does not protect what leaves beside the weights; `purpose` is for the journal.
    """

    def price() -> Price:
        training: Charges = ()
        if facts.trainer is not None:
            epochs = options.local_epochs
            training = tuple(plan_of(facts.trainer(), facts.num_records, epochs=epochs))
        weights = training or open_charges(UNPROTECTED_WEIGHTS)
        return Price(record=(*weights, *open_charges(*also_leaves)), training=training)

    return ReleasePlan(
        name=name,
        purpose=purpose,
        trainer=facts.trainer,
        tells_counts=bool(also_leaves),
        epochs=options.local_epochs,
        audience=AUDIENCE,
        reason=UNPROTECTED_WEIGHTS,
        reported=True,
        price=price,
    )


@cache
def options_for(kind: type[Strategy], **settings: float) -> type[WeightsOptions]:
    """Return options that also have the settings of one of Flower's strategies.

    They are those of `SETTINGS`, also for a subclass, and those that are given.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedProx
    >>> options_for(FedProx)(proximal_mu=1.0).to_config()
    {'local-epochs': 5, 'restrain': True, 'proximal-mu': 1.0}
    """
    known: Mapping[str, float] = next((SETTINGS[k] for k in kind.__mro__ if k in SETTINGS), {})
    own = {**known, **settings}
    names = {_RENAMED.get(name, name): name for name in own}
    fields = [
        (field, type(own[name]), option(own[name], f"{name} of Flower's {kind.__name__}"))
        for field, name in names.items()
    ]
    return make_dataclass(
        f"{kind.__name__}Options",
        fields,
        bases=(WeightsOptions,),
        # Other processes make the class anew, since no module has it by name.
        namespace={
            "owner": kind.__name__,
            "flower_names": names,
            "__reduce__": lambda options: (_rebuilt, (kind, settings, options.to_config())),
        },
        frozen=True,
        kw_only=True,
    )


def _rebuilt(
    kind: type[Strategy], settings: dict[str, float], config: dict[str, Any]
) -> WeightsOptions:
    return options_for(kind, **settings).from_config(config)


def make_flower(kind: type[Strategy], options: WeightsOptions) -> Strategy:
    """Return one of Flower's strategies with its settings; whom to ask is decided elsewhere."""
    own = {name: getattr(options, field) for field, name in options.flower_names.items()}
    made: Any = kind
    strategy: Strategy = made(**own, min_train_nodes=1, min_available_nodes=1)
    return strategy
