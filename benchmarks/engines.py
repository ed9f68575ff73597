"""Throughput of several engines behind one client (DATA_PARALLEL_SIZE): without Triton and HTTP.

    python -m benchmarks.engines FOLDER --sizes 1 2 --streams 256

FOLDER is an exported model. For each size, the engine processes are started, and --streams requests for each engine
decode at the same time. Tokens per second are counted from when every stream has its first token until the first one
ends. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine.core.types import Logprobs, PromptOutputs, Sampling
from engine.errors import RequestError
from engine.exporting.manifest import Manifest
from engine.link.engine_set import Engines
from engine.link.journal import JournalEntry, Submission
from engine.serving.build import connect
from engine.settings.config import Config

START_TIMEOUT_S = 300.0


class Stream:
    """Listener of one answer, which notes how many tokens it has and when the first and the last one came."""

    def __init__(self) -> None:
        self.count, self.began, self.ended_at = 0, 0.0, 0.0
        self.is_over = threading.Event()
        self.error: RequestError | None = None

    def prompt_outputs(self, outputs: PromptOutputs) -> None:
        """Ignore what no request of this benchmark wants."""

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None, finish_reason: str | None) -> None:
        self.count += len(token_ids)
        self.began = self.began or time.perf_counter()
        if finish_reason:
            self.ended_at = time.perf_counter()
            self.is_over.set()

    def ended(self, error: RequestError) -> None:
        self.error = error
        self.is_over.set()


@contextmanager
def running_engines(settings: dict[str, str], size: int) -> Iterator[Engines]:
    """Start `size` engine processes and return their client when all are ready."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, **settings, "RUN_DIR": folder, "DATA_PARALLEL_SIZE": str(size)}
        command = [sys.executable, "-m", "engine.process"]
        processes = [subprocess.Popen(command, env={**environ, "ENGINE_INDEX": str(index)}) for index in range(size)]
        with patch.dict(os.environ, environ):
            client = connect(Config.from_env())
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not all(engine.is_up for engine in client.engines):
                if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                    raise SystemExit("an engine has not started")
                time.sleep(0.1)
            yield client
        finally:
            client.close()
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def throughput(client: Engines, vocab_size: int, num_streams: int, prompt_len: int, answer_len: int) -> float:
    """Return the tokens per second while all streams decode."""
    rng = random.Random(0)
    streams = [Stream() for _ in range(num_streams)]
    for number, stream in enumerate(streams):
        prompt = [rng.randrange(vocab_size) for _ in range(prompt_len)]
        sampling = Sampling(answer_len, min_new_tokens=answer_len, temperature=0)
        client.submit(JournalEntry.of(prompt, [Submission(f"{time.monotonic_ns()}-{number}", sampling, stream)]))
    while not all(stream.began or stream.error for stream in streams):
        time.sleep(0.001)
    began, before = time.perf_counter(), sum(stream.count for stream in streams)
    while not any(stream.is_over.is_set() for stream in streams):
        time.sleep(0.001)
    seconds, count = time.perf_counter() - began, sum(stream.count for stream in streams) - before
    for stream in streams:
        stream.is_over.wait()
        if stream.error:
            raise SystemExit(str(stream.error))
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of an exported model")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2], help="numbers of engines")
    parser.add_argument("--streams", type=int, default=256, help="number of streams for each engine")
    parser.add_argument("--prompt", type=int, default=128, help="length in tokens")
    parser.add_argument("--answer", type=int, default=512, help="length in tokens")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds; the fastest is shown")
    args = parser.parse_args()
    settings = {"GRAPH_DIR": str(args.folder), "BATCH_SIZE": str(args.streams), "ENABLE_PREFIX_CACHING": "0"}
    settings["MAX_CACHED_TASK_NUM"] = str(10 * args.streams * max(args.sizes))
    vocab_size = Manifest.read(args.folder).vocab_size
    found: dict[str, Any] = {}
    for size in args.sizes:
        with running_engines(settings, size) as client:
            sizes = (size * args.streams, args.prompt, args.answer)
            found[str(size)] = max(throughput(client, vocab_size, *sizes) for _ in range(args.rounds))
        ratio = found[str(size)] / found[str(args.sizes[0])]
        print(f"{size} engines, {sizes[0]} streams: {found[str(size)]:.0f} tokens/s, {ratio:.2f}x", flush=True)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
