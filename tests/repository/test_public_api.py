import importlib.metadata
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import fl_strategies
from fl_strategies import REGISTRY, KnowledgeStrategy, PartyRole, privacy
from fl_strategies import errors as exceptions
from fl_strategies.errors import StrategyError

ROOT = Path(fl_strategies.__file__).parent.parent


@pytest.mark.parametrize("package", [fl_strategies, privacy])
def test_all_is_complete(package: ModuleType) -> None:
    assert len(package.__all__) == len({*package.__all__})
    assert package is privacy or package.__all__ == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_the_registry_holds_both_sides() -> None:
    """Each entry is named like its strategy and has a party role."""
    for name, algorithm in REGISTRY.items():
        assert issubclass(algorithm.strategy, KnowledgeStrategy)
        assert isinstance(algorithm.party, PartyRole)
        assert algorithm.strategy.name == name


def test_one_version_and_a_core_that_depends_on_four_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert fl_strategies.__version__ == project["version"]
    assert importlib.metadata.version("fl-strategies") == project["version"]
    names = [name.split(">")[0] for name in project["dependencies"]]
    assert names == ["flwr", "httpx", "numpy", "scipy"]


def test_every_error_is_drawn_in_the_tree() -> None:
    """The docstring of the module shows all errors, and all descend from one."""
    errors = [
        e for e in vars(exceptions).values() if isinstance(e, type) and e is not StrategyError
    ]

    for error in errors:
        assert issubclass(error, StrategyError)
        assert error.__name__ in (exceptions.__doc__ or "")


def test_missing_extra_says_what_to_run() -> None:
    """The sentence ends with the command that helps."""
    error = exceptions.MissingExtra("TorchLearner", "torch", "torch")

    assert str(error).endswith('Run: pip install "fl-strategies[torch]"')
