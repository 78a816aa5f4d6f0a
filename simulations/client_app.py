"""The client component of the Flower app: a simulated party per partition id."""

from dataclasses import replace
from pathlib import Path

from flwr.app import Context

from clients.app import client_app
from fl_strategies import Party, keys
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from simulations.config import Settings
from simulations.experiment import load_federation


def load_party(context: Context) -> Party:
    """Load the party that this node plays, with its journal if it keeps one.

    A node's own configuration (``state-dir``, ``max-epsilon``) wins over the run's: a
    server cannot raise the budget of a party.
    """
    settings = Settings.from_run_config(context.run_config)
    party = load_federation(settings).party(int(context.node_config[keys.PARTITION_ID]))
    folder = str(context.node_config.get("state-dir") or settings.state_dir)
    limit = float(context.node_config.get("max-epsilon") or settings.max_epsilon)
    if not folder:
        return party
    journal = PartyJournal(
        Path(folder) / f"party-{party.partition_id}",
        fingerprint=data_fingerprint(party.x, party.y),
        delta=settings.delta,
        max_epsilon=limit or None,
    )
    return replace(party, journal=journal, run=str(context.run_id))


app = client_app(load_party)
