"""The side of a node."""

import warnings

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from sklearnexample.task import (
    get_model,
    get_model_params,
    load_data,
    set_initial_params,
    set_model_params,
)

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on the rows of this node."""
    model = get_model(context.run_config["local-epochs"])
    set_initial_params(model)
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    x_train, _, y_train, _ = load_data(partition_id, num_partitions)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few passes do not converge
        model.fit(x_train, y_train)

    metrics = {"num-examples": len(x_train)}
    content = {
        "arrays": ArrayRecord(get_model_params(model)),
        "metrics": MetricRecord(metrics),
    }
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on held-out rows of this node."""
    model = get_model(context.run_config["local-epochs"])
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    _, x_test, _, y_test = load_data(partition_id, num_partitions)

    metrics = {
        "num-examples": len(x_test),
        "accuracy": float(model.score(x_test, y_test)),
        "loss": float(log_loss(y_test, model.predict_proba(x_test), labels=range(10))),
    }
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
