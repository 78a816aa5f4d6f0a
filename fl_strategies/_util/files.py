"""Files that survive a crash: written whole or not at all, and readable by their owner only."""

import hashlib
import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

_SECONDS_BETWEEN_TRIES: Final = 0.02


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that belongs to another one."""
    return path.with_name(f"{path.name}.{suffix}")


PRIVATE: Final = 0o600
SHARED: Final = 0o666
"""Permissions left to the owner's umask, as usual for files."""


def open_private(path: Path, mode: int = PRIVATE) -> BinaryIO:
    """Open a file to append to; if it is new, only its owner may read it by default."""
    return open(path, "ab", opener=lambda p, flags: os.open(p, flags, mode))


def write_through(path: Path, content: bytes, *, after: int, mode: int = PRIVATE) -> None:
    """Write after the first `after` bytes of a file and wait until it is on disk."""
    with open_private(path, mode) as file:
        file.truncate(after)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, as their contents do."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, where a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Replace a file's content atomically, even if others do so at the same time."""
    draft = beside(path, f"draft-{os.getpid()}-{threading.get_ident()}")
    write_through(draft, content, after=0, mode=mode)
    draft.replace(path)
    sync_folder(path.parent)


def sealed(place: str, content: bytes) -> bytes:
    """Return content behind a checksum of it and of the place where it belongs.

    Examples
    --------
    >>> unsealed("round 1", sealed("round 1", b"reply"))
    b'reply'
    >>> unsealed("round 2", sealed("round 1", b"reply")) is None
    True
    """
    return _checksum(place, content) + b"\n" + content


def unsealed(place: str, data: bytes) -> bytes | None:
    """Undo `sealed`; return None for anything that it did not return for this place."""
    checksum, _, content = data.partition(b"\n")
    return content if checksum == _checksum(place, content) else None


def _checksum(place: str, content: bytes) -> bytes:
    name = place.encode()
    digest = hashlib.sha256(len(name).to_bytes(8, "big") + name)
    digest.update(content)
    return digest.hexdigest().encode()


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, for its owner only."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Keep every other process and thread that locks the same file out of a block.

    Raises
    ------
    BlockingIOError
        If another has the lock and `wait` is false.
    """
    with open_private(path) as file:
        _lock(file.fileno(), wait=wait)
        try:
            yield
        finally:
            # Closing alone would leave the lock to a process forked meanwhile.
            _unlock(file.fileno())


def _lock(descriptor: int, *, wait: bool) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        _lock_first_byte(descriptor, wait=wait)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        msvcrt: Any = importlib.import_module("msvcrt")
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock_first_byte(descriptor: int, *, wait: bool) -> None:
    """Lock on Windows, whose own waiting lock gives up after ten seconds."""
    msvcrt: Any = importlib.import_module("msvcrt")
    while True:
        os.lseek(descriptor, 0, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            if not wait:
                raise BlockingIOError(*error.args) from error
            time.sleep(_SECONDS_BETWEEN_TRIES)
        else:
            return
