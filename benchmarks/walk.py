"""Count the modules that one has to read to follow a run.

    python benchmarks/walk.py            # both walks
    python benchmarks/walk.py fedkt      # one of them

Prints the modules in which a function was called, with the number of such functions, fewest
first: a module near the top may belong in another one.

fedkd
    ``fl-strategies run`` with FedKD on digits, random forests and extra trees, from the
    command to the report. All in this process: workers cannot be watched.
fedkt
    One party's reply to a training request of FedKT at L2 with random forests, from message to
    message, with the party's own construction. Modules of the simulation are not counted.

All modules are imported first, so that functions called by imports do not count. Neither do
modules of which only constants or types are used, nor kernels that Numba compiled.
"""

import argparse
import importlib
import inspect
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.app import client_app
from fl_strategies.wire import keys
from simulations.commands import main as command
from simulations.config import Settings, Value
from simulations.federation import load_federation
from simulations.runtime.local import run_local

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("fl_strategies", "clients", "simulations")
SMALL: Final[Mapping[str, Value]] = {
    "num-parties": 4,
    "train-rows": 240,
    "public-rows": 60,
    "test-rows": 60,
    "num-trees": 5,
    "final.num-trees": 5,
    "learner": "random-forest",
    "final-learner": "extra-trees",
    "num-workers": 1,
}
PRIVATE: Final[Mapping[str, Value]] = {
    "strategy": "fedkt",
    "privacy-level": "L2",
    "gamma": 0.25,
    "num-queries": 30,
    "accept-noise": True,
}


class Walk:
    """The functions of some packages that were called while it was watching."""

    def __init__(self, packages: tuple[str, ...] = PACKAGES) -> None:
        self.packages = packages
        self._called: set[CodeType] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every call in this thread and in those that start meanwhile."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._called.add(frame.f_code)

    def modules(self) -> dict[str, int]:
        """Return per module how many of its functions were called, fewest first."""
        counts: dict[str, int] = {}
        for code in self._called:
            path = Path(code.co_filename)
            # Bodies of modules and of classes are code too, but no functions.
            if code.co_flags & inspect.CO_OPTIMIZED and path.is_relative_to(ROOT):
                name = path.relative_to(ROOT)
                if name.parts[0] in self.packages:
                    counts[name.as_posix()] = counts.get(name.as_posix(), 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (item[1], item[0])))


def walk_fedkd() -> Walk:
    """Follow a run of FedKD from the command line to its report."""
    walk = Walk()
    settings = [f"--set={key}={value}" for key, value in SMALL.items()]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(chdir(folder))
        printed = stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(walk.watching())
        code = command(["run", "--strategy=fedkd", "--data=digits", "--quiet", *settings])
    if code:
        raise SystemExit(printed.getvalue())
    return walk


def walk_fedkt() -> Walk:
    """Follow a training request of FedKT at L2 through a party to its reply."""
    walk = Walk(packages=("fl_strategies", "clients"))
    federation = load_federation(Settings.from_run_config({**SMALL, **PRIVATE}))
    number = keys.PARTITION_ID
    app = client_app(lambda context: federation.party(int(context.node_config[number])))

    class FirstWatched(ClientApp):
        """Watches the first party where it is asked to train."""

        def __call__(self, message: Message, context: Context) -> Message:
            first = context.node_config[number] == 0
            if first and message.metadata.message_type == "train":
                with walk.watching():
                    return app(message, context)
            return app(message, context)

    run_local(federation.strategy(), FirstWatched(), federation.settings.num_parties)
    return walk


WALKS: Final[Mapping[str, Callable[[], Walk]]] = {"fedkd": walk_fedkd, "fedkt": walk_fedkt}


def import_all() -> None:
    """Import every module of the packages, but no ``__main__``."""
    for package in map(importlib.import_module, PACKAGES):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)


def main(arguments: list[str] | None = None) -> None:
    """Print the modules of the chosen walks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("walks", nargs="*", default=[*WALKS], help=", ".join(WALKS))
    import_all()
    for name in parser.parse_args(arguments).walks:
        modules = WALKS[name]().modules()
        print(f"{name}: {len(modules)} modules, {sum(modules.values())} functions")
        for module, count in modules.items():
            print(f"{count:4} {module}")


if __name__ == "__main__":
    main()
