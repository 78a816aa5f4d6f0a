"""The side of a node."""

from clients import client_app, party_loader

from sklearnexample.task import get_model, load_data, load_split

public, _ = load_split("test")
app = client_app(party_loader(load_data, public=public, num_classes=10, learner_fn=get_model))
