"""FedMD in which each party uses a small secret sample of its records."""
