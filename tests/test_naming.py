"""Misspelt names in Python get the answer that the command line gives."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fl_strategies
from fl_strategies import FedKT, FedKTOptions, FedMDOptions
from fl_strategies._util import derive_rng, replace_file
from fl_strategies.errors import InvalidParameter
from tests.toys import common_options

COMMON: dict[str, Any] = dict(common_options())


@pytest.mark.parametrize(
    ("make", "given", "sentence"),
    [
        (
            partial(FedKT, **COMMON),
            "num_techers",
            r"mean 'num_teachers'\? Write options=.*, or FedKT.from_settings\(num_teachers=",
        ),
        (
            partial(FedKT, **COMMON),
            "num_teachers",
            r"got 'num_teachers'. Write options=FedKTOptions",
        ),
        (partial(FedKT, **COMMON), "num_partys", r"FedKT: .* Did you mean 'num_parties'\?"),
        (FedKTOptions, "num_techers", r"FedKT: .* Did you mean 'num_teachers'\?"),
        (FedKTOptions, "gamma", r"got 'gamma'. Write privacy=VotePrivacy\(gamma=...\)."),
        (
            FedMDOptions,
            "num_samples",
            r"got 'num_samples'. Write release=SampleOnce\(num_samples=...\).",
        ),
        (
            partial(FedKT.from_settings, **COMMON),
            "num_techers",
            r"FedKT: .* Did you mean 'num_teachers'\?",
        ),
        (
            partial(FedKT.from_settings, **COMMON),
            "num_partys",
            r"FedKT: .* Did you mean 'num_parties'\?",
        ),
    ],
)
def test_a_misspelt_name_suggests_the_right_one(
    make: Callable[..., object], given: str, sentence: str
) -> None:
    with pytest.raises(InvalidParameter, match=sentence) as caught:
        make(**{given: 3})
    assert f"got {given!r}" in str(caught.value)


def test_a_file_has_the_whole_content_of_one_writer(tmp_path: Path) -> None:
    """Two that replace it at once do not mix, and leave nothing else behind."""
    path = tmp_path / "kept"
    contents = [bytes([letter]) * 5_000 for letter in b"abcdefgh"]

    def write(content: bytes) -> None:
        for _ in range(20):
            replace_file(path, content)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as writers:
        list(writers.map(write, contents))

    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]


PATHS = st.lists(st.one_of(st.integers(0, 5), st.sampled_from(["a", "b", "1"])), max_size=4)


@given(seed=st.integers(0, 2**63 - 1), path=PATHS)
def test_same_name_same_stream(seed: int, path: list[str | int]) -> None:
    assert derive_rng(seed, *path).integers(2**60) == derive_rng(seed, *path).integers(2**60)


@given(first=PATHS, second=PATHS)
def test_other_name_other_stream(first: list[str | int], second: list[str | int]) -> None:
    """Different paths, also the number 1 and the text "1", give different streams."""
    same = first == second and [type(p) for p in first] == [type(p) for p in second]
    drawn = [derive_rng(0, *path).integers(2**60) for path in (first, second)]

    assert (drawn[0] == drawn[1]) == same


def test_seeds_give_different_streams() -> None:
    assert derive_rng(0, "x").integers(2**60) != derive_rng(1, "x").integers(2**60)


# Windows' own locking is not here to be tried; its stand-in refuses in the same words.
WINDOWS = """
import subprocess, sys, types  # subprocess takes msvcrt for Windows itself
import fcntl
real = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN
sys.modules["fcntl"] = None
{}
"""
STAND_IN = """
def locking(descriptor, mode, size):
    flock, lock, unlock = real
    try:
        flock(descriptor, unlock if mode == 0 else lock)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error

sys.modules["msvcrt"] = types.SimpleNamespace(LK_UNLCK=0, LK_NBLCK=2, locking=locking)
"""


def run_without_fcntl(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WINDOWS.format(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(fl_strategies.__file__).parent.parent,
        timeout=60,
    )


def test_everything_can_be_imported() -> None:
    """Only who locks a file needs a way to lock it."""
    done = run_without_fcntl("import fl_strategies, clients.app, fl_strategies.privacy.journal")

    assert done.returncode == 0, done.stderr


def test_the_command_line_counts_processor_time_without_resource() -> None:
    """That of this process alone, which is all that Windows tells."""
    code = """
sys.modules["resource"] = None
from simulations.runtime.local import cpu_seconds
start = cpu_seconds()
sum(range(10**6))
print(cpu_seconds() > start >= 0)
"""
    done = run_without_fcntl(code)

    assert done.stdout.strip() == "True", done.stderr


def test_a_journal_charges_and_a_taken_lock_is_waited_for(tmp_path: Path) -> None:
    """A charge waits for the lock of another, and who does not wait is told at once."""
    code = f"""{STAND_IN}
import threading, time
from pathlib import Path
from fl_strategies.privacy.events import LaplaceEvent
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies._util import locked

folder = Path(sys.argv[1])
journal = PartyJournal(folder, fingerprint="0" * 64)
mean = LaplaceEvent(unit="example", relation="replace-one", scale=4, l1_sensitivity=1)
charged = threading.Event()
def charge():
    journal.charge([(mean, 1)], run="run", purpose="test")
    charged.set()
with locked(folder / ".lock"):
    try:
        with locked(folder / ".lock", wait=False):
            pass
    except BlockingIOError:
        print("refused")
    thread = threading.Thread(target=charge)
    thread.start()
    print("waits", not charged.wait(0.2))
thread.join()
print("lines", len(journal.path.read_text().splitlines()))
"""
    done = run_without_fcntl(code, str(tmp_path))

    assert done.stdout.split() == ["refused", "waits", "True", "lines", "1"], done.stderr
