"""GGUF files are exported with the numbers, positions and tokens of the checkpoints that they were made from."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import TokenizerError
from engine.exporting.export import ExportOptions, export
from engine.exporting.gguf_folder import as_checkpoint
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.gguf import Gguf, GgufCodes
from engine.models.gguf_blocks import BLOCK_FORMATS
from engine.models.gguf_model import read_gguf
from engine.text.gguf_tokenizer import write_tokenizer
from engine.text.tokenizer import Tokenizer
from tests import checkpoints, family_checkpoints
from tests.gguf_files import as_gguf, tokenizer_metadata, write_gguf
from tests.golden_arrays import golden
from tests.quantized_checkpoints import numbers_of

GOLDEN = golden("gguf")
QUANTIZED = [kind for kind in BLOCK_FORMATS.values() if kind.decode]
GEMMA = {"query_pre_attn_scalar": 32}
MODELS = {
    "llama": ("llama", checkpoints.make_checkpoint, {}),
    "qwen2": ("qwen2", checkpoints.make_checkpoint, {}),
    "qwen3": ("qwen3", checkpoints.make_checkpoint, {}),
    "gemma2": ("gemma2", family_checkpoints.make_checkpoint, GEMMA),
    "qwen3_moe": (
        "qwen3moe",
        family_checkpoints.make_checkpoint,
        {"mlp_only_layers": [], "tie_word_embeddings": False},
    ),
    "gemma3_text": ("gemma3", family_checkpoints.make_checkpoint, GEMMA | {"sliding_window_pattern": 6}),
}


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_blocks_have_the_values_that_the_gguf_package_reads(kind):
    raw, wanted = GOLDEN[kind.name], GOLDEN[f"{kind.name}_values"]
    tensor = GgufCodes("name", kind, raw, wanted.shape)
    np.testing.assert_array_equal(tensor[:], wanted)
    np.testing.assert_allclose(tensor.codes().values(), wanted, atol=1e-6 * np.abs(wanted).max())
    np.testing.assert_array_equal(tensor[1:4, 3:30], wanted[1:4, 3:30])


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_file_of_floats_is_the_checkpoint_that_it_was_made_from(family, tmp_path):
    arch, make, overrides = MODELS[family]
    plain = make(tmp_path / "plain", family, **overrides)
    folder = as_checkpoint(as_gguf(plain, arch), tmp_path / "cache")
    assert as_checkpoint(tmp_path / "gguf", tmp_path / "cache") == folder
    for name, directory in (("found", folder), ("wanted", plain)):
        export(directory, tmp_path / name, ExportOptions())
    (graph, found), (expected, wanted) = (load(tmp_path / name) for name in ("found", "wanted"))
    assert [node.op for node in graph.nodes] == [node.op for node in expected.nodes]
    routes = [[node.attributes for node in each.nodes if node.op == "moe_route"] for each in (graph, expected)]
    assert routes[0] == routes[1] and found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=2e-7 * ("norm" in name), err_msg=name)
    ours, theirs = (Tokenizer.load(tmp_path / name) for name in ("found", "wanted"))
    text = "the server <|im_start|>reads 12 naïve\n  answers"
    assert ours.encode(text) == theirs.encode(text) and set(ours.eos_token_ids) == set(theirs.eos_token_ids)
    message = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(message) == theirs.render_chat(message)


def random_blocks(kind, shape, seed):
    """Return blocks of the golden file, with smaller scales, and their values."""
    rng, number = np.random.default_rng(seed), shape[0] * shape[1] // kind.size
    raw = rng.integers(0, 256, (number, kind.num_bytes), np.uint8)
    for start in {"Q6_K": (208,)}.get(kind.name, (0, 2) if kind.name in ("Q4_1", "Q4_K", "Q5_K") else (0,)):
        raw[:, start : start + 2] = rng.uniform(1e-4, 3e-4, (number, 1)).astype(np.float16).view(np.uint8)
    raw = raw.reshape(shape[0], -1)
    return raw, GgufCodes("", kind, raw, shape)[:]


@pytest.mark.slow
def test_quantized_matrices_keep_their_codes_or_are_requantized_and_reported(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    plain, kinds = checkpoints.make_checkpoint(tmp_path / "plain", "qwen3", **sizes), {k.name: k for k in QUANTIZED}
    chosen = {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K", "o_proj": "Q4_0", "down_proj": "Q8_0"}
    numbers, quantized = load_file(plain / "model.safetensors"), {}
    for seed, name in enumerate(name for name in sorted(numbers) if "_proj" in name or "embed" in name):
        kind = kinds[chosen.get(name.split(".")[-2], "Q4_K")]
        raw, numbers[name] = random_blocks(kind, numbers[name].shape, seed)
        quantized[name] = (kind.name, raw)
    save_file(numbers, plain / "model.safetensors")
    folder, messages = as_checkpoint(as_gguf(plain, "qwen3", quantized), tmp_path / "cache"), []
    export(folder, tmp_path / "found", ExportOptions("float32"), messages.append)
    export(plain, tmp_path / "wanted", ExportOptions("float32"))
    found, wanted = (load(tmp_path / name)[1] for name in ("found", "wanted"))
    np.testing.assert_array_equal(found["embed_tokens.weight"], wanted["embed_tokens.weight"])
    for name in ("o_proj", "gate_up_proj", "qkv_proj", "down_proj"):
        codes, exact = found[f"layers.1.{name}.weight"], wanted[f"layers.1.{name}.weight"]
        assert codes.dtype == (np.uint8 if name in ("o_proj", "gate_up_proj") else np.int8)
        largest = np.abs(exact).max(axis=1, keepdims=True)
        tolerance = largest * (2**-7 if codes.dtype == np.uint8 else 0.51 / 127)
        error = np.abs(numbers_of(found, f"layers.1.{name}.weight")[:, : exact.shape[1]] - exact)
        assert (error <= tolerance).all(), name
    assert "3 matrices: Q8_0, requantized as weight_only_int8" in messages


@pytest.mark.slow
def test_experts_keep_their_codes_and_a_stack_has_one_format(tmp_path):
    """The file mixes types as files of the kind Q4_K_M do."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 12, "mlp_only_layers": []}
    plain = family_checkpoints.make_checkpoint(tmp_path / "plain", "qwen3_moe", **sizes, num_hidden_layers=1)
    numbers, quantized, kinds = load_file(plain / "model.safetensors"), {}, {k.name: k for k in QUANTIZED}
    for seed, name in enumerate(name for name in sorted(numbers) if ".experts." in name):
        kind = kinds["Q6_K" if "down" in name else "Q4_K"]
        raw, numbers[name] = random_blocks(kind, numbers[name].shape, seed)
        quantized[name] = (kind.name, raw)
    folder = as_checkpoint(as_gguf(plain, "qwen3moe", quantized), tmp_path / "cache")
    export(folder, tmp_path / "found", ExportOptions("float32"))
    found, block = load(tmp_path / "found")[1], "model.layers.0.mlp.experts"
    for parts, stored, step in ((("gate", "up"), np.uint8, 2**-7), (("down",), np.int8, 0.51 / 127)):
        name = f"layers.0.experts.{'_'.join(parts)}_proj.weight"
        wanted = [numbers[f"{block}.{expert}.{part}_proj.weight"] for expert in range(12) for part in parts]
        exact = np.concatenate(wanted)
        tolerance = np.abs(exact).max(axis=1, keepdims=True) * step
        assert found[name].dtype == stored
        assert (np.abs(numbers_of(found, name)[:, :256] - exact) <= tolerance).all()


