"""Families that read images: the networks that follow from config.json and tensors, and towers that are refused."""

import numpy as np
import pytest

from engine.models.config_fields import ModelError
from engine.models.families import read_model
from engine.models.formats import FLOAT32
from engine.models.vision import SEGMENT_ENDS, WINDOW_ENDS
from engine.models.vision_checkpoint import with_tower
from engine.models.vision_inputs import tower_inputs
from engine.models.weights import Shard
from tests.family_checkpoints import config_of

COUNTS = ("depth", "num_heads", "patch_size", "temporal_patch_size", "spatial_merge_size")
SHARD = Shard(FLOAT32, "float32", block_size=64)
TEXT, TOWER = "model.language_model.embed_tokens.weight", "model.visual.pos_embed.weight"


def networks(keys):
    model = read_model(keys)
    return list(model.networks(SHARD)), model.takes_spans


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_family_reads_images_if_it_has_a_tower(family):
    config = config_of(family, vision_config=config_of("qwen3_5")["vision_config"])
    text, sections = config["text_config"], {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config["text_config"] = {**text, "rope_parameters": {**text["rope_parameters"], **sections}}
    assert networks(config) == (["decoder", "vision"], True)
    keys, tensors = with_tower(config, {TEXT: 1, TOWER: 2})
    assert networks(keys) == (["decoder", "vision"], True)
    assert tensors == {"model.embed_tokens.weight": 1, "visual.pos_embed.weight": 2}
    for found in ({TEXT: 1}, {TEXT: 1, TOWER: 2}):
        described = {name: value for name, value in config.items() if len(found) == 1 or name != "vision_config"}
        keys, tensors = with_tower(described, found)
        assert networks(keys) == (["decoder"], False) and "vision_config" not in keys
        assert tensors == {"model.embed_tokens.weight": 1}


@pytest.mark.parametrize(
    ("outer", "family"), [("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("mistral3", "ministral3")]
)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_is_served_where_the_tower_is_not_known(outer, family, prefix):
    text = config_of("mistral_window" if family == "mistral" else family)
    heads = {"language_model.model.": "language_model.lm_head.weight", "model.language_model.": "lm_head.weight"}
    towers = ("vision_tower.patch_conv.weight", "model.multi_modal_projector.norm.weight")
    config = {"model_type": outer, "architectures": ["ForImages"], "text_config": text, "vision_config": {"depth": 2}}
    keys, tensors = with_tower(config, dict.fromkeys((f"{prefix}norm.weight", heads[prefix], *towers), 1))
    assert keys == {**text, "model_type": family, "architectures": ["ForImages"], **text}
    assert set(tensors) == {"model.norm.weight", "lm_head.weight"}
    assert repr(read_model(config)) == repr(read_model(keys)) == repr(read_model(text))
    with pytest.raises(ModelError, match=f"text_config.model_type is 'llama', supported is .*{family}"):
        read_model({**config, "text_config": {**text, "model_type": "llama"}})


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_whole_model_says_whether_its_embeddings_are_tied(is_tied):
    """transformers 5 writes the key for the language model, too, but does not use it."""
    text = {**config_of("mistral_window"), "tie_word_embeddings": not is_tied}
    config = {"model_type": "mistral3", "tie_word_embeddings": is_tied, "text_config": text}
    assert read_model(config).tied_embeddings == is_tied


@pytest.mark.parametrize(("full_layers", "window"), [([1, 3], 2), ([0, 1, 2, 3], 0), ([3, 2, 1, 0, 9], 0)])
def test_a_tower_whose_layers_all_attend_to_the_whole_image_has_no_windows(full_layers, window):
    config = config_of("qwen2_5_vl")
    keys = {**config, "vision_config": {**config["vision_config"], "fullatt_block_indexes": full_layers}}
    vision = read_model(keys).vision
    assert vision.window == window
    inputs = tower_inputs(vision, np.zeros((36, vision.patch_values), np.float32), (1, 3, 3))
    assert (WINDOW_ENDS in inputs) == (window > 0)


@pytest.mark.parametrize("full_layers", [[], [7, 15]])
def test_a_tower_whose_layers_all_have_windows_has_one_kind_of_segments(full_layers):
    config = config_of("qwen2_5_vl")
    keys = {**config, "vision_config": {**config["vision_config"], "fullatt_block_indexes": full_layers}}
    model = read_model(keys)
    tower = model.networks(SHARD)["vision"]
    inputs = tower_inputs(model.vision, np.zeros((36, model.vision.patch_values), np.float32), (1, 3, 3))
    assert inputs.keys() == set(tower.inputs)
    assert {layer.ends for layer in tower.layers} == {SEGMENT_ENDS}
    assert inputs[SEGMENT_ENDS].tolist() == [16, 24, 32, 36]


def test_the_layer_that_drafts_reads_text_alone():
    config = config_of("qwen3_5")
    mtp = read_model(config).with_mtp_layer()
    assert not mtp.takes_spans and read_model(config).takes_spans


@pytest.mark.parametrize(
    ("family", "vision", "message"),
    [
        (
            "qwen3_vl",
            {"deepstack_visual_indexes": [2, 0]},
            "indexes is .2, 0., supported are ascending layers",
        ),
        (
            "qwen3_vl",
            {"deepstack_visual_indexes": [0, 4]},
            "indexes is .0, 4., supported are ascending layers",
        ),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 2, 3]}, "num_hidden_layers is 4, it must be more than the 4"),
        ("qwen3_vl", {"num_position_embeddings": 26}, "num_position_embeddings is 26, it must be a square"),
        ("qwen3_vl", {"hidden_act": "silu"}, "hidden_act is 'silu', supported is 'gelu_pytorch_tanh'"),
        ("qwen3_vl", {"out_hidden_size": 60}, "out_hidden_size is 60, supported is 64"),
        *(("qwen2_5_vl", {key: 4097}, f"{key} is 4097, it must be at most 4096") for key in COUNTS),
    ],
)
def test_towers_that_are_not_built_are_refused(family, vision, message):
    config = config_of(family)
    with pytest.raises(ModelError, match=message):
        read_model({**config, "vision_config": {**config["vision_config"], **vision}})
