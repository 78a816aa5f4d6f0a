"""The side of the server: votes of all parties, and a model made of them."""

import logging

from fl_strategies import FedKT
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from quickstart_fedkt.task import MODELS, NUM_CLASSES, load_split

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one round and tell how good its model is."""
    strategy = FedKT(
        public=load_split("public")[0],
        num_classes=NUM_CLASSES,
        learner_fn=MODELS["forest"],
        learner_name="forest",
        num_parties=context.run_config["num-parties"],
        seed=context.run_config["seed"],
    )
    strategy.start(grid, ArrayRecord(), num_rounds=1)

    x, y = load_split("test")
    accuracy = (strategy.model_.predict(x) == y).mean()
    logging.getLogger("flwr").info("Accuracy on %s other rows: %.3f", len(y), accuracy)
