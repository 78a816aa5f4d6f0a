"""Single-threaded numerical libraries.

Several parties and servers often train on one machine, and results must not depend on its
number of processors: threads that share a sum round it in a different order.
"""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit numpy and scipy to one thread, in a block or a decorated function.

    This has no effect without `threadpoolctl`, which scikit-learn installs. It restores the
    previous limit, and resolves conflicts if several threads of a process set one.
    """
    controller = _controller()
    with nullcontext() if controller is None else controller.limit(limits=1, user_api="blas"):
        yield


def keep_to_one_thread() -> None:
    """Limit all libraries of this process to one thread from now on.

    A forked process needs this: the threads of its parent are gone, and a library that had
    some (GNU's OpenMP, which XGBoost and torch use) would wait for them for ever.
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
