"""The side of the server: labels of all parties, counted in every round."""

import logging

from fl_strategies import FedMD, FedMDOptions, SampleOnce
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedmd_nfdp.task import MODELS, NUM_CLASSES, load_split

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds; tell how good a model of the last consensus is, and what it cost."""
    sample = SampleOnce(num_samples=context.run_config["num-samples"])
    strategy = FedMD(
        public=load_split("public")[0],
        num_classes=NUM_CLASSES,
        learner_fn=MODELS["wide"],
        learner_name="wide",
        options=FedMDOptions(release=sample),
        num_parties=context.run_config["num-parties"],
    )
    strategy.start(grid, ArrayRecord(), num_rounds=context.run_config["num-server-rounds"])

    x, y = load_split("test")
    accuracy = (strategy.model_.predict(x) == y).mean()
    logger = logging.getLogger("flwr")
    logger.info("Accuracy on %s other rows: %.3f", len(y), accuracy)
    for line in strategy.ledger_.statement().splitlines():
        logger.info("%s", line)
