"""Process of a rank that is not the first of its host. The first rank starts it with the file descriptors of two
connections, for calls and for blocks."""

from __future__ import annotations

import logging
import os
import sys
import time
from multiprocessing.connection import Connection

from engine.errors import SetupError
from engine.executors import make_rank
from engine.executors.distributed.blocks import serve_blocks
from engine.executors.distributed.hosts import DETECTION_S
from engine.executors.distributed.ranks import die_with_parent, exit_with_first_rank, pack, serve
from engine.log import configure

log = logging.getLogger(__name__)


def main() -> int:
    die_with_parent()
    first = Connection(int(sys.argv[1]))
    graph_dir, config, membership = first.recv()
    configure(config.log_level, process=f"rank {membership.rank}")
    try:
        executor = make_rank(graph_dir, config, membership)
    except SetupError as error:
        first.send_bytes(pack("failed", f"rank {membership.rank}: {error}"))
        return 0
    exit_with_first_rank(first)
    serve_blocks(Connection(int(sys.argv[2])), executor.blocks)
    try:
        serve(first, executor)
    except Exception as error:
        log.error("%s", error, exc_info=not isinstance(error, SetupError))
        logging.shutdown()
        if membership.num_hosts > 1:
            time.sleep(DETECTION_S)  # The first rank notices a lost host, which may be the cause, before our end.
        os._exit(1)  # An orderly exit may wait for a GPU kernel that waits for other ranks.
    return 0


if __name__ == "__main__":
    sys.exit(main())
