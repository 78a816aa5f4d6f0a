"""The client component of the Flower app: a simulated party per partition, with its budget."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Self

from flwr.app import Context

from clients.app import client_app
from fl_strategies import Party
from fl_strategies._util import Array
from fl_strategies.errors import require
from fl_strategies.options import Options, option
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.federation import load_federation

OWNER: Final = "node-config"


def require_absolute(key: str, text: str) -> None:
    """Raise unless a path is absolute.

    Elsewhere started, a SuperNode would find another journal there, with a new budget.
    """
    path = Path(text).expanduser()
    require(not text or path.is_absolute(), OWNER, key, "an absolute path", str(path))


@dataclass(frozen=True, kw_only=True)
class Budget(Options):
    """Folder of a party's journal, and limits of what its data may pay; see `PartyJournal`."""

    owner: ClassVar[str] = OWNER
    names_keys: ClassVar[bool] = True

    state_dir: str = option("", "folder of the journal; empty: none")
    max_epsilon: float = option(0.0, "most that may be paid; 0: no limit", least=0)
    delta: float = option(1e-5, "of the epsilon that is paid", above=0, below=1)
    sample_delta: float = option(0.0, "most of secret samples; 0: none", least=0, below=1)
    data_changes: bool = option(False, "other records are the same party's, and pay as well")

    @classmethod
    def of_node(cls, node_config: Mapping[str, Value]) -> Self:
        """Read a node's configuration; raise if it contradicts itself."""
        given = {key: value for key, value in node_config.items() if key in cls.settings()}
        budget = cls.from_config(given)
        require_absolute("state-dir", budget.state_dir)
        for key, is_usual in (
            ("max-epsilon", not budget.max_epsilon),
            ("delta", budget.delta == cls.settings()["delta"].default),
        ):
            kept = bool(budget.state_dir) or is_usual
            require(kept, OWNER, "state-dir", f"given with {key}", budget.state_dir)
        return budget

    def journal(self, x: Array, y: Array, *below: str) -> PartyJournal | None:
        """Return the journal of these records, in a folder below; None if none is kept."""
        if not self.state_dir:
            return None
        return PartyJournal(
            Path(self.state_dir).expanduser().joinpath(*below),
            fingerprint=data_fingerprint(x, y),
            changing=self.data_changes,
            delta=self.delta,
            max_epsilon=self.max_epsilon or None,
            sample_delta=self.sample_delta,
        )


NODE_KEYS = (keys.PARTITION_ID, keys.NUM_PARTITIONS, *Budget.settings())


def load_party(context: Context) -> Party:
    """Load the party that this node plays, with its journal if it keeps one."""
    settings = read_settings(context.run_config)
    party = load_federation(settings).party(int(context.node_config[keys.PARTITION_ID]))
    budget = read_budget(context.node_config, settings)
    journal = budget.journal(party.x, party.y, f"party-{party.partition_id}")
    return replace(party, journal=journal, run=str(context.run_id))


def read_settings(run_config: Mapping[str, Value]) -> Settings:
    """Return the settings of a run, which all parties in a process read alike."""
    # 1, 1.0 and True are equal, but not the same setting.
    return _read_settings(tuple((key, type(own), own) for key, own in run_config.items()))


@functools.lru_cache(maxsize=4)
def _read_settings(items: tuple[tuple[str, type, Value], ...]) -> Settings:
    return Settings.from_run_config({key: own for key, _, own in items})


def read_budget(node_config: Mapping[str, Value], settings: Settings) -> Budget:
    """Return the budget by the node's word alone, or the run's if the node has none.

    As soon as a node says anything about its budget, nothing that a run says about it is
    read: a server can neither raise the limit, nor move the folder, nor choose the delta.
    Where no node says anything, the whole federation is an experiment of the run.
    """
    unknown = sorted(set(node_config) - set(NODE_KEYS))
    require(not unknown, OWNER, "keys", f"among {', '.join(NODE_KEYS)}", unknown)
    if set(node_config) & set(Budget.settings()):
        return Budget.of_node(node_config)
    return Budget(
        state_dir=settings.state_dir, max_epsilon=settings.max_epsilon, delta=settings.delta
    )


app = client_app(load_party)
