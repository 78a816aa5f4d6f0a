"""Data and settings."""

from clients import XGBoostLearner
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split


def load_split(split: str):
    """Return rows and labels: "train" is dealt to the nodes, "test" is nobody's."""
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=150, random_state=1)
    return (x_train, y_train) if split == "train" else (x_test, y_test)


def load_data(partition_id: int, num_partitions: int):
    """Return the rows of one node: x_train, x_test, y_train, y_test."""
    x, y = load_split("train")
    mine = slice(partition_id, None, num_partitions)
    return train_test_split(x[mine], y[mine], test_size=0.2, random_state=42)


def get_model():
    """Return boosted trees; at each node it could be another model."""
    return XGBoostLearner(num_classes=2, max_depth=4)
