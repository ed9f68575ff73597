"""Checkpoints that others have quantized are exported with their own numbers, or refused in a sentence."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.dtypes import from_bf16, from_fp8, to_bf16
from engine.executors.cpu.program import CpuProgram, allocated
from engine.exporting.export import ExportOptions, export, plan_of
from engine.exporting.export_options import options_of
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.formats import FORMATS
from engine.models.quantization import read_quantization, unused_settings
from engine.models.quantized_tensors import unpack
from engine.ops import cpu
from engine.settings.config import Config
from tests.paged_model import PagedModel
from tests.pure.models.test_quantized_models import error_of
from tests.quantized_checkpoints import (
    BY_TOKEN,
    FP8_KINDS,
    GPTQ,
    GROUP,
    KINDS,
    change_quantization,
    change_tensors,
    compressed,
    floats,
    gptq8,
    make_fp8,
    make_quantized,
    numbers_of,
    pack,
    values_of,
    w4a16,
)

pytestmark = pytest.mark.slow

PROMPT = list(range(5, 70))
MATRICES = [f"layers.{layer}.{name}_proj.weight" for layer in (0, 1) for name in ("qkv", "o", "gate_up", "down")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "num_ranks", "family"),
    [*((kind, num_ranks, "qwen2") for kind in KINDS for num_ranks in (1, 2)), ("gptq with zeros", 2, "ernie4_5")],
)
def test_every_rank_has_the_numbers_of_the_checkpoint_and_one_computes_with_them(kind, num_ranks, family, tmp_path):
    for name, checkpoint in zip(("quantized", "plain"), make_quantized(tmp_path, kind, family), strict=True):
        export(checkpoint, tmp_path / f"{name} graph", ExportOptions("float32", num_ranks=num_ranks))
    if num_ranks == 1:
        graphs = [PagedModel.of(tmp_path / f"{name} graph", cpu) for name in ("quantized", "plain")]
        assert error_of(*[graph.prefill(PROMPT, chunk=1000, num_logits=40) for graph in graphs]) < 0.04
    assert Manifest.read(tmp_path / "quantized graph").weight_format == KINDS[kind][2]
    for rank in range(num_ranks):
        found, wanted = (load(tmp_path / f"{name} graph", rank)[1] for name in ("quantized", "plain"))
        for name in MATRICES:
            numbers = numbers_of(found, name)[:, : wanted[name].shape[1]]
            np.testing.assert_allclose(numbers, wanted[name], rtol=2**-7, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(("quant_type", "most"), [("none", 0), ("weight_only_int4", 0.02)])
def test_a_layer_that_the_checkpoint_leaves_out_is_quantized_only_if_quant_type_says_so(quant_type, most, tmp_path):
    quantized, plain = make_quantized(tmp_path, "awq")
    layer = "model.layers.0.self_attn.k_proj."
    wanted = load_file(plain / "model.safetensors")[f"{layer}weight"]

    def leave_out(tensors):
        for end in ("qweight", "qzeros", "scales"):
            del tensors[layer + end]
        tensors[f"{layer}weight"] = wanted

    change_tensors(quantized, leave_out)
    export(quantized, tmp_path / "out", ExportOptions("float32", quant_type))
    found = numbers_of(load(tmp_path / "out")[1], "layers.0.qkv_proj.weight")[256:384]
    error = np.square(found - wanted).mean() / np.square(wanted).mean()
    assert error == 0 if most == 0 else 0 < error < most


def test_groups_in_another_order_are_requantized_to_8_bits(tmp_path):
    quantized, plain = make_quantized(tmp_path, "gptq with zeros")
    order = np.random.default_rng(0).permutation(3 * GROUP)

    def shuffle(tensors):
        """Move the inputs of one kind of layer, and with them the groups that they belong to."""
        for layer in ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"):
            if f"{layer}.weight" in tensors:
                tensors[f"{layer}.weight"] = np.ascontiguousarray(tensors[f"{layer}.weight"][:, order])
            else:
                codes = unpack(tensors[f"{layer}.qweight"], axis=0)[order]
                tensors |= {f"{layer}.qweight": pack(codes, 0), f"{layer}.g_idx": tensors[f"{layer}.g_idx"][order]}

    for checkpoint in (quantized, plain):
        change_tensors(checkpoint, shuffle)
    messages = []
    export(quantized, tmp_path / "out", ExportOptions("float32"), messages.append)
    export(plain, tmp_path / "wanted", ExportOptions("float32"))
    assert "2 matrices: gptq with desc_act, requantized as weight_only_int8" in messages
    found, wanted = (load(tmp_path / name)[1] for name in ("out", "wanted"))
    for name in MATRICES:
        codes, exact = found[name], wanted[name]
        assert codes.dtype == (np.int8 if "down" in name else np.uint8)
        step = np.abs(exact).max(axis=1, keepdims=True) / 127 if "down" in name else 2**-6 * np.abs(exact)
        assert (np.abs(numbers_of(found, name)[:, : exact.shape[1]] - exact) <= 0.51 * step + 1e-7).all(), name


def test_gptq_of_8_bits_in_groups_gets_one_scale_per_row(tmp_path):
    config, rng = {**GPTQ, "bits": 8, "sym": False}, np.random.default_rng(0)
    codes, zero = rng.integers(-127, 128, (32, 256), np.int8), rng.integers(-9, 9, (32, 2), np.int8)
    scale = rng.uniform(0.01, 0.02, (32, 2)).astype(np.float16).astype(np.float32)
    [quantization] = read_quantization({"quantization_config": config})
    read = quantization.read(gptq8(codes, scale, zero))
    np.testing.assert_array_equal(read.values(), values_of(codes, scale, zero))
    assert quantization.format == "weight_only_int8" and quantization.inexact == "gptq of 8 bits in groups"
    stored, step = FORMATS["weight_only_int8"].store_codes(read)
    assert (np.abs(stored * step[:, None] - read.values()) <= 0.51 * step[:, None]).all()


def test_options_of_single_layers_replace_those_of_a_gptq_checkpoint(tmp_path):
    quantized, plain = make_quantized(tmp_path, "gptq of 32")
    wide, left_out = "model.layers.1.mlp.down_proj.", "model.layers.0.self_attn.o_proj."
    numbers = load_file(plain / "model.safetensors")
    rng, shape = np.random.default_rng(0), numbers[f"{wide}weight"].shape
    codes, zero = rng.integers(-127, 128, shape, np.int8), np.zeros((shape[0], 1), np.uint8)
    scale = rng.uniform(0.001, 0.002, zero.shape).astype(np.float16).astype(np.float32)

    def store(tensors):
        tensors |= {f"{wide}{end}": array for end, array in gptq8(codes, scale, zero).items()}
        for end in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[left_out + end]
        tensors[f"{left_out}weight"] = numbers[f"{left_out}weight"]

    change_tensors(quantized, store)
    of_layers = {r"-:.*\.0\.self_attn": {}, r"+:.*\.1\.mlp\.down": {"bits": 8, "group_size": -1}}
    change_quantization(quantized, lambda config: config.update(dynamic=of_layers))
    export(quantized, tmp_path / "out", ExportOptions("float32"))
    found = load(tmp_path / "out")[1]
    np.testing.assert_array_equal(found["layers.1.down_proj.weight"], codes)
    gate_up = [numbers[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_allclose(numbers_of(found, "layers.1.gate_up_proj.weight"), np.concatenate(gate_up), rtol=2**-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_matrices_of_which_an_op_needs_floats_become_floats(dtype, tmp_path):
    """Keys and values of latent attention are made by parts of a matrix that AWQ and GPTQ quantize."""
    sizes = {"kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 32, "moe_intermediate_size": 64}
    quantized, plain = make_quantized(tmp_path, "awq of 32", "deepseek_v3", **sizes)
    for name, checkpoint in (("found", quantized), ("wanted", plain)):
        export(checkpoint, tmp_path / name, ExportOptions(dtype))
    found, wanted = (load(tmp_path / name)[1] for name in ("found", "wanted"))
    for name in ("layers.0.key_weight", "layers.2.value_weight"):
        np.testing.assert_array_equal(found[name], wanted[name])


@pytest.mark.parametrize("value", [0, 1])
def test_biases_that_gptq_adds_where_a_model_has_none_are_left_out_if_they_are_zeros(value, tmp_path):
    quantized, _ = make_quantized(tmp_path, "gptq")
    bias = np.full(256, value, np.float16)
    change_tensors(quantized, lambda tensors: tensors.update({"model.layers.1.mlp.down_proj.bias": bias}))
    if not value:
        assert plan_of(quantized, ExportOptions("float32"), print).checkpoint
        return
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.bias, for which this model type"):
        plan_of(quantized, ExportOptions("float32"), print)


@pytest.mark.parametrize("says", [{}, {"sym": True}])
def test_zero_points_of_gptq_count_whatever_its_config_says_of_symmetry(says, tmp_path):
    quantized, plain = make_quantized(tmp_path, "gptq with zeros")
    change_quantization(quantized, lambda config: (config.pop("sym"), config.update(says)))
    for name, checkpoint in (("found", quantized), ("wanted", plain)):
        export(checkpoint, tmp_path / name, ExportOptions("float32"))
    found, wanted = (load(tmp_path / name)[1] for name in ("found", "wanted"))
    for name in MATRICES:
        numbers = numbers_of(found, name)[:, : wanted[name].shape[1]]
        np.testing.assert_allclose(numbers, wanted[name], rtol=2**-7, atol=1e-7, err_msg=name)


def test_symmetric_gptq_is_exported_without_zero_points(tmp_path):
    quantized, _ = make_quantized(tmp_path, "gptq")
    change_quantization(quantized, lambda config: config.pop("sym"))
    export(quantized, tmp_path / "out", ExportOptions("float32"))
    assert "layers.0.qkv_proj.weight_zero" not in load(tmp_path / "out")[1]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gptq", {"checkpoint_format": "gptq_v2"}, "all of its zero points are 7 when read as checkpoint_format 'gptq"),
        ("gptq", {"group_size": 64}, r"down_proj.qweight: has scales for \(256, 3\).*config.json asks for \(256, 6\)"),
        ("awq", {"group_size": 64}, r"down_proj.qweight: has scales for \(256, 3\).*config.json asks for \(256, 6\)"),
        ("w4a16", {"symmetric": False}, "it has no weight_zero_point, but .* symmetric of its weights is False"),
        ("w4a16", {"group_size": 64}, r"has scales for \(256, 3\), config.json asks for \(256, 6\)"),
        (
            "w4a16 with zeros",
            {"symmetric": True},
            "it has a weight_zero_point, but .* is True",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(kind, change, message, tmp_path):
    quantized, _ = make_quantized(tmp_path, kind)
    change_quantization(quantized, lambda config: config.update(change))
    with pytest.raises(ModelError, match=message):
        export(quantized, tmp_path / "out", ExportOptions())


def test_groups_of_compressed_tensors_in_another_order_are_read_by_their_g_idx():
    rng = np.random.default_rng(0)
    codes, zero = rng.integers(0, 16, (8, 384), np.uint8), np.full((8, 3), 8, np.uint8)
    scale, g_idx = (
        rng.uniform(0.1, 0.2, (8, 3)).astype(np.float32),
        rng.permutation(np.arange(384, dtype=np.int32) // 128),
    )
    [quantization] = read_quantization({"quantization_config": compressed(4, "pack-quantized")})
    read = quantization.read(w4a16(codes, scale, zero) | {"weight_g_idx": g_idx})
    np.testing.assert_array_equal(read.values(), (codes - np.float32(8)) * scale[:, g_idx])
    part = read.part(slice(2, 5), slice(70, 90))
    np.testing.assert_array_equal(part.values(), read.values()[2:5, 70:90])


def test_one_scale_of_a_matrix_is_that_of_all_rows():
    config = compressed(8, "int-quantized", inputs=BY_TOKEN | {"dynamic": False, "strategy": "tensor"})
    config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    [quantization] = read_quantization({"quantization_config": config})
    assert unused_settings({"quantization_config": config}) == [
        "config.json: quantization_config: static scales of activations are not used"
    ]
    codes = np.random.default_rng(0).integers(-127, 128, (6, 64), np.int8)
    stored = quantization.read({"weight": codes, "weight_scale": np.array(0.25, np.float32)})
    np.testing.assert_array_equal(stored.values(), codes * np.float32(0.25))
    assert all(map(np.array_equal, FORMATS["a8w8"].store_codes(stored), (codes, np.full(6, 0.25, np.float32))))


def test_groups_of_layers_keep_formats_of_their_own(tmp_path):
    quantized, plain = make_quantized(tmp_path, "w4a16")
    attention, rng = r"re:.*self_attn\..*", np.random.default_rng(0)
    wanted = load_file(plain / "model.safetensors")

    def add_group(tensors):
        for name in [name for name in wanted if "self_attn" in name and name.endswith("_proj.weight")]:
            layer, codes = name.removesuffix("weight"), rng.integers(-127, 128, wanted[name].shape, np.int8)
            for end in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[layer + end]
            tensors |= {name: codes, f"{layer}weight_scale": np.full((len(codes), 1), 0.002, np.float32)}
            wanted[name] = codes * np.float32(0.002)

    change_tensors(quantized, add_group)
    save_file(wanted, plain / "model.safetensors")
    keys = json.loads((quantized / "config.json").read_text())
    other = compressed(8, "int-quantized", inputs=BY_TOKEN)["config_groups"]["group_0"]
    other |= {"targets": [attention], "format": "int-quantized"}
    keys["quantization_config"]["config_groups"]["group_1"] = other
    (quantized / "config.json").write_text(json.dumps(keys))
    for name, checkpoint in (("found", quantized), ("plain", plain)):
        export(checkpoint, tmp_path / f"{name} graph", ExportOptions("float32"))
    graph, found = load(tmp_path / "found graph")
    numbers = load(tmp_path / "plain graph")[1]
    assert [node.op for node in graph.nodes if node.op in ("linear_a8w8", "linear_int4")] == [
        *("linear_a8w8", "linear_a8w8", "linear_int4", "linear_int4") * 2
    ]
    for name in MATRICES:
        np.testing.assert_allclose(numbers_of(found, name)[:, : numbers[name].shape[1]], numbers[name], 2**-7, 1e-7)


@pytest.mark.parametrize("quant_type", ["none", "a8w8_fp8_wint4"])
def test_a_group_of_8_bit_floats_beside_one_of_4_bit_integers_keeps_its_numbers(quant_type, tmp_path):
    quantized, _ = make_quantized(tmp_path, "w4a16")
    layers = [f"model.layers.{layer}.self_attn.{name}_proj." for layer in (0, 1) for name in "qkvo"]

    def as_floats(tensors):
        for layer in layers:
            shape = [tensors.pop(f"{layer}{end}") for end in ("weight_packed", "weight_scale", "weight_shape")][2]
            numbers = np.random.default_rng(0).integers(0, 127, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
            tensors |= {f"{layer}weight": numbers, f"{layer}weight_scale": np.full((shape[0], 1), 2**-9, np.float32)}

    change_tensors(quantized, as_floats)
    path = quantized / "config.json"
    keys = json.loads(path.read_text())
    group = floats("channel")["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]}
    keys["quantization_config"]["config_groups"]["group_1"] = group | {"format": "float-quantized"}
    path.write_text(json.dumps(keys))
    export(quantized, tmp_path / "out", ExportOptions("float32", quant_type))
    graph, found = load(tmp_path / "out")
    fp8 = "linear_fp8" if quant_type == "none" else "linear_a8w8_fp8"
    of_layer = [fp8, fp8, "linear_int4", "linear_int4"]
    assert [node.op for node in graph.nodes if node.op.startswith("linear")][:8] == of_layer * 2
    assert (found["layers.1.o_proj.weight"] == np.random.default_rng(0).integers(0, 127, (256, 256), np.uint8)).all()
    assert (found["layers.1.o_proj.weight_scale"] == 2**-9).all()


def test_ranks_that_would_cut_a_group_are_refused(tmp_path):
    quantized, _ = make_quantized(tmp_path, "awq")
    with pytest.raises(ModelError, match="columns from 96 on do not begin a group of 64"):
        export(quantized, tmp_path / "out", ExportOptions(num_ranks=4, ranks=(1,)))  # 384 inputs of down_proj


def test_another_quantization_than_the_checkpoint_has_is_refused(tmp_path):
    quantized, _ = make_quantized(tmp_path, "gptq")
    message = "quant_type is 'a8w8', the checkpoint is quantized and exported as weight_only_int4"
    with pytest.raises(ModelError, match=message):
        export(quantized, tmp_path / "out", ExportOptions(quant_type="a8w8"))
    export(quantized, tmp_path / "out", ExportOptions(quant_type="weight_only_int4"))


def test_a_missing_tensor_is_named(tmp_path):
    quantized, _ = make_quantized(tmp_path, "gptq")
    change_tensors(quantized, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"))
    with pytest.raises(ModelError, match="tensor model.layers.1.mlp.up_proj.scales is missing"):
        export(quantized, tmp_path / "out", ExportOptions())


def test_codes_of_another_size_are_refused(tmp_path):
    quantized, _ = make_quantized(tmp_path, "w8a8")
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(quantized, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    with pytest.raises(
        ModelError, match=r"up_proj.weight: has codes for \(383, 256\), config.json asks for \(384, 256\)"
    ):
        export(quantized, tmp_path / "out", ExportOptions())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_floats_of_eight_bits_are_the_numbers_that_they_stand_for(kind, tmp_path):
    """Stored as bfloat16 unless less is asked for: nothing is lost but what that rounds."""
    quantized, plain = make_fp8(tmp_path, kind)
    for options in (ExportOptions("bfloat16", num_ranks=2), ExportOptions("float32", "a8w8")):
        for name, checkpoint in (("found", quantized), ("wanted", plain)):
            export(checkpoint, tmp_path / options.dtype / name, options)
        for rank in range(options.num_ranks):
            found, wanted = (load(tmp_path / options.dtype / name, rank)[1] for name in ("found", "wanted"))
            for name in wanted:
                np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_floats_of_eight_bits_can_stay_what_they_are(kind, tmp_path):
    """The exception is a matrix of which the checkpoint has a part in another format."""
    matrix = "model.layers.0.self_attn.k_proj.weight"

    def leave_out(stored):
        del stored[matrix + FP8_KINDS[kind][1]]
        stored.pop(f"{matrix.removesuffix('.weight')}.input_scale", None)
        stored[matrix] = stored[matrix].astype(np.float32)

    quantized, plain = make_fp8(tmp_path, kind, leave_out)
    export(quantized, tmp_path / "kept", ExportOptions("bfloat16", "weight_only_fp8"))
    export(plain, tmp_path / "wide", ExportOptions("bfloat16"))
    graph, found = load(tmp_path / "kept")
    wanted = load(tmp_path / "wide")[1]
    assert Manifest.read(tmp_path / "kept").weight_format == "weight_only_fp8"
    assert sum(node.op == "linear_fp8" for node in graph.nodes) == 7
    for name in wanted:
        if f"{name}_scale" in found:
            numbers = to_bf16(from_fp8(found[name], found[f"{name}_scale"]))
            np.testing.assert_array_equal(numbers, wanted[name], err_msg=name)
        elif "layers.0.qkv_proj.weight" not in name:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    assert found["layers.0.qkv_proj.weight"].dtype == np.uint16  # bf16


@pytest.mark.parametrize("scale", ["mlp.down_proj.activation_scale", "self_attn.k_proj.output_scale"])
def test_scales_of_activations_and_of_the_cache_are_left_out_by_all_their_names(scale, tmp_path):
    """transformers and the first compressed-tensors have names of their own for them."""

    def add(tensors):
        tensors[f"model.layers.1.{scale}"] = np.ones((), np.float32)

    quantized, _ = make_fp8(tmp_path, "a tensor", add)
    assert plan_of(quantized, ExportOptions("float32"), print).checkpoint


def test_scales_of_8_bit_floats_may_be_stored_as_powers_of_two(tmp_path):
    """A configuration with scale_fmt "ue8m0" may have them in their own dtype."""

    def stored(tensors, as_bytes):
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            exponents = np.random.default_rng(0).integers(117, 122, tensors[name].shape, np.uint8)
            scale = exponents.view(ml_dtypes.float8_e8m0fnu)
            tensors[name] = scale if as_bytes else scale.astype(np.float32)

    graphs = []
    for as_bytes in (True, False):
        folder = tmp_path / str(as_bytes)
        quantized, _ = make_fp8(folder, "a block", lambda tensors, as_bytes=as_bytes: stored(tensors, as_bytes))
        export(quantized, folder / "out", ExportOptions("float32"))
        graphs.append(load(folder / "out")[1])
    for name in MATRICES:
        np.testing.assert_array_equal(graphs[0][name], graphs[1][name])


def test_stacked_matrices_of_8_bit_floats_are_refused_by_their_name(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    stack = {name: np.zeros((2, 8, 8), ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": np.ones((2, 1, 1), np.float32)}
    quantized, _ = make_fp8(tmp_path, "a block", lambda tensors: tensors.update(stack))
    with pytest.raises(
        ModelError, match=rf"tensor {name} of 8-bit floats has shape \(2, 8, 8\), supported are matrices"
    ):
        export(quantized, tmp_path / "out", ExportOptions())


def test_a_quantization_is_also_read_by_the_first_name_of_its_key(tmp_path):
    quantized, _ = make_quantized(tmp_path, "w4a16")
    path = quantized / "config.json"
    path.write_text(path.read_text().replace('"quantization_config"', '"compression_config"'))
    assert plan_of(quantized, ExportOptions("float32"), print).manifest.weight_format == KINDS["w4a16"][2]


def test_ranks_share_floats_of_eight_bits_with_their_scales(tmp_path):
    quantized, plain = make_fp8(tmp_path, "a row", family="ernie4_5")
    for checkpoint, quant_type in ((quantized, "weight_only_fp8"), (plain, "none")):
        export(checkpoint, tmp_path / quant_type, ExportOptions("bfloat16", quant_type, num_ranks=2))
    for rank in range(2):
        found, wanted = (load(tmp_path / quant_type, rank)[1] for quant_type in ("weight_only_fp8", "none"))
        for name in MATRICES:
            numbers = to_bf16(from_fp8(found[name], found[f"{name}_scale"]))
            np.testing.assert_array_equal(numbers, wanted[name], err_msg=name)


def test_ranks_share_an_mlp_by_whole_blocks_and_refuse_to_cut_one_of_the_attention(tmp_path):
    heads = {"head_dim": 128, "num_attention_heads": 2}
    blocks, _ = make_fp8(tmp_path / "aligned", "a block", family="qwen3", **heads)
    for count in ("1", "2"):
        export(blocks, tmp_path / count, ExportOptions("bfloat16", "block_wise_fp8", num_ranks=int(count)))
    of_ranks = [load(tmp_path / count, rank)[1] for count, rank in (("1", 0), ("2", 0), ("2", 1))]
    name = "layers.1.down_proj.weight"
    whole, *parts = [(params[name], params[f"{name}_scale"]) for params in of_ranks]
    assert [numbers.shape[1] for numbers, _ in parts] == [256, 256]  # of 300 columns
    for array, *shares in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(shares, axis=1)[:, : array.shape[1]], array)
    cut, _ = make_fp8(tmp_path / "cut", "a block")
    with pytest.raises(ModelError, match="columns from 132 on do not begin a block of 128"):
        export(cut, tmp_path / "out", ExportOptions("bfloat16", "weight_only_fp8", num_ranks=2, ranks=(1,)))


def test_a_cpu_computes_with_floats_of_eight_bits_as_with_the_numbers_that_they_stand_for(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    quantized, plain = make_fp8(tmp_path, "a block")
    export(quantized, tmp_path / "kept", ExportOptions("bfloat16", "weight_only_fp8"))
    export(plain, tmp_path / "wide", ExportOptions("bfloat16"))
    logits = []
    for name in ("kept", "wide"):
        program = CpuProgram(*load(tmp_path / name))
        specs = Manifest.read(tmp_path / name).graph().caches
        program.set_caches({spec.name: allocated(spec.shape_of(2), spec.dtype) for spec in specs})
        logits.append(program.run(inputs_of(PROMPT[:40]))["logits"].copy())
    np.testing.assert_array_equal(*logits)
    assert "8 matrices of 8-bit or 4-bit floats become bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "gpu"}, "weight_only_fp8"),
        ({"device": "cpu"}, "none"),
        ({"device": "gpu", "batch_invariant": True}, "none"),
        ({"device": "gpu", "dtype": "bfloat16"}, "none"),
        ({"device": "gpu", "quant_type": "a8w8"}, "a8w8"),
    ],
)
def test_floats_of_eight_bits_stay_so_on_a_gpu_unless_something_else_is_asked_for(
    settings, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr("engine.exporting.export_options.with_device", lambda config: config)
    quantized, plain = make_fp8(tmp_path, "compressed rows")
    config = Config(**settings)
    assert options_of(config, quantized).quant_type == expected
    assert options_of(config, plain).quant_type == config.quant_type


def inputs_of(prompt):
    arrays = {"token_ids": prompt, "positions": range(len(prompt)), "query_starts": [0, len(prompt)]}
    arrays |= {"context_lens": [0], "block_tables": [[0]], "logit_rows": range(len(prompt))}
    return {name: np.array(values, np.int32) for name, values in arrays.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, name: t.pop(f"{name}_scale_inv"), "up_proj.weight has 8-bit floats, but no .*up_proj.weight_scale"),
        (
            lambda t, name: t.update({f"{name}_scale_inv": np.ones((3, 2), np.float32)}),
            r"has scales of shape \(3, 2\), supported are one, one a row and one for 128 x 128",
        ),
    ],
)
def test_floats_of_eight_bits_without_their_scales_are_refused(change, message, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    quantized, _ = make_fp8(tmp_path, "a block", lambda tensors: change(tensors, name))
    with pytest.raises(ModelError, match=message):
        export(quantized, tmp_path / "out", ExportOptions())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method is 'bitsandbytes', supported are compressed-tensors, gptq, awq, fp8, fbgemm_fp8",
        ),
        ({"quant_method": ["fp8"]}, r"quant_method is \['fp8'\], supported are compressed-tensors"),
        ({**GPTQ, "bits": 3}, "bits of gptq is 3, supported is 4, 8"),
        ({**GPTQ, "group_size": 48}, "the group size is 48, supported are multiples of 32"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format of gptq is 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "version of awq is 'gemv_fast'"),
        (floats("group"), "strategy of compressed-tensors weights of floats is 'group', supported is 'tensor'"),
        (floats("tensor", num_bits=4), "weights of 4-bit floats is 'float-quantized', supported is 'nvfp4-pack"),
        (floats("tensor", num_bits=6), "num_bits of compressed-tensors weights of floats is 6, supported is 8"),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            r"weight_block_size of fp8 is \[64, 64\], supported is",
        ),
        (compressed(8, "int-quantized", symmetric=False), "symmetric of .* is False, supported is True"),
        (compressed(4, "pack-quantized", inputs=BY_TOKEN), "weights of 4 bits by 'group' with inputs"),
        (compressed(4, "marlin-24"), "format of compressed-tensors is 'marlin-24', supported is 'pack-quantized'"),
        (
            compressed(8, "int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format of sparsity_config is 'sparse-24-bitmask', supported is 'dense'",
        ),
    ],
)
def test_unsupported_configurations_are_refused_in_a_sentence(config, message):
    with pytest.raises(ModelError, match=message):
        read_quantization({"quantization_config": config})


def test_zeros_that_are_stored_like_other_numbers_need_no_format_of_their_own():
    config = compressed(8, "int-quantized") | {"sparsity_config": {"format": "dense", "global_sparsity": 0.14}}
    assert [each.format for each in read_quantization({"quantization_config": config})] == ["weight_only_int8"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_numbers_come_out_of_words_as_they_went_in(axis, bits):
    numbers = np.random.default_rng(0).integers(0, 1 << bits, (16, 24), np.uint8)
    assert np.array_equal(unpack(pack(numbers, axis, bits), axis, bits), numbers)


def test_scales_are_rounded_to_bf16():
    """The additional bits of float16 are smaller than the error of a 4-bit code."""
    scale = np.float32(np.float16(0.01234))
    assert abs(from_bf16(to_bf16(scale[None]))[0] - scale) < scale * 2**-8
