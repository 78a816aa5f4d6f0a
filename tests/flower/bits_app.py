"""The simulated federation as a Flower app that writes its models, to compare their bits."""

from contextlib import suppress
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from clients import client_app
from clients.saved_model import write_arrays
from fl_strategies import Learner, Party
from fl_strategies.aggregation.ensembles import StackedEnsemble
from fl_strategies.errors import UnsupportedLearner
from fl_strategies.learners import require_portable
from fl_strategies.wire.knowledge import join_arrays
from simulations.config import Settings
from simulations.federation import load_federation
from simulations.runtime.client_app import load_party


def write_model(model: Learner, path: Path) -> None:
    """Write the arrays of a model; one without an array form has no file."""
    with suppress(UnsupportedLearner):
        write_arrays(require_portable(model).to_arrays(), path)


def write_final(model: Learner, path: Path) -> None:
    """Write the server's model, which may be a committee of models."""
    if not isinstance(model, StackedEnsemble):
        write_model(model, path)
        return
    members = [require_portable(member).to_arrays() for member in model.members]
    write_arrays({**model.weights, **join_arrays(members)}, path)


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
    write_final(strategy.model_, Path(settings.output_dir) / "model.npz")
