"""`start_server --dry-run` prints what a model needs, and agrees with what is exported and allocated."""

import json
import re
import socket

import pytest

from engine import graph
from engine.errors import ConfigError
from engine.exporting.manifest import Manifest
from engine.models.config_fields import ModelError
from engine.models.families import read_model
from engine.settings.config import Config
from server_scripts import dry_run as dry_run_module
from server_scripts.dry_run import dry_run
from server_scripts.model_source import ModelUnavailable
from server_scripts.start import report_sizes
from tests import family_checkpoints
from tests.lora_adapters import make_adapter

GIB = 2**30


def bytes_of(directory, **settings):
    return dry_run_module.model_sizes(Config(device="cpu", **settings), directory).weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3_next", {"quant_type": "weight_only_int4"}), ("gemma2", {}), ("deepseek_v3", {"dtype": "bfloat16"})],
)
def test_weights_have_the_size_of_those_that_an_export_writes(family, settings, checkpoint, exported):
    params = graph.load(exported(family, **settings))[1]
    wanted = sum(array.nbytes for array in params.values())
    assert bytes_of(checkpoint(family), **settings) == pytest.approx(wanted, rel=0.01)  # but for constants
    assert bytes_of(exported(family, **settings)) == wanted


def test_8_bit_floats_are_wider_on_cpus(checkpoint, exported):
    given = {"quant_type": "weight_only_fp8", "dtype": "bfloat16"}
    wide = bytes_of(checkpoint("qwen2"), dtype="bfloat16")
    assert bytes_of(checkpoint("qwen2"), **given) == wide
    assert bytes_of(exported("qwen2", **given)) == pytest.approx(wide, rel=0.01)


@pytest.mark.parametrize("keys", [{}, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}])
def test_config_json_alone_is_enough(keys, tmp_path, checkpoint):
    config = json.loads((checkpoint("qwen2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    settings = {"quant_type": "weight_only_int4"} if keys else {}
    assert bytes_of(tmp_path) == bytes_of(checkpoint("qwen2"), **settings)


@pytest.mark.parametrize("family", family_checkpoints.ALL)
def test_config_json_alone_is_enough_for_every_family(family, tmp_path):
    config = family_checkpoints.config_of(family)
    (tmp_path / "config.json").write_text(json.dumps(config))
    lengths = {"max_seq_len": 64, "max_dec_len": 64}
    assert dry_run(Config(device="cpu", **lengths), tmp_path)[1]
    has_experts = read_model(config).mixture is not None
    divided = {"mp_num": 2, "quant_type": "weight_only_int4", "enable_expert_parallel": has_experts}
    whole = bytes_of(tmp_path, quant_type="weight_only_int4")
    assert whole / 2 <= bytes_of(tmp_path, **divided) < whole


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("qwen3_moe", "mlp_only_layers", 1, "mlp_only_layers is 1, it must be a list of whole numbers"),
        ("qwen3_moe", "mlp_only_layers", "01", "mlp_only_layers is '01', it must be a list"),
        ("qwen3_moe", "num_experts", 10**12, "num_experts is 1000000000000, it must be at most 4096"),
        ("deepseek_v3", "routed_scaling_factor", "x", "routed_scaling_factor is 'x', it must be a positive number"),
        ("deepseek_v3", "n_shared_experts", 10**12, "n_shared_experts is 1000000000000, it must be at most 4096"),
        ("deepseek_v3", "kv_lora_rank", 10**12, "kv_lora_rank is 1000000000000, it must be at most 1048576"),
        ("deepseek_v3", "first_k_dense_replace", -1, "first_k_dense_replace is -1, it must be a whole number"),
        ("ernie4_5_moe", "moe_num_shared_experts", 10**12, "moe_num_shared_experts .* must be at most 4096"),
        ("qwen2_5_vl", "vision_config", {"fullatt_block_indexes": 7}, "fullatt_block_indexes is 7, it must be a list"),
        (
            "glm4_moe_lite",
            "mlp_layer_types",
            ["sparse"],
            "mlp_layer_types is .'sparse'., it must be a list of 3 values",
        ),
        ("smollm3", "no_rope_layers", 1, "no_rope_layers is 1, it must be a list of 4 values, one for each layer"),
        ("ministral", "layer_types", 7, "layer_types is 7, it must be a list"),
        ("exaone4", "sliding_window_pattern", 0, "sliding_window_pattern is 0, it must be a positive whole number"),
        ("qwen3_next", "linear_num_value_heads", 10**12, "linear_num_value_heads .* must be at most 4096"),
    ],
)
def test_wrong_values_of_config_json_are_refused_by_name(family, key, value, message, tmp_path):  # noqa: PLR0913
    (tmp_path / "config.json").write_text(json.dumps(family_checkpoints.config_of(family) | {key: value}))
    with pytest.raises(ModelError, match=message):
        dry_run(Config(device="cpu"), tmp_path)


def test_exaone_4_may_have_no_pattern_of_windows(tmp_path):
    keys = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(family_checkpoints.config_of("exaone4") | keys))
    assert not any(read_model(json.loads((tmp_path / "config.json").read_text())).windows)
    assert dry_run(Config(device="cpu"), tmp_path)[1]


