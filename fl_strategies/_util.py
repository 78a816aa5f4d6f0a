"""Small helpers of all packages: threads, imports, hints, progress, randomness, arrays, files.

Results must not depend on the number of processors, so numerical libraries get one thread:
threads that share a sum round it in a different order. Every draw of an experiment comes from
a generator named by the seed and a path such as ``("party", 3, "teacher", 0)``; neither the
order of replies nor the number of workers can change it. Noise that protects privacy never
comes from there: a known seed would undo it. Files are written whole or not at all, and are
readable by their owner only.
"""

import difflib
import functools
import hashlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_strategies.errors import InvalidData, InvalidParameter, MissingExtra


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


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return the name that was probably meant; an empty one if none is near."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")


def nearest(name: str, known: Collection[str]) -> str:
    """Return a sentence with the name that was probably meant, or with all there are.

    Examples
    --------
    >>> nearest("num_techers", ["num_splits", "num_teachers"])
    "Did you mean 'num_teachers'?"
    """
    close = nearest_name(name, known)
    return f"Did you mean {close!r}?" if close else f"Known are {', '.join(known)}."


def require_argument(owner: str, name: str, known: Collection[str], hint: str = "") -> None:
    """Raise `InvalidParameter`, with the nearest name, unless an argument is known.

    Parameters
    ----------
    owner : str
    name : str
    known : collection of str
    hint : str
        Shown instead of the nearest name.

    Examples
    --------
    >>> require_argument("FedKT", "num_partys", ["num_parties", "seed"])
    Traceback (most recent call last):
    fl_strategies.errors.InvalidParameter: FedKT: the argument must be a known one, \
got 'num_partys'. Did you mean 'num_parties'?
    """
    if name not in known:
        advice = hint or nearest(name, known)
        raise InvalidParameter(
            f"{owner}: the argument must be a known one, got {name!r}. {advice}"
        )


T = TypeVar("T")
Listener: TypeAlias = Callable[[str, int, int], None]
"""Receives the name of the items, such as epochs, the number done and the total."""

_listener: Final[ContextVar[Listener | None]] = ContextVar("listener", default=None)


def counted(items: Sequence[T], kind: str) -> Iterator[T]:
    """Yield items, and report to the listener how many are done.

    Examples
    --------
    >>> with listening(lambda *progress: print(*progress)):
    ...     for _ in counted(range(2), "epochs"):
    ...         pass
    epochs 0 2
    epochs 1 2
    epochs 2 2
    """
    report = _listener.get() or (lambda *_: None)
    for number, item in enumerate(items):
        report(kind, number, len(items))
        yield item
    report(kind, len(items), len(items))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Listen to all work in a block."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def derive_rng(seed: int, *path: str | int) -> np.random.Generator:
    """Return the generator of one named stream.

    Examples
    --------
    >>> a = derive_rng(7, "party", 3).integers(100, size=3)
    >>> b = derive_rng(7, "party", 3).integers(100, size=3)
    >>> bool((a == b).all())
    True
    """
    name = "/".join(f"{type(part).__name__}:{part}" for part in path)
    digest = hashlib.sha256(name.encode()).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=words))


Array: TypeAlias = NDArray[Any]
FloatArray: TypeAlias = NDArray[np.floating[Any]]
IntArray: TypeAlias = NDArray[np.int64]

NEARLY_CONSTANT: Final = 1e-6
"""A column whose relative spread is below this counts as constant."""


def plain(owner: str, name: str, value: Any) -> Any:
    """Return tensors, and sparse and masked arrays, as arrays; lists and frames as they are.

    They are recognised by their methods, so that no library is needed.
    """
    if isinstance(value, np.ma.MaskedArray):
        masked: Any = value.astype(np.float64) if value.dtype.kind in "biuf" else value
        return masked.filled(np.nan if masked.dtype.kind == "f" else None)
    if isinstance(value, np.ndarray | list | tuple) or hasattr(value, "columns"):
        return value
    try:
        if hasattr(value, "detach"):
            dense = value.detach().cpu()
            dense = dense.to_dense() if dense.is_sparse else dense
            # numpy has no such type of 16 bits.
            dense = dense.float() if str(dense.dtype) == "torch.bfloat16" else dense
            return np.asarray(dense)
        return np.asarray(value.toarray() if hasattr(value, "toarray") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_an_array(owner, name, value) from error


def to_array(owner: str, name: str, value: Any) -> Array:
    """Return a list, frame or tensor as an array; arrays stay the objects that they are."""
    if isinstance(value, np.ndarray):
        return value
    try:
        array = np.asarray(plain(owner, name, value))
        # Frames with columns of several types come as objects.
        return np.array(array.tolist()) if array.dtype == object and array.size else array
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_an_array(owner, name, value) from error


def _not_an_array(owner: str, name: str, value: Any) -> InvalidData:
    return InvalidData(
        f"{owner}: {name} must be an array, or a list, frame or tensor that numpy can "
        f"read, got {type(value).__name__}."
    )


def to_rows(owner: str, name: str, value: Any) -> Array:
    """Return rows as an array; truth values become numbers, and texts in a frame are named."""
    array = to_array(owner, name, value)
    if array.dtype.kind in "OUST" and hasattr(value, "columns"):
        wrong = [repr(str(c)) for c in value.columns if not _is_numeric(value[c])]
        raise InvalidData(
            f"{owner}: {name} must be an array of numbers, got text or gaps in the columns "
            f"{', '.join(wrong[:10])}. Make numbers of them, alike at all parties: "
            "docs/own_data.md shows how."
        )
    return array.astype(np.float32) if array.dtype.kind == "b" else array


def _is_numeric(column: Any) -> bool:
    array = np.asarray(column)
    plain = np.array(array.tolist()) if array.dtype == object else array
    return plain.dtype.kind in "biuf"


def column_scales(rows: FloatArray) -> FloatArray:
    """Return the scale of each column: 1 if columns share a unit, otherwise 1 / spread.

    They do if most columns span about as much as the widest: pixels, indicators, frequencies.

    Examples
    --------
    >>> column_scales(np.array([[0.0, 100.0, 7.0], [2.0, 900.0, 7.0]]))
    array([1.    , 0.0025, 0.    ])
    """
    spans, spread = np.ptp(rows, axis=0), rows.std(axis=0)
    if np.median(spans) >= spans.max(initial=0.0) / 2:
        return np.ones(rows.shape[1])
    varies = spread > NEARLY_CONSTANT * np.abs(rows).max(axis=0, initial=0.0)
    return np.where(varies, 1.0 / np.where(varies, spread, 1.0), 0.0)


def content_hash(array: Array) -> str:
    """Return a fingerprint of an array's type, shape and values.

    Server and parties compare it to be sure that they label the same rows.
    """
    plain = np.ascontiguousarray(array)
    plain = plain.astype(plain.dtype.newbyteorder("<"), copy=False)
    digest = hashlib.sha256(f"{plain.dtype.str}{plain.shape}".encode())
    digest.update(plain.data)
    return digest.hexdigest()


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
