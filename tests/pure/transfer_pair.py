"""A prefill and a decode instance in one process: two engine loops that exchange blocks through loopback."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import ClassVar

from engine.core.loop import EngineLoop
from engine.core.prefill_jobs import PrefillJobs
from engine.core.remote_prefill import RemotePrefill
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.settings.config import Config
from engine.transfer.client import PrefillClient, PulledBlocks
from engine.transfer.server import PrefillServer, ServedBlocks
from tests.patience import PATIENCE_S, wait_until

NUM_BLOCKS = 400
VOCAB_SIZE = 300
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


def a_loop(graph_dir, num_blocks=NUM_BLOCKS, **settings):
    """Return an engine loop with an executor of its own."""
    config = Config(max_dec_len=64, max_num_batched_tokens=64, batch_size=16, **settings)
    executor = make_executor(graph_dir, config, owns_process=False)
    executor.allocate(num_blocks)
    return EngineLoop(executor, num_blocks, config)


def random_requests(seed, count):
    """Return prompts, some of which begin alike, with sampling parameters of all kinds."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(70)] for _ in range(3)]
    requests = []
    for _ in range(count):
        prompt = rng.choice(stems)[: rng.choice([0, 16, 17, 70])]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 120))]
        sampling = Sampling(
            max_new_tokens=rng.randint(1, 12),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            logit_bias=rng.choice([(), ((5, 3.0),)]),
            bad_words=rng.choice([(), ((7, 8),)]),
            seed=rng.randrange(2**63),
            num_logprobs=1,
        )
        requests.append((prompt, sampling))
    return requests


def answers_of_one(loop, requests):
    """Return the answers of a mixed engine."""
    answers = {str(index): [] for index in range(len(requests))}
    for index, (prompt, sampling) in enumerate(requests):
        loop.add(Request(str(index), list(prompt), len(prompt), sampling))
    while not loop.is_idle:
        for update in loop.step():
            answers[update.request.request_id] += zip(update.token_ids, update.logprobs, strict=True)
    return answers


def serve(loop, tls=None, shares=False, layout=None):
    """Make `loop` that of a prefill instance and return its server. With `shares`, its blocks can be copied from its
    device. With a `layout`, its number of ranks may be another one."""
    jobs, access = PrefillJobs(loop.scheduler), loop.executor.blocks()
    loop.serve_prefills(jobs)
    shared = (access.digests, access.share()) if shares else ()
    served = ServedBlocks(jobs, access.read_block, IDENTITY, VOCAB_SIZE, 4096, *shared, layout=layout)
    return PrefillServer(("127.0.0.1", 0), served, TOKEN, tls)


def connect(loop, port, identity=None, token=TOKEN, tls=lambda host: None, **device):
    """Make `loop` that of a decode instance, connected to the prefill instance at this port. Return its client.
    `device` are further fields of PulledBlocks."""
    access, layout = loop.executor.blocks(), device.get("layout")
    size = layout.block_bytes if layout else len(access.read_block(0))
    pulled = PulledBlocks(access.write_block, size, identity or IDENTITY, **device)
    client = PrefillClient([("127.0.0.1", port)], pulled, token, tls)
    loop.pull_prefills(RemotePrefill(loop.scheduler, client, min_tokens=32))
    return client


class SharedHostMemory:
    """Blocks of an executor on the CPU as DeviceBlocks, which can be opened in the same process."""

    opened: ClassVar[dict[bytes, SharedHostMemory]] = {}

    def __init__(self, access):
        self._access, self._handle = access, str(id(self)).encode()
        self.opened[self._handle] = self
        self.read_block, self.write_block = access.read_block, access.write_block
        self.peers, self.num_copied = {}, 0

    def share(self):
        return [(NUM_BLOCKS, [(self._handle, 0)])]

    def digests(self, blocks):
        return [hashlib.blake2b(self.read_block(block), digest_size=8).digest() for block in blocks]

    def open(self, peer, shared):
        [(_, [(handle, _)])] = shared
        if handle not in self.opened:
            raise OSError("it is on another planet")
        self.peers[peer] = self.opened[handle]

    def close(self, peer):
        del self.peers[peer]

    def copy(self, peer, moves):
        for source, target in moves:
            self.write_block(target, self.peers[peer].read_block(source))
        self.num_copied += len(moves)
        return self.digests([target for _, target in moves])


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
        return cls.of_loops(a_loop(graph_dir), a_loop(graph_dir, num_blocks), link)

    @classmethod
    def that_shares(cls, graph_dir, link=None):
        """Return a pair that copies blocks from memory to memory."""
        loops = [a_loop(graph_dir) for _ in range(2)]
        for each in loops:
            memory = SharedHostMemory(each.executor.blocks())
            each.executor.blocks = lambda memory=memory: memory
        return cls.of_loops(*loops, link, shares=True)

    @classmethod
    def of_loops(cls, prefill, decode, link=None, shares=False):
        server = serve(prefill, shares=shares)
        if link:
            link.target = server.port
        device = {"device": decode.executor.blocks()} if shares else {}
        client = connect(decode, link.port if link else server.port, **device)
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
