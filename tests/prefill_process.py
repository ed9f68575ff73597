"""A prefill instance in a process of its own, without a server around it:

    python -m tests.prefill_process GRAPH_DIR SETTING=VALUE...

It prints a line when it accepts decode instances and runs until it is killed."""

import sys
import time

from engine.core.loop import EngineLoop
from engine.executors import make_executor
from engine.executors.distributed.ranks import die_with_parent
from engine.settings.config import Config
from engine.transfer.start import start_transfer

NUM_BLOCKS = 400


def loop_of(graph_dir, **settings):
    """Return the loop of an instance with these settings, and its settings."""
    fixed = {"graph_dir": str(graph_dir), "max_dec_len": 64, "max_num_batched_tokens": 64, "batch_size": 16}
    config = Config().changed(**fixed, **settings)
    executor = make_executor(config.graph_path, config, owns_process=False)
    executor.allocate(NUM_BLOCKS)
    return EngineLoop(executor, NUM_BLOCKS, config), config


def main():
    die_with_parent()
    graph_dir, *settings = sys.argv[1:]
    loop, config = loop_of(graph_dir, splitwise_role="prefill", **dict(each.split("=") for each in settings))
    start_transfer(loop, config, lambda: None)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        loop.step()
        time.sleep(1e-3)


if __name__ == "__main__":
    main()
