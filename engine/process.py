"""The engine's process: `python -m engine.process`. Puts executor, loop and socket together and runs them.

A failure of a step ends the process: the supervisor starts it again, the client replays. With several machines this
process serves on one of them, the master; on the others it holds ranks and answers nothing but pings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import zmq

from engine.core.loop import EngineLoop
from engine.errors import ConfigError, HostLost, InvalidRequest, SetupError
from engine.executors import LOADING
from engine.garbage import collect_garbage_seldom
from engine.link.messages import ModelBounds, most_bytes
from engine.link.server import Server
from engine.log import Report, configure
from engine.settings.config import Config
from engine.settings.disaggregation import MIXED
from engine.settings.processes import ENGINE_PROGRESS_FILE, ENGINE_SOCKET, EXPERT_USAGE_FILE

log = logging.getLogger(__name__)


def main() -> NoReturn:
    config = Config.from_env()
    configure(config.log_level)
    on_first_tokens = partial(note_progress, config.engine_path(ENGINE_PROGRESS_FILE, config.engine_index))
    address = f"ipc://{config.engine_path(ENGINE_SOCKET, config.engine_index)}"
    try:
        server = Server(address, most_bytes(config), on_first_tokens)
    except zmq.ZMQError as error:
        text = f"RUN_DIR is {str(config.run_path)!r}, the engine cannot listen in it: {error.strerror}"
        raise ConfigError(text) from None
    server.set_starting(LOADING)
    loop, bounds = make_loop(config, server.set_starting)
    if config.splitwise_role != MIXED or config.replica_cache_port:
        from engine.transfer.start import start_transfer

        start_transfer(loop, config, server.waker(), on_first_tokens)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.close())
    pool = loop.scheduler.pool
    text = "ready: %d blocks of %d tokens, fingerprint %012x"
    log.info(text, pool.num_blocks, pool.block_size, loop.fingerprint)
    server.run(loop, bounds)
    if usage := loop.executor.expert_usage:
        usage.write(config.engine_path(EXPERT_USAGE_FILE, config.engine_index), config.graph_path.name)
    log.info("stopped")
    logging.shutdown()
    # The kernel takes back memory, sockets and the GPU at once; destructors of CUDA graphs and caches take seconds.
    os._exit(0)


def note_progress(path: Path) -> None:
    """Create the file `path`, which tells the supervisor to restart the process at once if it ends later."""
    with contextlib.suppress(OSError):  # a full disk must not end an engine that computes
        path.touch()


def make_loop(config: Config, report: Report) -> tuple[EngineLoop, ModelBounds]:
    """Load the model, allocate the KV cache and return the loop, and the bounds of its requests. `report` is called
    with the progress. Raises SetupError."""
    # Imported here: a client of this module must not pay for Paddle.
    from engine.executors import make_executor
    from engine.executors.fingerprint import fingerprint
    from engine.executors.memory import allocate_cache
    from engine.exporting.manifest import Manifest
    from engine.grammars.pool import GrammarPool
    from engine.serving.lora_registry import LoraRegistry
    from engine.settings.device import take_gpus, with_device
    from engine.text.tokenizer import Tokenizer

    take_gpus(config)
    config = with_device(config)
    model = Manifest.read(config.graph_path)
    grammars = GrammarPool(partial(Tokenizer.load, config.graph_path), model.vocab_size, config)
    grammars.load()
    executor = make_executor(config.graph_path, config, report)
    collect_garbage_seldom()
    num_blocks = allocate_cache(executor, config, model.max_seq_len)
    bounds = config.model_len(model.max_seq_len), config.max_step_tokens, num_blocks
    loop = EngineLoop(executor, num_blocks, config, grammars, fingerprint(executor, model.vocab_size, bounds))
    for adapter in LoraRegistry.of_server(config).all():
        try:
            loop.adapters.ensure_loaded(adapter)
        except InvalidRequest as error:  # it has changed since it was loaded; requests for it get the same error
            log.error("%s", error)
    return loop, ModelBounds(model.vocab_size, model.max_seq_len)


if __name__ == "__main__":
    try:
        main()
    except HostLost as error:
        log.error("%s; the engine starts anew and waits for it", error)
        sys.exit(error.exit_status)
    except SetupError as error:
        sys.exit(str(error))
