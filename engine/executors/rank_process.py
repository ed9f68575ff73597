"""The process of a rank that is not the first of its host, which starts it: GRAPH_DIR RANK CONNECTION_FD SEGMENT_FD."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path

from engine.errors import SetupError
from engine.executors import make_rank
from engine.executors.ranks import die_with_parent, pack, serve
from engine.log import configure
from engine.ops.cpu.group import Membership
from engine.settings.config import Config


def main() -> int:
    die_with_parent()
    graph_dir, rank, connection_fd, segment_fd = Path(sys.argv[1]), *map(int, sys.argv[2:])
    config = Config.from_env()
    configure(config.log_level, process=f"rank {rank}")
    first = Connection(connection_fd)
    try:
        executor = make_rank(graph_dir, config, Membership(rank, config.mp_num, segment_fd, config.mp_nnode))
    except SetupError as error:
        first.send_bytes(pack("failed", f"rank {rank}: {error}"))
        return 0
    serve(first, executor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
