"""Finds what leaves a party, depends on a record, and is covered by no noise.

Noise is replaced by noise that does not depend on data: every mechanism releases what it
would release for one fixed input. A party is then asked in a whole run, with one data set
and with a neighbouring one. Whatever still differs in its replies, in records, metrics,
errors or sizes, is a release that nobody has paid for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message

from clients.app import client_app
from clients.networks import private
from fl_strategies import Party, _compat
from fl_strategies._util import Array, IntArray
from fl_strategies.errors import RunFailed
from fl_strategies.privacy import mechanisms
from fl_strategies.privacy.mechanisms import GaussianSums, LaplaceCounts
from fl_strategies.server.strategy import KnowledgeStrategy
from fl_strategies.strategies.fedmd import samples
from simulations.runtime.local import InMemoryGrid

NUM_RECORDS, NUM_CLASSES, WIDTH = 24, 3, 3
COUNTS = LaplaceCounts, GaussianSums
SAMPLE = 8
"""Records of a sample of noise-free privacy; here the first ones, so the last is outside."""


class Records(NamedTuple):
    """Private data of a party."""

    x: Array
    y: IntArray


def rows(number: int, seed: int) -> Records:
    """Return rows around one centre a class."""
    rng = np.random.default_rng(seed)
    y = np.arange(number) % NUM_CLASSES
    return Records(3.0 * np.eye(WIDTH)[y] + rng.normal(size=(number, WIDTH)), y)


PUBLIC = rows(18, 1)
ORDINARY = rows(NUM_RECORDS, 2)
EQUAL = Records(np.ones((NUM_RECORDS, WIDTH)), ORDINARY.y)
ONE_CLASS = Records(ORDINARY.x, np.zeros(NUM_RECORDS, dtype=np.int64))
DUPLICATES = Records(np.repeat(ORDINARY.x[:3], 8, axis=0), np.repeat(np.arange(3), 8))


def with_last(records: Records, row: float | Array, label: int) -> Records:
    """Return the records with another last one."""
    x, y = records.x.copy(), records.y.copy()
    x[-1], y[-1] = row, label
    return Records(x, y)


SETS: Mapping[str, Records] = {
    "ordinary": ORDINARY,
    "equal": EQUAL,
    "one class": ONE_CLASS,
    "duplicates": DUPLICATES,
}
NEIGHBOURS: Mapping[str, tuple[str, Records]] = {
    "another record": ("ordinary", with_last(ORDINARY, np.array([9.0, -4.0, 2.0]), 0)),
    "a label": ("ordinary", with_last(ORDINARY, ORDINARY.x[-1], 1)),
    "moved by 1e-9": ("ordinary", with_last(ORDINARY, ORDINARY.x[-1] + 1e-9, 2)),
    "beyond float32": ("ordinary", with_last(ORDINARY, 1e39, 0)),
    "largest float64": ("ordinary", with_last(ORDINARY, np.array([1.7e308, -1.7e308, 0]), 0)),
    "subnormal": ("ordinary", with_last(ORDINARY, 5e-324, 0)),
    "all equal": ("equal", with_last(EQUAL, 1e6, 0)),
    "all of one class": ("one class", with_last(ONE_CLASS, ORDINARY.x[-1], 2)),
    "duplicated": ("duplicates", with_last(DUPLICATES, 1e39, 0)),
}
"""A name of a set, and the same set with another last record."""


def party_of(records: Records, **options: Any) -> Party:
    """Return the party that is asked, with held-out rows of its own."""
    test = rows(30, 3)
    return Party(
        x=records.x,
        y=records.y,
        public=PUBLIC.x,
        num_classes=NUM_CLASSES,
        x_test=test.x,
        y_test=test.y,
        **options,
    )


@contextmanager
def noise_without_data() -> Iterator[None]:
    """Replace every source of noise by one that starts from a fixed point and sees no data."""
    with pytest.MonkeyPatch.context() as patch:
        source = np.random.default_rng(5)
        words = mechanisms.random_words

        def fixed_words(size: int, rng: np.random.Generator | None = None) -> Any:
            return words(size, source if rng is None else rng)

        patch.setattr(mechanisms, "random_words", fixed_words)
        patch.setattr(private, "random_words", fixed_words)
        patch.setattr(samples.secrets, "token_bytes", lambda size: bytes(size))
        for kind in (mechanisms.NoisyMax, mechanisms.ConfidentNoisyMax, *COUNTS):
            _release_nothing(patch, kind, np.zeros_like)
        _release_nothing(patch, mechanisms._NoisyScores, _even)
        patch.setattr(mechanisms.SubsampleOnce, "release", _first_rows)
        patch.setattr(private.NoisyOptimizer, "add_noise", _noise_alone)
        yield


def _release_nothing(
    patch: pytest.MonkeyPatch, kind: Any, nothing: Callable[[Array], Array]
) -> None:
    release = kind.release

    def data_free(
        self: Any, values: Array, rng: np.random.Generator | None = None, **rest: Array
    ) -> Any:
        return release(self, nothing(values), rng, **{k: 0 * v for k, v in rest.items()})

    patch.setattr(kind, "release", data_free)


def _even(scores: Array) -> Array:
    return np.full_like(scores, 1 / scores.shape[-1])


def _first_rows(self: mechanisms.SubsampleOnce, rng: Any = None) -> mechanisms.Release:
    charges = self.charges(seeded=rng is not None)
    return mechanisms.Release(np.arange(self.samples), charges)


_add_noise = private.NoisyOptimizer.add_noise


def _noise_alone(self: Any) -> None:
    for parameter in self.params:
        parameter.summed_grad.zero_()
    _add_noise(self)


class Recording:
    """A client app that keeps what the first party answers, as the bytes that travel."""

    def __init__(self, load: Callable[[Context], Party]) -> None:
        self.app, self.replies = client_app(load), list[tuple[str, object]]()

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self.app(message, context)
        failed = reply.has_error()
        told = reply.error.reason if failed else _compat.records_to_bytes(reply.content)
        if context.node_config["partition-id"] == 0:
            self.replies.append(("error" if failed else "reply", told))
        return reply


def transcript(
    strategy: KnowledgeStrategy[Any], parties: Sequence[Party], num_rounds: int = 1
) -> list[tuple[str, object]]:
    """Return everything that the first party says in a run, whether or not it ends well."""
    recording = Recording(lambda context: parties[int(context.node_config["partition-id"])])
    with noise_without_data(), suppress(RunFailed):
        grid = InMemoryGrid(recording, len(parties))  # type: ignore[arg-type]
        strategy.start(grid, ArrayRecord(), num_rounds=num_rounds)
    return recording.replies
