"""What runs inside Triton: from a client's JSON to a stream of JSON responses."""
