"""Tests of the export from a checkpoint directory to a served one: layout, dtypes, errors, atomicity, the cache."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.cache_groups import CacheGroup
from engine.dtypes import as_f32, from_bf16
from engine.exporting.__main__ import main
from engine.exporting.export import ExportOptions, export, plan_of
from engine.exporting.manifest import GRAPH_VERSION, Manifest, is_exported
from engine.graph import load, read_graph
from engine.models.checkpoint import Checkpoint, open_tensors
from engine.models.config_fields import ModelError
from engine.models.fp8 import fp8_bytes
from tests.checkpoints import COMMON, FAMILIES, make_checkpoint, random_tensors, write_shards, write_tensors
from tests.family_checkpoints import config_of

COPIED = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]


def test_the_length_of_the_export_selects_the_factors_of_longrope(tmp_path):
    """The overrides are those of docs/models.md."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("phi3_long")))
    angles = {}
    for length in (64, 65, 1024):
        overrides = json.dumps({"infer_model_max_seq_len": length})
        options = ExportOptions(load_format="dummy", hf_overrides=overrides)
        plan = plan_of(tmp_path, options, lambda message: None)
        assert plan.manifest.max_seq_len == length
        angles[length] = plan.model.rope.inv_freq[1] * 10000 ** (2 / 12)
    assert angles[64] == pytest.approx(1 / 1.1)
    assert angles[65] == angles[1024] == pytest.approx(1 / 2.0)


def tensors_of(family: str) -> dict[str, np.ndarray]:
    return dict(random_tensors({**COMMON, **FAMILIES[family]}, seed=0))


def test_an_export_has_everything_a_server_needs(exported, checkpoint):
    directory = exported("qwen2", block_size=16, max_seq_len=500)
    keys = json.loads((directory / "config.json").read_text())
    original = json.loads((checkpoint("qwen2") / "config.json").read_text())
    added = {
        "infer_model_block_size": 16,
        "infer_model_max_seq_len": 500,
        "infer_model_dtype": "float32",
        "infer_model_quant_type": None,
        "infer_model_cachekv_int8_type": None,
        "infer_model_num_ranks": 1,
        "infer_model_graph_version": GRAPH_VERSION,
        "infer_model_checkpoint": Checkpoint(open_tensors(checkpoint("qwen2"))).digest(),
    }
    assert keys == {**original, **added}
    model = Manifest.read(directory)
    assert (model.vocab_size, model.max_seq_len, model.block_size, model.num_ranks) == (320, 500, 16, 1)
    assert model.weight_format == "float32"
    for name in COPIED:
        assert (directory / name).read_bytes() == (checkpoint("qwen2") / name).read_bytes()
    assert sorted(path.name for path in (directory / "rank_0").iterdir()) == ["model.json", "model.pdiparams"]
    assert is_exported(directory)
    graph = load(directory)[0]
    assert list(graph.inputs) == [*model.graph().inputs, *(cache.name for cache in model.graph().caches)]
    assert list(graph.outputs) == list(model.graph().outputs)
    for cache in model.graph().caches:
        assert (cache.shape, cache.dtype) == (graph.inputs[cache.name].shape, graph.inputs[cache.name].dtype)
        assert cache.block_size == 16


def test_the_length_defaults_to_what_the_model_was_made_for(exported):
    assert Manifest.read(exported("llama")).max_seq_len == 1024


def test_a_sliding_window_is_a_cache_group_where_prompts_can_be_longer(a_checkpoint, tmp_path, no_paddle):
    change_config(use_sliding_window=True, max_window_layers=1)(a_checkpoint)
    export(a_checkpoint, tmp_path / "out", ExportOptions())
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.max_seq_len == 1024
    assert manifest.graph().cache_groups == (CacheGroup(), CacheGroup("sliding_window", 128))
    export(a_checkpoint, tmp_path / "less", ExportOptions(max_seq_len=128))
    assert Manifest.read(tmp_path / "less").graph().cache_groups == (CacheGroup(),)


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_chat_template_file_goes_along(name, a_checkpoint, tmp_path, no_paddle):
    (a_checkpoint / name).write_text("{{ messages }}")
    export(a_checkpoint, tmp_path / "out", ExportOptions())
    assert (tmp_path / "out" / name).read_text() == "{{ messages }}"


