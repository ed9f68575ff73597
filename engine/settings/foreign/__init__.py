"""Options, environment variables and commands of other servers, in one table: `start_server` translates them with it,
and docs/migrating.md is generated from it."""
