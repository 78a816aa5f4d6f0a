"""One federation on an engine: in this process, in Flower's simulation, as an app."""
