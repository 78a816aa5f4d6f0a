"""The client component of the Flower app: a simulated party per partition id."""

from flwr.app import Context

from clients.app import client_app
from fl_strategies import Party, keys
from simulations.config import Settings
from simulations.experiment import load_federation


def load_party(context: Context) -> Party:
    """Load the party that this node plays."""
    settings = Settings.from_run_config(context.run_config)
    return load_federation(settings).party(int(context.node_config[keys.PARTITION_ID]))


app = client_app(load_party)
