"""Serves one language model: configuration, scheduling, the static graph and the devices that run it."""

__version__ = "0.1.0"