@pytest.mark.parametrize(
    ("stored", "asked", "made"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_every_stored_dtype_becomes_what_was_asked_for(stored, asked, made, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen2", seed=0, torch_dtype=stored)
    export(checkpoint, tmp_path / "out", ExportOptions(dtype=asked))
    graph, params = load(tmp_path / "out")
    assert Manifest.read(tmp_path / "out").weight_format == made
    [cache, _] = Manifest.read(tmp_path / "out").graph().caches
    assert graph.parameters["embed_tokens.weight"].dtype == cache.dtype == graph.inputs[cache.name].dtype == made
    tolerance = 0 if stored == made == "float32" else 2**-7
    for ours, theirs in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
    ):
        np.testing.assert_allclose(as_f32(params[ours]), tensors_of("qwen2")[theirs], rtol=tolerance, atol=1e-6)


def test_rounding_to_bfloat16_is_to_nearest_even_and_keeps_odd_values(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen2", seed=0)
    tensors = tensors_of("qwen2")
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFFFFFFFF, 0x80000000], np.uint32)
    tensors["model.embed_tokens.weight"][0, :6] = bits.view(np.float32)
    write_tensors(checkpoint / "model.safetensors", tensors)
    export(checkpoint, tmp_path / "out", ExportOptions(dtype="bfloat16"))
    made = load(tmp_path / "out")[1]["embed_tokens.weight"][0, :6]
    assert made[[0, 1, 2, 3, 5]].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x8000]
    assert np.isnan(from_bf16(made[4:5]))


def test_names_without_the_prefix_of_the_model_export_like_those_with_it(a_checkpoint, tmp_path):
    """Embedding models are stored as the decoder alone, whose names begin with `layers`."""
    export(a_checkpoint, tmp_path / "with", ExportOptions())
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors_of("qwen2").items()}
    write_tensors(a_checkpoint / "model.safetensors", tensors)
    export(a_checkpoint, tmp_path / "without", ExportOptions())
    found, wanted = ((tmp_path / name / "rank_0/model.pdiparams").read_bytes() for name in ("without", "with"))
    assert found == wanted


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_weights_in_another_format_are_refused_with_the_way_to_convert_them(name, a_checkpoint, tmp_path):
    (a_checkpoint / "model.safetensors").rename(a_checkpoint / name)
    message = rf"only {name}.*convert it.*from_pretrained\('{a_checkpoint}'.*save_pretrained\('{a_checkpoint}'\)"
    with pytest.raises(ModelError, match=message):
        export(a_checkpoint, tmp_path / "out", ExportOptions())


def test_shards_export_like_one_file(a_checkpoint, tmp_path):
    export(a_checkpoint, tmp_path / "one", ExportOptions())
    (a_checkpoint / "model.safetensors").unlink()
    write_shards(a_checkpoint, tensors_of("qwen2"), num_shards=3)
    export(a_checkpoint, tmp_path / "three", ExportOptions())
    one, three = ((tmp_path / name / "rank_0/model.pdiparams").read_bytes() for name in ("one", "three"))
    assert one == three


def change_config(**keys):
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def change_tensors(change):
    def rewrite(directory: Path) -> None:
        tensors = tensors_of("qwen2")
        change(tensors)
        write_tensors(directory / "model.safetensors", tensors)

    return rewrite


def cut_weights(keep: int):
    def cut(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])

    return cut


def replace_in_weights(old: bytes, new: bytes):
    def replace(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(old, new, 1))

    return replace


