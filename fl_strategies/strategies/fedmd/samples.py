"""Which samples the parties of FedMD have used, as far as the server can know.

A party draws its sample once. One that loses its memory and keeps no journal draws again
and does not know it, so every sample has a random name, and the server composes those of
one party.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.privacy.accountant import Entry, delta_at
from fl_strategies.privacy.mechanisms import SubsampleOnce
from fl_strategies.wire.knowledge import Scalar, shown

logger = logging.getLogger("flwr.fl_strategies")

NUM_RECORDS: Final = "num-records"
SAMPLE_ID: Final = "sample-id"

_NAME: Final = re.compile(r"[0-9a-f]{32}")
_MOST_RECORDS: Final = 2**53


def check_sample_id(value: object) -> str:
    """Return the name of a sample; raise `KnowledgeMismatch` if it is none."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise KnowledgeMismatch(
            f"FedMD: {SAMPLE_ID} must be 32 hexadecimal digits, got {str(value)[:40]!r}."
        )
    return value


@dataclass(frozen=True)
class SamplesOfParty:
    """What the samples of one party cost together, and its fewest records."""

    charges: tuple[Entry, ...]
    delta: float
    num_records: int


class Sample(NamedTuple):
    """A sample by its random name, and the number of records that it was drawn from."""

    name: str
    num_records: int


@dataclass
class SampleBook:
    """The samples of every party, each by its name.

    Parameters
    ----------
    num_samples : int
    replacement, seeded : bool
        How samples are drawn, and whether from a known seed.
    records : dict of partition id to dict of name to int
        From how many records each sample was drawn.
    """

    num_samples: int
    replacement: bool
    seeded: bool
    records: dict[int, dict[str, int]] = field(default_factory=dict)

    def check(self, meta: Mapping[str, Scalar]) -> Sample:
        """Return the sample that an answer names.

        Raises
        ------
        KnowledgeMismatch
            If it names none, or no number of records to draw it from.
        """
        name = check_sample_id(meta.get(SAMPLE_ID))
        records, least = meta.get(NUM_RECORDS), 1 if self.replacement else self.num_samples
        if type(records) is not int or not least <= records <= _MOST_RECORDS:
            raise KnowledgeMismatch(
                f"FedMD: {NUM_RECORDS} must be a whole number from {least} to "
                f"{_MOST_RECORDS}, got {shown(records)}."
            )
        return Sample(name, records)

    def add(self, party: int, sample: Sample, *, num_attempts: int = 1) -> None:
        """Enter a party's sample.

        If the party was asked several times, answers that were lost on their way may have
        been made of samples of their own; they count, unless the sample was known before.
        """
        name, records = sample.name, sample.num_records
        known = self.records.setdefault(party, {})
        if known and name not in known:
            logger.warning(
                "FedMD: party %s has drawn sample %s of its records, and all of them count; "
                "with a journal it would have kept its first.",
                party,
                len(known) + 1,
            )
        if name not in known:
            known |= {f"{name} lost {number}": records for number in range(1, num_attempts)}
        known[name] = min(records, known.get(name, records))

    def count(self, party: int) -> int:
        """Return how many samples a party has used."""
        return len(self.records[party])

    def fewest_records(self, parties: Iterable[int]) -> int:
        """Return the fewest records that one of these parties has."""
        return min(min(self.records[party].values()) for party in parties)

    def worst(self) -> SamplesOfParty:
        """Return the party with the largest chance that a record is in a sample."""
        distinct = {tuple(sorted(known.values())) for known in self.records.values()}
        return max(map(self._together, distinct), key=lambda party: party.delta)

    def _together(self, sizes: tuple[int, ...]) -> SamplesOfParty:
        entries: list[Entry] = [
            (self._sample(size).event, count) for size, count in Counter(sizes).items()
        ]
        charges = tuple(
            (event, count * times)
            for size, times in Counter(sizes).items()
            for event, count in self._sample(size).charges(seeded=self.seeded)
        )
        return SamplesOfParty(charges, delta_at(entries, 0.0), min(sizes))

    def _sample(self, records: int) -> SubsampleOnce:
        return SubsampleOnce(
            records=records, samples=self.num_samples, replacement=self.replacement
        )
