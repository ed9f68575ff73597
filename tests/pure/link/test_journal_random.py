"""Journal and engine over a network of two lists, one small step at a time: crashes, lost connections, cancellations,
pauses, messages that come late and requests that crash every engine, in an order drawn from a seed. Each request ends
once, with its own tokens."""

import os
import random
import threading
from collections import deque

import pytest
import zmq

from engine.core.loop import EngineLoop
from engine.core.types import Sampling, State
from engine.errors import InvalidRequest, Overloaded
from engine.link import client as client_module
from engine.link import server as server_module
from engine.link.client import EngineClient
from engine.link.journal import JournalEntry, Submission
from engine.link.server import Server
from engine.settings.config import Config
from tests.pure.counting_executor import CountingExecutor, answer
from tests.pure.engine_helpers import Collector

MAX_STEPS = 10_000
POISON = 2**30  # a token id


class Crash(Exception):
    pass


class FragileExecutor(CountingExecutor):
    def launch(self, batch):
        if any(POISON in arrival.token_ids for arrival in batch.arrivals):
            raise Crash
        return super().launch(batch)


class Network:
    """Simulated network between one client and one engine. It replaces zmq.Context, the sockets and the clock."""

    def __init__(self, rng):
        self.rng = rng
        self.now = 1.0
        self.up, self.down = deque(), deque()
        self.is_up = False  # an engine listens
        self.connection = 0

    def socket(self, kind):
        return self

    def bind(self, address):
        self.is_up = True

    connect = bind

    def getsockopt_string(self, option):
        return ""

    def monotonic(self):
        return self.now

    # The client's end

    def send(self, message, flags):
        if not self.is_up:
            raise zmq.Again
        self.up.append(message)

    def recv(self, flags):
        return self._next(self.down)

    # The engine's end

    def poll(self, wait_ms):
        return bool(self.up)

    def recv_multipart(self, flags):
        return [b"%d" % self.connection, self._next(self.up)]

    def send_multipart(self, parts):
        if parts[0] == b"%d" % self.connection:
            self.down.append(parts[1])

    def _next(self, messages):
        if not messages or self.rng.random() < 0.1:
            raise zmq.Again  # the others come later
        return messages.popleft()

    def lose(self):
        """Drop messages in flight: in each direction only a prefix of them arrives."""
        for messages in (self.up, self.down):
            for _ in range(self.rng.randint(0, len(messages))):
                messages.pop()


