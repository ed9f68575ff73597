"""What the options, environment variables and commands of other servers mean here: one table, which `start_server`
answers from and docs/migrating.md is printed from."""
