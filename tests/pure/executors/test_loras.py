"""Adapters in the engine: the answers are those of a checkpoint with the adapter merged, in any batch composition."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.core.adapters import Adapters
from engine.core.block_pool import root_hash
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.errors import InvalidRequest, Overloaded
from engine.executors import make_executor
from engine.exporting.export import ExportOptions, export
from engine.link import messages
from engine.models.adapters import Adapter, identified
from engine.ops import reference
from engine.settings.config import Config
from tests import paged_model
from tests.checkpoints import FAMILIES
from tests.lora_adapters import make_adapter, merged
from tests.paged_model import PagedModel
from tests.pure.core.test_beams import a_search, answers_of
from tests.pure.core.test_prompt_outputs import run as run_loop
from tests.pure.executors.test_batch_invariance import BASE, BLOCK_SIZE, an_executor, random_requests, run

pytestmark = pytest.mark.slow

PROMPT = [7 * n % 300 for n in range(40)]
HAS_SOME = {"lora_dir": "/adapters"}


def with_adapter(request: tuple, adapter: Adapter):
    prompt, sampling = request
    return prompt, replace(sampling, adapter=adapter)


def greedy(graph_dir, adapter=(), **settings):
    """Return tokens and their log-probabilities."""
    config = Config(block_bs=4, batch_size=8, **HAS_SOME, **settings)
    executor = an_executor(graph_dir, config)
    sampling = Sampling(24, temperature=0, num_logprobs=0, adapter=adapter)
    answer = run(executor, config, [(PROMPT, sampling)])[0][0]
    executor.close()
    return [token_id for token_id, _ in answer], [each.chosen for _, each in answer]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, checkpoint):
    """Return a function that makes adapters of a family, by number."""
    folder = tmp_path_factory.mktemp("adapters")

    def make(family, seed, **config) -> Adapter:
        directory = folder / str(len([*folder.iterdir()]))
        make_adapter(directory, checkpoint(family), seed, **config)
        return identified(directory)

    return make


# --- the answers ---


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_answers_as_the_checkpoint_that_it_was_merged_into(family, adapter, checkpoint, exported, tmp_path):
    """The adapters have all matrices, with a rank that is no power of two, or some of them, scaled by the root of the
    rank, or with ranks and scales of their own.
    """
    base, _ = greedy(exported(family, block_size=BLOCK_SIZE))
    some = {"target_modules": ["v_proj", "down_proj"], "use_rslora": True, "rank": 16}
    ranks = {"^model.layers.0.self_attn.q_proj": 3, r"layers\.\d+\.mlp\.(down|up)_proj": 12, "down_proj": 1}
    own = {"rank_pattern": ranks, "alpha_pattern": {"model.layers.1.self_attn.[ko]_proj": 20, "q_proj": 1.5}}
    for seed, given in ((1, {"rank": 5}), (2, some), (3, own)):
        one = adapter(family, seed, **given)
        export(merged(tmp_path / f"merged {seed}", checkpoint(family), one[1]), tmp_path / f"{seed}", ExportOptions())
        wanted, wanted_logprobs = greedy(tmp_path / f"{seed}")
        tokens, logprobs = greedy(exported(family, block_size=BLOCK_SIZE), one)
        assert tokens == wanted != base
        np.testing.assert_allclose(logprobs, wanted_logprobs, rtol=0, atol=1e-4)


class Adapted:
    """The ops of the definition, with what an adapter adds to a matrix, by its place in memory."""

    def __init__(self, deltas):
        self._deltas = deltas

    def __getattr__(self, name):
        op = getattr(reference, name)
        if not name.startswith("linear"):
            return op
        return lambda x, weight, *rest: (
            op(x, weight, *rest) + x @ self._deltas.get(weight.ctypes.data, np.zeros((1, x.shape[1]), np.float32)).T
        )


@pytest.mark.parametrize("quant_type", ["weight_only_int8", "weight_only_int4", "a8w8"])
def test_the_weights_below_may_have_fewer_bits(quant_type, adapter, exported, monkeypatch):
    """The result is compared with the definition of the ops, several of whose matrices are stacked into one."""
    graph_dir, one = exported("qwen2", block_size=BLOCK_SIZE, quant_type=quant_type), adapter("qwen2", 3)
    (graph, params), tensors, deltas = paged_model.load(graph_dir), load_file(f"{one[1]}/adapter_model.safetensors"), {}
    parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up"), "o_proj": "o", "down_proj": ("down",)}
    for layer in range(2):
        for name, of_name in parts.items():
            block = "self_attn" if name[0] in "qo" else "mlp"
            modules = [f"base_model.model.model.layers.{layer}.{block}.{part}_proj.lora" for part in of_name]
            rows = [2 * tensors[f"{each}_B.weight"] @ tensors[f"{each}_A.weight"] for each in modules]
            deltas[params[f"layers.{layer}.{name}.weight"].ctypes.data] = np.concatenate(rows)
    monkeypatch.setattr(paged_model, "load", lambda *_: (graph, params))
    tokens, logprobs = greedy(graph_dir, one)
    model = PagedModel.of(graph_dir, Adapted(deltas))
    logits = [model.prefill(PROMPT, 1000)[-1]] + [model.step({0: [each]})[-1] for each in tokens[:-1]]
    wanted = [row[each] - np.logaddexp.reduce(row) for row, each in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=0.05)
    assert tokens != greedy(graph_dir)[0]


# --- in a batch ---


@pytest.fixture(scope="module")
def mixed(adapter):
    """Return requests with one adapter, with another one or with none; many of them share a prompt."""
    adapters = [(), adapter("qwen2", 1), adapter("qwen2", 2, rank=7)]
    requests = random_requests(seed=1)[:12]
    return [
        with_adapter(request, adapters[(at + again) % 3]) for at, request in enumerate(requests) for again in (0, 1)
    ]


@pytest.fixture(scope="module")
def alone(mixed, exported):
    config = Config(block_bs=4, max_dec_len=64, enable_prefix_caching=False, **HAS_SOME)
    executor = an_executor(exported("qwen2", block_size=BLOCK_SIZE), config)
    return {index: run(executor, config, [request])[0][0] for index, request in enumerate(mixed)}


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        pytest.param({}, 400, id="together"),
        pytest.param({"batch_size": 7, "max_num_batched_tokens": 17}, 400, id="small chunks"),
        pytest.param({"block_ratio": 0.9, "speculate_method": "ngram"}, 16, id="tiny pool, with drafts"),
        pytest.param({"speculate_method": "draft"}, 400, id="with a draft model"),
        pytest.param({"max_loras": 2, "batch_size": 2}, 400, id="as many as fit"),
    ],
)
def test_no_bit_of_an_answer_depends_on_the_adapters_of_others(exported, mixed, alone, settings, num_blocks):
    """Nor on what the cache has from the time before."""
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE)
    config = replace(BASE, block_bs=4, **HAS_SOME, **settings, speculate_model_path=str(graph_dir))
    executor = an_executor(graph_dir, config, num_blocks)
    answers, loop = run(executor, config, mixed, 2, num_blocks)
    assert answers == alone
    stats = loop.stats()
    assert stats["num_cached_tokens"] > 100
    assert (stats["num_preemptions"] > 0) == (num_blocks == 16)


def test_answers_to_one_prompt_and_searches_have_its_adapter(adapter, checkpoint, exported, tmp_path):
    one = adapter("qwen2", 1)
    export(merged(tmp_path / "merged", checkpoint("qwen2"), one[1]), tmp_path / "graph", ExportOptions(block_size=16))
    reported = []
    for graph_dir, given in ((exported("qwen2", block_size=BLOCK_SIZE), one), (tmp_path / "graph", ())):
        config = replace(BASE, block_bs=4, max_num_batched_tokens=32, **HAS_SOME)
        executor = an_executor(graph_dir, config)
        samplings = [Sampling(20, temperature=1.0, seed=n, adapter=given) for n in range(3)]
        leader, *forks = (Request(f"f.{n}", list(PROMPT), len(PROMPT), each) for n, each in enumerate(samplings))
        leader.forks = forks
        token_ids, _, _ = run_loop(EngineLoop(executor, 400, config), a_search("s", PROMPT, 3, adapter=given), leader)
        reported.append([answers_of(token_ids, name, 3) for name in "sf"])
        executor.close()
    assert reported[0] == reported[1]


def test_blocks_are_shared_by_requests_with_the_same_adapter_and_salt_only():
    keys = [root_hash(salt, adapter_id) for salt in ("", "a", "b") for adapter_id in ("", "a", "b")]
    assert len(set(keys)) == len(keys)


# --- which are in memory ---


class Memory:
    """An executor as far as adapters go."""

    def __init__(self):
        self.held, self.reported = [], []

    def load_adapter(self, adapter):
        if adapter[1] == "missing":
            raise InvalidRequest("it is missing")
        self.held.append(adapter[0])
        self.reported.append(adapter[0])

    def drop_adapter(self, adapter_id):
        self.held.remove(adapter_id)


def test_the_least_recently_used_adapter_is_evicted():
    memory, used = Memory(), set()
    adapters = Adapters(memory, 2, lambda: used)
    for name in ("a", "b", "a", "c"):
        adapters.ensure_loaded((name, ""))
    assert (memory.held, memory.reported) == (["a", "c"], ["a", "b", "c"])
    used |= {"a", "c"}
    with pytest.raises(Overloaded, match=r"requests of 2 adapters run or wait, .* MAX_LORAS\(2\)"):
        adapters.ensure_loaded(("d", ""))
    used.remove("a")
    with pytest.raises(InvalidRequest, match="it is missing"):
        adapters.ensure_loaded(("d", "missing"))
    adapters.ensure_loaded(("d", ""))
    assert memory.held == ["c", "d"]


def test_one_with_open_requests_stays_however_they_wait(adapter, exported):
    config = Config(block_bs=4, batch_size=1, max_loras=1, **HAS_SOME)
    loop = EngineLoop(an_executor(exported("qwen2", block_size=BLOCK_SIZE), config), 400, config)
    one, other = adapter("qwen2", 1), adapter("qwen2", 2)
    for name in ("runs", "waits"):
        loop.add(Request(name, list(PROMPT), len(PROMPT), Sampling(2, adapter=one)))
        loop.step()
    another = Request("another", list(PROMPT), len(PROMPT), Sampling(2, adapter=other))
    for name in ("runs", "waits"):
        with pytest.raises(Overloaded):
            loop.add(another)
        loop.drop(name)
    loop.add(another)
    while not loop.is_idle:
        loop.step()


def test_memory_for_the_largest_ones_is_left_free(exported, monkeypatch):
    monkeypatch.setattr("engine.executors.cpu.executor.free_memory_bytes", lambda: 1 << 30)
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE)
    none = make_executor(graph_dir, Config()).free_bytes()
    some = make_executor(graph_dir, Config(max_loras=3, max_lora_rank=8, **HAS_SOME)).free_bytes()
    of_a_layer = 4 * (64 + 64) - 2 * 32 + 3 * (64 + 150)  # q, k, v and o; k and v have half the heads
    assert none - some == 3 * 4 * 8 * 2 * of_a_layer


# --- what cannot be ---


def test_files_that_have_changed_since_are_refused_and_so_is_what_is_gone(checkpoint, exported, tmp_path):
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE)
    executor = make_executor(graph_dir, Config(**HAS_SOME))
    one = identified(make_adapter(tmp_path / "one", checkpoint("qwen2"), 1))
    make_adapter(tmp_path / "one", checkpoint("qwen2"), 2)
    with pytest.raises(InvalidRequest, match="its files have changed since it was loaded"):
        executor.load_adapter(one)
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="adapter_model.safetensors cannot be read: No such file"):
        executor.load_adapter(one)


@pytest.mark.parametrize("adapter", [("a",), ("a", 1), "ab", ["a", "b"], ("a", "b", "c")])
def test_the_engine_takes_no_message_with_half_an_adapter(adapter):
    fields = messages.pack_sampling(Sampling(1, adapter=("a", "b")))
    assert messages.unpack_sampling(fields, messages.ANY).adapter == ("a", "b")
    with pytest.raises(ValueError, match="adapter"):
        messages.unpack_sampling((*fields[:-1], adapter), messages.ANY)
