"""How many hostile inputs are tried, and a count of those that really were.

``FL_STRATEGIES_FUZZ_INPUTS`` is the number for all tests of this folder together. The few of
the default look whether anything is broken; ``FL_STRATEGIES_FUZZ_INPUTS=200000`` searches.
Inputs are numbered and every one is made from its number alone, so a failure names what to
look at, and a larger run tries the inputs of a smaller one again.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.fuzz.trials import Trials

TOTAL = int(os.environ.get("FL_STRATEGIES_FUZZ_INPUTS", "3000"))

_counts: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Every refused reply is logged, which here would be all that is seen."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Iterator[Trials]:
    """Return a counter with the share of inputs that the mark ``share`` gives this test."""
    mark = request.node.get_closest_marker("share")
    share = mark.args[0] if mark else 0.01
    counter = Trials(request.node.name, math.ceil(TOTAL * share))
    yield counter
    # Shown with a failure.
    print(f"{counter.name}: the last input was number {counter.last}")  # noqa: T201
    for outcome in ("tried", "refused", "taken"):
        _counts[outcome] += getattr(counter, outcome)
    request.node.user_properties.append(("fuzz-inputs", counter.tried))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "share(part): part of all fuzz inputs for this test")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _counts["tried"]:
        terminalreporter.write_line(
            f"fuzzing: {_counts['tried']} inputs tried, {_counts['refused']} refused, "
            f"{_counts['taken']} taken"
        )
