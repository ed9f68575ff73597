"""HTTP in front of the model, native protocol and OpenAI's. Of the engine it knows the wire contract and the errors."""
