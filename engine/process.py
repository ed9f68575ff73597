"""The engine's process: `python -m engine.process`. Puts executor, loop and socket together and runs them.

A failure of a step ends the process: the supervisor starts it again, the client replays. With several machines this
process serves on one of them, the master; on the others it holds ranks and answers nothing but pings.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable

import zmq

from engine.core.loop import Loop
from engine.errors import ConfigError, HostLost, SetupError
from engine.executors import LOADING
from engine.link.server import Server
from engine.log import configure
from engine.settings.config import Config

log = logging.getLogger(__name__)


def main() -> int:
    config = Config.from_env()
    configure(config.log_level)
    try:
        server = Server(f"tcp://127.0.0.1:{config.inter_proc_port}")
    except zmq.ZMQError as error:
        raise ConfigError(f"INTER_PROC_PORT is {config.inter_proc_port}, which cannot be used: {error}") from None
    with server.starting(LOADING) as tell:
        loop = make_loop(config, tell)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.close())
    pool = loop.scheduler.pool
    log.info("ready: %d blocks of %d tokens", pool.num_blocks, pool.block_size)
    server.run(loop)
    log.info("stopped")
    return 0


def make_loop(config: Config, tell: Callable[[str], None]) -> Loop:
    # Imported here: a client of this module must not pay for Paddle.
    from engine.executors import make_executor
    from engine.executors.device import with_device
    from engine.executors.memory import allocate_cache, collect_garbage_seldom
    from engine.exporting.manifest import Manifest

    config = with_device(config)
    executor = make_executor(config.graph_path, config, tell)
    collect_garbage_seldom()
    num_blocks = allocate_cache(executor, config, Manifest.read(config.graph_path).max_seq_len)
    return Loop(executor, num_blocks, config)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HostLost as error:
        log.error("%s; the engine starts anew and waits for it", error)
        sys.exit(error.exit_status)
    except SetupError as error:
        sys.exit(str(error))
