"""The samples of noise-free privacy (NFDP), and what else a party of FedMD keeps.

A party draws its sample once, charges for it once and uses it in every round. What it keeps
of a run lives as long as the run, a sample must live as long as the data: so a party with a
journal also keeps it in a file beside the journal, and a new run uses the sample that has
been paid for. A party that loses its memory and keeps no journal draws again and does not
know it; so every sample has a random name, and the server composes those of one party.
"""

import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from fl_strategies._util import IntArray, replace_file, sealed, unsealed
from fl_strategies.errors import InvalidData, KnowledgeMismatch, require_known
from fl_strategies.learners import Learner, LearnerFactory, PortableLearner
from fl_strategies.party.party import Party
from fl_strategies.party.role import (
    ArrayField,
    ArraysField,
    PartyState,
    ScalarField,
    privacy_metrics,
    spend,
    unprotected,
)
from fl_strategies.privacy.accountant import Entry, delta_at
from fl_strategies.privacy.bounds.theorems import nfdp_tight
from fl_strategies.privacy.events import SubsampleEvent
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import SubsampleOnce
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics, Scalar, shown

logger = logging.getLogger("flwr.fl_strategies")

NUM_RECORDS: Final = "num-records"
SAMPLE_ID: Final = "sample-id"
WHOLE_PARTY: Final = "all records of a party together have no protection"

_NOTES: Final = "fedmd"
_ID_BYTES: Final = 16
_SAMPLE_NAME: Final = re.compile(r"[0-9a-f]{32}")
_MOST_RECORDS: Final = 2**53
_MOST_DRAWS_PER_RECORD: Final = 4


class FedMDPartyState(PartyState):
    """State of a party of FedMD."""

    terms = ScalarField(_NOTES, "terms", "")
    """Terms of the last training that was paid for; empty before the first."""
    digested_round = ScalarField(_NOTES, "digested-round", 0)
    """Round of the consensus that was digested last; 0 before the first."""
    model_arrays = ArraysField("fedmd-model")
    """The model, for learners that continue."""
    model_origin = ScalarField(_NOTES, "model-origin", "")
    """What the model was trained on, and for whom."""
    packed_consensus = ArrayField("fedmd-consensus", "labels")
    """Labels of the last consensus, for learners that start anew each time."""
    found_contrast = ScalarField(_NOTES, "contrast", "")
    """How records relate to public rows, and which records."""
    sample = ArrayField("fedmd-sample", "rows")
    """Positions of the records in use, with noise-free privacy."""
    sample_origin = ScalarField(_NOTES, "sample", "")
    """How the sample was drawn."""
    sample_id = ScalarField(_NOTES, "sample-id", "")
    """A random name of the sample, which reveals nothing about it; empty without one."""

    def start_anew(self) -> None:
        """Forget model, consensus and terms; the sample and what was spent stay."""
        self.model_arrays = self.packed_consensus = None
        self.digested_round, self.terms, self.found_contrast = 0, "", ""

    def contrast(self, terms: str) -> str:
        """Return how the records of these terms relate to public rows; empty if unknown."""
        contrast, _, origin = self.found_contrast.partition("; ")
        return contrast if origin == self._origin(terms) else ""

    def keep_contrast(self, contrast: str, terms: str) -> None:
        """Keep how the records of these terms relate to public rows."""
        self.found_contrast = f"{contrast}; {self._origin(terms)}"

    def model(self, learner_fn: LearnerFactory, terms: str) -> Learner | None:
        """Return the model as it was kept, if there is one of these very terms.

        What has been paid for records under one release does not pay for another: a model
        that has seen all of them may answer with noise, but not in place of a sample's.
        """
        if self.model_origin != self._origin(terms):
            return None
        arrays, twin = self.model_arrays, learner_fn()
        if arrays is None or not isinstance(twin, PortableLearner):
            return None
        return twin.from_arrays(arrays)

    def keep_model(self, model: PortableLearner, *, digested_round: int, terms: str) -> None:
        """Keep a model together with what it has digested, and what it was trained on."""
        self.model_arrays = model.to_arrays()
        self.digested_round, self.model_origin = digested_round, self._origin(terms)

    def _origin(self, terms: str) -> str:
        return f"{terms}; sample {self.sample_id}"


