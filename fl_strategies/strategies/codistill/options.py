"""Options of co-distillation, and how models travel."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from fl_strategies.errors import KnowledgeMismatch, require_known
from fl_strategies.learners import Recipe, Task
from fl_strategies.options import Options, option
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.release import Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.server.replies import limit_events
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Scalar, join_arrays, part_arrays, shown

NUM_MODELS: Final = "num-models"
MODEL: Final = "model"
MODELS: Final = "models"
MAX_MODELS: Final = 100_000
MAX_NAME: Final = 200
# Of an array, and of the number that its name begins with in a message.
_MOST_HEADER: Final = 256


def join_models(models: Sequence[Knowledge], **meta: Scalar) -> Knowledge:
    """Return several models as one piece of knowledge, in this order."""
    joined: dict[str, Scalar] = {NUM_MODELS: len(models), **meta}
    for index, model in enumerate(models):
        joined |= {f"{index}/{key}": value for key, value in model.meta.items()}
    return Knowledge(MODELS, join_arrays([model.arrays for model in models]), joined)


def part_models(knowledge: Knowledge) -> list[Knowledge]:
    """Undo `join_models`, also for untrusted knowledge."""
    count = knowledge.meta.get(NUM_MODELS)
    most = min(MAX_MODELS, len(knowledge.arrays))  # no model is without arrays
    if knowledge.kind != MODELS or type(count) is not int or not 1 <= count <= most:
        raise KnowledgeMismatch(
            f"Knowledge: {NUM_MODELS} must be at least 1, with an array or more each and of "
            f"kind {MODELS!r}, got {shown(count)} of kind {shown(knowledge.kind)} with "
            f"{len(knowledge.arrays)} arrays."
        )
    metas: list[dict[str, Scalar]] = [{} for _ in range(count)]
    for full_name, value in knowledge.meta.items():
        index, _, name = full_name.partition("/")
        if index.isdecimal() and len(index) < 10 and int(index) < count:
            metas[int(index)][name] = value
    parts = part_arrays(knowledge.arrays, count)
    return [Knowledge(MODEL, arrays, meta) for arrays, meta in zip(parts, metas, strict=True)]


def check_relayed(knowledge: Knowledge) -> str:
    """Return the name of a model's learner; refuse what no receiver could use."""
    name = knowledge.meta.get(keys.LEARNER)
    plain = isinstance(name, str) and 1 <= len(name) <= MAX_NAME and name.isprintable()
    rule = f"a name of 1 to {MAX_NAME} letters"
    require_known(plain, "Reply", keys.LEARNER, rule, "others")
    require_known(bool(knowledge.arrays), "Reply", "arrays of a model", "given", "none")
    return str(name)


def wire_bytes(models: Iterable[Knowledge]) -> int:
    """Return how many bytes the arrays of models take in one message, at most."""
    arrays = [(name, a) for model in models for name, a in model.arrays.items()]
    return sum(len(name) + a.nbytes + _MOST_HEADER for name, a in arrays)


def check_share(model: Knowledge, share: int) -> None:
    """Raise `KnowledgeMismatch` for a model that takes too much of a message to others."""
    size = wire_bytes([model])
    rule = f"at most {share} bytes, its share of what the other agents read at once"
    require_known(size <= share, "Reply", "a model", rule, size)


def new_ledger(**settings: Any) -> PrivacyLedger:
    """Return an empty ledger of what agents' releases cost their records."""
    return PrivacyLedger("example", delta=DEFAULT_DELTA, **settings)


def has_forgotten(new: PrivacyLedger, old: PrivacyLedger) -> bool:
    """Return whether something of an agent's old ledger is missing in its new one.

    A new ledger comes with a new release, so it counts more releases than the old one.
    """
    counts = dict(new.entries)
    return new.num_releases <= old.num_releases or any(
        counts.get(event, 0) < count for event, count in old.entries
    )


def fill_ledger(ledger: PrivacyLedger, parts: Iterable[PrivacyLedger]) -> PrivacyLedger:
    """Enter also what other ledgers have recorded, as often as they have, and return it.

    Of more events than a party may have the rest counts as unprotected.
    """
    ledger.include(parts)
    return limit_events(ledger)


@dataclass
class Chain:
    """A model that goes from agent to agent, each of whom learns it anew.

    Parameters
    ----------
    start, holder : int
        Partition ids of the agents that trained the first and the newest model.
    model : Knowledge
        The newest model.
    length : int
        How many models the chain has had.
    after : int, optional
        The search for the next agent begins after this one, the last who was skipped; after
        the holder if nobody was.
    """

    start: int
    holder: int
    model: Knowledge
    length: int = 1
    after: int | None = None

    @property
    def sign(self) -> int:
        """Sign of the newest model in EKD's sum: plus for the first."""
        return 1 if self.length % 2 else -1

    def next_agent(self, circle: Sequence[int]) -> int | None:
        """Return who is to continue: the next in the sorted circle, never the holder itself."""
        place = bisect_right(circle, self.holder if self.after is None else self.after)
        nearest = [circle[(place + step) % len(circle)] for step in range(min(2, len(circle)))]
        return next((agent for agent in nearest if agent != self.holder), None)

    def skip(self, agent: int) -> None:
        """Offer the model to the agent after this one, who could not continue."""
        self.after = agent

    def follow(self, agent: int, model: Knowledge) -> None:
        """Take the model that the next agent has trained."""
        self.holder, self.after = agent, None
        self.model, self.length = model, self.length + 1


def take_turns(chains: Sequence[Chain], present: Collection[int]) -> dict[int, Chain]:
    """Return for each agent that is to train the chain that it continues with.

    Nobody trains twice in a round: a chain whose next agent is busy waits, and the
    shortest chains choose first.
    """
    turns: dict[int, Chain] = {}
    circle = sorted(present)
    for chain in sorted(chains, key=lambda chain: (chain.length, chain.start)):
        agent = chain.next_agent(circle)
        if agent is not None:
            turns.setdefault(agent, chain)
    return turns


CodistillLoss: TypeAlias = Literal["mse", "cross-entropy"]


@dataclass(frozen=True, kw_only=True)
class CodistillOptions(Options):
    """Options of AKD, AvgKD, PKD and EKD.

    Parameters
    ----------
    target_loss : "mse" or "cross-entropy"
        How agents learn probabilities, "mse" in the paper's figures; regression has "mse".
    """

    target_loss: CodistillLoss = option("mse", "how agents learn probabilities")

    def recipe(self, task: Task) -> Recipe:
        """Return how agents learn: probabilities in classification, numbers in regression."""
        if task == "regression":
            return Recipe(loss="mse", link="identity")
        return Recipe(loss=self.target_loss, link="softmax")


UNPROTECTED_MODEL: Final = "models left the agents that were trained without noise"


def release_plan(
    name: str,
    facts: ReleaseFacts,
    *,
    training: Callable[[], Sequence[Entry]] = tuple,
    reason: str = UNPROTECTED_MODEL,
    epochs: int = 0,
) -> ReleasePlan:
    """Return what one round releases: a model, protected by private training alone.

    `training` returns what the party's training spends, which parties report; `reason` says why
    nothing else protects the model.
    """

    def price() -> Price:
        spent = tuple(training())
        return Price(record=spent or open_charges(reason), training=spent)

    return ReleasePlan(
        name=name,
        trainer=facts.trainer,
        epochs=epochs,
        audience="the server, the other agents and everybody who sees a model",
        reason=reason,
        reported=True,
        price=price,
    )
