"""Blocks of instances with different numbers of ranks: which can be converted, and the answers that follow."""

import numpy as np
import pytest

from engine.core.types import Sampling
from engine.exporting.files import model_hash_of_any_ranks
from engine.exporting.manifest import Manifest
from engine.transfer.layout import BlockLayout
from tests.patience import wait_until
from tests.pure.transfer_pair import VOCAB_SIZE, Pair, SharedHostMemory, a_loop, answers_of_one, connect, serve

BLOCK_SIZE = 16
GREEDY = Sampling(max_new_tokens=4, temperature=0, num_logprobs=1)
PROMPTS = [
    [(seed + 7 * index) % VOCAB_SIZE for index in range(length)] for seed, length in ((1, 100), (2, 129), (3, 48))
]
NUM_HEADS = 4  # KV heads of a model


def layout_of(num_ranks):
    """Return the layout of two caches of a model with NUM_HEADS KV heads, and its block with random content."""
    num_heads = max(1, NUM_HEADS // num_ranks)
    layout = BlockLayout(num_ranks, 4, num_heads, 6, is_copied=False)
    model = np.random.default_rng(1).integers(0, 256, (4, NUM_HEADS, 6), np.uint8)
    starts = [rank * NUM_HEADS // num_ranks for rank in range(num_ranks)]
    return layout, b"".join(model[:, start : start + num_heads].tobytes() for start in starts)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("num_source_ranks", [1, 2, 4, 8])
def test_each_rank_gets_its_heads(num_source_ranks, num_ranks):
    layout, expected = layout_of(num_ranks)
    source, content = layout_of(num_source_ranks)
    if {num_ranks, num_source_ranks} == {8, 12}:
        assert "it has 8 ranks, this instance 12; of numbers above that of KV heads" in layout.difference(source)
        return
    assert (layout.difference(source), len(expected)) == ("", layout.block_bytes)
    assert layout.convert(memoryview(content), source) == expected


def test_every_rank_gets_a_copy_of_a_latent_cache():
    two, three = (BlockLayout(num_ranks, 1, 1, 5, is_copied=True) for num_ranks in (2, 3))
    assert not three.difference(two)
    assert three.convert(b"abcde" * 2, two) == b"abcde" * 3


def test_states_and_other_layouts_are_refused():
    one, two = (BlockLayout(num_ranks, 4, 4 // num_ranks, 5, False, is_fixed=True) for num_ranks in (1, 2))
    assert one.difference(two) == "it has 2 ranks, this instance 1; the states of this model need equal numbers"
    assert one.difference(one._replace(is_fixed=False, num_bytes=6)) != ""
    other = one._replace(is_fixed=False)
    assert other.difference(other._replace(num_bytes=6)) == "its blocks have another layout"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "deepseek_v3"))]
)
def test_instances_with_other_numbers_of_ranks_compute_the_same(family, exported):
    """The tokens do not depend on the number of ranks in float32."""
    dirs = [exported(family, dtype="float32", block_size=BLOCK_SIZE, num_ranks=num_ranks) for num_ranks in (1, 2)]
    assert len(set(map(model_hash_of_any_ranks, dirs))) == 1
    layouts = [BlockLayout.of(Manifest.read(each)) for each in dirs]
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    expected = answers_of_one(a_loop(dirs[0]), requests)
    for here in (0, 1):
        loops = [a_loop(each, mp_num=num_ranks, cpu_threads=1) for num_ranks, each in enumerate(dirs, 1)]
        try:
            decode, prefill = loops[here], loops[1 - here]
            server = serve(prefill, layout=layouts[1 - here])
            client = connect(decode, server.port, layout=layouts[here])
            wait_until(lambda client=client: client.is_ready)
            pair = Pair(prefill, decode, server, client)
            for index, (prompt, sampling) in enumerate(requests):
                pair.add(str(index), prompt, sampling)
            found, counters = pair.run(), decode.remote.counters
            assert len(decode.executor.blocks().read_block(0)) == layouts[here].block_bytes
        finally:
            for each in loops:
                each.executor.close()
        assert (counters.num_remote_prefills, counters.num_remote_prefill_failures) == (len(PROMPTS), 0)
        for name, answer in expected.items():
            assert [token for token, _ in found[name]] == [token for token, _ in answer]
            chosen = [[each.chosen for _, each in answers] for answers in (found[name], answer)]
            assert chosen[0] == pytest.approx(chosen[1], abs=1e-4)


def test_an_instance_whose_blocks_cannot_be_converted_is_refused(exported):
    graph_dir = exported("qwen2", block_size=BLOCK_SIZE)
    layout = BlockLayout.of(Manifest.read(graph_dir))
    decode = a_loop(graph_dir)
    memory = SharedHostMemory(decode.executor.blocks())

    def refusal(**changes):
        server = serve(a_loop(graph_dir), layout=layout._replace(**changes))
        client = connect(decode, server.port, layout=layout, device=memory, needs_device=True)
        [found] = client.refusals(within_s=5)
        return found.removeprefix(f"the prefill instance 127.0.0.1:{server.port} cannot be used: ")

    assert refusal(num_bytes=1) == "its blocks have another layout"
    assert refusal(num_ranks=2) == "KV_TRANSFER is cuda_ipc, but it has another number of ranks"