def test_unsupported_files_are_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0")
    with pytest.raises(ModelError, match=r"a.gguf is cut off or damaged"):
        Gguf.read(tmp_path / "a.gguf")
    other = write_gguf(tmp_path / "b.gguf", {"general.architecture": "mamba"}, {})
    with pytest.raises(ModelError, match="general.architecture is 'mamba', supported are llama"):
        as_checkpoint(other, tmp_path / "cache")
    with pytest.raises(ModelError, match="has several GGUF models: a.gguf, b.gguf"):
        as_checkpoint(tmp_path, tmp_path / "cache")
    plain = checkpoints.make_checkpoint(tmp_path / "plain", "qwen3")
    with pytest.raises(TokenizerError, match="pre='mpt', supported are .*put the model's tokenizer.json beside"):
        write_tokenizer(tokenizer_metadata(plain) | {"tokenizer.ggml.pre": "mpt"}, tmp_path)


def test_a_model_has_as_many_key_heads_as_query_heads_if_its_file_does_not_say(tmp_path):
    """llama.cpp writes no head_count_kv for checkpoints without num_key_value_heads, such as those of Llama 1."""
    path = as_gguf(checkpoints.make_checkpoint(tmp_path / "plain", "llama", num_key_value_heads=4), "llama")
    path.write_bytes(path.read_bytes().replace(b"llama.attention.head_count_kv", b"llama.attention.head_count_xx"))
    assert read_gguf([path])[0]["num_key_value_heads"] == 4


def test_metadata_of_wrong_types_are_refused(tmp_path):
    plain = checkpoints.make_checkpoint(tmp_path / "plain", "qwen3")
    with pytest.raises(TokenizerError, match="tokenizer of the GGUF file cannot be used: .* out of vocabulary"):
        write_tokenizer(tokenizer_metadata(plain) | {"tokenizer.ggml.merges": ["no such"]}, tmp_path)
    path = as_gguf(plain, "qwen3")
    path.write_bytes(path.read_bytes().replace(b"qwen3.attention.head_count", b"qwen3.attention.head_xxxxx"))
    with pytest.raises(ModelError, match="has metadata or tensors that cannot be used: KeyError.'num_attention_heads'"):
        as_checkpoint(path, tmp_path / "cache")
