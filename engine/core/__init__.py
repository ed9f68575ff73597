"""What runs when: requests, blocks of the KV cache, steps. No tensors, no sockets, no text."""
