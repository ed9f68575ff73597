"""Engines and clients for tests, over real sockets."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

from engine.core.loop import EngineLoop
from engine.core.types import Sampling
from engine.link.client import EngineClient
from engine.link.journal import JournalEntry, Submission
from engine.link.server import Server
from engine.settings.config import Config
from tests.patience import PATIENCE_S, wait_until
from tests.pure.counting_executor import CountingExecutor

ROOT = Path(__file__).parents[2]
# The process of an engine that drafts as much as possible, whatever it costs.
WITHOUT_POLICY = (
    "import engine.executors as executors, engine.process as process; executors.DraftPolicy = lambda _: None"
)
DRAFTING_ENGINE = [sys.executable, "-c", f"{WITHOUT_POLICY}; process.main()"]


class Collector:
    """A listener that remembers."""

    def __init__(self):
        self.token_ids, self.logprobs, self.ends = [], [], []  # ends: a finish reason or an error
        self.prompts = []  # prompt outputs that have arrived
        self.is_over = threading.Event()

    def prompt_outputs(self, outputs):
        self.prompts.append(outputs)

    def tokens(self, token_ids, logprobs, finish_reason):
        self.token_ids += token_ids
        self.logprobs += logprobs or [None] * len(token_ids)
        if finish_reason:
            self._end(finish_reason)

    def ended(self, error):
        self._end(error)

    def _end(self, how):
        self.ends.append(how)
        self.is_over.set()

    def wait(self):
        """Wait for the end of the request and return how it ended."""
        assert self.is_over.wait(PATIENCE_S), "the request has not ended"
        [how] = self.ends
        return how


class PausedClock:
    """Clock of a process that was stopped and continues: time has passed only for this process."""

    lost_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.lost_s


@contextmanager
def a_server(executor=None, address=None, max_message_bytes=-1, **settings):
    executor = executor or CountingExecutor(64, 4)
    server = Server(address or a_free_address(), max_message_bytes)
    server.begin(EngineLoop(executor, executor.num_blocks, Config(**settings)))
    thread = threading.Thread(target=server.run, args=[server.loop])
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


@contextmanager
def a_loading_server(address):
    """Run a server that only answers pings, as an engine process does while it loads the model."""
    server = Server(address)
    server.set_starting("the model is being loaded")
    try:
        yield server
    finally:
        server.close()
        server.run(None)  # which ends at once


@contextmanager
def a_client(address, failed_file=None, suspect_file=None):
    client = EngineClient(address, failed_file, suspect_file)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def connected(executor=None, **settings):
    with a_server(executor, **settings) as server, a_client(server.address) as client:
        yield server, client


def submit(client, prompt, max_new_tokens=8, request_id=None, **sampling):
    listener = Collector()
    listener.prompt = list(prompt)
    listener.sampling = Sampling(max_new_tokens, **{"temperature": 0, **sampling})
    listener.request_id = request_id or f"id {id(listener)}"
    client.submit(JournalEntry.of(listener.prompt, [Submission(listener.request_id, listener.sampling, listener)]))
    return listener


def is_empty(client):
    """Wait until the engine reports no requests. Its first reports may answer earlier questions."""
    before = client.stats
    wait_until(lambda: client.stats is not before)
    wait_until(lambda: not any(client.stats[name] for name in ("num_running", "num_waiting", "num_blocks_held")))
    return True


def a_free_address():
    """Return an address without a file, so that nothing of it remains."""
    return f"ipc://@llm-server-test-{uuid.uuid4()}"


@contextmanager
def an_engine_process(address, step_s=0.0, max_steps=math.inf):
    """Run an engine process. It hangs after `max_steps`, until it is killed."""
    command = [sys.executable, "-m", "tests.pure.counting_engine", address, str(step_s), str(max_steps)]
    engine = subprocess.Popen(command, cwd=ROOT)
    try:
        yield engine
    finally:
        engine.kill()
        engine.wait()
