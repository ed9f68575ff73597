"""A prefill and a decode instance in one process: two engine loops that exchange blocks through loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

from engine.core.loop import EngineLoop
from engine.core.prefill_jobs import PrefillJobs
from engine.core.remote_prefill import RemotePrefill
from engine.core.types import Request
from engine.executors import make_executor
from engine.settings.config import Config
from engine.transfer.client import PrefillClient, PulledBlocks
from engine.transfer.server import PrefillServer, ServedBlocks
from tests.patience import PATIENCE_S, wait_until

NUM_BLOCKS = 400
TOKEN = "secret"
IDENTITY = {"model": "tiny"}


class Link:
    """A TCP connection that can be cut, fall silent, or damage what it carries to the decode instance."""

    def __init__(self):
        self.target = 0
        self.is_damaging = False
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """Close all connections."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def freeze(self):
        """Carry nothing any more."""
        self._flows.clear()

    def thaw(self):
        """Carry again what was sent meanwhile."""
        self._flows.set()

    def close(self):
        self._listener.close()
        self.thaw()
        self.cut()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += near, far
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink, source is far), daemon=True).start()

    def _carry(self, source, sink, is_to_decode):
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                self._flows.wait()
                if self.is_damaging and is_to_decode and len(data) > 1000:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


def a_loop(graph_dir, num_blocks=NUM_BLOCKS):
    """Return an engine loop with an executor of its own."""
    config = Config(max_dec_len=64, max_num_batched_tokens=64, batch_size=16)
    executor = make_executor(graph_dir, config)
    executor.allocate(num_blocks)
    return EngineLoop(executor, num_blocks, config)


def serve(loop, tls=None):
    """Make `loop` that of a prefill instance and return its server."""
    loop.jobs = PrefillJobs(loop.scheduler)
    served = ServedBlocks(loop.jobs, loop.executor.blocks().read_block, IDENTITY, vocab_size=300, max_len=4096)
    return PrefillServer(("127.0.0.1", 0), served, TOKEN, tls)


def connect(loop, port, identity=None, token=TOKEN, tls=lambda host: None):
    """Make `loop` that of a decode instance, connected to the prefill instance at this port. Return its client."""
    access = loop.executor.blocks()
    pulled = PulledBlocks(access.write_block, len(access.read_block(0)), identity or IDENTITY)
    client = PrefillClient([("127.0.0.1", port)], pulled, token, tls)
    loop.remote = RemotePrefill(loop.scheduler, client, min_tokens=32)
    return client


@dataclass
class Pair:
    """The two loops, driven by one thread."""

    prefill: EngineLoop
    decode: EngineLoop
    server: PrefillServer
    client: PrefillClient
    answers: dict[str, list] = field(default_factory=dict)
    outputs: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, graph_dir, link=None, num_blocks=NUM_BLOCKS):
        prefill, decode = a_loop(graph_dir), a_loop(graph_dir, num_blocks)
        server = serve(prefill)
        if link:
            link.target = server.port
        client = connect(decode, link.port if link else server.port)
        wait_until(lambda: client.is_ready)
        return cls(prefill, decode, server, client)

    def add(self, name, prompt, sampling):
        self.answers[name] = []
        self.decode.add(Request(name, list(prompt), len(prompt), sampling))

    def turn(self):
        """Make a step of each loop."""
        self.prefill.step()
        self.turn_decode()

    def turn_decode(self):
        for update in self.decode.step():
            name = update.request.request_id
            self.answers[name] += zip(update.token_ids, update.logprobs, strict=True)
            if update.prompt_outputs:
                self.outputs[name] = update.prompt_outputs

    def run(self):
        """Run until the decode instance is idle and the prefill instance holds no blocks. Return all answers."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.decode.is_idle or self.prefill.jobs.num_open:
            assert time.monotonic() < deadline
            self.turn()
        for loop in (self.prefill, self.decode):
            loop.scheduler.check()
        return self.answers
