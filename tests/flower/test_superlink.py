"""The SuperLink's database: what Flower's own does with a lock, and what ours does."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from flwr.supercore import sql_mixin
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from simulations.deploy import superlink
from simulations.deploy.superlink import UnknownSuperLink, queue_for_the_database

# Flower's migrations use an old option of Alembic's.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")

LOCK = text("INSERT INTO objectstore_locks (lock_id, lock_value) VALUES (:name, 0)")
QUICKLY = tuple(
    (name, "50" if name == "busy_timeout" else value)
    for name, value in sql_mixin.SQLITE_PRAGMAS
)
"""Flower's settings, but who waits for the file gives up after 0.05 instead of 5 seconds."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlObjectStore]:
    """Return a part of a SuperLink's state, in a file."""
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", QUICKLY)
    # Put back what the tests replace.
    monkeypatch.setattr(sql_mixin.SqlMixin, "session", sql_mixin.SqlMixin.session)
    made = SqlObjectStore(str(tmp_path / "state.db"))
    made.initialize()
    yield made
    assert made._engine is not None
    made._engine.dispose()


def write(store: SqlObjectStore, name: str) -> None:
    with store.session() as session:
        session.execute(LOCK, {"name": name})


def fail_after_writing(store: SqlObjectStore) -> None:
    with store.session() as session:
        session.execute(LOCK, {"name": "failed"})
        raise ZeroDivisionError


def slow_and_quick_writer(store: SqlObjectStore) -> bool:
    """Let one thread write for longer than another waits; return whether both have written."""
    begun, outcome, second = threading.Event(), [False], threading.Event()

    def slow() -> None:
        with store.session() as session:
            session.execute(LOCK, {"name": "slow"})
            begun.set()
            second.wait(0.5)

    def quick() -> None:
        begun.wait(10)
        with suppress(OperationalError):
            write(store, "quick")
            outcome[0] = True
        second.set()

    threads = [threading.Thread(target=target) for target in (slow, quick)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome[0]


def test_flowers_own_state_gives_up(store: SqlObjectStore) -> None:
    """Somebody who cannot write in time gets an error, which no SuperNode repeats."""
    assert not slow_and_quick_writer(store)


def test_a_queue_lets_everybody_write(store: SqlObjectStore) -> None:
    """The same writers, one after the other, however long each takes."""
    queue_for_the_database()

    assert slow_and_quick_writer(store)
    with store.session() as session:
        names = session.execute(text("SELECT lock_id FROM objectstore_locks")).scalars().all()
    assert sorted(names) == ["quick", "slow"]


def test_a_transaction_in_another_does_not_wait_for_itself(store: SqlObjectStore) -> None:
    """Flower nests transactions of one request; both are one."""
    queue_for_the_database()

    with store.session() as outer, store.session() as inner:
        assert inner is outer


def test_a_transaction_that_fails_lets_the_next_one_in(store: SqlObjectStore) -> None:
    """An error takes back what was written, and leaves the queue."""
    queue_for_the_database()

    with pytest.raises(ZeroDivisionError):
        fail_after_writing(store)

    assert slow_and_quick_writer(store)
    with store.session() as session:
        assert session.execute(text("SELECT count(*) FROM objectstore_locks")).scalar() == 2


def test_another_flower_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that keeps its state in another way is not taken for a safe one."""
    monkeypatch.setattr(superlink, "SqlMixin", object)

    with pytest.raises(UnknownSuperLink, match=r"must have SqlMixin\.session"):
        queue_for_the_database()
