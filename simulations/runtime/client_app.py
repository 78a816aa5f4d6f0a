"""The client component of the Flower app: a simulated party per partition id."""

import functools
from collections.abc import Mapping
from dataclasses import replace

from flwr.app import Context

from clients.app import client_app
from fl_strategies import Party
from fl_strategies.errors import require
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.federation import load_federation
from simulations.runtime.budget import BUDGET_KEYS, OWNER, Budget

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
        folder=settings.state_dir, max_epsilon=settings.max_epsilon, delta=settings.delta
    )


app = client_app(load_party)
