"""The party's role in FedHistogram and FedRegression: sum the own records up, once."""

from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.errors import KnowledgeMismatch, require_known
from fl_strategies.party.accounting import privacy_metrics, spend, unprotected
from fl_strategies.party.party import Party
from fl_strategies.party.policy import Request
from fl_strategies.party.role import PartyRole, check_public_data, read_seed
from fl_strategies.party.state import PartyState
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import MOST_SUMS, GaussianSums
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.planning.facts import Facts, Planner
from fl_strategies.strategies.sums.options import (
    SUMS,
    TASK,
    TRUSTED,
    UNPROTECTED,
    SumOptions,
)
from fl_strategies.strategies.sums.summary import LARGEST_SUM, Summary, direction
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, config_choice


class SumParty(PartyRole):
    """The party's role: sum the own records up as public rows say; no model is trained."""

    def __init__(
        self, options: type[SumOptions], summary: type[Summary], planner: Planner
    ) -> None:
        self._name, _, _ = planner.name.partition(" ")
        self._options, self._summary, self._planner = options, summary, planner

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return that sums leave, with the party's own noise or without."""
        options = self._options.received(config)
        noisy, privacy = options.level == "L2", options.privacy
        seeded = privacy is not None and privacy.seeded_noise
        return Request(
            name=f"{self._name} {options.level}",
            trainer=party.learner_fn,
            models=False,
            protected=noisy,
            trusted=not noisy and privacy is not None and not seeded,
            seeded=noisy and seeded,
            fits=0,
            drowned=lambda: self._drowned(party, options) if noisy else "",
        )

    def _drowned(self, party: Party, options: SumOptions) -> str:
        """Say if one party's noise drowns all records that the server has announced."""
        privacy = options.privacy
        if privacy is None or privacy.target_epsilon is None:
            return ""
        facts = Facts(
            target_epsilon=privacy.target_epsilon,
            delta=privacy.delta,
            num_parties=1,
            num_records=options.num_records or max(1, len(party.public)),
            num_classes=max(2, party.num_classes),
            num_public=max(1, len(party.public)),
        )
        return self._planner.problem(facts)

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return what the own records sum up to, with noise if the party is to add it."""
        check_public_data(party, config)
        config_choice(config, TASK, [party.task])
        classes, rule = party.task != "regression", "single-label or multi-label"
        require_known(classes, party.owner, "task", rule, party.task)
        require_known(len(party.y) > 0, party.owner, "x", "records to sum up", "none")
        options = self._options.received(config)
        summary, shape = self._read(party, received)
        own = options.privacy if options.level == "L2" else None
        moved = summary.moved(party.num_classes, party.task)
        mechanism = None if own is None else own.mechanism(moved, int(np.prod(shape)))
        ledger, reason = self._charge(party, options, mechanism, shape, state)
        sums = summary.of_records(party.x, party.y, party.num_classes, party.task)
        if own is not None and mechanism is not None:
            rng = own.rng(read_seed(config), SUMS, party.partition_id)
            sums = np.rint(mechanism.release(sums, rng).values).astype(np.int64)
        if options.level == "L1":
            sums = direction(sums)
        limited = np.clip(sums, -LARGEST_SUM, LARGEST_SUM).astype(np.int32)
        metrics = privacy_metrics(party=unprotected(reason), example=ledger)
        # All directions weigh the same, whatever they are of.
        claim = {} if options.level == "L1" else {keys.NUM_EXAMPLES: len(party.y)}
        return Knowledge(SUMS, {SUMS: limited}, claim), metrics

    def _read(
        self, party: Party, received: Knowledge | None
    ) -> tuple[Summary, tuple[int, ...]]:
        """Return how to sum up, as the server sent it, and the shape of the sums."""
        if received is None or received.kind != self._summary.kind:
            raise KnowledgeMismatch(f"Server: the message must hold {self._summary.kind}.")
        num_values = int(np.prod(party.x.shape[1:]))
        summary = self._summary.from_arrays(received.arrays, num_values)
        shape = summary.shape(party.num_classes, party.task)
        few, rule = int(np.prod(shape)) <= MOST_SUMS, f"for at most {MOST_SUMS} sums"
        require_known(few, "Server", summary.kind, rule, shape)
        return summary, shape

    def _charge(
        self,
        party: Party,
        options: SumOptions,
        mechanism: GaussianSums | None,
        shape: Sequence[int],
        state: PartyState,
    ) -> tuple[PrivacyLedger, str]:
        """Record what the sums will cost, before a record is looked at."""
        privacy = options.privacy
        charges: Sequence[Entry]
        if mechanism is None or privacy is None:
            reason = UNPROTECTED if privacy is None else TRUSTED
            charges = [(NonPrivateEvent(unit="example", reason=reason), 1)]
        else:
            reason = "noise on sums over records protects examples, not parties"
            charges = mechanism.charges(int(np.prod(shape)), seeded=privacy.seeded_noise)
        purpose = f"{self._name} {options.level}"
        return spend(party, charges, purpose, options.delta, state), reason
