"""What a party of FedMD keeps: its model, its sample, what it has digested and spent.

Flower's `Context.state` lives as long as a run. A sample that was drawn once must live as
long as the data, so a party with a journal keeps it in a file beside the journal: a new run
then uses the sample that has been paid for.
"""

import json
import logging
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies.arrays import Array, IntArray
from fl_strategies.core.accounting import privacy_metrics, run_ledger, spend, unprotected
from fl_strategies.core.party import Party
from fl_strategies.core.protocols import Learner, PortableLearner
from fl_strategies.exceptions import InvalidData, KnowledgeMismatch
from fl_strategies.privacy.accountant import Entry, delta_at
from fl_strategies.privacy.bounds.nfdp import nfdp_tight
from fl_strategies.privacy.events import SubsampleEvent
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import SubsampleOnce
from fl_strategies.runtime.atomic_files import replace_file, sealed, unsealed
from fl_strategies.strategies.fedmd.samples import check_sample_id
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics, decode_arrays, encode_arrays
from fl_strategies.wire.packing import pack_labels, unpack_labels

logger = logging.getLogger("flwr.fl_strategies")

_NOTES = "fedmd"
_MODEL = "fedmd-model"
_SAMPLE = "fedmd-sample"
_CONSENSUS = "fedmd-consensus"
_DIGESTED = "digested-round"
_DRAWN = "sample"
_SAMPLE_ID = "sample-id"
_TERMS = "terms"
_ORIGIN = "model-origin"
_CONTRAST = "contrast"

_ID_BYTES = 16
_MOST_DRAWS_PER_RECORD = 4

WHOLE_PARTY = "all records of a party together have no protection"


