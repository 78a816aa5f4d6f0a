"""Optional libraries, imported when they are first needed."""

import functools
import importlib
import sys
from types import ModuleType

from fl_strategies._util.extras import import_library as import_library


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
