"""The life of the processes: `start_server`, `stop_server` and the supervisor between them. Serves no requests;
`run_batch` asks some."""
