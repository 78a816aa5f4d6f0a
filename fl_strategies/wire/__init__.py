"""What crosses the trust boundary, and how it is read on the other side."""
