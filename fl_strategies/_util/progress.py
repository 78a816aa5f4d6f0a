"""Progress of work, for listeners in the same process.

There are no listeners by default, and nothing here leaves the process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Listener: TypeAlias = Callable[[str, int, int], None]
"""Receives the name of the items, such as epochs, the number done and the total."""

_listener: Final[ContextVar[Listener | None]] = ContextVar("listener", default=None)


def counted(items: Sequence[T], kind: str) -> Iterator[T]:
    """Yield items, and report to the listener how many are done.

    Examples
    --------
    >>> with listening(lambda *told: print(*told)):
    ...     for _ in counted(range(2), "epochs"):
    ...         pass
    epochs 0 2
    epochs 1 2
    epochs 2 2
    """
    tell = _listener.get()
    for number, item in enumerate(items):
        if tell is not None:
            tell(kind, number, len(items))
        yield item
    if tell is not None:
        tell(kind, len(items), len(items))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Listen to all work in a block."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)
