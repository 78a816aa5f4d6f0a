"""Fixtures of several learners' tests."""

import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a package be missing for our modules of some prefixes, which are imported anew."""

    def forget(package: str, *prefixes: str) -> None:
        for name in [name for name in sys.modules if name.startswith(prefixes)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return forget


@pytest.fixture
def without_numba(without: Callable[..., None]) -> None:
    """Let Numba be missing for networks that are trained from now on."""
    without("numba", "clients.compiled", "clients.networks.compiled")
