"""Flower apps that lie in a folder, run in this process instead of by `flwr run`."""

import importlib
import sys
import tomllib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from simulations.runtime.local import InMemoryGrid

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class FlowerApp:
    """Both components, and the run configuration that pyproject.toml has for them."""

    server_app: ServerApp
    client_app: ClientApp
    run_config: dict[str, Any]
    task: Any

    def run(self, num_nodes: int) -> None:
        """Run the app on a grid in this process."""
        grid = InMemoryGrid(self.client_app, num_nodes, run_config=self.run_config)
        context = Context(grid.run.run_id, 0, {}, RecordDict(), dict(self.run_config))
        with closing(grid):
            self.server_app(grid, context)


def read_project(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's pyproject.toml."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def load_app(folder: Path) -> FlowerApp:
    """Import an app; then forget its modules, so that another app may have their names."""
    app = read_project(folder)["tool"]["flwr"]["app"]
    names = app["components"]
    package = names["serverapp"].partition(".")[0]
    sys.path.insert(0, str(folder))
    try:
        server, client = (_component(names[side]) for side in ("serverapp", "clientapp"))
        task = importlib.import_module(f"{package}.task")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
    return FlowerApp(server, client, flat(app["config"]), task)


def _component(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings as Flower hands them to an app, sections joined by dots."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, dict)
        settings |= flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return settings
