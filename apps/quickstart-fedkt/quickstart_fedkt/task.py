"""Data and models."""

import numpy as np
from clients import SklearnLearner
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.tree import DecisionTreeClassifier

NUM_CLASSES = 10


def load_split(split: str):
    """Return images and labels of "train", which is dealt out, of "public" or of "test"."""
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(1).permutation(len(y))
    parts = {"test": rows[:300], "public": rows[300:600], "train": rows[600:]}
    return x[parts[split]] / 16, y[parts[split]]


def load_data(partition_id: int, num_partitions: int):
    """Return the rows of one node: x_train, x_test, y_train, y_test."""
    x, y = load_split("train")
    mine = slice(partition_id, None, num_partitions)
    return train_test_split(x[mine], y[mine], test_size=0.2, random_state=42)


def make_forest():
    """Return the model that the server trains in the end."""
    return SklearnLearner(RandomForestClassifier(), num_classes=NUM_CLASSES)


def make_regression():
    """Return a linear model."""
    return SklearnLearner(LogisticRegression(), num_classes=NUM_CLASSES)


def make_bayes():
    """Return a model of one bell curve a class and pixel."""
    return SklearnLearner(GaussianNB(var_smoothing=0.01), num_classes=NUM_CLASSES)


def make_tree():
    """Return a single tree."""
    return SklearnLearner(DecisionTreeClassifier(), num_classes=NUM_CLASSES)


MODELS = {
    "forest": make_forest,
    "regression": make_regression,
    "bayes": make_bayes,
    "tree": make_tree,
}
