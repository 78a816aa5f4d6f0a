"""The side of the server: sums of noisy counts, and a model made of them."""

import logging

from fl_strategies import FedHistogram, FedHistogramOptions, SumPrivacy
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from private_histogram.task import CLASSES, NUM_RECORDS, load_split, make_forest

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one round; tell how good its model is, and what it cost."""
    privacy = SumPrivacy(target_epsilon=context.run_config["target-epsilon"])
    strategy = FedHistogram(
        public=load_split("public")[0],
        num_classes=len(CLASSES),
        learner_fn=make_forest,
        options=FedHistogramOptions(privacy=privacy, num_records=NUM_RECORDS),
        num_parties=context.run_config["num-parties"],
    )
    strategy.start(grid, ArrayRecord(), num_rounds=1)

    x, y = load_split("test")
    accuracy = (strategy.model_.predict(x) == y).mean()
    logger = logging.getLogger("flwr")
    logger.info("Accuracy on %s other rows: %.3f", len(y), accuracy)
    for line in strategy.ledger_.statement().splitlines():
        logger.info("%s", line)
