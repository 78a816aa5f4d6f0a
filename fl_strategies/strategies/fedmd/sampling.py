"""The sample of noise-free privacy: drawn and charged once, then kept.

What a party keeps of a run lives as long as the run. A sample must live as long as the data,
so a party with a journal also keeps it in a file beside the journal: a new run then uses the
sample that has been paid for.
"""

import json
import logging
import secrets
from pathlib import Path

import numpy as np

from fl_strategies.arrays import IntArray
from fl_strategies.core.accounting import privacy_metrics, spend, unprotected
from fl_strategies.core.party import Party
from fl_strategies.exceptions import InvalidData, KnowledgeMismatch
from fl_strategies.privacy.accountant import delta_at
from fl_strategies.privacy.bounds.nfdp import nfdp_tight
from fl_strategies.privacy.events import SubsampleEvent
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import SubsampleOnce
from fl_strategies.runtime.atomic_files import replace_file, sealed, unsealed
from fl_strategies.strategies.fedmd.party_state import FedMDPartyState
from fl_strategies.strategies.fedmd.samples import check_sample_id
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics

logger = logging.getLogger("flwr.fl_strategies")

_ID_BYTES = 16
_MOST_DRAWS_PER_RECORD = 4

WHOLE_PARTY = "all records of a party together have no protection"


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
    if num_samples > most:
        many = f"{_MOST_DRAWS_PER_RECORD} times its records, with"
        what = many if replacement else "its records, without"
        raise KnowledgeMismatch(
            f"{party.owner}: num-samples must be at most {most}, "
            f"{what} replacement, got {num_samples}."
        )


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
    _warn_of_chance(party, mechanism)
    return name.hex(), rows


def _warn_of_chance(party: Party, mechanism: SubsampleOnce) -> None:
    records, replacement = mechanism.records, mechanism.replacement
    delta = nfdp_tight(records, mechanism.samples, replacement=replacement).delta
    if delta > 1 / records:
        logger.warning(
            "Party %s: delta %.4g of its sample is above 1 / %s: each record is used in "
            "the clear with this chance.",
            party.partition_id,
            delta,
            records,
        )


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
