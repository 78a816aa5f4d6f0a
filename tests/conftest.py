"""Shared set-up: one thread per library, and every test may create Flower messages."""

import os

# Before anything loads OpenMP. `make test` runs several processes side by side; with a thread
# per core in each they wait for one another: 40 s instead of 0.2 for a small histogram forest.
for _library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import pytest  # noqa: E402

from fl_strategies._compat import claim_task_identity  # noqa: E402


@pytest.fixture(autouse=True)
def _task_identity() -> None:
    claim_task_identity()
