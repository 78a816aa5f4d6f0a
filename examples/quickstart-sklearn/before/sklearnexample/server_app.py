"""The side of the server."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from sklearnexample.task import get_model, get_model_params, set_initial_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and save the model."""
    num_rounds = context.run_config["num-server-rounds"]
    model = get_model(context.run_config["local-epochs"])
    set_initial_params(model)
    arrays = ArrayRecord(get_model_params(model))

    strategy = FedAvg(min_available_nodes=5)

    result = strategy.start(grid, initial_arrays=arrays, num_rounds=num_rounds)

    coef, intercept = result.arrays.to_numpy_ndarrays()
    np.savez("final_model.npz", coef=coef, intercept=intercept)
