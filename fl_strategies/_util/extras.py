"""Optional libraries, imported when they are first needed."""

import importlib
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
