"""The executor of DEVICE=cpu: the exported graph as a list of calls of our C++ kernels. Paddle is not needed for it."""
