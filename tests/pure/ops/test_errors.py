"""Tests of the errors of ops for arrays that do not fit, and of refused instruction sets."""

import numpy as np
import pytest

from engine.errors import SetupError
from engine.ops import cpu
from engine.ops.cpu.calls import ArgumentError
from engine.ops.sampling_rows import SamplingRows
from engine.settings.config import Config
from tests.pure.paged_batch import PagedBatch


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*values):
    return np.array(values, np.int32)


SEGMENTS = {"num_heads": 2, "scale": 1.0, "is_bf16": 0}
ROUTE = {"top_k": 3, "scoring": 0, "num_groups": 1, "top_groups": 1, "group_best": 1}
ROUTE |= {"renormalize": 0, "epsilon": 0.0, "minimum": 0.0, "factor": 1.0, "first_expert": 0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cpu.rms_norm(f32(2, 8), f32(7), epsilon=1e-6), "rms_norm: weight has shape (7), needs (8)"),
        (lambda: cpu.linear(f32(2, 8), f32(3, 9)), "linear: weight has shape (3, 9), needs (3, 8)"),
        (lambda: cpu.linear(f32(2, 8), f32(3, 8), f32(4)), "linear: bias has shape (4), needs (3)"),
        (
            lambda: cpu.linear(f32(2, 8), f32(3, 8).astype(np.float64)),
            "linear: weight is float64 [3, 8], which no op takes",
        ),
        (
            lambda: cpu.linear_int8(f32(2, 8), f32(3, 8), f32(3)),
            "linear_int8: weight is float32, needs int8",
        ),
        (
            lambda: cpu.linear_a8w8(f32(2, 8), np.zeros((3, 8), np.int8), f32(1)),
            "linear_a8w8: scale has shape (1), needs (3)",
        ),
        (
            lambda: cpu.linear_int4(f32(2, 130), np.zeros((3, 65), np.uint8), f32(3, 2)),
            "linear_int4: weight has shape (3, 65), needs (3, 128)",
        ),
        (
            lambda: cpu.linear_int4(f32(2, 130), np.zeros((3, 128), np.uint8), f32(3, 4)),
            "linear_int4: scale is float32, needs bfloat16",
        ),
        (lambda: cpu.linear(f32(8, 2).T, f32(3, 8)), "linear: x must be dense and row-major"),
        (
            lambda: cpu.embedding(i32(1, -5), f32(5, 2), first_id=0),
            "embedding: token_ids holds -5, needs 0 .. 2147483647",
        ),
        (
            lambda: cpu.all_gather(f32(5, 2), num_ranks=2, width=4),
            "all_gather: num_ranks is 2, this process is one of 1",
        ),
        (
            lambda: cpu.all_gather(f32(5, 2), num_ranks=1, width=3),
            "all_gather: width is 3, num_ranks is 1, N is 2, needs width <= num_ranks * N",
        ),
        (lambda: cpu.gather_rows(f32(5, 2), i32(-1)), "gather_rows: rows holds -1, needs 0 .. 4"),
        (
            lambda: cpu.replace_rows(f32(3, 2), i32(-1, 3, 4), f32(4, 2)),
            "replace_rows: rows holds 4, needs -1 .. 3",
        ),
        (lambda: cpu.replace_rows(f32(3, 2), i32(-1, 3, 2), f32(4, 1)), "replace_rows: H is 2, W is 1, needs H <= W"),
        (
            lambda: cpu.add_gathered_rows(f32(3, 2), i32(-1, 3, 4), f32(4, 5), column=3),
            "add_gathered_rows: rows holds 4, needs -1 .. 3",
        ),
        (
            lambda: cpu.add_gathered_rows(f32(3, 2), i32(-1, 3, 2), f32(4, 5), column=4),
            "add_gathered_rows: column is 4, H is 2, W is 5, needs column + H <= W",
        ),
        (lambda: cpu.concat_rows(f32(5, 2), i32([0, 5])), "concat_rows: rows holds 5, needs 0 .. 4"),
        (
            lambda: cpu.interpolate_rows(f32(5, 2), i32([0, 4]), f32(1, 3)),
            "interpolate_rows: weights has shape (1, 3), needs (1, 2)",
        ),
        (
            lambda: cpu.bidirectional_attention(f32(5, 12), f32(5, 2), i32(3, 2, 5), **SEGMENTS),
            "bidirectional_attention: segment_ends must ascend to 5",
        ),
        (
            lambda: cpu.bidirectional_attention(f32(5, 12), f32(5, 2), i32(3), **SEGMENTS),
            "bidirectional_attention: segment_ends must ascend to 5",
        ),
        (
            lambda: cpu.bidirectional_attention(f32(5, 11), f32(5, 2), i32(5), **SEGMENTS),
            "bidirectional_attention: qkv has shape (5, 11), needs (5, any), axis 1 a multiple of 6",
        ),
        (
            lambda: cpu.mrope_angles(np.zeros((3, 5), np.int32), f32(2), i32(0, 3), attention_scaling=1.0),
            "mrope_angles: axes holds 3, needs 0 .. 2",
        ),
        (
            lambda: cpu.mrope_angles(i32(1, 2), f32(2), i32(0, 1), attention_scaling=1.0),
            "mrope_angles: positions has shape (2), needs (3, any)",
        ),
        (
            lambda: cpu.expert_down(f32(2, 8), i32([0, 1], [1, 2]), f32(2, 2), f32(16, 4), num_experts=3),
            "expert_down: weight has shape (16, 4), needs (any, 4), axis 0 a multiple of 3",
        ),
        (
            lambda: cpu.expert_down(f32(2, 8), i32([0, 1], [1, 2]), f32(2, 2), f32(15, 4), num_experts=0),
            "expert_down: weight has shape (15, 4), needs (any, 4)",
        ),
        (
            lambda: cpu.moe_route(f32(2, 8), f32(6, 8), **ROUTE | {"num_groups": 4}),
            "moe_route: num_groups is 4, E is 6, needs 0 < num_groups and E % num_groups == 0",
        ),
        (
            lambda: cpu.moe_route(f32(2, 8), f32(6, 8), **ROUTE | {"num_groups": 3}),
            "moe_route: top_k is 3, top_groups is 1, E is 6, num_groups is 3, "
            "needs 0 < top_k and top_k <= top_groups * (E // num_groups)",
        ),
        (
            lambda: cpu.moe_route(f32(2, 8), f32(6, 8), **ROUTE | {"first_expert": 6}),
            "moe_route: first_expert is 6, E is 6, needs 0 <= first_expert and first_expert < E",
        ),
        (lambda: cpu.swiglu(f32(5, 3)), "swiglu: gate_up has shape (5, 3), needs (5, any), axis 1 a multiple of 2"),
        (
            lambda: cpu.sample(f32(2, 40), SamplingRows.greedy(3)),
            "sample: values has shape (3,), needs (2,)",
        ),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ArgumentError) as raised:
        call()
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("query_starts", i32(0, 2, 5), "query_starts must run from 0 to 4"),
        ("context_lens", i32(30, 0), "block_tables has 2 blocks a request, needs 4"),
        ("block_tables", i32([0, 9], [1, 2]), "block_tables holds 9, needs 0 .. 3"),
        ("block_tables", i32([0, 1]), "block_tables has shape (1, 2), needs (2, 2)"),
        ("cos_sin", f32(4, 18), "rotary_dim is 18, head_dim is 16, needs rotary_dim <= head_dim"),
    ],
)
def test_a_wrong_batch_is_refused_before_it_writes(field, value, message):
    batch = PagedBatch([3, 0], [1, 3])
    if field == "block_tables" and value.shape[0] == 2:
        batch.context_lens = i32(8, 0)
    setattr(batch, field, value)
    arrays = (batch.qkv, batch.cos_sin, batch.kv_cache, batch.query_starts, batch.context_lens, batch.block_tables)
    with pytest.raises(ArgumentError, match="^paged_attention: ") as raised:
        cpu.paged_attention(*arrays, num_heads=4, num_kv_heads=2, scale=1.0, window=0, softcap=0.0)
    assert message in str(raised.value)


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("CPU_ISA", "avx1024")
    with pytest.raises(cpu.UnknownIsa, match=r"^CPU_ISA is 'avx1024': there is no such .* one of .*portable$"):
        cpu.cpu_isa()
    for isa in cpu.available_isas():
        monkeypatch.setenv("CPU_ISA", isa)
        assert cpu.cpu_isa() == isa


def test_the_engine_names_an_unknown_instruction_set_before_it_loads_the_graph(monkeypatch, tmp_path):
    from engine.executors.cpu.executor import CpuExecutor

    monkeypatch.setenv("CPU_ISA", "avx1024")
    with pytest.raises(SetupError, match=r"^CPU_ISA is 'avx1024': there is no such"):
        CpuExecutor(tmp_path, Config())


def test_a_thread_count_below_one_is_refused():
    with pytest.raises(ValueError, match=r"^set_num_threads: count is 0, it must be at least 1$"):
        cpu.set_num_threads(0)
