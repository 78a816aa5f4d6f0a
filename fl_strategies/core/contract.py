"""What a strategy says about its algorithm: the page to read before writing one."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from flwr.app import ArrayRecord

from fl_strategies.arrays import Array
from fl_strategies.core.federation import FederationOptions
from fl_strategies.core.members import Known
from fl_strategies.core.protocols import can_travel
from fl_strategies.core.state import State
from fl_strategies.exceptions import InvalidParameter, require
from fl_strategies.naming import nearest_name, require_argument
from fl_strategies.options import Options, key_of
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar
from fl_strategies.wire.replies import PartyReply

T = TypeVar("T")


class Contract(ABC, Generic[T]):
    """Hooks of a strategy, in the order in which a round calls them.

    `begin_round`, then for every reply `check` and `add`, then `exclude` and `finish`; with
    too few replies `record_releases` instead. All have defaults but `party_config`, `check`
    and `finish`.
    """

    name: ClassVar[str]
    reply_kind: str
    state: State
    state_type: ClassVar[type[State]] = State
    """What rounds leave to the next."""
    model_name: str = ""
    """What parties call the final model; they need a factory of this name to receive it."""
    options_type: ClassVar[type[Options]] = Options
    """What can be set about the algorithm itself."""
    takes: ClassVar[tuple[str, ...]] = (
        "public",
        "num_classes",
        "learner_fn",
        "learner_name",
        "task",
        "options",
    )
    """Keyword arguments of the constructor, besides those of `FederationOptions`."""
    identified_by: ClassVar[tuple[str, ...]] = (
        "public",
        "num_classes",
        "learner_fn",
        "model_name",
        "task",
        "options",
    )
    """Attributes that must be as before in a resumed run: every setting of the strategy."""
    run_settings: Mapping[str, Scalar]
    """What else a resumed run must have as before, such as the settings of its learner."""
    last_round: int | None = None
    """Round after which the strategy has nothing more to ask, or None."""
    central: ClassVar[bool] = True
    """Whether the run ends in one model for everybody, or each party keeps its own."""
    usual_rounds: ClassVar[int] = 1
    """Rounds that a run has unless another number is given."""
    same_learner: ClassVar[bool] = False
    """Whether all parties and the server need the same kind of model."""
    relays_models: ClassVar[bool] = False
    """Whether parties' models travel, so that the server must be able to rebuild them."""
    model_as_made: ClassVar[bool] = True
    """Whether the final model has the shape that its factory makes, so that another strategy
    can continue with it."""
    parties_train: ClassVar[bool] = True
    """Whether parties train models of their own."""
    party_learner_needs: ClassVar[tuple[type, ...]] = ()
    """Protocols beyond `Learner` that the parties' models must have."""
    final_learner_needs: ClassVar[tuple[type, ...]] = ()
    """Protocols beyond `Learner` that the server's model must have."""
    min_parties: int
    members: Known
    _kept: list[PartyReply[T]]

    @classmethod
    def from_settings(cls, **given: Any) -> Self:
        """Make a strategy of flat settings, as a run configuration has them.

        Parameters
        ----------
        **given
            What the constructor takes, and by snake_case names what its options are made
            of; None stands for what is not given.

        Examples
        --------
        `FedKT.from_settings(..., privacy_level="L1", gamma=0.1)` is short for
        `FedKT(..., options=FedKTOptions(privacy=VotePrivacy(level="L1", gamma=0.1)))`.
        """
        own = cls.arguments()
        for name in given:
            require_argument(cls.__name__, name, [*own, *cls.setting_names()])
        flat = {key_of(name): value for name, value in given.items() if name not in own}
        options = cls.options_type.from_config(cls.options_type.completed(flat))
        rest: dict[str, Any] = {name: value for name, value in given.items() if name in own}
        if "options" in own:  # a strategy need not have any
            rest["options"] = options
        return cls(**rest)

    @classmethod
    def arguments(cls) -> list[str]:
        """Return what the constructor takes."""
        return [*cls.takes, *FederationOptions.__annotations__]

    @classmethod
    def setting_names(cls) -> list[str]:
        """Return what `from_settings` takes besides."""
        return [key.replace("-", "_") for key in cls.options_type.settings()]

    @classmethod
    def require_arguments(cls, given: Iterable[str]) -> None:
        """Raise `InvalidParameter`, saying what to write, for an argument nobody knows."""
        own, settings = cls.arguments(), cls.setting_names()
        for name in given:
            rule = "names of arguments of its constructor"
            require(name not in cls.takes, cls.__name__, "takes", rule, name)
            meant = nearest_name(name, [*own, *settings])
            said = "" if meant == name else f"Did you mean {meant!r}? "
            hint = (
                f"{said}Write options={cls.options_type.__name__}(...), "
                f"or {cls.__name__}.from_settings({meant}=...)."
            )
            require_argument(cls.__name__, name, own, hint if meant in settings else "")

    @abstractmethod
    def party_config(self) -> dict[str, Scalar]:
        """Return the settings that parties need in round `round_`."""

    def begin_round(self) -> bool:
        """Make ready to ask the parties; return whether they may be asked at all."""
        return True

    @abstractmethod
    def check(self, knowledge: Knowledge) -> T:
        """Return what a party says; raise `KnowledgeMismatch` to exclude it.

        Nothing may change here: what is excluded leaves no trace.
        """

    def add(self, reply: PartyReply[T]) -> None:
        """Take a checked reply into the round; by default it is kept until the end.

        Replies come in any order, so sums must not depend on it. Must not fail.
        """
        self._kept.append(reply)

    def exclude(self, replies: Sequence[PartyReply[T]]) -> Mapping[int, str]:  # noqa: ARG002
        """Return nodes whose reply does not fit the others', and why; none by default."""
        return {}

    @abstractmethod
    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Combine what was added, and return the result with metrics of its own."""

    def record_releases(self) -> None:
        """Record in the ledger what has left the parties although too few of them answered.

        `finish` records this by itself in a round that ends well.
        """

    def confirm_delivery(self, replies: Sequence[PartyReply[None]]) -> None:
        """Note who has received and measured what was delivered."""

    @property
    def replies(self) -> list[PartyReply[T]]:
        """What `add` has kept, by the numbers of the parties and sorted."""
        found = [
            replace(reply, partition_id=self.party_of(reply.node_id)) for reply in self._kept
        ]
        return sorted(found, key=lambda reply: reply.partition_id)

    def party_of(self, node_id: int) -> int:
        """Return which party a node is."""
        return self.members[node_id][1]

    def nodes_for_round(self, nodes: list[int]) -> list[int]:
        """Return which of the connected nodes to ask; all of them by default.

        With none, nothing is sent and the round does not count.
        """
        return nodes

    def num_replies_needed(self) -> int:
        """Return how many valid replies a round needs; `min_parties` by default.

        Never more are needed than nodes were asked.
        """
        return self.min_parties

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return what this node is to learn from before it trains; nothing by default."""
        return None

    def delivery_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return what this node is given after a round; by default the final model."""
        return self.state.delivery

    def warm_start(self, arrays: Mapping[str, Array]) -> None:  # noqa: ARG002
        """Begin with a model that is given to `start`; raise where that means nothing."""
        raise InvalidParameter(
            f"{type(self).__name__}: initial_arrays must be empty, got some. Its model is made "
            f"of what the parties know, not continued from another one."
        )

    @property
    def delivered_learner(self) -> str:
        """Name of the learner whose model `delivery_for` gives; empty if it gives none.

        Parties are told it with every question, so that one that could not read the model
        refuses before it pays.
        """
        made = getattr(self, "learner_fn", None)
        return self.model_name if made is not None and can_travel(made()) else ""

    @property
    def most_score_bytes(self) -> int:
        """How large the array ``scores`` of a reply is; 0 if it must not be compressed.

        The size of a compressed reply tells something about the scores to whoever counts
        bytes. So it is 0 where scores are protected only by what the server makes of them.
        """
        return 0

    @property
    def sends_models(self) -> bool:
        """Whether replies are models, which may travel in half precision."""
        return self.relays_models or self.reply_kind == "models"

    @property
    def ends_early(self) -> bool:
        """Whether a run that too few parties are left for keeps its result and ends."""
        return False
