"""Data and settings."""

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


def booster_params(run_config):
    """Return the settings of XGBoost, with its own names."""
    found = {k.removeprefix("params."): v for k, v in run_config.items() if "params." in k}
    return {name.replace("-", "_"): value for name, value in found.items()}
