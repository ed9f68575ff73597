"""Executor of an exported graph on one NVIDIA GPU, with torch and our kernels. It does not need Paddle.

Only this package and engine/ops/cuda import torch.
"""
