"""Chains: the final model of one strategy starts another, in one run with one ledger.

    rounds of the first link     unchanged, for example one round of FedKT
    then                         its final model becomes the next link's first weights
    rounds of the next link      unchanged, for example twenty rounds of FedProx

There is one ledger, which composes the releases of all links, one numbering of rounds, one
checkpoint, and one list of which node is which party.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fl_strategies._util import Array
from fl_strategies.errors import require
from fl_strategies.learners import Learner, require_portable
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.release import AUDIENCES
from fl_strategies.server.replies import PartyReport, most_expensive
from fl_strategies.server.run import Checkpoint, EvaluateFn, OnRound, Run, State
from fl_strategies.server.strategy import KnowledgeStrategy, described
from fl_strategies.strategies.weights import FlowerStrategy
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar

Link = KnowledgeStrategy[Any]

_OWNER: Final = "chain"
_WEAKEST_FIRST: Final = (AUDIENCES["L0"], AUDIENCES["L1"])
_PRICES: Final = {
    "party": (keys.EPSILON_PARTY, keys.DELTA_PARTY),
    "example": (keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
}
"""Metrics of a ledger's price, per unit."""


def chain(
    first: Link,
    *others: Strategy,
    num_rounds: int | Sequence[int] = 0,
    checkpoint_dir: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | Sequence[OnRound] = (),
) -> "Chain":
    """Return a strategy that runs others one after the other, each from the last one's model.

    Parameters
    ----------
    first : KnowledgeStrategy
        Its model must be of the learner that the next link averages: the same `learner_fn`
        and `learner_name`.
    *others : KnowledgeStrategy, or one of Flower's own
        Strategies that begin with given weights: FedAvg, `FlowerStrategy`, FedMD. One of
        Flower's own is given parties, learner and seed of the link before it.
    num_rounds : int, or one for each link
        Of the last link; those before it, and 0, have their usual number.
    checkpoint_dir, resume, on_round
        See `KnowledgeStrategy`; the links must have none of their own.

    Examples
    --------
    ``chain(FedKT(...), FedProx(proximal_mu=0.1), num_rounds=20).start(grid)`` is FedKT-Prox.
    """
    links: list[Link] = [first]
    for other in others:
        if not isinstance(other, KnowledgeStrategy):
            other = _wrapped(other, links[-1])
        links.append(other)
    given = [*[0] * len(others), num_rounds] if isinstance(num_rounds, int) else [*num_rounds]
    return Chain(links, given, checkpoint_dir=checkpoint_dir, resume=resume, on_round=on_round)


def _wrapped(flower: Strategy, before: Link) -> FlowerStrategy:
    """Return one of Flower's strategies for the parties and the learner of another link."""
    learner_fn = getattr(before, "learner_fn", None)
    _require_model(before)
    return FlowerStrategy(
        flower=flower,
        learner_fn=learner_fn,  # type: ignore[arg-type]
        learner_name=before.model_name,
        num_classes=learner_fn().num_classes,  # type: ignore[misc]
        task=getattr(before, "task", "single-label"),
        num_parties=before.num_parties,
        min_parties=before.min_parties,
        max_wait=before.max_wait,
        seed=before.seed,
        evaluate=before.evaluate,
    )


def _require_model(link: Link) -> None:
    made = getattr(link, "learner_fn", None) is not None and link.model_as_made
    rule = "one whose server makes a model of learner_fn, for the next link to begin with"
    require(made, _OWNER, "a link", rule, type(link).__name__)


@dataclass(kw_only=True)
class ChainState(State):
    """Also the number of the running link, the model handed to it, and all links' states."""

    number: int = 0
    handed: dict[str, Array] = field(default_factory=dict)
    links: list[State] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return all fields by their names, those of the links too."""
        return {**super().to_dict(), "links": [link.to_dict() for link in self.links]}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take what `to_dict` once gave; the links keep sharing who is which party."""
        own = {name: value for name, value in values.items() if name != "links"}
        super().restore(own)
        for link, kept in zip(self.links, values["links"] if values else (), strict=False):
            link.restore(kept)
            link.members = self.members


