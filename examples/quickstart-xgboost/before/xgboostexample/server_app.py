"""The side of the server."""

import numpy as np
import xgboost as xgb
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedXgbBagging

from xgboostexample.task import booster_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and save the model."""
    num_rounds = context.run_config["num-server-rounds"]
    arrays = ArrayRecord([np.array([], dtype=np.uint8)])

    strategy = FedXgbBagging(min_available_nodes=5)

    result = strategy.start(grid, initial_arrays=arrays, num_rounds=num_rounds)

    booster = xgb.Booster(params=booster_params(context.run_config))
    booster.load_model(bytearray(result.arrays["0"].numpy().tobytes()))
    booster.save_model("final_model.json")
