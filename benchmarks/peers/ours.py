"""This engine, stepped in its own environment: `python -m benchmarks.peers.ours GRAPH_DIR THREADS`."""

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.clock import MAX_REQUESTS, MAX_TOKENS_IN_STEP, Clock, Prompts, measure
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.exporting.manifest import Manifest
from engine.garbage import collect_garbage_seldom
from engine.settings.config import Config


def main(graph_dir: Path, threads: int) -> None:
    limits = Config(batch_size=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS_IN_STEP, cpu_threads=threads)
    config = replace(limits, enable_prefix_caching=False)
    executor = make_executor(graph_dir, config)
    collect_garbage_seldom()
    num_blocks = allocate_cache(executor, config, Manifest.read(graph_dir).max_seq_len)

    def run(prompts: Prompts, answer_len: int, clock: Clock) -> None:
        loop, sampling = EngineLoop(executor, num_blocks, config), Sampling(max_new_tokens=answer_len, temperature=0)
        clock.start(len(prompts))
        for index, ids in enumerate(prompts):
            loop.add(Request(str(index), list(ids), len(ids), sampling))
        while not loop.is_idle:
            for update in loop.step():
                clock.tick(int(update.request.request_id), len(update.token_ids))

    measure(run)
    executor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
