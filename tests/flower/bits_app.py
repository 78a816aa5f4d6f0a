"""The simulated federation as a Flower app that writes its models, to compare their bits."""

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from clients import client_app
from fl_strategies import Learner, Party
from simulations.client_app import load_party
from simulations.config import Settings
from simulations.deploy.server_app import write_model
from simulations.experiment import load_federation


def save(model: Learner, party: Party, context: Context) -> None:
    """Write what a party was given, or what became of its own model."""
    folder = Path(str(context.run_config["output-dir"]))
    write_model(model, folder / f"party-{party.partition_id}.npz")


client = client_app(load_party, on_model=save)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy that the settings name."""
    run(grid, Settings.from_run_config(context.run_config))


def run(grid: Grid, settings: Settings) -> None:
    """Run a strategy on any grid and write the server's model."""
    strategy = load_federation(settings).strategy()
    strategy.start(
        grid, ArrayRecord(), num_rounds=settings.num_rounds, timeout=settings.timeout
    )
    write_model(strategy.model_, Path(settings.output_dir) / "model.npz")
