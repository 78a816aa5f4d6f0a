"""A federation as people deploy it: own files, own keys, own processes.

`data` reads a party's file, `client_app` and `server_app` are the two sides of the Flower
app, and `federation` writes and starts all of it on one machine. docs/deployment.md has the
commands.
"""
