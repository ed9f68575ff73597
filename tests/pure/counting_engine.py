"""An engine process with the counting executor.

`python -m tests.pure.counting_engine ADDRESS STEP_S` serves there; without arguments it is `python -m engine.process`.
"""

import runpy
import sys
import time

from engine import executors
from engine.config import Config
from engine.loop import Loop
from engine.process import Server
from tests.pure.counting_executor import CountingExecutor


class SlowExecutor(CountingExecutor):
    """So slow that a test can do something between two steps."""

    def __init__(self, num_blocks, block_size, step_s):
        super().__init__(num_blocks, block_size)
        self._step_s = step_s

    def step(self, batch):
        time.sleep(self._step_s)
        return super().step(batch)

    def warm_up(self):
        print("warmed up", flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    if len(sys.argv) == 1:
        executors.make_executor = lambda graph_dir, config: SlowExecutor(40, 4, 0.001)
        del sys.modules["engine.process"]
        runpy.run_module("engine.process", run_name="__main__")
    address, step_s = sys.argv[1], float(sys.argv[2])
    config = Config(batch_size=12, max_num_batched_tokens=32)
    Server(Loop(SlowExecutor(40, 4, step_s), 4, config), address).run()