def write_index(weight_map: Any):
    return lambda d: (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def lose_a_shard(directory: Path) -> None:
    write_shards(directory, tensors_of("qwen2"), num_shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), r"config\.json is missing"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), r"config\.json holds a JSON list, an object was expected"),
        (change_config(model_type="gpt2"), "model_type is 'gpt2'"),
        (change_tensors(lambda t: t.pop(K_PROJ)), f"tensor {K_PROJ} is missing"),
        (
            change_tensors(lambda t: t.update({K_PROJ: t[K_PROJ][:-1]})),
            rf"tensor {K_PROJ} has shape \(31, 64\), config.json asks for \(32, 64\)",
        ),
        (
            change_tensors(lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": t["model.norm.weight"]})),
            "has tensor model.layers.0.self_attn.o_proj.bias, for which this model type has no place",
        ),
        (lambda d: (d / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (lose_a_shard, r"model-00002-of-00002\.safetensors is missing"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "weight_map is missing or empty"),
        *(
            (
                write_index(weight_map),
                f"index.json: weight_map is {re.escape(repr(weight_map))}, it must be an object of",
            )
            for weight_map in ([], {"a": 3}, {"a": "../model.safetensors"}, {"a": "/model.safetensors"})
        ),
        (cut_weights(0), r"model\.safetensors \(0 bytes\) is cut off or no safetensors file: .*header too small"),
        (cut_weights(4), r"\(4 bytes\) is cut off or no safetensors file: .*header too small"),
        (cut_weights(100), r"\(100 bytes\) is cut off or no safetensors file: .*invalid header length"),
        (cut_weights(-1), "is cut off or no safetensors file: .*file not fully covered"),
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            r"model\.safetensors is a pointer of Git LFS; `git lfs pull` fetches the file itself",
        ),
        (replace_in_weights(b'{"model', b"{!model"), "is cut off or no safetensors file: .*invalid JSON in header"),
        (replace_in_weights(b'"dtype"', b'"dtipe"'), "is cut off or no safetensors file: .*missing field `dtype`"),
        (replace_in_weights(b'"F32"', b'"I32"'), "has dtype I32, supported are F32, F16, BF16"),
        (replace_in_weights(b'"F32"', b'"F16"'), "is cut off or no safetensors file: .*offset for tensor"),
    ],
)
def test_a_wrong_checkpoint_is_refused_with_the_reason_and_nothing_is_left(damage, message, a_checkpoint, tmp_path):
    damage(a_checkpoint)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ModelError, match=message):
        export(a_checkpoint, tmp_path / "out", ExportOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_of_weights_may_have_null_as_its_metadata(tmp_path):
    header = json.dumps({"__metadata__": None, "a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}})
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\x38")
    assert fp8_bytes(tmp_path / "a")["a"][:] == [0x38]


def test_a_checkpoint_with_a_harmless_extra_tensor_is_fine(a_checkpoint, tmp_path):
    tensors = tensors_of("qwen2")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied, and stored all the same
    write_tensors(a_checkpoint / "model.safetensors", tensors)
    export(a_checkpoint, tmp_path / "out", ExportOptions())
    assert is_exported(tmp_path / "out")
    assert "lm_head.weight" not in load(tmp_path / "out")[1]


def test_an_output_table_that_is_not_the_embeddings_is_used_though_config_json_ties_them(a_checkpoint, tmp_path):
    tensors = tensors_of("qwen2")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    write_tensors(a_checkpoint / "model.safetensors", tensors)
    steps: list[str] = []
    export(a_checkpoint, tmp_path / "out", ExportOptions(), steps.append)
    np.testing.assert_array_equal(load(tmp_path / "out")[1]["lm_head.weight"], tensors["lm_head.weight"])
    assert any("tie_word_embeddings is true, but lm_head.weight" in step for step in steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4', supported are auto, float32, bfloat16"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_ranks": 0}, "num_ranks is 0, it must be a positive number of ranks"),
        ({"num_ranks": 3}, r"num_ranks \(MP_NUM\) is 3, it must divide num_attention_heads, which is 4"),
        ({"max_seq_len": 2000}, "max_seq_len is 2000, the model was made for 1 to 1024"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message, a_checkpoint, tmp_path):
    with pytest.raises(ModelError, match=message):
        export(a_checkpoint, tmp_path / "out", ExportOptions(**options))


def test_a_folder_in_use_is_not_overwritten(a_checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(FileExistsError, match="exists and is not an empty folder"):
        export(a_checkpoint, tmp_path / "out", ExportOptions())


def test_an_empty_folder_is_filled(a_checkpoint, tmp_path, no_paddle):
    (tmp_path / "out").mkdir()
    export(a_checkpoint, tmp_path / "out", ExportOptions())
    assert is_exported(tmp_path / "out")


def test_a_missing_tokenizer_is_mentioned(a_checkpoint, tmp_path, no_paddle):
    (a_checkpoint / "tokenizer.json").unlink()
    steps: list[str] = []
    export(a_checkpoint, tmp_path / "out", ExportOptions(), steps.append)
    assert f"{a_checkpoint} has no tokenizer.json: the graph can be run, but not served" in steps


def test_an_export_that_fails_late_leaves_nothing(a_checkpoint, tmp_path, monkeypatch):
    def full_disk(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("engine.exporting.export.shutil.copyfile", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export(a_checkpoint, tmp_path / "out", ExportOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.slow
def test_an_export_never_has_all_weights_in_memory(a_checkpoint, tmp_path):
    """It has the weights of one of the 24 layers at a time, besides the tables."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 24}
    checkpoint = make_checkpoint(tmp_path / "deep", "qwen2", **sizes)
    export(a_checkpoint, tmp_path / "first", ExportOptions())  # what Paddle itself needs is in memory from here on
    used: list[int] = []
    export(checkpoint, tmp_path / "out", ExportOptions(), lambda step: used.append(anonymous_bytes()))
    assert (tmp_path / "out/rank_0/model.pdiparams").stat().st_size > 60 * 2**20
    assert max(used) - used[0] < 20 * 2**20


def anonymous_bytes() -> int:
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def test_the_command_line_shows_its_steps_with_times(a_checkpoint, tmp_path, no_paddle, capsys):
    assert main([str(a_checkpoint), str(tmp_path / "out"), "--max-seq-len", "100", "--block-size", "8"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"[   0.0 s] read {a_checkpoint}"
    assert printed[-1].endswith(f"{tmp_path / 'out'} is ready")
    assert Manifest.read(tmp_path / "out").max_seq_len == 100


def test_the_command_line_gives_the_reason_of_a_failure(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"export failed: {tmp_path / 'config.json'} is missing\n"


@pytest.mark.parametrize("options", [{}, {"quant_type": "weight_only_int4", "int8_cache": True}])
def test_a_dummy_export_is_the_same_graph_without_weights(exported, tmp_path, options):
    """Made from config.json alone."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen2")
    (checkpoint / "model.safetensors").unlink()
    export(checkpoint, tmp_path / "dummy", ExportOptions("float32", load_format="dummy", **options))
    model, whole = Manifest.read(tmp_path / "dummy"), Manifest.read(exported("qwen2", **options))
    assert replace(model.graph(), parameters="model.pdiparams") == whole.graph()
    assert is_exported(tmp_path / "dummy")
    [path] = (tmp_path / "dummy/rank_0").iterdir()
    found, expected = (
        read_graph(each, whole.graph().outputs) for each in (path, exported("qwen2", **options) / "rank_0/model.json")
    )
    assert found == expected
    params, stored = load(tmp_path / "dummy")[1], load(exported("qwen2", **options))[1]
    assert {name: (each.dtype, each.shape) for name, each in params.items()} == {
        name: (each.dtype, each.shape) for name, each in stored.items()
    }
