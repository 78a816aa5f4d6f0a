"""Optional libraries, imported when they are first needed."""

import functools
import importlib
import sys
from types import ModuleType

from fl_strategies.errors import MissingExtra


def import_library(owner: str, module: str, extra: str) -> ModuleType:
    """Import an optional library, or name the extra that installs it.

    Examples
    --------
    >>> import_library("adult", "no_such_library", "sklearn")
    Traceback (most recent call last):
    fl_strategies.errors.MissingExtra: adult: the package 'no_such_library' must be \
installed, got none. Run: pip install "fl-strategies[sklearn]"
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(owner, module.partition(".")[0], extra) from error


def import_torchvision(owner: str) -> ModuleType:
    """Import torchvision, also where its wheel was built for another torch than ours.

    A torchvision built for CUDA cannot load its compiled operators next to a CPU build of
    torch, and then fails while it registers them. Declaring the two names it asks for is
    enough: data sets, transforms and models use none of these operators.
    """
    try:
        return import_library(owner, "torchvision", "simulation")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            error.add_note(
                "torch and torchvision must be of one build; docs/getting_started.md says how "
                "to install them."
            )
            raise
    _declare_torchvision_operators()
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]  # left behind by the import that failed half-way
    return import_library(owner, "torchvision", "simulation")


@functools.cache  # the declaration lives as long as the object that made it
def _declare_torchvision_operators() -> object:
    library = importlib.import_module("torch").library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
