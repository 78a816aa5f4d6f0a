"""Data and model."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split


def load_split(split: str):
    """Return images and labels: "train" is dealt to the nodes, "test" is nobody's."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        x / 16, y, test_size=300, random_state=1
    )
    return (x_train, y_train) if split == "train" else (x_test, y_test)


def load_data(partition_id: int, num_partitions: int):
    """Return the rows of one node: x_train, x_test, y_train, y_test."""
    x, y = load_split("train")
    mine = slice(partition_id, None, num_partitions)
    return train_test_split(x[mine], y[mine], test_size=0.2, random_state=42)


def get_model(local_epochs: int):
    """Return a model that learns so many passes at a time."""
    return LogisticRegression(max_iter=local_epochs, warm_start=True)


def get_model_params(model):
    """Return the weights of a model."""
    return [model.coef_, model.intercept_]


def set_model_params(model, params):
    """Give a model these weights."""
    model.classes_ = np.arange(10)
    model.coef_, model.intercept_ = params
    return model


def set_initial_params(model):
    """Give a model weights to begin with."""
    return set_model_params(model, [np.zeros((10, 64)), np.zeros(10)])
