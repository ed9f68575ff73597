"""The way between the Triton model and the engine's process: both ends of the socket, the journal, crashes."""
