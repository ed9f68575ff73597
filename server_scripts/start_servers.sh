#!/bin/sh
# Starts an instance like `start_server --foreground`. start_server checks the rank tables of the environment.
here=$(dirname "$0")
if [ -x "$here/start_server" ]; then
  exec "$here/start_server" --foreground "$@"
fi
exec start_server --foreground "$@"
