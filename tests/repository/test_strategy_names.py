"""Code that is not a strategy's knows none by its name: it asks the registry."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fl_strategies
from fl_strategies import REGISTRY

ROOT = Path(fl_strategies.__file__).parent.parent
NAMES = {*REGISTRY, *(algorithm.strategy.__name__ for algorithm in REGISTRY.values())}
NAMED = re.compile(rf"(?<!\w)({'|'.join(sorted(NAMES, key=len, reverse=True))})(?!\w)")
KNOWS = ("fl_strategies/strategies/", "fl_strategies/registry.py", "fl_strategies/__init__.py")
"""Where strategies are named: their own code, the registry, and what the package offers."""
LEFT = {"simulations/data/images.py"}
"""A data set has the name of the paper that made it: "cifar100-fedmd"."""


def sources(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


def words_of(path: Path) -> Iterator[str]:
    """Yield identifiers and texts of a module, without its documentation."""
    tree = ast.parse(path.read_text())
    bare = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    documentation = {id(node) for node in bare if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "" if id(node) in documentation else node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


def names_in(path: Path) -> set[str]:
    return {name for word in words_of(path) for name in NAMED.findall(word)}


def test_the_check_itself_can_fail() -> None:
    assert "fedkt" in names_in(ROOT / "fl_strategies" / "strategies" / "fedkt" / "server.py")


@pytest.mark.parametrize("top", ["fl_strategies", "clients", "simulations"])
def test_no_strategy_is_known_by_name(top: str) -> None:
    found = {path.relative_to(ROOT).as_posix() for path in sources(top) if names_in(path)}

    assert {name for name in found if not name.startswith(KNOWS)} <= LEFT
