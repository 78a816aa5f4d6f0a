"""Settings as JSON has them, by which a resumed run is compared with the one before."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np

from fl_strategies.arrays import content_hash


def described(value: object) -> object:
    """Return a setting as JSON has it; of code, which has none, only that it is there."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return content_hash(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: described(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): described(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    return value if isinstance(value, str | int | float | None) else "..."
