"""Processes that are started here end here, and no others."""

import os
import signal
import subprocess

from simulations.runtime.flower import SuperLink
from simulations.runtime.processes import Processes
from tests.leftovers import command_line


class Idle(SuperLink):
    """A SuperLink that starts nothing."""

    def _open(self) -> None:
        pass


def test_signals_are_handled_as_before() -> None:
    """Who starts a federation gets TERM back when it has ended."""
    before = signal.getsignal(signal.SIGTERM)
    with Idle(simulation=False):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_number_of_an_ended_process_is_a_strangers() -> None:
    """The system gives numbers anew; who has one now is left alone."""
    family = Processes()
    own = family.start(["true"], os.environ, subprocess.DEVNULL)
    own.wait()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        own.pid = stranger.pid
        assert family.living() == set()
        family.end()
        assert stranger.poll() is None
        stranger.kill()


def test_what_was_started_ends_with_all_that_it_started() -> None:
    """Also what a child has started."""
    family = Processes()
    family.start(["sh", "-c", "sleep 60 & sleep 60"], os.environ, subprocess.DEVNULL)
    while sum("sleep 60" in command_line(pid) for pid in family.living()) < 3:
        pass

    family.end()

    assert family.living() == set()
