"""Runs an exported graph on one NVIDIA GPU with torch and our kernels. Needs no Paddle.

torch is imported here and in engine/ops/cuda alone.
"""
