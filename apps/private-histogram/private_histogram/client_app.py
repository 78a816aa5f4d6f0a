"""The side of a node: it counts its records, with noise of its own."""

from clients import client_app, party_loader

from private_histogram.task import CLASSES, load_data, load_split, make_forest

public, _ = load_split("public")
app = client_app(
    party_loader(load_data, public=public, classes=CLASSES, learner_fn=make_forest)
)
