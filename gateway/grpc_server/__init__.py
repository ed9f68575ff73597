"""Triton's gRPC service for clients, `inference.GRPCInferenceService`, before a tritonserver that they never reach.

Every request is read, checked and written anew, so that nothing a client invents comes to tritonserver; its answers are
passed on as they are. Knows tensors and streams, not the JSON in them.
"""
