"""Kills at random moments: the same bits in the end, and nobody charged without a reason.

`FL_STRATEGIES_KILLS` says how many; `make kills` takes 500.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_strategies import REGISTRY
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.wire import keys
from tests.kept import NUM_PARTIES, MortalGrid, bits, build, figures, journal_app, start
from tests.toys import toy_party

NUM_KILLS = int(os.environ.get("FL_STRATEGIES_KILLS", "10"))
MOST_IN_A_ROW = 3
SHARE_AT_ANY_MOMENT = 0.3
"""Kills that another process sends when it likes; the others come at a file operation."""
LOUD = {"seeded_noise": True, "accept_noise": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in sorted(REGISTRY)},
    "fedkt-l1": ("fedkt", {"privacy_level": "L1", "gamma": 0.3, **LOUD}),
    "fedkt-l2": ("fedkt", {"privacy_level": "L2", "gamma": 0.5, **LOUD}),
    "fedmd-nfdp": ("fedmd", {"release": "nfdp", "num_samples": 10, "seeded_noise": True}),
    "fedmd-ldp": ("fedmd", {"release": "ldp", "noise": "gumbel", "gamma": 1.0, **LOUD}),
}
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Blow:
    """When a process is killed: at a file operation, or after some seconds."""

    operation: int
    how: str
    seconds: float | None


class Reaper:
    """Kills its own process at a file operation, and says whose answer was in the making.

    A party pays, makes its answer and keeps it, in this order. If it is killed in between,
    it pays again for the same question: nothing says how much of the first answer left.
    """

    def __init__(self, blow: Blow, parties: Path, paying: Any, count: Any) -> None:
        self._blow, self._parties, self._paying, self._count = blow, parties, paying, count
        for name in ("fsync", "replace", "unlink"):
            setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            target = _target(operation.__name__, arguments)
            self._note(target, done=False)
            self._count.value += 1
            due = self._count.value == self._blow.operation
            if due and self._blow.how == "torn" and operation.__name__ == "fsync":
                _tear(arguments[0], target)
            if due and self._blow.how != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*arguments, **options)
            self._note(target, done=operation.__name__ == "replace")
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return watched

    def _note(self, target: Path, *, done: bool) -> None:
        if self._parties not in target.parents or target.parent == self._parties:
            return
        party = int(target.relative_to(self._parties).parts[0])
        if target.suffix == ".run" and done:
            self._paying[party] = 0
        elif ".jsonl" in target.name:
            self._paying[party] = 1


def _target(operation: str, arguments: tuple[Any, ...]) -> Path:
    if operation == "fsync":
        return Path(f"/proc/self/fd/{arguments[0]}").readlink()
    return Path(os.fspath(arguments[-1]))


def _tear(descriptor: int, path: Path) -> None:
    """Take away half of what was written last, as a power failure might."""
    if path.is_file():
        content = path.read_bytes()
        old = content.rstrip(b"\n").rfind(b"\n") + 1 if path.suffix == ".jsonl" else 0
        os.ftruncate(descriptor, (old + len(content)) // 2)


def without_costs(phases: list[dict[int, dict[str, Any]]]) -> list[dict[int, dict[str, Any]]]:
    """Return figures without those that grow if a question is paid for twice."""
    costs = ("epsilon", "delta", keys.NUM_RELEASES, "num-bytes")
    return [
        {
            number: {name: v for name, v in record.items() if not name.startswith(costs)}
            for number, record in phase.items()
        }
        for phase in phases
    ]


@dataclass(frozen=True)
class Place:
    """The folders of one federation."""

    server: Path
    parties: Path

    def run(self, variant: str, *, resume: bool) -> tuple[bytes, Any]:
        name, options = VARIANTS[variant]
        strategy = build(name, self.server, resume=resume, **options)
        result = start(strategy, MortalGrid(journal_app(self.parties)))
        return bits(strategy), without_costs(figures(result))

    def charges(self) -> list[int]:
        """Return how often each party has paid."""
        found = []
        for number in range(NUM_PARTIES):
            party = toy_party(number)
            fingerprint = data_fingerprint(party.x, party.y)
            journal = PartyJournal(self.parties / str(number), fingerprint=fingerprint)
            found.append(len(journal.entries()))
        return found


def work(place: Place, variant: str, blow: Blow, paying: Any, count: Any) -> None:
    """Run until the end or the kill; for a process of its own."""
    sys.stdout = sys.stderr = (place.server.parent / "log").open("w")
    Reaper(blow, place.parties, paying, count)
    place.run(variant, resume=place.server.exists())


@dataclass(frozen=True)
class Outcome:
    """How a process ended: killed or not, who was paying then, after how many operations."""

    killed: bool
    paying: list[int]
    num_operations: int


def strike(place: Place, variant: str, blow: Blow) -> Outcome:
    """Run in another process, and let the blow fall."""
    place.server.parent.mkdir(exist_ok=True)
    (place.server.parent / "log").touch()
    paying, count = _fork.Array("i", NUM_PARTIES, lock=False), _fork.Value("i", 0, lock=False)
    child = _fork.Process(target=work, args=(place, variant, blow, paying, count))
    child.start()
    if blow.seconds is not None:
        time.sleep(blow.seconds)
        child.kill()
    child.join()
    killed = child.exitcode == -signal.SIGKILL
    log = (place.server.parent / "log").read_text()
    assert killed or child.exitcode == 0, (variant, blow, log[-2000:])
    return Outcome(killed, list(paying) if killed else [0] * NUM_PARTIES, count.value)


@dataclass(frozen=True)
class Plain:
    """A run that nobody disturbs."""

    result: tuple[bytes, Any]
    charges: list[int]
    seconds: float
    num_operations: int


def random_blow(rng: random.Random, plain: Plain) -> Blow:
    if rng.random() < SHARE_AT_ANY_MOMENT:
        return Blow(0, "moment", rng.uniform(0, plain.seconds))
    how = rng.choice(("before", "torn", "after"))
    return Blow(rng.randint(1, plain.num_operations), how, None)


def run_plain(variant: str, folder: Path) -> Plain:
    """Run once here, for the result, and once as a process, for its length."""
    place, begin = Place(folder / "server", folder / "parties"), time.monotonic()
    result = place.run(variant, resume=False)
    seconds = time.monotonic() - begin
    other = Place(folder / "other-server", folder / "other-parties")
    outcome = strike(other, variant, Blow(0, "never", None))
    return Plain(result, place.charges(), seconds, outcome.num_operations)


def test_kills_at_random_moments_change_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Server and parties die together, up to three times a run, and the result is the same.

    A party has paid as often as without a kill, and once more for each kill between its
    charge and the moment when its answer was on its disk, and never otherwise.
    """
    rng = random.Random(7)  # noqa: S311 - chooses tests
    plain, kills, again = dict[str, Plain](), 0, 0
    variants = sorted(VARIANTS)
    rng.shuffle(variants)
    trial = 0
    while kills < NUM_KILLS:
        variant, folder = variants[trial % len(variants)], tmp_path / str(trial)
        if variant not in plain:
            plain[variant] = run_plain(variant, tmp_path / variant)
        expected, place = plain[variant], Place(folder / "server", folder / "parties")
        excused = [0] * NUM_PARTIES
        for _ in range(rng.randint(1, MOST_IN_A_ROW)):
            outcome = strike(place, variant, random_blow(rng, expected))
            kills += outcome.killed
            excused = [old + new for old, new in zip(excused, outcome.paying, strict=True)]

        assert place.run(variant, resume=place.server.exists()) == expected.result, trial
        extra = [n - m for n, m in zip(place.charges(), expected.charges, strict=True)]
        assert all(0 <= n <= most for n, most in zip(extra, excused, strict=True)), (
            variant,
            trial,
            extra,
            excused,
        )
        again += sum(extra)
        shutil.rmtree(folder)
        trial += 1
    record_property("kills", kills)
    print(f"{kills} kills in {trial} runs, {again} charges repeated")  # noqa: T201


def test_a_party_that_dies_before_its_answer_is_kept_pays_again(tmp_path: Path) -> None:
    """The window is real, so the test above can fail: killed at its end, a party pays twice."""
    last, was_paying = Place(tmp_path / "0", tmp_path / "0-parties"), False
    for operation in range(1, 100):
        place = Place(tmp_path / f"{operation}", tmp_path / f"{operation}-parties")
        is_paying = any(strike(place, "fedmd", Blow(operation, "after", None)).paying)
        if was_paying and not is_paying:
            break
        last, was_paying = place, is_paying
    expected = run_plain("fedmd", tmp_path / "plain")

    assert last.run("fedmd", resume=True) == expected.result
    assert sum(last.charges()) == sum(expected.charges) + 1
