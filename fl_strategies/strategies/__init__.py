"""One folder or file an algorithm: its options, its server and its party role."""
