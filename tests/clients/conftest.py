"""Fixtures of several learners' tests."""

import sys

import pytest


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Numba be missing for all that is imported from now on."""
    for name in list(sys.modules):
        if name.startswith("clients.compiled") or name in (
            "clients.networks.compiled",
            "clients.tabular.boosted_trees",
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
