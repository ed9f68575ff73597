"""Disaggregation on GPUs: KV blocks that are copied from GPU to GPU or sent over TCP, and the answers that follow."""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core import remote_prefill  # noqa: E402
from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Sampling  # noqa: E402
from engine.executors import make_host, nixl_blocks  # noqa: E402
from engine.executors.block_access import STAGED  # noqa: E402
from engine.executors.cuda import ipc  # noqa: E402
from engine.executors.cuda.blocks import CudaBlocks  # noqa: E402
from engine.executors.cuda.cache import Caches  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.nixl_blocks import NixlBlocks  # noqa: E402
from engine.executors.speculation.executor import with_speculation  # noqa: E402
from engine.models.kv_cache import ATTENTION_AXES, CacheSpec  # noqa: E402
from engine.ops.cuda import block_copy  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from engine.transfer import messages  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED, ROOT  # noqa: E402
from tests.cuda.test_executor import generate  # noqa: E402
from tests.patience import PATIENCE_S, wait_until  # noqa: E402
from tests.pure import transfer_pair  # noqa: E402
from tests.pure.transfer_pair import VOCAB_SIZE, Pair, answers_of_one, connect, random_requests  # noqa: E402

NUM_BLOCKS, NUM_REQUESTS = 400, 1 if IS_INTERPRETED else 60
CONFIG = {"device": "gpu", "max_dec_len": 64, "max_num_batched_tokens": 64, "batch_size": 16}
CONFIG["max_cached_task_num"] = 500
CONFIG["batch_invariant"] = not IS_INTERPRETED  # which takes minutes there
MODELS = ["qwen2", "qwen2-bfloat16", "gemma3_text", "qwen3_next", "deepseek_v3"]  # all kinds of cache groups
LONG = [index * 7 % VOCAB_SIZE for index in range(1000)]
FEW = Sampling(max_new_tokens=4, temperature=0, num_logprobs=1)
needs_gpu = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no memory that another process can open")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Wait for an instance that compiles its kernels."""
    monkeypatch.setattr(remote_prefill, "STALL_S", PATIENCE_S)
    for name in ("SILENT_S", "LEASE_S") if IS_INTERPRETED else ("SILENT_S",):
        monkeypatch.setattr(messages, name, PATIENCE_S)
    monkeypatch.setattr(transfer_pair, "PATIENCE_S", 5 * PATIENCE_S)


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch):
    """Let threads take turns at the interpreter, which cannot run in two of them."""
    if not IS_INTERPRETED:
        return
    from triton.runtime import interpreter

    run, lock = interpreter.GridExecutor.__call__, threading.RLock()

    def locked(*args, **kwargs):
        with lock:
            return run(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", locked)


@pytest.fixture
def in_one_process(monkeypatch):
    """Share memory within this process, for which the driver's handles are not made."""
    monkeypatch.setattr(ipc, "export_memory", lambda tensor: (tensor.data_ptr().to_bytes(64, "little"), 0))
    monkeypatch.setattr(ipc, "open_memory", lambda handle, device: int.from_bytes(handle, "little"))
    monkeypatch.setattr(ipc, "close_memory", lambda address, device: None)


@pytest.fixture
def model(exported):
    """Return a function that exports a model of MODELS."""

    def make(name):
        family, dtype = (*name.split("-"), "float32")[:2]
        return exported(family, dtype, block_size=16)

    return make


@pytest.fixture
def loop_of(device):
    """Return a function that makes a loop over a graph, which ends with the test."""
    executors = []

    def make(graph_dir, num_blocks=NUM_BLOCKS, **settings):
        config = Config(**CONFIG | settings)
        executors.append(with_speculation(CudaExecutor(graph_dir, config, device.type), config))
        executors[-1].allocate(num_blocks)
        return EngineLoop(executors[-1], num_blocks, config)

    yield make
    for executor in executors:
        executor.close()


def filled(num_blocks, device, shape, dtype):
    """Return caches of two layers with random bits."""
    specs = [CacheSpec(f"kv_cache_{index}", dtype, (-1, *shape), ATTENTION_AXES) for index in range(2)]
    caches = Caches(specs, device)
    caches.allocate(num_blocks)
    for layer in caches.words:
        bits = np.random.default_rng(len(layer)).integers(-(2**62), 2**62, layer.shape)
        layer.copy_(torch.from_numpy(bits))
    return caches


def wait_for(device):
    """Wait for what was launched, for which CudaBlocks does not wait."""
    if device.type == "cuda":
        torch.cuda.synchronize()


SHAPES = [((2, 3, 16, 20), "float32"), ((2, 8, 64, 128), "bfloat16"), ((2, 3, 16, 36), "int8")]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_blocks_are_copied_to_the_last_bit_and_no_others_are_written(device, in_one_process, shape, dtype):
    """The second shape has more words than a program copies at once."""
    ours, theirs = filled(9, device, shape, dtype), filled(12, device, shape, dtype)
    before = [layer.clone() for layer in ours.words]
    wait_for(device)
    here, there = CudaBlocks(ours, device), CudaBlocks(theirs, device)
    here.open(5, there.share())
    moves = [(11, 0), (3, 8), (4, 2), (3, 5)]
    digests = here.copy(5, moves)
    for layer, old, source in zip(ours.words, before, theirs.words, strict=True):
        for block, target in moves:
            old[target] = source[block]
        assert torch.equal(layer, old)
    assert digests == there.digests([source for source, _ in moves]) == here.digests([target for _, target in moves])
    assert len(set(digests)) == 3
    with pytest.raises(ValueError, match="not one of the 12"):
        here.copy(5, [(12, 0)])
    here.close(5)


def test_blocks_are_read_with_nixl_to_the_last_bit_and_no_others_are_written(device):
    if not any(map(importlib.util.find_spec, nixl_blocks.MODULES)):
        pytest.skip("NIXL is missing: pip install --no-deps nixl-cu13")
    ours, theirs = (filled(count, device, (2, 3, 16, 20), "float32") for count in (9, 12))
    before = [layer.clone() for layer in ours.words]
    wait_for(device)
    here, there = (NixlBlocks(CudaBlocks(each, device)) for each in (ours, theirs))
    num_slots = here.stage()
    here.open(5, there.share())
    here.fetch(1, 5, [(11, num_slots - 1), (3, 0)])
    reasons = []
    wait_until(lambda: reasons.append(here.fetched(1)) or reasons[-1] is not None)
    assert reasons[-1] == ""
    assert here.copy(STAGED, [(num_slots - 1, 0), (0, 8)]) == there.digests([11, 3])
    for layer, old, source in zip(ours.words, before, theirs.words, strict=True):
        old[0], old[8] = source[11], source[3]
        assert torch.equal(layer, old)
    here.fetch(2, 5, [(12, 0)])
    assert here.fetched(2) == "a block is not one of those that are shared"
    here.close(5)


def test_every_word_and_its_place_change_the_digest(device):
    caches = filled(2, device, (2, 3, 16, 20), "float32")
    blocks, layers = CudaBlocks(caches, device), caches.words
    seen = []

    def note():
        wait_for(device)
        seen.extend(blocks.digests([0]))

    note()
    for layer, word in itertools.product(range(2), (0, 1, layers[0].shape[1] - 1)):
        layers[layer][0, word] ^= 1
        note()
    layers[0][0, [3, 4]] = layers[0][0, [4, 3]]
    note()
    layers[0][0], layers[1][0] = layers[1][0].clone(), layers[0][0].clone()
    note()
    assert len(set(seen)) == len(seen) == 9


def test_a_block_is_read_and_written_over_the_memory_of_the_host(device):
    ours, theirs = (filled(count, device, (2, 3, 16, 20), "float32") for count in (4, 6))
    content = CudaBlocks(theirs, device).read_block(5)
    before = [layer.clone() for layer in ours.words]
    wait_for(device)
    CudaBlocks(ours, device).write_block(2, memoryview(content))
    for layer, old, source in zip(ours.words, before, theirs.words, strict=True):
        old[2] = source[5]
        assert torch.equal(layer, old)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", ["qwen2"] if IS_INTERPRETED else MODELS)
def test_answers_are_those_of_one_engine(model, loop_of, in_one_process, name, shares):
    """Both engines are in this process. All ways to choose tokens, and log-probabilities, are the same bits."""
    requests = random_requests(seed=1, count=NUM_REQUESTS)
    pair = Pair.of_loops(loop_of(model(name)), loop_of(model(name)), shares=shares)
    for index, (prompt, sampling) in enumerate(requests):
        pair.add(str(index), prompt, sampling)
        pair.turn()
    found, counters = pair.run(), pair.decode.remote.counters
    assert counters.num_remote_prefill_failures == 0
    assert counters.num_pulled_blocks >= counters.num_remote_prefills > NUM_REQUESTS / 4
    expected = answers_of_one(loop_of(model(name)), requests)
    assert tokens_of(found) == tokens_of(expected)
    assert IS_INTERPRETED or found == expected


def tokens_of(answers):
    return {name: [token for token, _ in answer] for name, answer in answers.items()}


class Prefill:
    """Prefill instance in a process of its own, if possible on another GPU, and a decode instance here."""

    def __init__(self, graph_dir, decode, shares=True, num_blocks=NUM_BLOCKS, **config):
        settings = json.dumps({"config": CONFIG | config, "shares": shares})
        command = [sys.executable, "-m", "tests.cuda.transfer_prefill", str(graph_dir), str(num_blocks), settings]
        env = os.environ if "mp_num" in config else os.environ | {"CUDA_VISIBLE_DEVICES": str(last_gpu())}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=env)
        self.loop, self.answers = decode, {}
        device = {"device": decode.executor.blocks(), "needs_device": True} if shares else {}
        self.client = connect(decode, int(self.process.stdout.readline()), **device)
        wait_until(lambda: self.client.is_ready or self.client.refusals(0))
        assert self.client.is_ready, self.client.refusals(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def last_gpu():
    return torch.cuda.device_count() - 1


@needs_gpu
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_answers_of_two_processes_are_those_of_one(model, loop_of, name, shares):
    requests = random_requests(seed=2, count=500 if name == "qwen2-bfloat16" and shares else NUM_REQUESTS)
    decode = loop_of(model(name))
    with Prefill(model(name), decode, shares):
        found, counters = answers_of_one(decode, requests), decode.remote.counters
    assert counters.num_remote_prefill_failures == 0
    assert counters.num_pulled_blocks >= counters.num_remote_prefills > NUM_REQUESTS / 4
    assert found == answers_of_one(loop_of(model(name)), requests)


@needs_gpu
@pytest.mark.parametrize("name", MODELS)
def test_every_step_of_the_decode_instance_is_a_captured_decode_step(model, loop_of, name, monkeypatch):
    """The first step of an answer is one as well, so that a prompt that arrives does not stall the others."""
    decode, shapes = loop_of(model(name)), []
    graphs = decode.executor.runner.graphs
    shape_for = graphs.shape_for
    monkeypatch.setattr(graphs, "shape_for", lambda inputs: shapes.append(shape_for(inputs)) or shapes[-1])
    with Prefill(model(name), decode):
        answers_of_one(decode, [(LONG[more : 160 + 2 * more], FEW) for more in range(17)])
    assert decode.remote.counters.num_remote_prefill_failures == 0
    assert shapes and all(shape and shape.is_decode for shape in shapes)


@needs_gpu
@pytest.mark.parametrize("shares", [True, False])
def test_a_prompt_is_computed_here_when_the_prefill_instance_is_killed_during_the_transfer(model, loop_of, shares):
    expected = answers_of_one(loop_of(model("qwen2")), [(LONG, FEW)])
    for num_pulled in (1, 10, 30):
        # All blocks may have arrived when the process dies, so this is tried again.
        counters, num_tries = remote_prefill.PullCounters(), 0
        while not counters.num_remote_prefill_failures:
            num_tries += 1
            assert num_tries <= 20
            decode = loop_of(model("qwen2"))
            with Prefill(model("qwen2"), decode, shares, max_num_batched_tokens=32) as prefill:
                with killed_after(prefill, num_pulled):
                    assert answers_of_one(decode, [(LONG, FEW)]) == expected
            counters = decode.remote.counters
            decode.scheduler.check()
        assert counters.num_remote_prefills == counters.num_remote_prefill_failures == 1
        assert num_pulled <= counters.num_pulled_blocks < len(LONG) // 16


@contextlib.contextmanager
def killed_after(prefill, num_pulled):
    """Kill the process of the prefill instance when so many blocks have arrived."""
    step = prefill.loop.step

    def step_and_kill():
        if prefill.loop.remote.counters.num_pulled_blocks >= num_pulled:
            prefill.process.kill()
        return step()

    prefill.loop.step = step_and_kill
    yield
    del prefill.loop.step


@needs_gpu
def test_the_memory_of_a_prefill_instance_that_was_killed_is_free_again(model, loop_of):
    """Otherwise it could not be started again beside a decode instance that has opened its caches. What other processes
    do on the same GPU meanwhile is less than half of the cache."""
    graph_dir, decode = model("qwen2-bfloat16"), loop_of(model("qwen2-bfloat16"))
    num_bytes = 8 * 2**30

    def free_bytes():
        return torch.cuda.mem_get_info(last_gpu())[0]

    with Prefill(graph_dir, decode, num_blocks=num_bytes // decode.executor.block_bytes) as prefill:
        before = free_bytes()
        prefill.process.kill()
        wait_until(lambda: free_bytes() > before + num_bytes // 2)


@needs_gpu
def test_the_blocks_of_drafted_answers_are_transferred_while_steps_are_launched_ahead(model, loop_of):
    """Blocks are reserved while a step that may write them still waits to be launched."""
    requests = [(prompt * 4, dataclasses.replace(each, max_new_tokens=40)) for prompt, each in random_requests(3, 40)]
    decode = loop_of(model("qwen2"), num_blocks=150, speculate_method="ngram")
    with Prefill(model("qwen2"), decode):
        found = answers_of_one(decode, requests)
    assert decode.remote.counters.num_pulled_blocks > 0
    assert found == answers_of_one(loop_of(model("qwen2")), requests)


@needs_gpu
def test_each_rank_copies_the_blocks_of_its_own_heads(exported, two_devices):
    """Both instances have a rank on each GPU. In float32, the tokens do not depend on the batch."""
    graph_dir = exported("qwen2", "float32", block_size=16, num_ranks=2)
    rng = np.random.default_rng(4)
    prompts = rng.integers(0, VOCAB_SIZE, (4, 500)).tolist()
    config = {"mp_num": 2, "batch_invariant": False}
    executor = make_host(graph_dir, Config(**CONFIG | config))
    executor.allocate(NUM_BLOCKS)
    try:
        expected = generate(EngineLoop(executor, NUM_BLOCKS, Config(**CONFIG)), prompts, max_new_tokens=30)
        for shares in (True, False):
            decode = EngineLoop(executor, NUM_BLOCKS, Config(**CONFIG))
            with Prefill(graph_dir, decode, shares, **config):
                assert generate(decode, prompts, max_new_tokens=30) == expected
            counters = decode.remote.counters
            assert (counters.num_pulled_blocks, counters.num_remote_prefill_failures) == (4 * 32, 0)
    finally:
        executor.close()


@needs_gpu
def test_a_handle_that_was_made_up_is_refused_with_the_call_and_its_error(device):
    with pytest.raises(ipc.IpcError, match="cuIpcOpenMemHandle_v2 has failed: CUDA_ERROR_"):
        ipc.open_memory(bytes(64), 0)


def test_number_of_programs_changes_nothing(device, monkeypatch):
    blocks = CudaBlocks(filled(3, device, (2, 8, 64, 128), "bfloat16"), device)
    found = blocks.digests([0, 1, 2])
    monkeypatch.setattr(block_copy, "NUM_PROGRAMS", 3)
    assert blocks.digests([0, 1, 2]) == found
