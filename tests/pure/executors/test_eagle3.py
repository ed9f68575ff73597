"""EAGLE-3 heads draft what the reference computes with their weights (tests/golden/eagle3), and change no answer."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.executors import make_executor
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions, export
from engine.exporting.export_options import options_of
from engine.models.config_fields import ModelError
from engine.models.eagle3 import FILE
from tests.eagle3_checkpoints import LAYER_IDS, make_head, make_model, make_right
from tests.golden_arrays import golden
from tests.pure.executors.test_mtp import BASE, BLOCK_SIZE, NUM_DRAFTS, check_drafts, check_layer_answers
from tests.quantized_checkpoints import change_tensors

DRAFTING = replace(BASE, speculate_method="eagle3", speculate_max_draft_token_num=NUM_DRAFTS)


@pytest.fixture(scope="module")
def graph_dir(tmp_path_factory):
    """Return a function that exports a model of a family with a head."""

    @functools.cache
    def exported(family: str, is_right: bool = False, num_ranks: int = 1) -> Path:
        folder = tmp_path_factory.mktemp(family)
        model = make_model(folder / "model", family)
        head = make_head(folder / "head", family, model)
        if is_right:
            make_right(model, head)
        options = ExportOptions(block_size=BLOCK_SIZE, eagle3=str(head), num_ranks=num_ranks)
        export(model, folder / "out", options)
        return folder / "out"

    return exported


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", LAYER_IDS)
def test_drafts_behind_a_prompt_are_those_of_the_reference(family, num_ranks, graph_dir):
    exported = graph_dir(family, num_ranks=num_ranks)
    check_drafts(exported, replace(DRAFTING, mp_num=num_ranks), f"eagle3/{family}", np.load(exported / FILE))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("qwen3", True, 1, 400), marks=pytest.mark.slow),
        ("qwen3", True, 1, 14),
        ("llama", False, 1, 400),
        pytest.param(("qwen3", True, 2, 14), marks=pytest.mark.slow),
    ],
    ids=["right", "tiny pool", "wrong", "ranks, tiny pool"],
)
def test_answers_with_a_head_are_those_without(case, graph_dir):
    """The second round finds the prompts of the first in the prefix cache, with the head's part of it."""
    check_layer_answers(graph_dir, case, DRAFTING)


@pytest.mark.slow
def test_the_export_for_the_settings_has_the_head_and_changes_with_it(tmp_path):
    model = make_model(tmp_path / "model", "llama")
    head = make_head(tmp_path / "head", "llama", model)
    config = replace(DRAFTING, speculate_model_path=str(head))
    options = options_of(config, model)
    first = export_cached(model, tmp_path / "cache", options)
    assert len(np.load(first / FILE)) == golden("eagle3/llama")["logprobs_3"].shape[1]
    make_executor(first, config).close()
    change_tensors(head, lambda tensors: tensors.update({"fc.weight": 2 * tensors["fc.weight"]}))
    assert export_cached(model, tmp_path / "cache", options) != first
    with pytest.raises(ConfigError, match="SPECULATE_METHOD is eagle3, .* export its checkpoint again with --eagle3"):
        make_executor(export_cached(model, tmp_path / "cache", replace(options, eagle3="")), config)


@pytest.mark.slow
def test_layers_of_sglangs_key_are_those_before(graph_dir, tmp_path):
    model = make_model(tmp_path / "model", "llama")
    outputs = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYER_IDS["llama"]]}
    head = make_head(tmp_path / "head", "llama", model, eagle_config=outputs)
    export(model, tmp_path / "out", ExportOptions(block_size=BLOCK_SIZE, eagle3=str(head)))
    check_drafts(tmp_path / "out", DRAFTING, "eagle3/llama", np.load(tmp_path / "out" / FILE))


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ({"hidden_size": 64}, None, "hidden_size is 64, it must be 72"),
        ({"vocab_size": 64}, None, "vocab_size is 64, it must be 320"),
        (
            {"num_hidden_layers": 2},
            None,
            "head is no EAGLE-3 head .*: num_hidden_layers is 2, it must be 1",
        ),
        ({"model_type": "qwen3"}, None, "model_type is 'qwen3', supported are heads like 'llama'"),
        ({"speculators_model_type": "eagle"}, None, "speculators_model_type is 'eagle', supported is 'eagle3'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, None, r"is \[1, 2, 6\], it must be three layers from 0 to 5"),
        ({"draft_vocab_size": 199}, None, r"tensor d2t has shape \(200,\), config.json asks for \(199,\)"),
        ({}, lambda tensors: tensors.pop("d2t"), "d2t is missing, and draft_vocab_size is 200, vocab_size 320"),
        ({}, lambda tensors: tensors.update(d2t=tensors["d2t"] + 300), "d2t must give each of the 200 tokens"),
        ({}, lambda tensors: tensors.pop("fc.weight"), "no EAGLE-3 head for this model: tensor fc.weight is missing"),
        ({}, lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"), "up_proj.weight is missing"),
        ({}, lambda tensors: tensors.update({"fc.bias": np.ones(72)}), "fc.bias, for which .* no place"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(keys, change, message, tmp_path):
    model = make_model(tmp_path / "model", "llama")
    head = make_head(tmp_path / "head", "llama", model, **keys)
    if change:
        change_tensors(head, change)
    with pytest.raises(ModelError, match=message):
        export(model, tmp_path / "out", ExportOptions(eagle3=str(head)))


def test_a_head_that_cannot_be_divided_among_the_ranks_is_refused(tmp_path):
    model = make_model(tmp_path / "model", "llama")
    head = make_head(tmp_path / "head", "llama", model, num_attention_heads=3, num_key_value_heads=3, head_dim=24)
    message = r"MP_NUM\) is 2, it must divide num_attention_heads of the EAGLE-3 head, which is 3"
    with pytest.raises(ModelError, match=message):
        export(model, tmp_path / "out", ExportOptions(eagle3=str(head), num_ranks=2))
