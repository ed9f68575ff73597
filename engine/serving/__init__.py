"""Service inside the Triton model: turns a client's JSON request into a stream of responses."""
