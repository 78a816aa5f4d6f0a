"""The server side of every strategy."""
