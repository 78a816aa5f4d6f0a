"""Kernels that Numba compiles for the processor they run on; they know arrays alone."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, cast

from fl_strategies.errors import MissingExtra

try:
    import numba
except ImportError as error:
    raise MissingExtra("compiled kernels", "numba", "fast") from error

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# Sums may be added up in any order; NaN and infinity keep their meaning.
ANY_ORDER: Final = ("reassoc", "contract", "nsz")


def compiled(kernel: Kernel, **options: Any) -> Kernel:
    """Compile a function at its first call, and keep the result for later processes.

    It is kept beside the function's file or in the user's cache. Numba notices changes of that
    file, not of others that a kernel uses: then remove `__pycache__/*.nb*`. Dividing by zero
    gives infinity or NaN, as in numpy.
    """
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        result = numba.njit(kernel, cache=True, **options)
    except RuntimeError:  # no folder can be written to: compiled anew in every process
        result = numba.njit(kernel, **options)
    return cast("Kernel", result)


def part(kernel: Kernel, **options: Any) -> Kernel:
    """Compile a function along with the compiled ones that call it.

    Python cannot call it, which saves more than half of the time to compile.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **options}
    result = numba.njit(kernel, nogil=True, error_model="numpy", **options)
    return cast("Kernel", result)


fast_compiled = partial(compiled, fastmath=set(ANY_ORDER))
fast_part = partial(part, fastmath=set(ANY_ORDER))
