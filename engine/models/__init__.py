"""Definitions of the supported networks: their configuration, their tensors in a checkpoint, and their computation."""
