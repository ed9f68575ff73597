"""Serves one language model: configuration, scheduling, the static graph and the devices that run it."""
