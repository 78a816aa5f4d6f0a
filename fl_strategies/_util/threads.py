"""One thread, where several mostly wait for each other.

Parties and servers train beside others on their machine, and results must not depend on how
many processors it has: threads that share a sum round it in another order.
"""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let numpy and scipy multiply with one thread, in a block or a decorated function.

    Nothing changes without `threadpoolctl`, which scikit-learn brings. It restores what was
    before, and settles who decides where several threads of a process ask for a limit.
    """
    controller = _controller()
    with nullcontext() if controller is None else controller.limit(limits=1, user_api="blas"):
        yield


def keep_to_one_thread() -> None:
    """Let all libraries of this process compute with one thread from now on.

    A forked process needs it: the threads of its parent are gone, and a library that had
    some there (GNU's OpenMP, which XGBoost and torch bring) waits for them for ever.
    """
    with suppress(ModuleNotFoundError):
        importlib.import_module("threadpoolctl").threadpool_limits(limits=1)


@functools.cache  # to look for libraries takes some milliseconds
def _controller() -> Any:
    """Return what limits the libraries that numpy and scipy have loaded, or None."""
    importlib.import_module("scipy.linalg")  # which has one of its own
    try:
        return importlib.import_module("threadpoolctl").ThreadpoolController()
    except ModuleNotFoundError:
        return None
