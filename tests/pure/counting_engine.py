"""An engine process with the counting executor.

`python -m tests.pure.counting_engine ADDRESS STEP_S MAX_STEPS` serves there, hangs after so many steps, and dies of a
prompt that holds POISON; without arguments it is `python -m engine.process`.
"""

import math
import os
import runpy
import sys
import time

from engine import executors
from engine.core.loop import Loop
from engine.link.server import Server
from engine.settings.config import Config
from tests.pure.counting_executor import CountingExecutor

POISON = 666


class SlowExecutor(CountingExecutor):
    """So slow that a test can do something between two steps; after `max_steps` it hangs."""

    def __init__(self, num_blocks, block_size, step_s, max_steps=math.inf):
        super().__init__(num_blocks, block_size)
        self.step_s = step_s
        self._max_steps = max_steps

    def step(self, batch):
        if any(POISON in chunk.request.token_ids[: chunk.request.prompt_len] for chunk in batch.chunks):
            os._exit(1)
        time.sleep(self.step_s if len(self.batches) < self._max_steps else 600)
        return super().step(batch)

    def warm_up(self):
        print("warmed up", flush=True)  # noqa: T201 - the test reads it


def make_executor(graph_dir, config):
    print(f"reads {graph_dir}", flush=True)  # noqa: T201 - the test reads it
    return SlowExecutor(40, 4, 0.001)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        executors.make_executor = make_executor
        runpy.run_module("engine.process", run_name="__main__")
    address, step_s, max_steps = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    config = Config(batch_size=12, max_num_batched_tokens=32)
    Server(Loop(SlowExecutor(40, 4, step_s, max_steps), config), address).run()
