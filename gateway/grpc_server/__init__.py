"""Triton's gRPC service for clients, `inference.GRPCInferenceService`, in front of a tritonserver that they cannot
reach.

Every request is parsed, checked and written anew, so that nothing unexpected reaches tritonserver; its answers are
forwarded unchanged. The package handles tensors and streams and not the JSON in them.
"""
