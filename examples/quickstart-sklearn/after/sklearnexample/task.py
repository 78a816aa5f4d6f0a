"""Data and model."""

from clients import SklearnLearner
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


def get_model():
    """Return a model; at each node it could be another one."""
    return SklearnLearner(LogisticRegression(), num_classes=10)
