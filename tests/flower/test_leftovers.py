"""However a block of Flower processes is left, none of them outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simulations.runtime.flower import APP_FOLDER
from simulations.runtime.processes import marked
from tests.leftovers import MARK, left_behind

pytestmark = pytest.mark.flower

PATIENCE = 300.0
BLOCK = """
import time
from tests.flower.supernodes import OpenSuperLink

def use(ending):
    with OpenSuperLink() as superlink:
        superlink.start_supernode({"partition-id": 0, "num-partitions": 1})
        while superlink.control.num_online() < 1:
            time.sleep(0.2)
        print("online", flush=True)
        ending()

def fail():
    raise ValueError("deliberate")

def wait():
    time.sleep(600)
"""
SCRIPT = BLOCK + "\nuse({ending})\n"
TESTS = BLOCK + "\ndef test_it():\n    use({ending})\n"
PYTEST = ["-m", "pytest", "-s", "-p", "tests.leftovers", "-p", "no:cacheprovider"]


@pytest.mark.parametrize(
    ("text", "ending", "number", "code"),
    [
        pytest.param(SCRIPT, "fail", None, 1, id="exception"),
        pytest.param(SCRIPT, "wait", signal.SIGTERM, 128 + signal.SIGTERM, id="term"),
        pytest.param(TESTS, "fail", None, 1, id="failing-test"),
        pytest.param(TESTS, "wait", signal.SIGTERM, 2, id="term-to-pytest"),
    ],
)
def test_nothing_outlives_a_block_that_ends_badly(
    tmp_path: Path, text: str, ending: str, number: signal.Signals | None, code: int
) -> None:
    """An exception or a TERM, in a script or under pytest, ends every process."""
    path = tmp_path / "test_block.py"
    path.write_text(text.replace("{ending}", ending))
    command = [sys.executable, *(PYTEST if text is TESTS else []), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(APP_FOLDER)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as block:
        assert block.stdout is not None
        try:
            assert any(b"online" in line for line in iter(block.stdout.readline, b""))
            if number is not None:
                block.send_signal(number)
            for _ in block.stdout:  # a full pipe would stop it
                pass
            got = block.wait(PATIENCE)
        finally:
            block.kill()

    assert left_behind(os.environ[MARK]) == []
    assert got == code


def test_the_check_finds_what_is_left() -> None:
    """A process that nobody ends is named, and ended."""
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            while not marked(MARK, os.environ[MARK]):  # started, but not yet to be seen
                time.sleep(0.05)
            assert left_behind(os.environ[MARK], grace=0.5) == ["sleep 600 "]
        finally:
            sleeper.kill()
