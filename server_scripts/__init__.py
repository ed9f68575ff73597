"""Process management of the server: `start_server`, `stop_server`, the supervisor between them, and `run_batch`."""
