"""The folder that `flwr run` submits.

It holds one file and no code: the components are named in it, and every machine runs the
ones of the fl-strategies that is installed there. The settings come from `Settings`, so
they cannot fall behind it.
"""

import json
from importlib import metadata
from pathlib import Path

from simulations.deploy.server_app import run_settings

_HEAD = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fl-strategies-deployment"
version = "{version}"
description = "Names the components of fl-strategies; the code is installed on each machine."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fl-strategies"

[tool.flwr.app.components]
serverapp = "simulations.deploy.server_app:app"
clientapp = "simulations.deploy.client_app:app"

[tool.flwr.app.config]
"""


def write_app(folder: Path) -> Path:
    """Write the app and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = [f"{key} = {json.dumps(value)}" for key, value in run_settings().items()]
    text = _HEAD.format(version=metadata.version("fl-strategies"))
    (folder / "pyproject.toml").write_text(text + "\n".join(settings) + "\n", encoding="utf-8")
    return folder
