"""Readers of settings that another side sent: typed, and within limits."""

from collections.abc import Sequence

from flwr.app import ConfigRecord

from fl_strategies.exceptions import KnowledgeMismatch, between
from fl_strategies.wire.knowledge import shown


def config_int(config: ConfigRecord, key: str, *, minimum: int, maximum: int) -> int:
    """Read a whole number that the server sent, within the bounds that a party accepts."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise KnowledgeMismatch(
            f"Server: {key} must be {between(minimum, maximum, 'a whole number')}, "
            f"got {shown(value)}."
        )
    return value


def config_float(config: ConfigRecord, key: str, *, minimum: float, maximum: float) -> float:
    """Read a number that the server sent, within the bounds that a party accepts."""
    value = config.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum:  # type: ignore[operator]
        raise KnowledgeMismatch(
            f"Server: {key} must be {between(minimum, maximum, 'a number')}, "
            f"got {shown(value)}."
        )
    return float(value)  # type: ignore[arg-type]


def config_choice(config: ConfigRecord, key: str, choices: Sequence[str]) -> str:
    """Read a string that the server sent, which must be one of a party's choices."""
    value = config.get(key)
    if not isinstance(value, str) or value not in choices:
        raise KnowledgeMismatch(
            f"Server: {key} must be one of {', '.join(choices)}, got {shown(value)}."
        )
    return value
