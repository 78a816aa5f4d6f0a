"""The side of a node: its rows, and a network of its own choice."""

from clients import client_app
from fl_strategies import Party
from flwr.app import Context

from fedmd_nfdp.task import MODELS, NUM_CLASSES, load_data, load_split


def load_party(context: Context) -> Party:
    """Return the party of this node."""
    number = int(context.node_config["partition-id"])
    count = int(context.node_config["num-partitions"])
    x, x_test, y, y_test = load_data(number, count)
    name = list(MODELS)[number % len(MODELS)]
    return Party(
        x=x,
        y=y,
        x_test=x_test,
        y_test=y_test,
        public=load_split("public")[0],
        num_classes=NUM_CLASSES,
        learner_fn=MODELS[name],
        learner_name=name,
        partition_id=number,
        catalogue={"wide": MODELS["wide"]},
    )


app = client_app(load_party)
