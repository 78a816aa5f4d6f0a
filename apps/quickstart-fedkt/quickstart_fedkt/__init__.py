"""One round of federated learning between different models, by FedKT."""
