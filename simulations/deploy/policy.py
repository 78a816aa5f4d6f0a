"""What a party's node-config says about its policy."""

from collections.abc import Mapping
from typing import Final

from fl_strategies import REGISTRY
from fl_strategies.core.policy import PartyPolicy
from fl_strategies.exceptions import require
from fl_strategies.strategies.fedkt.options import LEVELS
from fl_strategies.strategies.fedmd.options import RELEASES
from fl_strategies.strategies.sums.options import LEVELS as SUM_LEVELS
from fl_strategies.strategies.weights import FLOWER
from simulations.budget import OWNER
from simulations.config import Value

_USUAL: Final = PartyPolicy()
MAX_RUN_EPSILON: Final = "max-run-epsilon"
POLICY_KEYS: Final[Mapping[str, Value]] = {
    "strategies": "",
    "allow-unprotected": _USUAL.allow_unprotected,
    "allow-models": _USUAL.allow_models,
    "allow-seeded-noise": _USUAL.allow_seeded_noise,
    "allow-drowned-noise": _USUAL.allow_drowned_noise,
    MAX_RUN_EPSILON: float(_USUAL.max_run_epsilon or 0),
    "max-epochs": _USUAL.max_epochs,
    "max-fits": _USUAL.max_fits,
    "max-predictions": _USUAL.max_predictions,
}
"""What a node may say about its policy, and the default of what it omits."""
FORMS: Final = (
    *REGISTRY,
    FLOWER,
    *(f"fedkt {level}" for level in LEVELS),
    *(f"{name} {release}" for name in ("cronus", "fedmd") for release in RELEASES),
    *(f"{name} {level}" for name in ("fedhistogram", "fedregression") for level in SUM_LEVELS),
)
"""What a policy may allow by name."""


def policy_of(config: Mapping[str, Value], *, limited: bool) -> PartyPolicy:
    """Return the policy that a complete node-config describes.

    Parameters
    ----------
    config : mapping
    limited : bool
        Whether the node itself names `max-run-epsilon`, which contradicts
        `allow-unprotected`; the default does not.
    """
    is_open = bool(config["allow-unprotected"])
    rule = "omitted with allow-unprotected: what has no noise costs more than any number"
    require(not (is_open and limited), OWNER, MAX_RUN_EPSILON, rule, config[MAX_RUN_EPSILON])
    return PartyPolicy(
        strategies=_names(str(config["strategies"])),
        allow_unprotected=is_open,
        allow_models=bool(config["allow-models"]),
        allow_seeded_noise=bool(config["allow-seeded-noise"]),
        allow_drowned_noise=bool(config["allow-drowned-noise"]),
        max_run_epsilon=None if is_open else float(config[MAX_RUN_EPSILON]),
        delta=float(config["delta"]),
        sample_delta=float(config["sample-delta"]),
        max_epochs=int(config["max-epochs"]),
        max_fits=int(config["max-fits"]),
        max_predictions=int(config["max-predictions"]),
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        require(name in FORMS, OWNER, "strategies", f"among {', '.join(FORMS)}", name)
    return names