def check_sample_id(value: object) -> str:
    """Return the name of a sample; raise `KnowledgeMismatch` if it is none."""
    if not isinstance(value, str) or not _SAMPLE_NAME.fullmatch(value):
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
        """Return the sample that an answer names, with the records it was drawn from."""
        name = check_sample_id(meta.get(SAMPLE_ID))
        records, least = meta.get(NUM_RECORDS), 1 if self.replacement else self.num_samples
        if type(records) is int and least <= records <= _MOST_RECORDS:
            return Sample(name, records)
        rule = f"a whole number from {least} to {_MOST_RECORDS}"
        raise KnowledgeMismatch(f"FedMD: {NUM_RECORDS} must be {rule}, got {shown(records)}.")

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

    def fewest_records(self, parties: Iterable[int]) -> int:
        """Return the fewest records that one of these parties has."""
        return min(min(self.records[party].values()) for party in parties)

    def worst(self) -> SamplesOfParty:
        """Return the party with the largest chance that a record is in a sample."""
        distinct = {tuple(sorted(known.values())) for known in self.records.values()}
        return max(map(self._together, distinct), key=lambda party: party.delta)

    def _together(self, sizes: tuple[int, ...]) -> SamplesOfParty:
        drawn = [
            (
                SubsampleOnce(
                    records=size, samples=self.num_samples, replacement=self.replacement
                ),
                times,
            )
            for size, times in Counter(sizes).items()
        ]
        charges = tuple(
            (event, count * times)
            for sample, times in drawn
            for event, count in sample.charges(seeded=self.seeded)
        )
        delta = delta_at([(sample.event, times) for sample, times in drawn], 0.0)
        return SamplesOfParty(charges, delta, min(sizes))


def sample_records(
    party: Party,
    state: FedMDPartyState,
    mechanism: SubsampleOnce,
    rng: np.random.Generator | None,
    *,
    delta: float,
) -> IntArray:
    """Return the positions of the records in use, the same in every round.

    A party without a journal states what it has spent at `delta`.

    Raises
    ------
    InvalidData
        If another sample of the same data was used in this run and no journal would
        compose the two.
    PrivacyBudgetExceeded
        If the journal's budget does not allow a sample; none is drawn then.
    """
    source = "the operating system" if rng is None else "a known seed"
    wanted = f"{_name(mechanism)} of {mechanism.records} by {source}"
    drawn, kept = state.sample_origin, state.sample
    if kept is not None and drawn == wanted:
        return kept
    if kept is not None and party.journal is None:
        raise InvalidData(
            f"{party.owner}: a second sample must be composed with the first "
            f"one ({drawn!r}) by a journal, got none."
        )
    lasting = party.journal if rng is None else None
    paid = None if lasting is None else _paid_sample(lasting, mechanism)
    sample_id, rows = paid or _draw(party, state, mechanism, rng, delta)
    state.sample, state.sample_origin, state.sample_id = rows, wanted, sample_id
    return rows


def check_size(party: Party, num_samples: int, *, replacement: bool) -> None:
    """Raise `KnowledgeMismatch` for a sample that is too large for this party."""
    most = len(party.y) * (_MOST_DRAWS_PER_RECORD if replacement else 1)
    many = f"{_MOST_DRAWS_PER_RECORD} times its records, with"
    what = many if replacement else "its records, without"
    rule = f"at most {most}, {what} replacement"
    require_known(num_samples <= most, party.owner, "num-samples", rule, num_samples)


