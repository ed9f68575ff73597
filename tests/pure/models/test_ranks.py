"""Tensor-parallel ranks of an exported model compute what one rank does: same tokens, logits within 1e-4."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.families import read_model
from engine.models.formats import FLOAT32
from engine.models.weights import Shard
from tests.checkpoints import COMMON, FAMILIES, make_checkpoint
from tests.golden_arrays import golden
from tests.paged_model import PagedModel
from tests.pure.ranks import run_processes, run_threads

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
CUTS = [*((family, 2) for family in FAMILIES), ("qwen2", 4), ("qwen3", 4)]  # 4: more than key-value heads


def answer(model: PagedModel, prompt: list[int]) -> tuple[np.ndarray, list[int]]:
    """Return the logits of the prompt's last two tokens, given in two steps, and the greedy answer."""
    logits = model.prefill(prompt, chunk=-(-len(prompt) // 2), num_logits=2)
    token_ids = [int(logits[-1].argmax())]
    while len(token_ids) < NUM_TOKENS:
        token_ids.append(int(model.step({0: token_ids[-1:]})[-1].argmax()))
    return logits, token_ids


def answers_of_ranks(model_dir: Path, num_ranks: int, prompt: list[int]) -> list[tuple[np.ndarray, list[int]]]:
    return run_threads(num_ranks, lambda rank, ops: answer(PagedModel.of(model_dir, ops, rank), prompt))


def assert_like(expected: tuple[np.ndarray, list[int]], ranks: list[tuple[np.ndarray, list[int]]]) -> None:
    """Assert that every rank has the same bits, equal to those of one rank up to rounding."""
    for logits, token_ids in ranks:
        np.testing.assert_array_equal(logits, ranks[0][0])
        np.testing.assert_allclose(logits, expected[0], rtol=0, atol=1e-4)
        assert token_ids == expected[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "num_ranks"), CUTS)
def test_ranks_give_the_logits_and_tokens_of_transformers(family, num_ranks, exported):
    expected = golden(family)
    ranks = answers_of_ranks(exported(family, num_ranks=num_ranks), num_ranks, expected["prompt_65"].tolist())
    assert_like((expected["logits_65"], expected["tokens_65"][:NUM_TOKENS].tolist()), ranks)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])  # with one table, and with two
def test_a_vocabulary_that_the_ranks_do_not_divide_is_filled_up_with_zeros(family, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", family, vocab_size=321)
    for num_ranks in (1, 4):
        export(checkpoint, tmp_path / f"of {num_ranks}", ExportOptions(num_ranks=num_ranks))
    prompt = [320, 0, 80, 81, 161, 162, 242, 243]  # at the edges of the ranks' shares
    expected = answer(PagedModel.of(tmp_path / "of 1"), prompt)
    assert expected[0].shape == (2, 321)
    assert_like(expected, answers_of_ranks(tmp_path / "of 4", 4, prompt))
    [last] = [load(tmp_path / "of 4", rank=3)[1]["embed_tokens.weight"]]
    assert last.shape == (81, 64)
    assert last[:78].any(axis=1).all()
    assert not last[78:].any()


def test_fewer_key_value_heads_than_ranks_are_held_twice(exported):
    directory = exported("qwen2", num_ranks=4)
    assert Manifest.read(directory).num_ranks == 4
    assert {cache.shape for cache in Manifest.read(directory).graph().caches} == {(-1, 2, 1, 64, 16)}
    keys = [load(directory, rank)[1]["layers.0.qkv_proj.weight"][16:32] for rank in range(4)]
    np.testing.assert_array_equal(keys[0], keys[1])
    np.testing.assert_array_equal(keys[2], keys[3])
    assert not np.array_equal(keys[1], keys[2])


def test_an_mlp_that_the_ranks_do_not_divide_is_filled_up_with_zeros(exported):
    _, params = load(exported("qwen2", num_ranks=4), rank=3)  # 150 = 38 + 38 + 38 + 36
    gate, up = np.split(params["layers.0.gate_up_proj.weight"], 2)
    for of_channels in (gate, up, params["layers.0.down_proj.weight"].T):
        assert of_channels[:36].any(axis=1).all()
        assert not of_channels[36:].any()


def test_one_rank_adds_the_biases_of_sums(exported):
    names = [set(load(exported("llama3", num_ranks=2), rank)[1]) for rank in range(2)]
    biases = {f"layers.{i}.{name}.bias" for i in range(2) for name in ("o_proj", "down_proj")}
    assert names[0] - names[1] == biases
    assert names[1] < names[0]


def test_a_layer_adds_up_twice_and_one_rank_alone_never(exported):
    def ops(num_ranks: int) -> list[str]:
        return [node.op for node in load(exported("qwen3", num_ranks=num_ranks))[0].nodes if node.op.startswith("all_")]

    assert ops(1) == []
    assert ops(2) == ["all_reduce"] * (1 + 2 * 3) + ["all_gather"]


def in_paddle(model_dir: Path, prompt: list[int], rank: int) -> tuple[np.ndarray, list[int]]:
    return answer(PagedModel.through_paddle(model_dir, rank), prompt)


def test_ranks_in_processes_of_their_own_give_the_tokens_of_transformers(exported):
    expected = golden("llama3")
    prompt, tokens = expected["prompt_65"].tolist(), expected["tokens_65"][:NUM_TOKENS].tolist()
    ranks = run_processes(2, partial(in_paddle, exported("llama3", num_ranks=2), prompt))
    assert_like((expected["logits_65"], tokens), ranks)


@pytest.mark.parametrize(
    ("keys", "num_ranks", "message"),
    [
        ({"num_attention_heads": 6}, 4, r"num_ranks \(MP_NUM\) is 4, it must divide num_attention_heads, which is 6"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            r"num_ranks \(MP_NUM\) is 2, it must divide num_key_value_heads, which is 3, or be a multiple of it",
        ),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused_with_the_numbers(keys, num_ranks, message):
    model = read_model({**COMMON, **FAMILIES["llama"], **keys})
    with pytest.raises(ModelError, match=message):
        model.network(Shard(FLOAT32, "float32", 64, num_ranks=num_ranks))
