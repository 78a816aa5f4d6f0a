"""Flower's SuperLink with a database that loses no reply of many parties.

Run: ``python -m simulations.deploy.superlink`` with the arguments of ``flower-superlink``.

Flower serves up to 40 requests at once, on up to 15 connections to one SQLite file, of
which one may write. Who waits asks again and again, in no order, and after five seconds is
told ``database is locked``. Flower answers that with an error that no SuperNode
repeats: the reply is gone, and the party has paid for it. All of these connections belong to
one process, so here they queue for a lock of that process instead, as Flower's SuperLink
without a database does, and none meets another in the file. docs/reliability.md has the
analysis and what was measured.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from logging import WARNING
from typing import Any, Final

from flwr.common.logger import log
from flwr.supercore.sql_mixin import SqlMixin

from fl_strategies._compat import TESTED_FLOWER
from fl_strategies.errors import StrategyError

_LONG_WAIT_SECONDS: Final = 10.0
Session = Callable[[SqlMixin], AbstractContextManager[Any]]


class UnknownSuperLink(StrategyError, RuntimeError):
    """A release of Flower that keeps its state in another way."""


def one_after_the_other(session: Session) -> Session:
    """Return the same transactions, of which one runs at a time in this process.

    A transaction in another one, which is the same to Flower, does not wait for it.
    """
    turn = threading.RLock()

    @wraps(session)
    @contextmanager
    def queued(state: SqlMixin) -> Iterator[Any]:
        start = time.monotonic()
        with turn:
            if (waited := time.monotonic() - start) > _LONG_WAIT_SECONDS:
                log(WARNING, "The database was waited for %.0f s; give it more CPU", waited)
            with session(state) as transaction:
                yield transaction

    return queued


def queue_for_the_database() -> None:
    """Let the transactions of a SuperLink in this process run one after the other."""
    session = getattr(SqlMixin, "session", None)
    if not callable(session):
        raise UnknownSuperLink(
            "superlink: flwr must have SqlMixin.session, as "
            f"{' and '.join(TESTED_FLOWER)} have, got another release. Use flower-superlink."
        )
    SqlMixin.session = one_after_the_other(session)  # type: ignore[assignment,method-assign]


def main() -> None:
    """Start the SuperLink; it reads the command line itself."""
    from flwr.superlink.cli import flower_superlink

    queue_for_the_database()
    flower_superlink()


if __name__ == "__main__":
    main()
