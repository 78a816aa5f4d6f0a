"""The client component of the Flower app: a simulated party per partition, with its budget."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from flwr.app import Context

from clients.app import client_app
from fl_strategies import Party
from fl_strategies._util import Array
from fl_strategies.errors import require
from fl_strategies.options import TYPE_NAMES
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.federation import load_federation

OWNER: Final = "node-config"
BUDGET_KEYS: Final[Mapping[str, Value]] = {
    "state-dir": "",
    "max-epsilon": 0.0,
    "delta": 1e-5,
    "sample-delta": 0.0,
    "data-changes": False,
}
"""Keys of a node's budget, with their defaults."""


def with_defaults(
    config: Mapping[str, Value], defaults: Mapping[str, Value]
) -> dict[str, Value]:
    """Return a node's configuration with defaults filled in; raise for other types."""
    whole: dict[str, Value] = {**defaults, **config}
    for key, default in defaults.items():
        value, kind = whole[key], type(default)
        number = kind is float and type(value) is int
        require(number or type(value) is kind, OWNER, key, TYPE_NAMES[kind], value)
        whole[key] = kind(value)
    return whole


def require_absolute(key: str, text: str) -> None:
    """Raise unless a path is absolute.

    Elsewhere started, a SuperNode would find another journal there, with a new budget.
    """
    path = Path(text).expanduser()
    require(not text or path.is_absolute(), OWNER, key, "an absolute path", str(path))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Where a party keeps its journal, and how much its data may pay; see `PartyJournal`."""

    state_dir: str
    max_epsilon: float
    delta: float
    sample_delta: float = 0.0
    data_changes: bool = False

    @classmethod
    def of_node(cls, node_config: Mapping[str, Value]) -> Self:
        """Read a node's configuration; raise if it contradicts itself."""
        given = {key: value for key, value in node_config.items() if key in BUDGET_KEYS}
        config: dict[str, Any] = with_defaults(given, BUDGET_KEYS)
        budget = cls(**{key.replace("-", "_"): value for key, value in config.items()})
        budget._check()
        return budget

    def _check(self) -> None:
        require_absolute("state-dir", self.state_dir)
        limit, share, kept = self.max_epsilon, self.sample_delta, bool(self.state_dir)
        require(0 <= limit < math.inf, OWNER, "max-epsilon", "at least 0 (0: no limit)", limit)
        require(0 < self.delta < 1, OWNER, "delta", "between 0 and 1", self.delta)
        require(0 <= share < 1, OWNER, "sample-delta", "at least 0 and below 1", share)
        for key, is_usual in (
            ("max-epsilon", not limit),
            ("delta", self.delta == BUDGET_KEYS["delta"]),
        ):
            require(kept or is_usual, OWNER, "state-dir", f"given with {key}", self.state_dir)

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


NODE_KEYS = (keys.PARTITION_ID, keys.NUM_PARTITIONS, *BUDGET_KEYS)


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
    if set(node_config) & set(BUDGET_KEYS):
        return Budget.of_node(node_config)
    return Budget(
        state_dir=settings.state_dir, max_epsilon=settings.max_epsilon, delta=settings.delta
    )


app = client_app(load_party)
