"""The side of the server."""

from fl_strategies import FedKT
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from xgboostexample.task import get_model, load_split

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and save the model."""
    num_rounds = context.run_config["num-server-rounds"]
    public, _ = load_split("test")

    strategy = FedKT(public=public, num_classes=2, learner_fn=get_model, min_available_nodes=5)

    strategy.start(grid, initial_arrays=ArrayRecord(), num_rounds=num_rounds)

    strategy.model_.booster.save_model("final_model.json")
