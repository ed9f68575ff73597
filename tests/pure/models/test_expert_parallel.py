"""Expert parallelism (ENABLE_EXPERT_PARALLEL=1): ranks with some of the experts each compute what one rank does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.executors import check_num_ranks
from engine.exporting.export import ExportOptions, plan_of
from engine.exporting.manifest import Manifest
from engine.models.config_fields import ModelError
from engine.models.formats import FLOAT32, FORMATS, QUANTIZED
from engine.models.weights import Shard, weights_of
from engine.settings.config import Config
from tests.family_checkpoints import make_checkpoint
from tests.golden_arrays import golden, log_softmax
from tests.pure.models.test_family_goldens import BLOCK_SIZE, cases
from tests.pure.models.test_ranks import answers_of_ranks
from tests.quantized_checkpoints import KINDS, make_fp8, make_quantized

pytestmark = pytest.mark.slow

# Latent attention, groups and shared experts; biases, and six experts, which four ranks cannot share evenly.
FAMILIES = ("deepseek_v2", "gpt_oss", "qwen3_moe")


@pytest.mark.parametrize(("count", "sizes"), [(8, [8]), (8, [4, 4]), (6, [2, 2, 1, 1]), (3, [1, 1, 1])])
def test_each_expert_is_on_one_rank_and_the_first_ranks_have_one_more(count, sizes):
    shard = Shard(FLOAT32, "float32", 64, num_ranks=len(sizes), expert_parallel=True)
    experts = [replace(shard, rank=rank).experts(count) for rank in range(len(sizes))]
    assert [len(each) for each in experts] == sizes
    assert [expert for each in experts for expert in each] == list(range(count))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_with_some_of_the_experts_give_the_tokens_of_transformers(family, num_ranks, exported):
    graph_dir = exported(family, block_size=BLOCK_SIZE, num_ranks=num_ranks, expert_parallel=True)
    prompt, tokens = cases(family)[127]
    ranks = answers_of_ranks(graph_dir, num_ranks, prompt)
    for logits, token_ids in ranks:
        np.testing.assert_array_equal(logits, ranks[0][0])
        np.testing.assert_allclose(
            log_softmax(logits), golden(f"families/{family}")["logprobs_127"][-2:], rtol=0, atol=2e-4
        )
        assert token_ids == tokens[: len(token_ids)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_16_bits_log_probabilities_are_those_of_ranks_with_shares_of_the_experts(family, exported):
    """Compare means: where the scores of two experts are nearly equal, rounding decides which one is chosen."""
    prompt, _ = cases(family)[127]
    shares, whole = (
        exported(family, block_size=BLOCK_SIZE, dtype="bfloat16", num_ranks=2, expert_parallel=is_whole)
        for is_whole in (False, True)
    )
    expected, found = (log_softmax(answers_of_ranks(each, 2, prompt)[1][0]) for each in (shares, whole))
    assert np.abs(found - expected).mean() < 2e-2


def stored_experts(checkpoint: Path, options: ExportOptions) -> list[dict[str, tuple[np.ndarray, ...]]]:
    """Return, for each rank, the arrays of the stacks of its experts by name."""
    plan = plan_of(checkpoint, options, lambda step: None)
    return [
        {name: plan.checkpoint.stored(weight) for name, weight in weights_of(network).items() if ".experts." in name}
        for network in (plan.model.network(shard) for shard in plan.shards)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [*FORMATS, "awq", "w4a16 of 32", "w8a8", "a block"])
def test_the_stacks_of_the_ranks_are_together_that_of_one_rank(kind, tmp_path):
    if kind == "a block":
        (checkpoint, _), options = (
            make_fp8(tmp_path, kind, family="qwen3_moe"),
            ExportOptions("auto", "weight_only_fp8"),
        )
    elif kind in KINDS:
        checkpoint, _ = make_quantized(tmp_path, kind, "qwen3_moe", moe_intermediate_size=256)
        options = ExportOptions()
    else:
        checkpoint = make_checkpoint(tmp_path, "gpt_oss")
        options = ExportOptions("bfloat16", kind) if kind in QUANTIZED else ExportOptions(kind)
    [whole] = stored_experts(checkpoint, options)
    for num_ranks in (2,) if kind == "a block" else (2, 4):
        ranks = stored_experts(checkpoint, replace(options, num_ranks=num_ranks, expert_parallel=True))
        for name, arrays in whole.items():
            for index, array in enumerate(arrays):
                np.testing.assert_array_equal(np.concatenate([rank[name][index] for rank in ranks]), array)


def test_models_that_ranks_cannot_divide_by_experts_are_refused_by_name(checkpoint, exported):
    for family, num_ranks, message in (
        ("qwen2", 2, "^ENABLE_EXPERT_PARALLEL is 1, but the model has no mixtures of experts"),
        ("qwen3_moe", 16, r"^num_ranks \(MP_NUM\) is 16, with ENABLE_EXPERT_PARALLEL=1 it must be at most .* is 8$"),
    ):
        options = ExportOptions(num_ranks=num_ranks, expert_parallel=True, hf_overrides='{"num_attention_heads": 16}')
        with pytest.raises(ModelError, match=message):
            plan_of(checkpoint(family), replace(options, load_format="dummy"), lambda step: None)
    graph_dir = exported("qwen3_moe", num_ranks=2)
    config = Config(mp_num=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=f"^ENABLE_EXPERT_PARALLEL is 1, {graph_dir} was exported without it"):
        check_num_ranks(graph_dir, Manifest.read(graph_dir), config)
