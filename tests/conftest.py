"""Shared set-up: every test may create Flower messages."""

import pytest

from fl_strategies._compat import claim_task_identity


@pytest.fixture(autouse=True)
def _task_identity() -> None:
    claim_task_identity()
