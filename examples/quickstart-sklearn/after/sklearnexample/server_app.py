"""The side of the server."""

import numpy as np
from fl_strategies import FedKD
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from sklearnexample.task import get_model, load_split

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and save the model."""
    num_rounds = context.run_config["num-server-rounds"]
    public, _ = load_split("test")

    strategy = FedKD(public=public, num_classes=10, learner_fn=get_model, min_available_nodes=5)

    strategy.start(grid, initial_arrays=ArrayRecord(), num_rounds=num_rounds)

    np.savez("final_model.npz", **strategy.model_.to_arrays())
