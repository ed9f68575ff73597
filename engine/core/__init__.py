"""Core of the engine: requests, blocks of the KV cache and steps. Independent of tensors, sockets and texts."""
