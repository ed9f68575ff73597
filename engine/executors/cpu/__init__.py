"""Executor of DEVICE=cpu: runs the exported graph as a list of calls of our C++ kernels. It does not need Paddle."""
