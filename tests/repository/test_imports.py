"""The core stays small: no machine-learning library, no layer that points upwards."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import fl_strategies
from fl_strategies import _compat

ROOT = Path(fl_strategies.__file__).parent
PACKAGES = ("fl_strategies", "clients", "simulations")
HEAVY = (
    *("torch", "sklearn", "lightgbm", "xgboost", "numba", "ray", "opacus", "pandas"),
    *("clients", "simulations"),
)


def loaded_by(statement: str) -> set[str]:
    """Return the heavy modules that a fresh interpreter holds after a statement."""
    return modules_after(statement) & set(HEAVY)


def modules_after(statement: str) -> set[str]:
    """Return all modules that a fresh interpreter holds after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
    )
    return set(done.stdout.split())


def test_the_core_loads_no_heavy_library() -> None:
    assert loaded_by("import fl_strategies") == set()


def test_the_core_loads_no_part_of_scipy_before_it_is_used() -> None:
    """SciPy's parts take longer than Flower: each is loaded by the first call that needs it."""
    found = modules_after("import fl_strategies")

    parts = ("special", "optimize", "stats", "signal", "fft", "integrate", "linalg", "cluster")
    assert "scipy" in found
    assert found & {f"scipy.{part}" for part in parts} == set()


def test_the_check_itself_can_fail() -> None:
    assert "sklearn" in loaded_by("import sklearn")


def test_the_client_app_loads_no_heavy_library() -> None:
    """A party with its own learner needs none of our wrappers."""
    assert loaded_by("import clients.app") == {"clients"}


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    plain = {
        alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
    }
    return plain | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.stem)
def test_the_core_never_points_upwards(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imports_of(path)}

    assert not tops & {"clients", "simulations"}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.stem)
def test_unpublished_names_of_flower_stay_in_one_file(path: Path) -> None:
    """Only `flwr.app`, `flwr.serverapp` and `flwr.clientapp` are public."""
    if path.name == "_compat.py":
        return
    flower = {name for name in imports_of(path) if name.partition(".")[0] == "flwr"}

    assert flower <= {"flwr.app", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.clientapp"}


@cache
def graph() -> dict[str, set[str]]:
    """Return which modules of the three packages each of them imports, also for types."""
    modules = {module_name(path): path for path in sources()}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        full = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        parents = {
            str(node.module)
            for node in froms
            if any(f"{node.module}.{alias.name}" not in modules for alias in node.names)
        }
        found[name] = (plain | full | parents) & modules.keys()
    return found


def sources() -> list[Path]:
    return [path for top in PACKAGES for path in (ROOT.parent / top).rglob("*.py")]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other() -> None:
    """Whoever reads one module can read what it rests on first."""
    rest = graph()
    while leaves := {name for name, needs in rest.items() if not needs & rest.keys()}:
        rest = {name: needs for name, needs in rest.items() if name not in leaves}

    assert not rest


STACK = {
    "fl_strategies": [
        ("errors", "_util", "options", "_compat"),
        ("wire",),
        ("privacy",),
        ("features",),
        ("learners",),
        ("aggregation", "release"),
        ("party",),
        ("server",),
        ("strategies", "extend"),
        ("registry",),
    ],
    "clients": [
        ("compiled",),
        ("tabular", "networks"),
        ("encoders",),
        ("app", "checks", "saved_model"),
    ],
}
"""Lowest first: a folder or module imports its own level and those below."""


@pytest.mark.parametrize("package", STACK)
def test_folders_form_a_stack(package: str) -> None:
    level = {name: height for height, names in enumerate(STACK[package]) for name in names}
    inside = [name.split(".") for name in graph() if name.startswith(f"{package}.")]
    upwards = [
        (name, need)
        for name, needs in graph().items()
        for need in needs
        if name.startswith(f"{package}.") and need.startswith(f"{package}.")
        if level[name.split(".")[1]] < level[need.split(".")[1]]
    ]

    assert {parts[1] for parts in inside} == {*level}
    assert not upwards


def test_privacy_knows_nothing_of_the_federation() -> None:
    """Accountants, mechanisms and journals can be used, and reviewed, by themselves."""
    allowed = ("privacy", "_util", "errors", "options")
    for name, needs in graph().items():
        if name.startswith("fl_strategies.privacy"):
            foreign = {
                need
                for need in needs
                if not need.removeprefix("fl_strategies.").startswith(allowed)
            }
            assert not foreign, name


def test_unpublished_names_are_imported_where_they_are_used() -> None:
    """If another Flower lacks one, importing the package does not fail."""
    for path in (Path(_compat.__file__), ROOT.parent / "simulations" / "runtime" / "flower.py"):
        tree = ast.parse(path.read_text())
        at_once = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        flower = {name for name in at_once if name and name.startswith("flwr")}

        assert flower <= {"flwr.app", "flwr.serverapp"}, path


def test_unpublished_names_exist() -> None:
    """Whatever Flower moves in its next release shows up here first."""
    for path in (Path(_compat.__file__), ROOT.parent / "simulations" / "runtime" / "flower.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flwr"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), node.module


def test_inheritance_is_flat() -> None:
    """A strategy has at most three bases of this package, the common one included."""
    for algorithm in (
        *fl_strategies.REGISTRY.values(),
        *fl_strategies.FLOWER_STRATEGIES.values(),
    ):
        bases = algorithm.strategy.__mro__[1:]
        own = [base.__name__ for base in bases if base.__module__.startswith("fl_strategies.")]
        assert len(own) <= 3, own