class World:
    def __init__(self, seed, monkeypatch):
        self.rng = rng = random.Random(seed)
        self.network = Network(rng)
        for module in (server_module, client_module):
            monkeypatch.setattr(module, "time", self.network)
        monkeypatch.setattr(server_module.zmq, "Context", lambda: self.network)
        monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # its work is done here, in parts
        self.client = EngineClient("")
        self.client.connect(self.network)
        self.network.is_up = False
        self.server = None
        self.block_size, self.num_blocks = rng.choice([1, 2, 4]), rng.randint(6, 30)
        self.config = Config(
            batch_size=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(1, 20),
            block_ratio=rng.choice([0.01, 0.3, 0.75, 1]),
            max_cached_task_num=rng.choice([2, 50]),
        )
        self.listeners = []
        self.num_wanted = rng.randint(3, 15)
        self.num_disturbances = 0
        self.poisoned = rng.choice([None, 1, 3])  # the number of one that is never cancelled

    @property
    def is_over(self):
        network, client = self.network, self.client
        done = len(self.listeners) >= self.num_wanted and client.num_open == 0
        return done and self.server and self.server.loop.is_idle and not (network.up or network.down)

    def submit(self):
        rng, room = self.rng, self.block_size * self.num_blocks
        if len(self.listeners) >= self.num_wanted:
            return
        listener = Collector()
        first = rng.choice([0, rng.randrange(10**6)])
        listener.prompt = [first + index // 3 for index in range(rng.randint(1, min(room, 20)))]
        is_poisoned = len(self.listeners) == self.poisoned
        if is_poisoned:
            listener.prompt[rng.randrange(len(listener.prompt))] = POISON
        siblings = [listener]
        for _ in range(0 if is_poisoned else rng.choice([0, 0, 2])):  # more answers to it
            siblings.append(Collector())
        for each in siblings:
            each.prompt, each.cancelled_at, each.has_siblings = listener.prompt, None, len(siblings) > 1
            max_new_tokens = rng.randint(1, min(room - len(listener.prompt) + 1, 30))
            each.sampling = Sampling(max_new_tokens, temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(1000))
        numbers = range(len(self.listeners), len(self.listeners) + len(siblings))
        submissions = [Submission(str(n), each.sampling, each) for n, each in zip(numbers, siblings, strict=True)]
        self.client.submit(JournalEntry.of(listener.prompt, submissions))
        self.listeners += siblings

    def cancel(self):
        if self.listeners:
            number = self.rng.randrange(len(self.listeners)) // 2 * 2  # every other one must end by itself
            listener = self.listeners[number]
            self.client.cancel(str(number))
            if not listener.ends and listener.cancelled_at is None:
                listener.cancelled_at = len(listener.token_ids)

    def step(self):
        if self.server is None:
            self.network.connection += 1
            loop = EngineLoop(FragileExecutor(self.num_blocks, self.block_size), self.num_blocks, self.config)
            self.server = Server("")
            self.server.begin(loop)
        try:
            self.server.turn()
        except Crash:
            self.crash()
            return
        scheduler = self.server.loop.scheduler
        if scheduler.is_idle:
            scheduler.check()
        leaders = (*scheduler.waiting, *scheduler.running.values())
        open_ids = {r.request_id for leader in leaders for r in (leader, *leader.forks) if r.state is not State.ENDED}
        assert open_ids == self.server._client_of.keys()

    def disturb(self):
        self.num_disturbances += 1
        kind = self.rng.choice(["crash", "lost connection", "pause"])
        if kind == "pause":
            self.network.now += 3600
        elif self.server and self.num_disturbances < 12:
            if kind == "crash":
                if self.client._crash_search._alone is None:  # else it would be blamed
                    self.crash()
            else:
                self.network.lose()
                while self.server and self.network.up:  # arrives, and its answer is not received
                    self.step()
                self.network.connection += 1

    def crash(self):
        self.network.lose()
        self.network.up.clear()
        self.server, self.network.is_up = None, False

    def live(self):
        client = self.client
        actions = [self.submit, self.cancel, client.turn, self.step, self.disturb]
        for _ in range(MAX_STEPS):
            if self.is_over:
                return
            self.network.now += self.rng.random() * 0.02
            [action] = self.rng.choices(actions, weights=[5, 2, 45, 46, 2])
            action()
        raise AssertionError(f"open for ever: {client.num_open}")

    def check_end(self):
        for end in self.client._pipe:
            os.close(end)
        assert self.server.loop.scheduler.pool.num_held == 0
        for listener in self.listeners:
            if listener.cancelled_at is not None:
                assert (len(listener.token_ids), listener.ends) == (listener.cancelled_at, [])
                continue
            [end] = listener.ends
            if POISON in listener.prompt:
                assert str(end) == "the engine crashes whenever it computes this request" or type(end) is Overloaded
                continue
            # Together they may be too many for the pool or the batch.
            assert end == "length" or type(end) in (Overloaded, InvalidRequest if listener.has_siblings else Overloaded)
            assert end != "length" or listener.token_ids == answer(listener.prompt, listener.sampling)


@pytest.mark.slow
def test_every_request_ends_once_whatever_is_lost(monkeypatch):
    num_restarts = 0
    for seed in range(30):
        with monkeypatch.context() as patch:
            world = World(seed, patch)
            world.live()
            world.check_end()
            num_restarts += world.client.num_restarts
    assert num_restarts > 60