def test_the_report_tells_the_cache_of_a_token_and_the_state_of_a_request(checkpoint, exported):
    lines, fits = dry_run(Config(device="cpu", max_seq_len=64, max_dec_len=64), checkpoint("qwen3_next"))
    caches = Manifest.read(exported("qwen3_next")).graph().caches
    assert fits and "KV cache  0.5 KiB per token and rank" in lines  # one layer of 2 x 2 heads of 32 floats
    state = next(line for line in lines if line.startswith("states"))
    assert len(caches) == 1 and state.endswith("MiB per request and rank") and " 0.0 " not in state


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"quant_type": "weight_only_int4"}])
def test_experts_in_the_host_s_memory_need_only_a_stage_on_the_gpu(settings, checkpoint, exported):
    config = Config(device="gpu", experts_on_host=1, **settings)
    found = dry_run_module.model_sizes(config, checkpoint("qwen3_moe"))
    assert found.experts == dry_run_module.model_sizes(config, exported("qwen3_moe", **settings)).experts
    total = found.experts.num_bytes
    config = config.changed(experts_on_host=0.5 * total / GIB)
    assert found.experts.numbers_on_host(config.host_expert_bytes) == [4, 4]  # of 8 in each of 2 layers
    num_bytes, lines = dry_run_module._weights(config, found)
    assert num_bytes == found.weight_bytes - total // 2 + total // 4
    assert lines[1].startswith("experts ")


def test_experts_on_the_host_are_refused_on_cpus(checkpoint):
    lines, fits = dry_run(Config(device="cpu", experts_on_host=0.01), checkpoint("qwen3_moe"))
    assert not fits and "EXPERTS_ON_HOST is 0.01, but on the CPU all weights are in the host's memory" in lines[-1]


@pytest.mark.parametrize(
    ("free", "settings", "message"),
    [(1000, {}, "the weights alone do not fit"), (GIB, {"block_bs": 1e6}, "BLOCK_BS is 1e.06: .* at most .* fits")],
)
def test_a_model_that_does_not_fit_is_reported(free, settings, message, checkpoint, monkeypatch):  # noqa: PLR0913
    monkeypatch.setattr(dry_run_module, "free_memory_bytes", lambda: free)
    lines, fits = dry_run(Config(device="cpu", **settings), checkpoint("qwen2"))
    assert not fits
    assert re.match(f"fits      no: {message}", lines[-1])


def test_the_command_prints_the_report_and_refuses_a_model_that_has_to_be_fetched(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setenv("BACH_SIZE", "3")
    notes: list[str] = []
    assert report_sizes(str(checkpoint("qwen2")), notes.append) == 0
    assert notes == ["note: BACH_SIZE is no setting, did you mean BATCH_SIZE?"]
    assert capsys.readouterr().out.startswith("model     qwen2: float32, ranks: 1, device: cpu\nweights ")
    with pytest.raises(ConfigError, match="needs a folder of this disk .*, org/model is none"):
        report_sizes("org/model", notes.append)


def test_a_report_on_what_is_no_model_says_so_as_a_start_does(tmp_path, monkeypatch):
    file = tmp_path / "README.md"
    file.touch()
    with pytest.raises(ModelUnavailable, match=r"README.md, which is a file but no .gguf file"):
        report_sizes(str(file), print)
    monkeypatch.setenv("MODEL_DIR", str(tmp_path))
    with pytest.raises(ModelUnavailable, match=r"MODEL_DIR is .*, which has no config.json"):
        report_sizes("", print)


def test_adapters_and_addresses_that_a_start_would_refuse_are_refused(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEVICE", "cpu")
    fits = make_adapter(tmp_path / "fits", checkpoint("qwen2"), seed=0)
    other = make_adapter(tmp_path / "other", checkpoint("llama"), seed=0, rank=128)
    for folder, message in ((tmp_path / "none", "adapter_config.json cannot be read"), (other, "r is 128")):
        monkeypatch.setenv("LORA_MODULES", f"a={fits} b={folder}")
        with pytest.raises(ConfigError, match=f"LORA_MODULES: adapter {folder}: .*{message}"):
            report_sizes(str(checkpoint("qwen2")), print)
    monkeypatch.setenv("LORA_MODULES", f"a={fits}")
    assert report_sizes(str(checkpoint("qwen2")), print) == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:  # as by the server that runs
        monkeypatch.setenv("SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("HEALTH_HTTP_PORT", str(taken.getsockname()[1]))
        assert report_sizes(str(checkpoint("qwen2")), print) == 0
    monkeypatch.setenv("SERVICE_HOST", "192.0.2.1")
    with pytest.raises(ConfigError, match="SERVICE_HOST is '192.0.2.1', which is no address of this machine") as raised:
        report_sizes(str(checkpoint("qwen2")), print)
    assert str(raised.value).count("SERVICE_HOST") == 1
    capsys.readouterr()
