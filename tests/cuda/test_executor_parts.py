"""Weights, transfers, graphs and memory of the GPU's executor, one by one."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine import graph as graphs  # noqa: E402
from engine.core.types import Copy  # noqa: E402
from engine.dtypes import from_bf16, to_bf16  # noqa: E402
from engine.errors import ConfigError  # noqa: E402
from engine.executors.cuda import weights  # noqa: E402
from engine.executors.cuda.cache import MIN_BLOCK_SIZE, Caches  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.cuda.host_transfers import IN_FLIGHT, Download, Uploads  # noqa: E402
from engine.executors.cuda.step_graphs import OptionalInputs, StepGraphs  # noqa: E402
from engine.executors.cuda.step_shapes import (  # noqa: E402
    Shape,
    decode_shapes,
    padded_inputs,
    padding_step,
    prompt_shapes,
    uncaptured_inputs,
    unpack_inputs,
    verifying_shapes,
)
from engine.executors.memory import allocate_cache  # noqa: E402
from engine.models.constants import constants_of  # noqa: E402
from engine.models.kv_cache import ATTENTION_AXES, CacheSpec  # noqa: E402
from engine.ops.cuda.prefill_attention import KnownStarts  # noqa: E402
from engine.ops.cuda.step_buffers import StepBuffers  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests.cuda.arrays import array  # noqa: E402
from tests.cuda.test_executor import SETTINGS  # noqa: E402


@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_weights_arrive_as_they_are_and_biases_in_the_type_of_their_matrix(exported, device, monkeypatch, chunk):
    monkeypatch.setattr(weights, "CHUNK", chunk)
    graph, params = graphs.load(exported("qwen2", "bfloat16"))
    found = weights.load(graph, params, device)
    for name, expected in params.items():
        if "bias" in name:
            assert found[name].dtype == torch.bfloat16
            assert np.array_equal(array(found[name]), to_bf16(expected))
        else:
            assert np.array_equal(array(found[name]), expected)


def test_a_failed_copy_of_weights_leaves_its_buffer_to_the_others(device):
    copy, target = weights._Copy(device), torch.zeros(2, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="size"):
        copy(target, np.zeros(3, np.uint8))
    assert copy._free.qsize() == weights.NUM_READERS


def test_drawn_weights_have_the_shapes_of_the_graph_and_the_constants_of_the_model(exported, device):
    graph, params = graphs.load(exported("llama3", "bfloat16"))
    drawn = weights.draw(graph, constants_of(exported("llama3", "bfloat16")), device)
    assert {name: tuple(each.shape) for name, each in drawn.items()} == {n: v.shape for n, v in params.items()}
    assert np.array_equal(array(drawn["inv_freq"]), params["inv_freq"])
    assert (array(drawn["norm.weight"]) == 1).all()
    matrix = from_bf16(array(drawn["layers.0.down_proj.weight"]))
    assert 0.01 < matrix.std() < 0.03
    assert weights.num_bytes(graph) == sum(each.nbytes for each in params.values())


def test_a_router_is_stored_in_16_bits_if_that_changes_none_of_its_values(exported, device):
    graph, params = graphs.load(exported("qwen3_moe", "bfloat16"))
    first, second = "layers.0.router.weight", "layers.2.router.weight"
    rounded = dict(params) | {first: from_bf16(to_bf16(params[first])), second: params[second] + np.float32(2**-20)}
    loaded = weights.load(graph, rounded, device)
    assert (loaded[first].dtype, loaded[second].dtype) == (torch.bfloat16, torch.float32)
    for name in (first, second):
        assert np.array_equal(array(loaded[name].float()), rounded[name])


def test_drawn_codes_of_4_bits_stand_for_numbers_around_zero(exported, device, monkeypatch):
    """Otherwise all activations would point in one direction, and all tokens would choose the same experts."""
    monkeypatch.setattr("engine.ops.cuda.packer", lambda op: None)
    graph_dir = exported("llama", quant_type="weight_only_int4")
    codes = weights.draw(graphs.load(graph_dir)[0], constants_of(graph_dir), device)["layers.0.down_proj.weight"]
    assert abs(array(codes & 15).mean() - 8) < 0.2 and abs(array(codes >> 4).mean() - 8) < 0.2


def test_uploaded_arrays_arrive_with_their_shape_and_type(device):
    uploads = Uploads(device)
    sent = []
    for turn in range(3 * IN_FLIGHT):
        arrays = {
            "ids": np.arange(turn, dtype=np.int32),
            "table": np.arange(6 * turn, dtype=np.int32).reshape(turn, 6)[:, ::2],
            "seeds": np.array([2**64 - 1, turn], np.uint64),
            "floats": np.full(3, turn / 2, np.float32),
            "bytes": np.arange(turn, dtype=np.uint8),
        }
        tensors = uploads.send(arrays)
        sent.append((arrays, Download.of(tensors, device)))
    for arrays, download in sent:
        for name, found in download.wait().items():
            assert found.shape == arrays[name].shape
            assert np.array_equal(found.view(arrays[name].dtype), arrays[name])


@pytest.mark.parametrize(
    ("text", "most", "sizes"),
    [("1,2,4,8", 4, [1, 2, 4]), ("8,1", 5, [1, 5]), ("1,2", 9, [1, 2]), ("16", 3, [3]), ("2,2", 2, [2])],
)
def test_the_sizes_that_are_captured_cover_the_largest_batch_where_the_setting_does(text, most, sizes):
    assert decode_shapes(text, most) == [Shape(size, size, size) for size in sizes]


@pytest.mark.parametrize(
    ("batch_size", "max_tokens", "shapes"),
    [
        (8, 130, [(64, 9, 9), (128, 9, 9)]),
        (63, 64, [(64, 65, 64)]),  # 64 requests with 64 tokens would be a decode step
        (100, 8192, [(64, 101, 64), (128, 101, 101), (256, 101, 101), (512, 101, 101)]),
        (2, 10, []),
    ],
)
def test_steps_with_prompts_have_a_request_to_spare(batch_size, max_tokens, shapes):
    assert prompt_shapes(batch_size, max_tokens) == [Shape(*shape) for shape in shapes]


# What fills a step up is never written, so it may be anything.
with_garbage = pytest.mark.filterwarnings("ignore:.*encountered in")
STEPS = {
    "decode": ([(0, 17, 1), (2, 64, 1), (1, 3, 1)], (4, 4, 4)),
    "a prompt": ([(1, 0, 30)], (64, 6, 6)),
    "mixed": ([(0, 17, 1), (2, 64, 1), (1, 0, 30)], (64, 6, 6)),
    "drafts": ([(0, 17, 3), (2, 64, 1)], (64, 6, 6)),
    "drafts alone": ([(0, 17, 3), (2, 64, 1), (1, 30, 2)], (8, 5, 8, 4)),
}


@with_garbage
@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_is_filled_up_gives_the_same_logits(exported, device, case):
    """It also writes the same keys and values. Tables are longer than this step needs, and contain old blocks."""
    rows, shape = STEPS[case]
    executor = CudaExecutor(exported("qwen2"), SETTINGS, device.type)
    executor.allocate(9)
    caches = executor.runner.caches
    generator = torch.Generator(device).manual_seed(0)
    for tensor in caches.tensors.values():
        tensor.normal_(generator=generator)
    before = {name: tensor.clone() for name, tensor in caches.tensors.items()}
    inputs = step_inputs(rows)
    graphs = StepGraphs(SETTINGS, 4, device)
    graphs.null_block = caches.null_block
    empty = padding_step(Shape(*shape), 0)
    numbers = unpack_inputs(on_device(inputs, empty, device), empty)
    tables = torch.full((shape[1], 40), caches.null_block, dtype=torch.int32, device=device)
    own = graphs._stack_tables([inputs["block_tables"]], shape[1], MIN_BLOCK_SIZE)
    tables[:, : own.shape[1]] = torch.from_numpy(own).to(device)
    usual_tokens = Shape(*shape).usual_tokens
    known = {"query_starts": KnownStarts(numbers["query_starts"], usual_tokens=usual_tokens)} if usual_tokens else {}
    found = (
        executor.runner.compute({**numbers, "block_tables": tables, **known})
        .logits[: len(inputs["logit_rows"])]
        .clone()
    )
    written = {name: tensor.clone() for name, tensor in caches.tensors.items()}
    for name, tensor in caches.tensors.items():
        tensor.copy_(before[name])
    expected = executor.runner.compute(
        {name: torch.from_numpy(each).to(device) for name, each in inputs.items()}
    ).logits
    assert torch.allclose(found, expected, atol=1e-4)
    for name, tensor in caches.tensors.items():
        assert torch.allclose(written[name][:-1], tensor[:-1], atol=1e-5)


def on_device(inputs, empty, device):
    return torch.from_numpy(np.concatenate(padded_inputs(inputs, empty))).to(device)


def step_inputs(rows):
    """Return the inputs of rows (request, context, tokens). The last token of each row gives logits."""
    rng = np.random.default_rng(0)
    counts = np.array([count for _, _, count in rows])
    starts = np.cumsum([0, *counts])
    wanted = [
        np.arange(end - (count if context else 1), end)
        for (_, context, count), end in zip(rows, starts[1:], strict=True)
    ]
    arrays = {
        "token_ids": rng.integers(0, 300, counts.sum()),
        "positions": np.concatenate([np.arange(context, context + count) for _, context, count in rows]),
        "query_starts": starts,
        "context_lens": np.array([context for _, context, _ in rows]),
        "block_tables": np.arange(9).reshape(3, 3)[[request for request, _, _ in rows]],
        "logit_rows": np.concatenate(wanted),
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def test_a_step_with_its_logit_rows_in_another_order_has_no_shape_of_decodes(device):
    """There every row is wanted, and none is gathered."""
    graphs = StepGraphs(dataclasses.replace(SETTINGS, use_cudagraph=False), 4, device)
    graphs._decodes, graphs._verifying, graphs._prompts = [Shape(4, 4, 4)], [Shape(8, 5, 8, 4)], [Shape(64, 6, 6)]
    assert graphs.shape_for(step_inputs([(0, 17, 3), (2, 64, 1), (1, 3, 4)])) == Shape(8, 5, 8, 4)
    assert graphs.shape_for(step_inputs([(0, 17, 3), (2, 64, 1), (1, 3, 5)])) is None
    inputs = step_inputs([(0, 17, 1), (2, 64, 1), (1, 3, 1)])
    assert graphs.shape_for(inputs) == Shape(4, 4, 4)
    assert graphs.shape_for(inputs | {"logit_rows": np.array([1, 0, 2], np.int32)}) == Shape(64, 6, 6)
    assert graphs.shape_for(inputs | {"logit_rows": np.array([0, 1], np.int32)}) == Shape(64, 6, 6)


@pytest.mark.parametrize(("num_drafts", "most"), [(3, 1024), (4, 960), (1, 512)])
def test_steps_that_verify_drafts_of_many_requests_are_captured(num_drafts, most, device):
    """A padding row has room for all tokens of the largest one."""
    config = Config(batch_size=256, max_num_batched_tokens=8192, speculate_max_draft_token_num=num_drafts)
    shapes = verifying_shapes(config, decode_shapes(config.cudagraph_capture_sizes, config.batch_size))
    assert shapes[-1] == Shape(most, 257, most, num_drafts + 1)
    graphs = StepGraphs(dataclasses.replace(config, use_cudagraph=False), 8, device)
    assert graphs._width * MIN_BLOCK_SIZE >= most


def test_padding_of_several_cache_groups_has_blocks_for_all_its_tokens(device):
    """Its rows are those of requests in other shapes, whose blocks remain behind those that a step writes."""
    graphs = StepGraphs(dataclasses.replace(SETTINGS, use_cudagraph=False), 8, device, OptionalInputs(num_groups=2))
    graphs.null_block = 9
    tables = [np.full((2, 1), group, np.int32) for group in range(2)]
    stacked = graphs._stack_tables(tables, 4, num_padding=2 * MIN_BLOCK_SIZE + 1)
    assert stacked.tolist() == [[0, 9, 9], [0, 9, 9], [9] * 3, [9] * 3, [1, 9, 9], [1, 9, 9], [9] * 3, [9] * 3]
    assert graphs._stack_tables(tables[:1], 4).tolist() == [[0], [0], [9], [9]]


def test_positions_in_three_rows_are_filled_up_at_the_end_of_each(device):
    empty = {**padding_step(Shape(4, 2, 2), 9), "positions": np.zeros((3, 4), np.int32)}
    positions = np.arange(1, 10, dtype=np.int32).reshape(3, 3)
    found = array(unpack_inputs(on_device({"positions": positions}, empty, device), empty)["positions"])
    assert found.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 0]]
    assert uncaptured_inputs({"positions": np.zeros((3, 5), np.int32)}, empty).keys() == {"positions"}
    assert not uncaptured_inputs({"positions": positions}, empty)


def test_a_captured_decode_step_takes_sampling_inputs(device):
    """Each number is in its place, whatever its type. Padding rows are greedy and use the padding slot. With more rows
    than the graph has, none of these inputs is written.
    """
    inputs, empty = step_inputs([(0, 17, 1), (2, 64, 1), (1, 3, 1)]), padding_step(Shape(4, 4, 4), 9)
    choice = {
        "seed": np.array([2**64 - 1, 5, 6], np.uint64),
        "counter": np.array([2**40, 1, 2]),
        "slots": np.array([3, 0, 7]),
        "temperature": np.array([0.5, 0, 1], np.float32),
        "top_p": np.array([0.25, 1, 0.5], np.float32),
        "top_k": np.array([7, 0, 2], np.int32),
        "min_p": np.array([0.125, 0, 0], np.float32),
    }
    more = choice | {"bias": np.ones(2, np.float32)}
    assert uncaptured_inputs(more, empty).keys() == {"bias"}
    found = unpack_inputs(on_device(inputs | more, empty, device), empty)
    padding = {"slots": 9, "top_p": 1}
    for name, wanted in choice.items():
        signed = wanted.astype(np.int64) if name == "seed" else wanted
        expected = [*signed.tolist(), padding.get(name, 0)]
        assert array(found[name]).tolist() == expected
    forked = {name: np.repeat(each, 2) for name, each in choice.items()}
    assert uncaptured_inputs(forked, empty) == forked
    assert array(unpack_inputs(on_device(inputs | forked, empty, device), empty)["slots"]).tolist() == [9] * 4


def test_steps_load_their_inputs_in_turn(device):
    """The inputs of the next step may be written earlier. Rows of tables are longer than what is written, and the rest
    is unchanged.
    """
    buffers = StepBuffers(2, 3000, 4, device)
    numbers = torch.zeros(1001, dtype=torch.int32, device=device)
    tables = torch.full((3, 50), -1, dtype=torch.int32, device=device)
    steps = [
        (np.arange(step, step + 1001, dtype=np.int32), step_tables(width)) for step, width in enumerate((40, 1, 7))
    ]
    buffers.write([steps[0][0][:1], steps[0][0][1:]], steps[0][1])
    for step, (own, own_tables) in enumerate(steps):
        if step + 1 < len(steps):
            buffers.write([steps[step + 1][0]], steps[step + 1][1])
        before = array(tables)
        buffers.load(numbers, tables)
        assert np.array_equal(array(numbers), own)
        width = own_tables.shape[1]
        assert np.array_equal(array(tables)[:, :width], own_tables)
        assert np.array_equal(array(tables)[:, width:], before[:, width:])


def step_tables(width):
    return np.arange(7, 7 + 3 * width, dtype=np.int32).reshape(3, width)


def test_tokens_are_answered_to_the_host_in_turn_and_kept_by_slot(device):
    buffers = StepBuffers(2, 10, 4, device)
    last_tokens, chosen = (torch.zeros(5, dtype=torch.int32, device=device) for _ in range(2))
    numbers, tables = (torch.zeros(size, dtype=torch.int32, device=device) for size in (1, (3, 1)))
    found = []
    for step in range(4):
        buffers.write([np.zeros(1, np.int32)], np.zeros((3, 1), np.int32))
        buffers.load(numbers, tables)
        tokens = torch.tensor([10, 20, 30], dtype=torch.int32, device=device) + step
        buffers.store(tokens, torch.tensor([4, 0, 1], device=device), last_tokens, chosen)
        found.append(Download({"tokens": buffers.tokens(2)}, device))
        if step:
            assert found[step - 1].wait()["tokens"].tolist() == [9 + step, 19 + step]
    assert found[3].wait()["tokens"].tolist() == [13, 23]
    assert array(last_tokens).tolist() == [23, 33, 0, 0, 13]
    assert array(chosen).tolist() == [13, 23, 33, 0, 0]


@pytest.mark.parametrize(("block_size", "is_taken"), [(8, False), (48, False), (16, True), (64, True), (256, True)])
def test_block_sizes_that_the_kernels_cannot_read_are_refused(device, block_size, is_taken):
    spec = CacheSpec("kv_cache_0", "float32", (-1, 2, 2, block_size, 16), ATTENTION_AXES)
    if is_taken:
        Caches([spec], device)
    else:
        with pytest.raises(ConfigError, match=f"BLOCK_SIZE was {block_size} at export, .* a power of two, 16 at least"):
            Caches([spec], device)


def test_a_block_is_copied_in_every_layer(device):
    specs = [CacheSpec(f"kv_cache_{n}", "float32", (-1, 2, 1, 16, 4), ATTENTION_AXES) for n in range(2)]
    caches = Caches(specs, device)
    caches.allocate(3)
    for number, tensor in enumerate(caches.tensors.values()):
        tensor.copy_(torch.arange(4, device=device).view(4, 1, 1, 1, 1) + 10 * number)
    caches.copy([Copy(0, 0, 0, source=1, target=2), Copy(0, 0, 0, source=2, target=0)])
    blocks = [tensor[:, 0, 0, 0, 0].tolist() for tensor in caches.tensors.values()]
    assert blocks == [[1, 1, 1, 3], [11, 11, 11, 13]]  # the last one is padding


def test_more_blocks_than_fit_are_refused_by_the_name_of_the_setting(exported, device, monkeypatch):
    monkeypatch.setattr("engine.executors.memory.with_device", lambda config: config)
    config = dataclasses.replace(SETTINGS, device="gpu", block_bs=None, num_gpu_blocks_override=10**8)
    executor = CudaExecutor(exported("qwen2"), config, device.type)
    with pytest.raises(ConfigError, match="NUM_GPU_BLOCKS_OVERRIDE is 100000000: 100000000 blocks need .* are free"):
        allocate_cache(executor, config, 512)
