"""The reader of exported graphs: what it reads equals what was written, and damage is named."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.dtypes import from_bf16, to_bf16
from engine.executors.cpu.program import allocated
from engine.exporting.manifest import Manifest
from engine.graph import GraphError, Value, load
from engine.graph.__main__ import lines, main
from engine.graph.run import run_graph
from engine.paddle_files import release
from tests.checkpoints import COMMON, FAMILIES, SEEDS, random_tensors
from tests.paged_model import make_caches


def tensors_of(family: str) -> dict[str, np.ndarray]:
    """Return the tensors with the heads of queries and keys in the order of the graph, which rotates elements half a
    head apart.
    """
    keys = {**COMMON, **FAMILIES[family]}
    tensors = dict(random_tensors(keys, SEEDS[family]))
    for name, tensor in tensors.items():
        if family == "ernie4_5" and ("q_proj" in name or "k_proj" in name):
            heads = np.split(tensor, len(tensor) // keys["head_dim"])
            tensors[name] = np.concatenate([head[start::2] for head in heads for start in (0, 1)])
    return tensors


@pytest.fixture
def a_copy(exported, tmp_path):
    """Return an exported model that a test may damage."""
    return shutil.copytree(exported("qwen2"), tmp_path / "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_read_back_equal_the_checkpoint(family, exported):
    _, params = load(exported(family))
    tensors = tensors_of(family)
    last = COMMON["num_hidden_layers"] - 1
    np.testing.assert_array_equal(params["embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["norm.weight"], tensors["model.norm.weight"])
    for stacked, module, parts in (("qkv_proj", "self_attn", "qkv"), ("gate_up_proj", "mlp", ("gate", "up"))):
        weights = [tensors[f"model.layers.{last}.{module}.{part}_proj.weight"] for part in parts]
        np.testing.assert_array_equal(params[f"layers.{last}.{stacked}.weight"], np.concatenate(weights))
    if FAMILIES[family].get("use_bias"):
        biases = [tensors[f"model.layers.{last}.self_attn.{part}_proj.bias"] for part in "qkv"]
        np.testing.assert_array_equal(params[f"layers.{last}.qkv_proj.bias"], np.concatenate(biases))


def test_bfloat16_is_rounded_to_nearest_and_vectors_stay_float32(exported):
    _, params = load(exported("llama3", dtype="bfloat16"))
    tensors = tensors_of("llama3")
    np.testing.assert_array_equal(params["lm_head.weight"], to_bf16(tensors["lm_head.weight"]))
    np.testing.assert_array_equal(params["layers.0.o_proj.bias"], tensors["model.layers.0.self_attn.o_proj.bias"])
    assert np.abs(from_bf16(params["lm_head.weight"]) - tensors["lm_head.weight"]).max() < 0.01


def test_the_graph_says_what_the_catalogue_says(exported):
    graph, params = load(exported("qwen3"))
    assert list(graph.inputs)[:6] == [
        "token_ids",
        "positions",
        "query_starts",
        "context_lens",
        "block_tables",
        "logit_rows",
    ]
    assert list(graph.inputs)[6:] == ["kv_cache_0", "kv_cache_1", "kv_cache_2"]
    assert graph.inputs["kv_cache_1"].shape == (-1, 2, 2, 64, 32)
    assert set(params) == set(graph.parameters)
    assert {name: (value.dtype, value.shape) for name, value in graph.outputs.items()} == {
        "logits": ("float32", (-1, 320)),
        "hidden": ("float32", (-1, 64)),
    }
    attention = next(node for node in graph.nodes if node.op == "paged_attention")
    assert attention.attributes == {
        "num_heads": 4,
        "num_kv_heads": 2,
        "scale": pytest.approx(32**-0.5),
        "window": 0,
        "softcap": 0.0,
    }
    assert attention.updated == graph.inputs["kv_cache_0"]
    assert [node.op for node in graph.nodes].count("head_norm") == 3


def test_the_cache_has_the_dtype_of_the_weights(exported):
    graph, _ = load(exported("qwen2", dtype="bfloat16"))
    assert graph.inputs["kv_cache_0"].dtype == graph.parameters["layers.0.o_proj.weight"].dtype == "bfloat16"


def test_unused_rows_are_dropped_before_the_last_mlp(exported):
    graph, _ = load(exported("llama"))
    ops = [node.op for node in graph.nodes]
    assert ops.count("gather_rows") == 2
    assert ops.index("gather_rows") == len(ops) - 1 - ops[::-1].index("paged_attention") + 1


def test_a_graph_prints_one_line_a_node(exported, capsys, monkeypatch):
    graph, _ = load(exported("qwen2"))
    printed = list(lines(graph))
    assert len(printed) == len(graph.inputs) + len(graph.nodes) + len(graph.outputs)
    [first_linear, *_] = [line for line in printed if " = linear(" in line]
    assert first_linear.endswith("layers.0.qkv_proj.weight, layers.0.qkv_proj.bias)")
    monkeypatch.setattr(sys, "argv", ["graph", str(exported("qwen2"))])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[:-1] == printed


def test_printing_what_is_not_a_model_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["graph", str(tmp_path)])
    assert main() == 1
    assert "config.json is missing" in capsys.readouterr().err


def test_a_missing_input_is_named(exported):
    graph, params = load(exported("qwen2"))
    with pytest.raises(GraphError, match="needs input block_tables"):
        run_graph(graph, params, make_caches(Manifest.read(exported("qwen2")).graph().caches, 1))


@pytest.mark.parametrize("keep", [0, 1, 1000, -2])
def test_a_cut_off_program_is_named(a_copy, keep):
    path = a_copy / "rank_0/model.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(GraphError, match=r"model\.json is cut off or not JSON"):
        load(a_copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["base_code"].update(magic="x"), "magic is 'x'"),
        (lambda d: d.pop("base_code"), "not a Paddle program"),
        (lambda d: d["program"]["regions"][0]["blocks"].append({}), "not a Paddle program of one block"),
        (lambda d: ops_of(d)[-2].update({"#": "1.relu"}), "'1.relu' is not an op of the catalogue"),
        (lambda d: ops_of(d)[-2].update({"#": "3.llm_linear_"}), "'llm_linear_': in place"),
        (lambda d: ops_of(d)[0]["O"]["TT"]["D"].__setitem__(0, {"#": "0.t_c64"}), "unknown type '0.t_c64'"),
        (lambda d: ops_of(d)[-1]["I"].__setitem__(0, {"%": 999}), "value 999 is used before it is made"),
        (lambda d: ops_of(d)[-1].pop("I"), "cannot be read: KeyError"),
        (lambda d: ops_of(d).pop(), "model.json has 1 outputs, its manifest names logits, hidden"),
    ],
)
def test_an_unknown_program_is_refused_with_the_reason(a_copy, change, message):
    path = a_copy / "rank_0/model.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(GraphError, match=message):
        load(a_copy)


def ops_of(document: dict) -> list[dict]:
    return document["program"]["regions"][0]["blocks"][0]["ops"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:10], "embed_tokens.weight: the file is cut off"),
        (lambda data: data[:30], "embed_tokens.weight: the file is cut off"),
        (lambda data: data[:-1], "norm.weight: the file is cut off"),
        (lambda data: data[:-1000], "cut off"),
        (lambda data: data + b"\0", "the graph's parameters end at"),
        (lambda data: b"\1" + data[1:], "no tensor begins at byte 0"),
        (lambda data: data[:21] + b"\x63" + data[22:], "element type 99 is unknown"),
        (lambda data: data[:20] + b"\x18" + data[21:], "unknown field 3"),
        (lambda data: data[:21] + b"\x02" + data[22:], r"is int32 \[320, 64\], the graph expects float32"),
        (lambda data: data[:22] + b"\xff" * 6 + data[28:], "embed_tokens.weight: the message is cut off"),
    ],
)
def test_damaged_parameters_are_named(a_copy, damage, message):
    path = a_copy / "rank_0/model.pdiparams"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(GraphError, match=message):
        load(a_copy)


def test_a_missing_file_is_named(a_copy):
    (a_copy / "rank_0/model.pdiparams").unlink()
    with pytest.raises(GraphError, match=r"model\.pdiparams is missing"):
        load(a_copy)


def test_a_value_shows_its_type():
    assert str(Value(7, "bfloat16", (-1, 64))) == "%7 bfloat16[?, 64]"


def resident_kb(file: str) -> int:
    """Return how much of the mappings of a file is in the memory of this process."""
    mappings = re.split(r"^[0-9a-f]+-[0-9a-f]+ ", Path("/proc/self/smaps").read_text(), flags=re.M)
    return sum(int(re.search(r"Rss: +(\d+) kB", each)[1]) for each in mappings if each.split("\n")[0].endswith(file))


def test_a_released_parameter_takes_no_memory_until_it_is_read_again_and_other_arrays_are_kept(a_copy):
    params, path = load(a_copy)[1], str(a_copy / "rank_0/model.pdiparams")
    held = allocated((5, 4096), "float32")
    held[:] = 7
    wanted = {name: array.copy() for name, array in {**params, "held": held}.items()}
    before = resident_kb(path)
    for array in (*params.values(), held):
        release(array)
    assert resident_kb(path) < before / 2
    for name, array in {**params, "held": held}.items():
        np.testing.assert_array_equal(array, wanted[name])