class Chain(KnowledgeStrategy[Any]):
    """Strategies that run one after the other; made by `chain`.

    Leaves the party
        What leaves it in every link.
    Guarantee
        The releases of all links, composed. Where the links' units differ it is about an
        example, and it holds against those that no link trusts.

    Attributes
    ----------
    links : tuple of KnowledgeStrategy
    link : KnowledgeStrategy
        The one that is running; after a run the last.
    ledger_ : PrivacyLedger
        All links' releases together. Where links know what each party has spent, it is that
        of the party that has spent most in all links.

    Notes
    -----
    Rounds are counted over all links; messages to parties have their link's own name and
    number. A round of a link that has ended early is empty. `start` runs all rounds that
    the chain was made for, whatever `num_rounds` it is given, and only once.
    """

    state_type = ChainState
    takes = ()

    def __init__(
        self,
        links: Sequence[Link],
        num_rounds: Sequence[int],
        *,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        on_round: OnRound | Sequence[OnRound] = (),
    ) -> None:
        self.links, last = tuple(links), links[-1]
        _check_links(self.links, num_rounds)
        super().__init__(
            num_parties=last.num_parties,
            min_parties=last.min_parties,
            max_wait=last.max_wait,
            seed=last.seed,
            max_reply_bytes=max(link.max_reply_bytes for link in self.links),
            encoding=last.encoding,
            checkpoint_dir=checkpoint_dir,
            resume=resume,
            on_round=on_round,
        )
        self.model_name = last.model_name
        self.num_rounds = tuple(
            given or link.usual_rounds
            for given, link in zip(num_rounds, self.links, strict=True)
        )
        states = [link.state for link in self.links]
        self.state: ChainState = ChainState(ledger=links[0].state.ledger, links=states)
        for link in self.links:
            link.state.members = self.state.members
            if self.run.is_kept:
                link.adopt(self.run)
        self._warm = 0

    def _make_run(self, folder: str | Path | None, resume: bool | None) -> Run:
        run = super()._make_run(folder, resume)
        if isinstance(run, Checkpoint):
            kinds = [kind for link in self.links for kind in link.state_type.kinds]
            run.kinds = tuple(dict.fromkeys(kinds))
        return run

    def identity(self) -> dict[str, object]:
        """Return what must be the same to resume: all links, and all rounds but the last's."""
        return {
            "links": [link.identity() for link in self.links],
            "rounds": list(self.num_rounds[:-1]),
            "run-settings": described(self.run_settings),
        }

    @property
    def link(self) -> Link:
        """The link that is running."""
        return self.links[self.state.number]

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,  # noqa: ARG002 - Flower's signature
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run all links; `initial_arrays` are for the first."""
        require(self.round_ == 0, _OWNER, "start", "called once", self.round_)
        return super().start(
            grid,
            ArrayRecord() if initial_arrays is None else initial_arrays,
            num_rounds=sum(self.num_rounds),
            timeout=timeout,
            train_config=train_config,
            evaluate_config=evaluate_config,
            evaluate_fn=evaluate_fn,
        )

    def warm_start(self, arrays: Mapping[str, Array]) -> None:
        """Begin the first link with these weights."""
        self.links[0].warm_start(arrays)

    def summary(self) -> None:
        """Log the settings of all links."""
        for link in self.links:
            link.summary()

    def ask_parties(
        self,
        server_round: int,  # noqa: ARG002 - Flower's signature
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Let the running link ask the parties."""
        self._callbacks.begin(self.round_)
        self._hand_over()
        sent = self.link.ask_parties(self.link.round_ + 1, arrays, config, grid)
        self.state.round += 1
        return sent

    def _hand_over(self) -> None:
        """Give the model of a link that is over to the next, also once more after a resume."""
        state = self.state
        while state.round >= sum(self.num_rounds[: state.number + 1]):
            self.link.require_result()
            model = require_portable(self.link.model_, "It cannot start another strategy.")
            state.handed, state.number = dict(model.to_arrays()), state.number + 1
        if self._warm < state.number:
            self.link.warm_start(state.handed)
            self._warm = state.number

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the link combine the replies."""
        made, metrics = self.link.aggregate_train(server_round, replies)
        self.rejected_, self.failure_ = self.link.rejected_, self.link.failure_
        self.state.prices[self.round_] = {**self.link.state.prices.get(self.link.round_, {})}
        if metrics is not None:
            # The price in a round's metrics is that of all links, not only the present one.
            total = self.ledger_
            epsilon, delta = _PRICES[total.unit]
            reported = metrics.get(epsilon, 0.0)
            known = reported if isinstance(reported, float) else 0.0
            metrics[epsilon], metrics[delta] = max(total.get_epsilon(), known), total.delta
            self.state.history["train"][self.round_] = dict(metrics)
        return made, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Let the link deliver its result."""
        return self.link.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Let the link combine what parties have measured."""
        metrics = self.link.aggregate_evaluate(server_round, replies)
        self.undelivered_ = self.link.undelivered_
        if metrics is not None:
            self.state.history["evaluate"][self.round_] = dict(metrics)
        if not self._evaluates:
            self._end_round()
        return metrics

    def party_config(self) -> dict[str, Scalar]:
        """Return the settings of the present link."""
        return self.link.party_config()

    def check(self, knowledge: Knowledge) -> Any:
        """Return a party's answer to the present link."""
        return self.link.check(knowledge)

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Let the present link combine what was added."""
        return self.link.finish()

    @property
    def name(self) -> str:  # type: ignore[override]
        """The names of all links."""
        return "+".join(link.name for link in self.links)

    @property
    def central(self) -> bool:  # type: ignore[override]
        """Whether the last link ends in one model for everybody."""
        return self.links[-1].central

    @property
    def has_result(self) -> bool:
        """Whether the last link has one."""
        return self.links[-1].has_result

    @property
    def model_(self) -> Learner:
        """The model of the present link."""
        return self.link.model_

    @property
    def parties_(self) -> dict[int, PartyReport]:
        """What each party reported last, in whichever link."""
        return {number: r for link in self.links for number, r in link.parties_.items()}

    @property
    def ledger_(self) -> PrivacyLedger:
        """The releases of all links so far."""
        return _composed([link for link in self.links if link.round_] or self.links[:1])


def _check_links(links: Sequence[Link], num_rounds: Sequence[int]) -> None:
    require(len(links) >= 2, _OWNER, "links", "at least two strategies", len(links))
    each = len(num_rounds) == len(links) and all(
        type(number) is int and number >= 0 for number in num_rounds
    )
    require(each, _OWNER, "num_rounds", "a whole number, or one for each link", num_rounds)
    for link in links:
        fresh = not link.run.is_kept
        rule = f"given to {_OWNER}, not to a link"
        require(fresh, _OWNER, "checkpoint_dir", rule, type(link).__name__)
        require(not link.round_, _OWNER, "a link", "one that has not run", type(link).__name__)
    for before, after in pairwise(links):
        _require_model(before)
        starts = type(after).warm_start is not KnowledgeStrategy.warm_start
        rule = "one that can begin with a given model (averages of weights, FedMD)"
        require(starts, _OWNER, "the next link", rule, type(after).__name__)
        same = after.model_name == before.model_name
        rule = f"{before.model_name!r} in all links: one model starts the next"
        require(same, _OWNER, "learner_name", rule, after.model_name)


def _composed(links: Sequence[Link]) -> PrivacyLedger:
    """Return one ledger for what several strategies have released to the same parties."""
    ledgers = [link.ledger_ for link in links]
    by_party = [getattr(link.state, "ledgers", {}) for link in links]
    known = sorted({number for one in by_party for number in one})
    if not known:
        return compose_ledgers(ledgers)
    totals: dict[str, PrivacyLedger] = {}
    for number in known:
        own = [
            one[number][1] if number in one else ledger.emptied() if one else ledger
            for one, ledger in zip(by_party, ledgers, strict=True)
        ]
        total = compose_ledgers(own)
        totals.setdefault(json.dumps(total.state_dict()["entries"]), total)
    # The epsilon that parties report is about their own past, not about this composition.
    return most_expensive((math.inf, total) for total in totals.values())


def compose_ledgers(ledgers: Sequence[PrivacyLedger]) -> PrivacyLedger:
    """Return a ledger of all that some ledgers have recorded about the same data.

    Of different units it is about an example; see `PrivacyLedger.include`. Delta is the
    largest of theirs.
    """
    mixed = len({ledger.unit for ledger in ledgers}) > 1
    unit = "example" if mixed else ledgers[0].unit
    audiences = [ledger.audience for ledger in ledgers]
    weakest = [audience for audience in _WEAKEST_FIRST if audience in audiences]
    total = PrivacyLedger(
        unit,
        delta=max(ledger.delta for ledger in ledgers),
        audience=[*weakest, audiences[-1]][0],
        num_records=_smallest(ledger.num_records for ledger in ledgers),
        num_parties=_smallest(ledger.num_parties for ledger in ledgers),
    )
    total.include(ledgers)
    return total


def _smallest(sizes: Iterable[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)
