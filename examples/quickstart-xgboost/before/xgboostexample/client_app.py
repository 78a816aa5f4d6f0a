"""The side of a node."""

import numpy as np
import xgboost as xgb
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from xgboostexample.task import booster_params, load_data

app = ClientApp()


def _local_boost(booster, num_local_round, train_dmatrix):
    """Grow some trees and return these alone, for the server to add."""
    for _ in range(num_local_round):
        booster.update(train_dmatrix, booster.num_boosted_rounds())
    total = booster.num_boosted_rounds()
    return booster[total - num_local_round : total]


@app.train()
def train(msg: Message, context: Context):
    """Grow trees on the rows of this node."""
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    x_train, _, y_train, _ = load_data(partition_id, num_partitions)
    train_dmatrix = xgb.DMatrix(x_train, label=y_train)

    num_local_round = context.run_config["local-epochs"]
    params = booster_params(context.run_config)
    if msg.content["config"]["server-round"] == 1:
        booster = xgb.train(params, train_dmatrix, num_boost_round=num_local_round)
    else:
        booster = xgb.Booster(params=params)
        booster.load_model(bytearray(msg.content["arrays"]["0"].numpy().tobytes()))
        booster = _local_boost(booster, num_local_round, train_dmatrix)

    model = np.frombuffer(booster.save_raw("json"), dtype=np.uint8)
    metrics = MetricRecord({"num-examples": len(x_train)})
    content = RecordDict({"arrays": ArrayRecord([model]), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate all trees on held-out rows of this node."""
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    _, x_test, _, y_test = load_data(partition_id, num_partitions)

    booster = xgb.Booster(params=booster_params(context.run_config))
    booster.load_model(bytearray(msg.content["arrays"]["0"].numpy().tobytes()))
    told = booster.eval_set([(xgb.DMatrix(x_test, label=y_test), "valid")])
    auc = float(told.split("\t")[1].split(":")[1])

    metrics = MetricRecord({"auc": auc, "num-examples": len(x_test)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
