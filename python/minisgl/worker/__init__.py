"""The scheduler process: an engine, a scheduler, and messages over ZeroMQ; one for each rank.

`python -m minisgl.worker` is started by the server. May import everything below it.
"""
