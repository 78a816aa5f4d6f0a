"""Tests with real processes must leave none behind, and say what they have measured."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.leftovers import nothing_is_left_behind

__all__ = ["nothing_is_left_behind"]

Measured = Callable[..., None]


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """Return a function that takes down what came of a fault, for the end of the output."""

    def take_down(fault: str, seconds: float, outcome: str) -> None:
        record_property("outcome", (fault, seconds, outcome))

    return take_down


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what docs/reliability.md is made of."""
    passed = [one for one in terminalreporter.stats.get("passed", []) if one.when == "call"]
    noted = [pair for one in passed for pair in one.user_properties]
    rows = [value for name, value in noted if name == "outcome"]
    if rows:
        terminalreporter.section("measured outcomes")
    for fault, seconds, outcome in rows:
        terminalreporter.write_line(f"{fault} | {seconds:.0f} s | {outcome}")
