"""An engine process with the counting executor.

`python -m tests.pure.counting_engine ADDRESS STEP_S MAX_STEPS` serves there, hangs after so many steps, and dies of a
prompt that holds POISON; without arguments it is `python -m engine.process`.
"""

import math
import os
import runpy
import sys
import time
from types import SimpleNamespace

from engine import executors
from engine.core.loop import EngineLoop
from engine.executors import memory
from engine.exporting import manifest
from engine.link.server import Server
from engine.settings.config import Config
from engine.text.tokenizer import Tokenizer
from tests.pure.counting_executor import CountingExecutor

POISON = 666


class SlowExecutor(CountingExecutor):
    """Executor that is slow enough for a test to act between two steps. After `max_steps` it hangs."""

    def __init__(self, num_blocks, block_size, step_s, max_steps=math.inf):
        super().__init__(num_blocks, block_size)
        self.step_s = step_s
        self._max_steps = max_steps

    def launch(self, batch):
        if any(POISON in arrival.token_ids[: arrival.prompt_len] for arrival in batch.arrivals):
            os._exit(1)
        return super().launch(batch)

    def finish(self):
        time.sleep(self.step_s if len(self.batches) <= self._max_steps else 600)
        super().finish()


def make_executor(graph_dir, config, tell):
    print(f"reads {graph_dir}", flush=True)  # noqa: T201 - the test reads it
    return SlowExecutor(40, 4, 0.001)


def allocate_cache(executor, config, model_len):
    print(f"warms up: {config.use_warmup}", flush=True)  # noqa: T201 - the test reads it
    return executor.num_blocks


def load_tokenizer(graph_dir):
    return SimpleNamespace(eos_token_ids=())


if __name__ == "__main__":
    from tests.pure import counting_engine  # the fork server of grammars cannot import what __main__ has

    if len(sys.argv) == 1:
        executors.make_executor = make_executor
        memory.allocate_cache = allocate_cache
        manifest.Manifest.read = lambda graph_dir: SimpleNamespace(max_seq_len=100, vocab_size=2000)
        Tokenizer.load = counting_engine.load_tokenizer
        runpy.run_module("engine.process", run_name="__main__")
    address, step_s, max_steps = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    config = Config(batch_size=12, max_num_batched_tokens=32)
    Server(address).run(EngineLoop(SlowExecutor(40, 4, step_s, max_steps), 40, config))
