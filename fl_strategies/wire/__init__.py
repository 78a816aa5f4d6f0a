"""Everything that crosses the trust boundary, and strict readers for it."""
