"""The party's role in every head on sums: sum the own records, once."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.errors import KnowledgeMismatch, require_known
from fl_strategies.learners import Task
from fl_strategies.party.party import Party
from fl_strategies.party.role import (
    PartyRole,
    PartyState,
    charge_plan,
    check_num_classes,
    check_public_data,
    facts_of,
    read_seed,
)
from fl_strategies.privacy.mechanisms import MOST_SUMS
from fl_strategies.release import ReleasePlan
from fl_strategies.strategies.sums.options import (
    SUMS,
    TASK,
    SumOptions,
    SumPlanner,
    mechanism_of,
    release_plan,
)
from fl_strategies.strategies.sums.summary import (
    LARGEST_SUM,
    MOST_EXACT,
    Summary,
    direction,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, config_choice

CLASSES: Final[Sequence[Task]] = ("single-label", "multi-label")


class SumParty(PartyRole):
    """The party's role: sum the own records as public rows define; no model is trained."""

    def __init__(
        self,
        options: type[SumOptions],
        summary: type[Summary],
        planner: type[SumPlanner],
        tasks: Sequence[Task] = CLASSES,
    ) -> None:
        self._options, self._summary, self._tasks = options, summary, tasks
        self._planner = planner(level="L2")

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return that sums leave, with the party's own noise or without."""
        return self._plan(party, self._options.received(config))

    def _plan(
        self, party: Party, options: SumOptions, summary: Summary | None = None
    ) -> ReleasePlan:
        return release_plan(options, facts_of(party), self._planner, summary=summary)

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the sum of the own records, with noise if the party is to add it."""
        # Without public rows, whatever the party holds of them is not used.
        (check_public_data if keys.PUBLIC_HASH in config else check_num_classes)(party, config)
        config_choice(config, TASK, [party.task])
        fits, rule = party.task in self._tasks, " or ".join(self._tasks)
        require_known(fits, party.owner, "task", rule, party.task)
        require_known(len(party.y) > 0, party.owner, "x", "records to sum up", "none")
        options = self._options.received(config)
        summary = self._read(
            party, received, MOST_EXACT if options.level == "L0" else MOST_SUMS
        )
        # Charged before a record is looked at.
        _, _, metrics = charge_plan(party, self._plan(party, options, summary), state)
        sums = summary.of_records(party.x, party.y, party.num_classes, party.task)
        multiples = summary.multiples(party.num_classes, party.task)
        if options.privacy is not None and options.level == "L2":
            mechanism = mechanism_of(options.privacy, facts_of(party), summary)
            rng = options.privacy.rng(read_seed(config), SUMS, party.partition_id)
            noisy = mechanism.release(sums * multiples, rng).values
            sums = np.rint(noisy / multiples).astype(np.int64)
        if options.level == "L1":
            sums = direction(sums * multiples)
        limited = np.clip(sums, -LARGEST_SUM, LARGEST_SUM).astype(np.int32)
        # All directions weigh the same, whatever they are of.
        claim = {} if options.level == "L1" else {keys.NUM_EXAMPLES: len(party.y)}
        return Knowledge(SUMS, {SUMS: limited}, claim), metrics

    def _read(self, party: Party, received: Knowledge | None, most: int) -> Summary:
        """Return the summary that the server sent, of so many sums at most."""
        if received is None or received.kind != self._summary.kind:
            raise KnowledgeMismatch(f"Server: the message must hold {self._summary.kind}.")
        num_values = int(np.prod(party.x.shape[1:]))
        summary = self._summary.from_arrays(received.arrays, num_values)
        summary.check_task(party.num_classes, party.task)
        shape = summary.shape(party.num_classes, party.task)
        few, rule = math.prod(shape) <= most, f"for at most {most} sums"
        require_known(few, "Server", summary.kind, rule, shape)
        return summary