class PartyMemory:
    """One party's records in Flower's `Context.state`.

    Parameters
    ----------
    party : Party
    state : RecordDict
    delta : float
        At which a party without a journal states what it has spent.
    """

    def __init__(self, party: Party, state: RecordDict, *, delta: float) -> None:
        self._party = party
        self._state = state
        self._delta = delta

    # What the party has learned.

    @property
    def digested_round(self) -> int:
        """Round of the consensus that was digested last; 0 before the first."""
        value = self._notes().get(_DIGESTED, 0)
        return value if isinstance(value, int) else 0

    def start_anew(self) -> None:
        """Forget model, consensus and terms; the sample and what was spent stay."""
        for name in (_MODEL, _CONSENSUS):
            self._state.pop(name, None)
        self._note(_DIGESTED, 0)
        self._note(_TERMS, "")
        self._note(_CONTRAST, "")

    @property
    def terms(self) -> str:
        """Terms of the last training that was paid for; empty before the first."""
        return str(self._notes().get(_TERMS, ""))

    def keep_terms(self, terms: str) -> None:
        """Keep the terms under which the party has just trained."""
        self._note(_TERMS, terms)

    def contrast(self, terms: str) -> str:
        """How the records of these terms relate to public rows; empty if not found out."""
        contrast, _, origin = str(self._notes().get(_CONTRAST, "")).partition("; ")
        return contrast if origin == self._origin(terms) else ""

    def keep_contrast(self, contrast: str, terms: str) -> None:
        """Keep how the records of these terms relate to public rows."""
        self._note(_CONTRAST, f"{contrast}; {self._origin(terms)}")

    def model(self, terms: str) -> Learner | None:
        """Return the model as it was kept, if there is one of these very terms.

        What has been paid for records under one release does not pay for another: a model
        that has seen all of them may answer with noise, but not in place of a sample's.
        """
        if self._notes().get(_ORIGIN) != self._origin(terms):
            return None
        arrays, twin = self._arrays(_MODEL), self._party.learner_fn()
        if arrays is None or not isinstance(twin, PortableLearner):
            return None
        return twin.from_arrays(arrays)

    def keep_model(self, model: PortableLearner, *, digested_round: int, terms: str) -> None:
        """Keep a model together with what it has digested, and what it was trained on."""
        self._state[_MODEL] = encode_arrays(model.to_arrays())
        self._note(_DIGESTED, digested_round)
        self._note(_ORIGIN, self._origin(terms))

    def _origin(self, terms: str) -> str:
        return f"{terms}; sample {self.sample_id}"

    def consensus_labels(self, num_public: int) -> IntArray | None:
        """Return the labels of the last consensus, for learners that start anew each time."""
        arrays = self._arrays(_CONSENSUS)
        if arrays is None:
            return None
        return unpack_labels(arrays["labels"], (num_public,), self._party.num_classes)

    def keep_consensus(self, labels: IntArray, *, digested_round: int) -> None:
        """Keep the labels of a consensus and its round."""
        packed = pack_labels(labels, self._party.num_classes)
        self._state[_CONSENSUS] = encode_arrays({"labels": packed})
        self._note(_DIGESTED, digested_round)

    # What the party has spent.

    def charge(self, charges: Sequence[Entry], purpose: str) -> PrivacyLedger:
        """Record what is about to leave, and return everything that has been recorded.

        With a journal that is the party's whole past; without one, the run's.
        """
        return spend(self._party, charges, purpose, self._delta, self._state)

    def ledger(self) -> PrivacyLedger:
        """Return everything that has been recorded."""
        if self._party.journal is not None:
            return self._party.journal.ledger()
        return run_ledger(self._state, self._delta)

    # The sample of noise-free privacy.

    def sample(
        self, num_samples: int, *, replacement: bool, rng: np.random.Generator | None
    ) -> IntArray:
        """Return the positions of the records in use: drawn and charged once, then kept.

        Raises
        ------
        InvalidData
            If another sample of the same data was used in this run and no journal would
            compose the two.
        PrivacyBudgetExceeded
            If the journal's budget does not allow a sample; none is drawn then.
        """
        party, records = self._party, len(self._party.y)
        self.check_size(num_samples, replacement=replacement)
        mechanism = SubsampleOnce(records=records, samples=num_samples, replacement=replacement)
        source = "the operating system" if rng is None else "a known seed"
        wanted = f"{_name(mechanism)} of {records} by {source}"
        drawn, kept = self._notes().get(_DRAWN), self._arrays(_SAMPLE)
        if kept is not None and drawn == wanted:
            return kept["rows"]
        if kept is not None and party.journal is None:
            raise InvalidData(
                f"{party.owner}: a second sample must be composed with the first "
                f"one ({drawn!r}) by a journal, got none."
            )
        sample = self._paid_sample(mechanism) if rng is None else None
        sample_id, rows = sample or self._draw(mechanism, rng)
        self._state[_SAMPLE] = encode_arrays({"rows": rows})
        self._note(_DRAWN, wanted)
        self._note(_SAMPLE_ID, sample_id)
        return rows

    @property
    def sample_id(self) -> str:
        """A random name of the sample, which says nothing about it; empty without one."""
        return str(self._notes().get(_SAMPLE_ID, ""))

    def check_size(self, num_samples: int, *, replacement: bool) -> None:
        """Raise `KnowledgeMismatch` for a sample that is too large for this party."""
        records = len(self._party.y)
        most = records * (_MOST_DRAWS_PER_RECORD if replacement else 1)
        if num_samples > most:
            many = f"{_MOST_DRAWS_PER_RECORD} times its records, with"
            what = many if replacement else "its records, without"
            raise KnowledgeMismatch(
                f"{self._party.owner}: num-samples must be at most {most}, "
                f"{what} replacement, got {num_samples}."
            )

    def _draw(
        self, mechanism: SubsampleOnce, rng: np.random.Generator | None
    ) -> tuple[str, IntArray]:
        charges = mechanism.charges(seeded=rng is not None)
        self.charge(charges, f"fedmd nfdp: a sample of {mechanism.samples} records")
        rows: IntArray = mechanism.release(rng).values
        # Equal seeded draws are one sample, and so have one name.
        name = secrets.token_bytes(_ID_BYTES) if rng is None else rng.bytes(_ID_BYTES)
        if self._party.journal is not None and rng is None:
            _write_sample(self._party.journal, mechanism, name.hex(), rows)
        delta = nfdp_tight(
            mechanism.records, mechanism.samples, replacement=mechanism.replacement
        ).delta
        if delta > 1 / mechanism.records:
            logger.warning(
                "Party %s: delta %.4g of its sample is above 1 / %s: each record is used in "
                "the clear with this chance.",
                self._party.partition_id,
                delta,
                mechanism.records,
            )
        return name.hex(), rows

    def _paid_sample(self, mechanism: SubsampleOnce) -> tuple[str, IntArray] | None:
        """Return the sample of an earlier run, if the journal knows that it was paid."""
        journal = self._party.journal
        if journal is None:
            return None
        paid = any(
            entry.fingerprint == journal.fingerprint and event == mechanism.event
            for entry in journal.entries()
            for event, _ in entry.charges
        )
        return _read_sample(journal, mechanism) if paid else None

    # Records.

    def _notes(self) -> ConfigRecord:
        notes = self._state.get(_NOTES)
        return notes if isinstance(notes, ConfigRecord) else ConfigRecord()

    def _note(self, name: str, value: str | int) -> None:
        self._state[_NOTES] = ConfigRecord({**self._notes(), name: value})

    def _arrays(self, name: str) -> dict[str, Array] | None:
        record = self._state.get(name)
        return decode_arrays(record, sys.maxsize) if isinstance(record, ArrayRecord) else None


def spent_metrics(ledger: PrivacyLedger) -> Metrics:
    """Return the privacy figures of a party.

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
