"""Tests that no request waits for a kernel to be compiled after the warm-up."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Request, Sampling  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.memory import allocate_cache  # noqa: E402
from engine.exporting.manifest import Manifest  # noqa: E402
from engine.settings.config import Config  # noqa: E402

SETTINGS = {"device": "gpu", "batch_size": 40, "block_ratio": 2.0, "num_gpu_blocks_override": 600}
MODELS = [
    *(("qwen2", quant_type) for quant_type in ("none", "weight_only_int4", "a8w8")),
    *(("qwen3_moe", quant_type) for quant_type in ("none", "weight_only_int4")),
]
SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "num_logprobs": 3},
    {"logit_bias": ((5, 2.0),), "bad_words": ((7,), (8, 9)), "num_logprobs": 0},
    {"temperature": 0, "num_prompt_logprobs": 2},
    {"temperature": 0, "pooling": "mean"},
]


@pytest.mark.parametrize("model", MODELS, ids="-".join)
@pytest.mark.parametrize("is_invariant", [False, True])
def test_no_kernel_is_compiled_after_the_warm_up(device, exported, caplog, model, is_invariant):
    family, quant_type = model
    if device.type != "cuda":
        pytest.skip("the interpreter compiles nothing")
    if is_invariant and quant_type != "none":
        pytest.skip("BATCH_INVARIANT=1 has no quantized weights")
    graph_dir = exported(family, "bfloat16", quant_type=quant_type)
    config = Config(model_dir=str(graph_dir), batch_invariant=is_invariant, **SETTINGS)
    executor = CudaExecutor(graph_dir, config)
    num_blocks = allocate_cache(executor, config, Manifest.read(graph_dir).max_seq_len)
    loop, longest = EngineLoop(executor, num_blocks, config), Manifest.read(graph_dir).max_seq_len
    with caplog.at_level(logging.WARNING):
        for number in range(120):
            length = 1 + number * 37 % (longest - 10)
            fields = {"max_new_tokens": 1 + number % 9, "seed": number, **SAMPLINGS[number % len(SAMPLINGS)]}
            loop.add(Request(str(number), [3 + number % 50] * length, length, Sampling(**fields)), replay=True)
            loop.step()
        while not loop.is_idle:
            loop.step()
    executor.close()
    assert [record.getMessage() for record in caplog.records] == []
