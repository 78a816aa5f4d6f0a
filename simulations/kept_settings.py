"""Which settings a run must have as before when it is resumed."""

from simulations.config import Settings, Value

MAY_CHANGE = frozenset(
    {
        "checkpoint-dir",
        "resume",
        "num-server-rounds",
        "then-rounds",
        "min-parties",
        "max-wait",
        "timeout",
        "output-dir",
        "data-dir",
        "state-dir",
        "solo",
        "central",
        "central-learner",
        "pate",
        "public-only",
        "num-workers",
    }
)
"""Settings that a run may have another value of when it is resumed."""


def settings_to_keep(settings: Settings) -> dict[str, Value]:
    """Return the settings that a resumed run must have the same values of."""
    told = settings.to_run_config().items()
    return {key: value for key, value in told if key not in MAY_CHANGE}