def spent_metrics(ledger: PrivacyLedger) -> Metrics:
    """Return the privacy metrics of a party.

    A secret sample spends delta whatever epsilon is. If there is one, delta is the chance
    that a record is in it, plus the ledger's own delta if noise was used as well.
    """
    metrics = privacy_metrics(party=unprotected(WHOLE_PARTY), example=ledger)
    samples = [entry for entry in ledger.entries if isinstance(entry[0], SubsampleEvent)]
    if not samples:
        return metrics
    delta = delta_at(samples, 0.0)
    if len(samples) < len(ledger.entries):
        delta += (1 - delta) * ledger.delta
    # At delta 1 anything is allowed, so nothing is promised.
    epsilon = ledger.get_epsilon(delta) if delta < 1 else float("inf")
    return {**metrics, keys.EPSILON_EXAMPLE: epsilon, keys.DELTA_EXAMPLE: delta}


def _draw(
    party: Party,
    state: FedMDPartyState,
    mechanism: SubsampleOnce,
    rng: np.random.Generator | None,
    delta: float,
) -> tuple[str, IntArray]:
    charges = mechanism.charges(seeded=rng is not None)
    purpose = f"fedmd nfdp: a sample of {mechanism.samples} records"
    spend(party, charges, purpose, delta, state)
    rows: IntArray = mechanism.release(rng).values
    # Equal seeded draws are one sample, and so have one name.
    name = secrets.token_bytes(_ID_BYTES) if rng is None else rng.bytes(_ID_BYTES)
    if party.journal is not None and rng is None:
        _write_sample(party.journal, mechanism, name.hex(), rows)
    records = mechanism.records
    chance = nfdp_tight(records, mechanism.samples, replacement=mechanism.replacement).delta
    if chance > 1 / records:
        logger.warning(
            "Party %s: delta %.4g of its sample is above 1 / %s: each record is used in "
            "the clear with this chance.",
            party.partition_id,
            chance,
            records,
        )
    return name.hex(), rows


def _paid_sample(
    journal: PartyJournal, mechanism: SubsampleOnce
) -> tuple[str, IntArray] | None:
    """Return the sample of an earlier run, if the journal knows that it was paid."""
    paid = any(
        entry.fingerprint == journal.fingerprint and event == mechanism.event
        for entry in journal.entries()
        for event, _ in entry.charges
    )
    return _read_sample(journal, mechanism) if paid else None


def _name(mechanism: SubsampleOnce) -> str:
    how = "with" if mechanism.replacement else "without"
    return f"sample-{mechanism.samples}-{how}-replacement"


def _sample_path(journal: PartyJournal, mechanism: SubsampleOnce) -> Path:
    stem = journal.path.name.removesuffix(".jsonl")
    return journal.folder / f"{stem}.{_name(mechanism)}.json"


def _write_sample(
    journal: PartyJournal, mechanism: SubsampleOnce, sample_id: str, rows: IntArray
) -> None:
    """Keep a sample for later runs, readable by its owner only."""
    content = {
        "fingerprint": journal.fingerprint,
        "id": sample_id,
        "records": mechanism.records,
        "rows": rows.tolist(),
    }
    path = _sample_path(journal, mechanism)
    replace_file(path, sealed(path.name, json.dumps(content).encode()))


def _read_sample(
    journal: PartyJournal, mechanism: SubsampleOnce
) -> tuple[str, IntArray] | None:
    """Return the sample of these very data; None, and so a new charge, for anything else."""
    try:
        path = _sample_path(journal, mechanism)
        content = json.loads(unsealed(path.name, path.read_bytes()) or b"")
        rows = np.array(content["rows"])
        sample_id = check_sample_id(content["id"])
        own = (content["fingerprint"], content["records"]) == (
            journal.fingerprint,
            mechanism.records,
        )
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    if not own or rows.dtype.kind != "i" or rows.shape != (mechanism.samples,):
        return None
    inside = bool(((rows >= 0) & (rows < mechanism.records)).all())
    return (sample_id, rows.astype(np.int64)) if inside else None
