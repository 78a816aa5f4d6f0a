"""The party's role in FedHistogram; see `fl_strategies.strategies.fedhistogram`."""

from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.aggregation.cells import Cells, count_records
from fl_strategies.core.accounting import privacy_metrics, spend, unprotected
from fl_strategies.core.party import Party
from fl_strategies.core.party_state import PartyState
from fl_strategies.core.policy import Request
from fl_strategies.core.role import PartyRole, check_public_data, read_seed
from fl_strategies.exceptions import KnowledgeMismatch, require_known
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import MOST_CELLS, GaussianCounts
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.strategies.fedhistogram.options import (
    CELLS,
    COUNTS,
    HISTOGRAM,
    TASK,
    TRUSTED,
    UNPROTECTED,
    FedHistogramOptions,
)
from fl_strategies.wire.config import config_choice
from fl_strategies.wire.knowledge import Knowledge, Metrics

LARGEST_COUNT = 2**31 - 1


class FedHistogramParty(PartyRole):
    """The party's role: count the own records by cell and class; no model is trained."""

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return that counts leave, with the party's own noise or without."""
        options = FedHistogramOptions.received(config)
        noisy = options.level == "L2"
        return Request(
            name=f"fedhistogram {options.level}",
            trainer=party.learner_fn,
            models=False,
            protected=noisy,
            seeded=noisy and options.privacy is not None and options.privacy.seeded_noise,
            fits=0,
        )

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return how many records are in each cell, by class."""
        check_public_data(party, config)
        config_choice(config, TASK, [party.task])
        require_known(len(party.y) > 0, party.owner, "x", "records to count", "none")
        options = FedHistogramOptions.received(config)
        cells, shape = _read_cells(party, received)
        own = options.privacy if options.level == "L2" else None
        mechanism = None if own is None else own.mechanism(party.task, party.num_classes)
        ledger, reason = _charge(party, options, mechanism, shape, state)
        counts = count_records(cells.find(party.x), party.y, shape, party.task)
        if own is not None and mechanism is not None:
            rng = own.rng(read_seed(config), HISTOGRAM, party.partition_id)
            counts = np.rint(mechanism.release(counts, rng).values).astype(np.int64)
        limited = np.clip(counts, -LARGEST_COUNT, LARGEST_COUNT).astype(np.int32)
        metrics = privacy_metrics(party=unprotected(reason), example=ledger)
        return Knowledge(HISTOGRAM, {COUNTS: limited}), metrics


def _read_cells(party: Party, received: Knowledge | None) -> tuple[Cells, tuple[int, ...]]:
    """Return the cells that came and the shape of their histogram."""
    if received is None or received.kind != CELLS:
        raise KnowledgeMismatch("Server: the message must hold cells, got none.")
    cells = Cells.from_arrays(received.arrays, int(np.prod(party.x.shape[1:])))
    classes = (2, party.num_classes) if party.task == "multi-label" else (party.num_classes,)
    few = cells.num_cells * int(np.prod(classes)) <= MOST_CELLS
    require_known(few, "Server", "cells", f"at most {MOST_CELLS} counts", cells.num_cells)
    return cells, (cells.num_cells, *classes)


def _charge(
    party: Party,
    options: FedHistogramOptions,
    mechanism: GaussianCounts | None,
    shape: Sequence[int],
    state: PartyState,
) -> tuple[PrivacyLedger, str]:
    """Record what the histogram will cost, before a record is looked at."""
    privacy = options.privacy
    charges: Sequence[Entry]
    if mechanism is None or privacy is None:
        reason = UNPROTECTED if privacy is None else TRUSTED
        charges = [(NonPrivateEvent(unit="example", reason=reason), 1)]
    else:
        reason = "noise on counts protects examples, not parties"
        charges = mechanism.charges(int(np.prod(shape)), seeded=privacy.seeded_noise)
    delta = DEFAULT_DELTA if privacy is None else privacy.delta
    return spend(party, charges, f"fedhistogram {options.level}", delta, state), reason
