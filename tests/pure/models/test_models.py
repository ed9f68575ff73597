"""Exported models against what transformers computed (tests/golden): same tokens, logits within 1e-4."""

import json
import zlib

import numpy as np
import pytest

from engine.models.rope import read_rope
from engine.ops import cpu, reference
from tests.checkpoints import FAMILIES
from tests.golden_arrays import GOLDEN, golden
from tests.paged_model import PagedModel

PROMPT_LENS = (1, 7, 63, 64, 65, 130, 200)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_random_weights_are_those_transformers_saw(family, checkpoint):
    assert zlib.crc32((checkpoint(family) / "model.safetensors").read_bytes()) == golden(family)["checksum"]


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, ops, exported):
    expected = golden(family)
    for prompt_len in PROMPT_LENS:
        wanted = expected[f"logits_{prompt_len}"]
        logits = PagedModel.of(exported(family), ops).prefill(
            expected[f"prompt_{prompt_len}"].tolist(), chunk=1000, num_logits=len(wanted)
        )
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4, err_msg=f"prompt of {prompt_len}")


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "prompt_lens"),
    [(1000, PROMPT_LENS), (64, (64, 65, 200)), (63, (63, 130)), (17, (65, 200))],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family, chunk, prompt_lens, exported):
    expected = golden(family)
    for prompt_len in prompt_lens:
        prompt, tokens = expected[f"prompt_{prompt_len}"].tolist(), expected[f"tokens_{prompt_len}"].tolist()
        assert PagedModel.of(exported(family), cpu).greedy(prompt, len(tokens), chunk) == tokens


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_definition_of_the_ops_gives_the_tokens_of_transformers(family, exported):
    expected = golden(family)
    model = PagedModel.of(exported(family, block_size=24), reference)
    assert model.greedy(expected["prompt_65"].tolist(), 64, chunk=30) == expected["tokens_65"].tolist()


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_logits_do_not_depend_on_what_else_is_in_the_step(family, exported):
    prompts = [golden(family)[f"prompt_{n}"].tolist() for n in (65, 7, 130)]
    together = PagedModel.of(exported(family), cpu, num_requests=3, num_blocks=4)
    together.step({0: prompts[0], 2: prompts[2][:50]})
    mixed = together.step({2: prompts[2][50:], 0: [11], 1: prompts[1]})  # a chunk, a decode, a whole prompt
    for row, prompt in zip(mixed, [prompts[2], [*prompts[0], 11], prompts[1]], strict=True):
        alone = PagedModel.of(exported(family), cpu).prefill(prompt, chunk=1000)
        np.testing.assert_array_equal(row, alone[0])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_stays_near_float32(family, exported):
    prompt = golden(family)["prompt_64"].tolist()
    exact = PagedModel.of(exported(family), cpu).prefill(prompt, 1000)
    for ops in (reference, cpu):
        rounded = PagedModel.of(exported(family, dtype="bfloat16"), ops).prefill(prompt, chunk=40)
        assert np.corrcoef(exact[0], rounded[0])[0, 1] > 0.999


@pytest.mark.parametrize(("family", "dtype"), [("llama3", "float32"), ("qwen3", "float32"), ("qwen2", "bfloat16")])
def test_paddle_inference_computes_what_the_graph_says(family, dtype, exported):
    model_dir = exported(family, dtype=dtype)
    prompt = golden(family)["prompt_130"].tolist()
    ours, paddles = PagedModel.of(model_dir, cpu), PagedModel.through_paddle(model_dir)
    np.testing.assert_array_equal(paddles.prefill(prompt, chunk=50), ours.prefill(prompt, chunk=50))
    for token_id in range(20):
        np.testing.assert_array_equal(paddles.step({0: [token_id]}), ours.step({0: [token_id]}))


@pytest.mark.parametrize("case", json.loads((GOLDEN / "rope.json").read_text())["cases"])
def test_rotary_frequencies_equal_those_of_transformers(case):
    keys = case["config"]
    rope = read_rope(keys, keys["head_dim"], keys["max_position_embeddings"])
    np.testing.assert_allclose(rope.inv_freq, np.float32(case["inv_freq"]), rtol=3e-7)
    assert rope.attention_scaling == pytest.approx(case["attention_scaling"], rel=1e-12)
