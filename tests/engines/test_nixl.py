"""KV_TRANSFER=nixl: blocks that NIXL reads from the memory of a prefill instance in another process."""

import contextlib
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError
from engine.executors import nixl_blocks
from engine.executors.cpu.blocks import CpuBlocks
from engine.executors.nixl_blocks import NixlBlocks
from engine.transfer import messages, staging
from engine.transfer.start import start_transfer
from tests.patience import wait_until
from tests.prefill_process import loop_of
from tests.pure.transfer.test_transfer import FEW, LONG
from tests.pure.transfer_pair import Pair, answers_of_one, random_requests
from tests.server import ROOT, free_ports

BLOCK_SIZE = 16
needs_nixl = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, nixl_blocks.MODULES)),
    reason="NIXL is missing: pip install --no-deps nixl-cu13",
)


@pytest.fixture(autouse=True)
def reads_over_tcp(monkeypatch):
    """Let UCX use TCP as between hosts. From memory to memory, a read ends as soon as it has begun, and the memory of a
    process that is stopped can be read."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def instance():
    """Return a function that starts a prefill instance in a process."""
    with contextlib.ExitStack() as stack:

        def start(graph_dir, port, **settings):
            texts = [f"{name}={value}" for name, value in {"engine_worker_queue_port": port, **settings}.items()]
            command = [sys.executable, "-m", "tests.prefill_process", str(graph_dir), *texts]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            stack.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


class Decode(Pair):
    """A decode instance that is connected to a prefill instance in another process."""

    @classmethod
    def of(cls, graph_dir, port, **settings):
        settings = {"kv_transfer": "nixl", "remote_prefill_min_tokens": 32} | settings
        loop, config = loop_of(graph_dir, splitwise_role="decode", innode_prefill_ports=port, **settings)
        start_transfer(loop, config, lambda: None)
        client = loop.remote._source
        wait_until(lambda: client.is_ready)
        scheduler = SimpleNamespace(check=lambda: None)
        elsewhere = SimpleNamespace(step=lambda: None, jobs=SimpleNamespace(num_open=0), scheduler=scheduler)
        return cls(elsewhere, loop, None, client)

    @property
    def counts(self):
        """Return the numbers of prompts that were computed remotely, and of those of which blocks have not arrived."""
        counters = self.decode.remote.counters
        return counters.num_remote_prefills, counters.num_remote_prefill_failures


@pytest.fixture
def graph_dir(exported):
    return exported("qwen2", block_size=BLOCK_SIZE)


@pytest.fixture
def port():
    return free_ports(1)[0]


@pytest.fixture
def tcp_blocks(monkeypatch):
    """Return a list of the blocks that are written as they come over TCP."""
    written, write = [], CpuBlocks.write_block
    monkeypatch.setattr(
        CpuBlocks, "write_block", lambda self, block, content: written.append(block) or write(self, block, content)
    )
    return written


def before_fetch(monkeypatch, number, act):
    """Call `act` when the reads before the one of this number have ended. Return a list that gets the state of that one
    after it has begun."""
    fetch, states = NixlBlocks.fetch, []

    def act_and_fetch(self, count, peer, moves):
        if count == number:
            wait_until(lambda: "PROC" not in map(self._agent.check_xfer_state, self._handles.values()))
            act()
        fetch(self, count, peer, moves)
        if count == number:
            states.append(self.fetched(count))

    monkeypatch.setattr(NixlBlocks, "fetch", act_and_fetch)
    return states


def stop(process):
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")


@pytest.mark.sampled(2)
@needs_nixl
@pytest.mark.parametrize(
    "family",
    ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "qwen3_next", "deepseek_v3"))],
)
def test_answers_are_those_of_one_engine(family, exported, instance, port, tcp_blocks):
    graph_dir, requests = exported(family, block_size=BLOCK_SIZE), random_requests(seed=1, count=20)
    instance(graph_dir, port, kv_transfer="nixl")
    decode = Decode.of(graph_dir, port)
    for index, (prompt, sampling) in enumerate(requests):
        decode.add(str(index), prompt, sampling)
    assert decode.run() == answers_of_one(loop_of(graph_dir)[0], requests)
    num_remote, num_failures = decode.counts
    assert num_remote > len(requests) / 2
    assert num_failures == 0
    assert not tcp_blocks


@needs_nixl
def test_ranks_read_their_shares(exported, instance, port, tcp_blocks):
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE, num_ranks=2)
    ranks = {"mp_num": 2, "cpu_threads": 1}
    instance(graph_dir, port, kv_transfer="nixl", **ranks)
    decode = Decode.of(graph_dir, port, **ranks)
    with contextlib.closing(decode.decode.executor):  # a process can have one model of several ranks at a time
        decode.add("0", LONG, FEW)
        answer = decode.run()["0"]
    loop, _ = loop_of(graph_dir, **ranks)
    with contextlib.closing(loop.executor):
        assert answer == answers_of_one(loop, [(LONG, FEW)])["0"]
    assert decode.counts == (1, 0)
    assert not tcp_blocks


@needs_nixl
def test_a_prompt_whose_instance_is_killed_during_a_read_is_computed_here(graph_dir, instance, port, monkeypatch):
    """The instance stops when some blocks have arrived, so that a read is certainly open when it is killed."""
    process = instance(graph_dir, port, kv_transfer="nixl")
    decode = Decode.of(graph_dir, port)
    states = before_fetch(monkeypatch, 3, lambda: stop(process))
    decode.add("0", LONG, FEW)
    while process.poll() is None:
        decode.turn_decode()
        if states:
            process.kill()
            process.wait()
    expected = answers_of_one(loop_of(graph_dir)[0], [(LONG, FEW)])["0"]
    assert decode.run()["0"] == expected
    assert states == [None]
    assert decode.counts == (1, 1)
    assert decode.decode.remote.counters.num_pulled_blocks > 0
    instance(graph_dir, port, kv_transfer="nixl")
    wait_until(lambda: decode.client.is_ready)
    second = LONG[::-1]
    decode.add("1", second, FEW)
    assert decode.run()["1"] == answers_of_one(loop_of(graph_dir)[0], [(second, FEW)])["0"]
    assert decode.counts == (2, 1)


@needs_nixl
def test_a_read_that_was_given_up_writes_no_block_when_the_instance_continues(
    graph_dir, instance, port, monkeypatch, tcp_blocks
):
    """NIXL cannot cancel it: it writes the staging area after the prompt was computed here. The instance is read again
    when it is connected again."""
    monkeypatch.setattr(messages, "SILENT_S", 0.5)
    process = instance(graph_dir, port, kv_transfer="nixl")
    decode = Decode.of(graph_dir, port)
    num_slots = decode.client.staging._free.qsize()
    states = before_fetch(monkeypatch, 3, lambda: stop(process))
    decode.add("0", LONG, FEW)
    prompts = [(LONG, FEW), (LONG[::-1], FEW)]
    expected = answers_of_one(loop_of(graph_dir)[0], prompts)
    assert decode.run()["0"] == expected["0"]
    assert states == [None]
    assert decode.counts == (1, 1)
    wait_until(lambda: decode.client.staging._free.qsize() == num_slots)
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: decode.client.is_ready)
    decode.add("1", LONG[::-1], FEW)
    decode.add("2", LONG, FEW)
    decode.run()
    assert decode.answers == {"0": expected["0"], "1": expected["1"], "2": expected["0"]}
    assert decode.counts == (2, 1)
    assert not tcp_blocks


@needs_nixl
def test_blocks_come_over_tcp_when_a_read_fails_or_hangs(graph_dir, instance, port, monkeypatch, tcp_blocks):
    """The network of NIXL may be another one than that of the TCP connection."""
    monkeypatch.setattr(staging, "WITHIN_S", 0.2)
    instance(graph_dir, port, kv_transfer="nixl")
    prompts = [(LONG, FEW), (LONG[::-1], FEW)]
    expected = list(answers_of_one(loop_of(graph_dir)[0], prompts).values())
    for (prompt, sampling), answer, reason in zip(prompts, expected, ("the adapter is broken", None), strict=True):
        with monkeypatch.context() as broken:
            broken.setattr(NixlBlocks, "fetched", lambda self, number, reason=reason: reason)
            decode = Decode.of(graph_dir, port)
            decode.add("0", prompt, sampling)
            assert decode.run()["0"] == answer
        assert decode.counts == (1, 0)
        assert tcp_blocks
        tcp_blocks.clear()


@needs_nixl
def test_a_block_that_is_overwritten_during_its_read_is_computed_here(graph_dir, instance, port, monkeypatch):
    copy = CpuBlocks.copy

    def overwrite_and_copy(self, peer, moves):
        self._staged[-1][moves[-1][0], -1] ^= 1
        return copy(self, peer, moves)

    instance(graph_dir, port, kv_transfer="nixl")
    decode = Decode.of(graph_dir, port)
    with monkeypatch.context() as damaged:
        damaged.setattr(CpuBlocks, "copy", overwrite_and_copy)
        decode.add("0", LONG, FEW)
        assert decode.run()["0"] == answers_of_one(loop_of(graph_dir)[0], [(LONG, FEW)])["0"]
    assert decode.counts == (1, 1)


@needs_nixl
def test_the_thread_of_an_agent_waits_for_events(monkeypatch):
    name = next(filter(importlib.util.find_spec, nixl_blocks.MODULES))
    bindings, configs = importlib.import_module(f"{name}._api").nixlBind, []
    make = bindings.nixlAgent
    monkeypatch.setattr(bindings, "nixlAgent", lambda name, config: configs.append(config) or make(name, config))
    NixlBlocks(None)
    assert [config.pthrDelay for config in configs] == [nixl_blocks.THREAD_WAIT_US]


@needs_nixl
def test_an_instance_with_another_way_of_transfer_is_refused(graph_dir, instance, port):
    instance(graph_dir, port)
    with pytest.raises(ConfigError, match="KV_TRANSFER is nixl, but the prefill instance has another KV_TRANSFER"):
        Decode.of(graph_dir, port)


def test_a_missing_package_is_an_error_of_the_configuration(graph_dir, port, monkeypatch):
    monkeypatch.setattr(nixl_blocks, "MODULES", ("no_such_package",))
    loop, config = loop_of(graph_dir, splitwise_role="prefill", kv_transfer="nixl", engine_worker_queue_port=port)
    with pytest.raises(
        ConfigError, match="KV_TRANSFER is nixl, which needs a package: pip install --no-deps nixl-cu13"
    ):
        start_transfer(loop, config, lambda: None)
