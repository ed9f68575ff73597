"""Settings from the environment: read once, checked once, and every refusal names the variable and the value."""

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.table import markdown_table
from engine.settings.unused import likely_misspelt

SETTINGS = {field.name: field.metadata["setting"] for field in fields(Config)}


def test_an_empty_environment_gives_the_defaults():
    assert Config.from_env({}) == Config()


def test_the_defaults_are_those_the_predecessor_documents():
    config = Config()
    ports = config.health_http_port, config.service_grpc_port, config.metrics_http_port, config.service_http_port
    assert ports == (8110, 8811, 8722, 9965)
    assert (config.max_prompt_len, config.max_answer_len, config.batch_size) == (8192, 1024, 50)
    assert (config.block_ratio, config.max_cached_task_num, config.push_mode_http_workers) == (0.75, 128, 1)


def test_every_default_is_a_value_that_may_be_given():
    environ = {}
    for field in fields(Config):
        if field.default not in (None, ""):
            value = int(field.default) if isinstance(field.default, bool) else field.default
            environ[SETTINGS[field.name].env] = str(value)
    assert Config.from_env(environ) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("MAX_SEQ_LEN", "4096", "max_seq_len", 4096),
        ("BLOCK_BS", "2.5", "block_bs", 2.5),
        ("BLOCK_RATIO", "1", "block_ratio", 1.0),
        ("ENABLE_PREFIX_CACHING", "0", "enable_prefix_caching", False),
        ("DISABLE_STREAMING", "True", "disable_streaming", True),
        ("SERVICE_HTTP_PORT", "-1", "service_http_port", -1),
        ("model_name", "org/model", "model_name", "org/model"),
        ("START_TIMEOUT", "2.5", "start_timeout_s", 2.5),
        ("BATCH_SIZE", "", "batch_size", 50),  # empty is like unset
        ("CORS_ALLOW_ORIGIN", "", "cors_allow_origin", ""),  # unless it says something
        ("CORS_ALLOW_ORIGIN", "http://chat", "cors_allow_origin", "http://chat"),
        ("CORS_ALLOW_ORIGIN", "https://[::1]:8443", "cors_allow_origin", "https://[::1]:8443"),
        ("CORS_ALLOW_ORIGIN", "null", "cors_allow_origin", "null"),  # of a page that is a file
        ("REASONING_PARSER", "ernie-x1", "reasoning_parser", "ernie"),
        ("TOOL_CALL_PARSER", "ernie-45-vl-thinking", "tool_call_parser", "hermes"),
    ],
)
def test_a_variable_sets_its_field(variable, text, field, value):
    found = getattr(Config.from_env({variable: text}), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("image=2", 2),
        ("image=3,video=1", 3),
        ('{"image": 4, "video": 2}', 4),
        ('{"image": {"count": 5}}', 5),
        ("{}", 16),
    ],
)
def test_a_limit_of_images_is_written_in_any_of_the_ways_that_others_have(text, count):
    assert Config.from_env({"LIMIT_MM_PER_PROMPT": text}).max_images == count


@pytest.mark.parametrize(
    ("text", "pixels"),
    [
        ("", (None, None)),
        ('{"min_pixels": 5, "max_pixels": 7}', (5, 7)),
        ('{"image_max_pixels": 7, "video_max_pixels": 9, "fps": 2}', (None, 7)),
    ],
)
def test_the_pixels_of_images_have_the_names_of_others_too(text, pixels):
    assert Config.from_env({"MM_PROCESSOR_KWARGS": text}).image_pixels == pixels


@pytest.mark.parametrize(
    ("old", "field"),
    [
        ("HTTP_PORT", "health_http_port"),
        ("GRPC_PORT", "service_grpc_port"),
        ("METRICS_PORT", "metrics_http_port"),
        ("PUSH_MODE_HTTP_PORT", "service_http_port"),
    ],
)
def test_an_old_name_still_works(old, field):
    assert getattr(Config.from_env({old: "1234"}), field) == 1234
    assert getattr(Config.from_env({old: "1234", SETTINGS[field].env: "1234"}), field) == 1234


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"BATCH_SIZE": "many"}, "BATCH_SIZE is 'many', it must be a whole number"),
        ({"BATCH_SIZE": "1.5"}, "BATCH_SIZE is '1.5', it must be a whole number"),
        ({"BATCH_SIZE": "0"}, "BATCH_SIZE is 0, it must be at least 1 and at most 1024 (requests in one step at most)"),
        ({"BATCH_SIZE": "1025"}, "BATCH_SIZE is 1025, it must be at least 1 and at most 1024"),
        ({"BLOCK_RATIO": "a lot"}, "BLOCK_RATIO is 'a lot', it must be a number"),
        ({"BLOCK_RATIO": "nan"}, "BLOCK_RATIO is 'nan', it must be a finite number"),
        ({"BLOCK_BS": "inf"}, "BLOCK_BS is 'inf', it must be a finite number"),
        ({"USE_WARMUP": "yes"}, "USE_WARMUP is 'yes', it must be 0 or 1"),
        (
            {"CUDAGRAPH_CAPTURE_SIZES": "1,two"},
            "CUDAGRAPH_CAPTURE_SIZES is '1,two', it must be whole numbers from 1 with commas between them",
        ),
        ({"LIMIT_MM_PER_PROMPT": "two"}, "LIMIT_MM_PER_PROMPT is 'two', it must be a JSON object or like image=2"),
        ({"LIMIT_MM_PER_PROMPT": "images=2"}, "LIMIT_MM_PER_PROMPT has 'images', the kinds are image, video, audio"),
        ({"LIMIT_MM_PER_PROMPT": '{"image": -1}'}, "LIMIT_MM_PER_PROMPT has -1 for image, it must be a whole number"),
        ({"HF_OVERRIDES": "[" * 100_000}, "it must be a JSON object: it is nested too deeply"),
        ({"MM_PROCESSOR_KWARGS": "[]"}, "MM_PROCESSOR_KWARGS is '[]', it must be a JSON object"),
        ({"MM_PROCESSOR_KWARGS": '{"max_pixels": "x"}'}, "MM_PROCESSOR_KWARGS has 'x' for max_pixels, it must be a"),
        ({"ALLOWED_MEDIA_DOMAINS": "a.b, http://c"}, "ALLOWED_MEDIA_DOMAINS has 'http://c', it must be names of hosts"),
        ({"NUM_GPU_BLOCKS_OVERRIDE": "1.5"}, "NUM_GPU_BLOCKS_OVERRIDE is '1.5', it must be a whole number"),
        ({"SWAP_SPACE": "-1"}, "SWAP_SPACE is -1, it must be at least 0"),
        (
            {"SWAP_SPACE": "4", "ENABLE_PREFIX_CACHING": "0"},
            "SWAP_SPACE is 4 and ENABLE_PREFIX_CACHING is 0: only what can be found again by its tokens is kept",
        ),
        ({"CUDAGRAPH_CAPTURE_SIZES": "0"}, "CUDAGRAPH_CAPTURE_SIZES is '0', it must be whole numbers from 1"),
        ({"DEVICE": "tpu"}, "DEVICE is 'tpu', it must be one of: auto, cpu, gpu"),
        (
            {"MP_NUM": "65"},
            "MP_NUM is 65, it must be at least 1 and at most 64 (tensor-parallel ranks of the model on all machines",
        ),
        (
            {"DATA_PARALLEL_SIZE": "2", "MP_NNODE": "2", "MP_NUM": "2", "POD_IPS": "127.0.0.1,10.0.0.2"},
            "DATA_PARALLEL_SIZE is 2 and MP_NNODE 2: a model on several machines is served by one engine",
        ),
        (
            {"DATA_PARALLEL_SIZE": "100"},  # without the link of the document
            "each with MP_NUM ranks; requests are distributed among them)",
        ),
        ({"MP_NNODE": "17"}, "MP_NNODE is 17, it must be at least 1 and at most 16"),
        ({"DRAIN_TIMEOUT": "1e10"}, "DRAIN_TIMEOUT is 1e10, it must be at least 0 and at most 1e+06"),  # Triton's limit
        ({"CORS_ALLOW_ORIGIN": "a,b"}, "CORS_ALLOW_ORIGIN is 'a,b', it must be one origin such as https://"),
        ({"CORS_ALLOW_ORIGIN": "http://a, http://b"}, "CORS_ALLOW_ORIGIN is 'http://a, http://b', it must be one"),
        ({"CORS_ALLOW_ORIGIN": "http://a/"}, "CORS_ALLOW_ORIGIN is 'http://a/', it must be one"),  # no browser's
        *(
            ({"OTEL_EXPORTER_OTLP_HEADERS": f"x-tenant=1,{item}"}, "OTEL_EXPORTER_OTLP_HEADERS: item 2 must be name=")
            for item in ("secret", "=secret", "a b=secret", "a=secret%0A", "a=s\u00e9cret")
        ),
        ({"HTTP_PORT": "x"}, "HTTP_PORT is 'x', it must be a whole number"),  # the name that was used
        ({"METRICS_HTTP_PORT": "70000"}, "METRICS_HTTP_PORT is 70000, it must be at least 1 and at most 65535"),
        ({"SERVICE_HTTP_PORT": "0"}, "SERVICE_HTTP_PORT is 0, it must be a port from 1 to 65535, or -1 for none"),
        (
            {"HEALTH_HTTP_PORT": "1", "HTTP_PORT": "2"},
            "HEALTH_HTTP_PORT is '1' and HTTP_PORT, its old name, is '2'; set only one",
        ),
        (
            {"SERVICE_GRPC_PORT": "8110"},
            "SERVICE_GRPC_PORT is 8110, which HEALTH_HTTP_PORT has already; every port needs its own",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(environ, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_env(environ)


def test_every_wrong_variable_is_named_at_once():
    environ = {"BATCH_SIZE": "many", "BLOCK_RATIO": "x", "SERVICE_HTTP_PORT": "0", "MP_NNODE": "two", "POD_IPS": "::1"}
    with pytest.raises(ConfigError) as caught:
        Config.from_env(environ)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "MP_NNODE",
        "BATCH_SIZE",
        "BLOCK_RATIO",
        "SERVICE_HTTP_PORT",
    ]  # POD_IPS may be right: it depends on MP_NNODE


def test_the_api_key_is_never_shown():
    assert "s3cret" not in repr(Config.from_env({"API_KEY": "s3cret"}))
    for key in ("s3cret key", "s3cr\u00e9t", "s3cret\n"):
        with pytest.raises(ConfigError, match="API_KEY has a character that is no visible ASCII") as caught:
            Config.from_env({"API_KEY": key})
        assert "s3cr" not in str(caught.value)


def test_a_step_holds_at_least_two_tokens_a_request():
    assert Config().max_step_tokens == 256
    assert Config(device="gpu").max_step_tokens == 8192
    assert Config(batch_size=200).max_step_tokens == 400
    assert Config(batch_size=20, max_num_batched_tokens=10).max_step_tokens == 40


def test_the_length_of_the_model_is_that_of_prompt_and_answer_where_these_are_not_set():
    config = Config.from_env({"MAX_MODEL_LEN": "32768", "MAX_DEC_LEN": "2048"})
    assert (config.max_prompt_len, config.max_answer_len, config.model_len(131072)) == (32768, 2048, 32768)
    assert (Config().model_len(131072), Config(max_model_len=4096).model_len(4096)) == (131072, 4096)
    with pytest.raises(ConfigError, match="^MAX_MODEL_LEN is 4097, the model takes at most 4096 tokens$"):
        Config(max_model_len=4097).model_len(4096)


@pytest.mark.parametrize(
    ("text", "length"),
    [("8k", 8000), ("8K", 8192), ("1M", 2**20), ("25.6k", 25600), ("0.5K", 512), ("auto", None), ("-1", None)],
)
def test_a_length_may_be_written_as_at_vllm(text, length):
    assert Config.from_env({"MAX_MODEL_LEN": text}).max_model_len == length
    assert Config().changed(max_model_len=text).max_model_len == length


@pytest.mark.parametrize("text", ["8x", "k", "1.5", "1.0001k", "-8k", "8 k", "1e3k", "nank", "long", "٣k"])
def test_a_length_that_is_no_number_is_refused_with_examples(text):
    with pytest.raises(ConfigError) as caught:
        Config.from_env({"MAX_MODEL_LEN": text})
    expected = "it must be a whole number such as 32768, 32k (32000) or 32K (32768) or auto"
    assert str(caught.value) == f"MAX_MODEL_LEN is {text!r}, {expected}"
    with pytest.raises(ConfigError, match="^BATCH_SIZE is '1k', it must be a whole number$"):
        Config.from_env({"BATCH_SIZE": "1k"})


def test_the_limits_of_partial_prefills_go_together():
    assert Config(max_seq_len=10000).long_prefill_tokens == 400
    assert Config(max_seq_len=10000, long_prefill_token_threshold=7).long_prefill_tokens == 7
    variables = {"MAX_NUM_PARTIAL_PREFILLS": "2", "MAX_LONG_PARTIAL_PREFILLS": "3"}
    with pytest.raises(ConfigError, match="^MAX_LONG_PARTIAL_PREFILLS is 3, it must be at most MAX_NUM_PARTIAL_PREFIL"):
        Config.from_env(variables)


def test_paths_are_made_from_the_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config(run_dir="~/run").run_path == tmp_path / "run"
    assert Config().run_path == Path(f"/tmp/llm-server-{os.getuid()}")
    assert Config(log_dir="log").log_path == Path.cwd() / "log"
    one, other = (Config(log_dir=name).run_path for name in ("prefill_log", "decode_log"))
    assert one != other and {one.parent, other.parent} == {Path("/tmp")}
    assert one == Config(log_dir=str(Path.cwd() / "prefill_log")).run_path != Config().run_path


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("MAX_SEQLEN", "MAX_SEQ_LEN"),
        ("MAX_SEQ_LENGTH", "MAX_SEQ_LEN"),
        ("MAX_DEC_LENGTH", "MAX_DEC_LEN"),
        ("BATCHSIZE", "BATCH_SIZE"),
        ("MAX_BATCH_SIZE", "BATCH_SIZE"),
        ("MODEL_NAME", "model_name"),
        ("max_dec_len", "MAX_DEC_LEN"),
        ("ENABLE_PREFIX_CACHE", "ENABLE_PREFIX_CACHING"),
        ("METRIC_PORT", "METRICS_PORT"),
        ("MAX_PREFIL_BATCH", "MAX_PREFILL_BATCH"),
    ],
)
def test_a_misspelt_variable_is_named_with_what_was_meant(written, meant):
    assert likely_misspelt({written: "1"}) == [f"{written} is no setting, did you mean {meant}?"]


def test_no_variable_of_fastdeploy_is_passed_over_in_silence():
    of_a_newer_version = {"FD_SOMETHING_NEW": "1", "FD_LOG_MAX_BYTES": "9", "FD_UNSET": "", "FD_PD_REORDER": "1"}
    assert likely_misspelt(of_a_newer_version) == ["FD_SOMETHING_NEW has no effect: there is no such setting"]


def test_the_usual_variables_of_a_shell_are_not_taken_for_ours():
    usual = "PATH HOME USER SHELL LANG TERM PWD HOSTNAME LOGNAME HTTP_PROXY NO_PROXY http_proxy LD_LIBRARY_PATH EDITOR"
    usual += " CUDA_VISIBLE_DEVICES OMP_NUM_THREADS PYTHONPATH VIRTUAL_ENV XDG_RUNTIME_DIR TMPDIR HF_HOME PORT"
    assert likely_misspelt(dict.fromkeys(usual.split(), "1")) == []
    assert likely_misspelt({setting.env: "1" for setting in SETTINGS.values()}) == []


def test_the_table_has_a_row_for_every_setting():
    rows = markdown_table().splitlines()
    envs = [setting.env for setting in SETTINGS.values() if not setting.internal]
    assert [re.match(r"\| `(\w+)` \|", row)[1] for row in rows[2:]] == envs
    assert "| `BLOCK_RATIO` | `0.75` |" in rows[2 + envs.index("BLOCK_RATIO")]
    assert "(old name: `PUSH_MODE_HTTP_PORT`)" in "\n".join(rows)
    assert "| `ENABLE_PREFIX_CACHING` | `1` |" in "\n".join(rows)


def test_settings_given_by_name_are_taken_as_the_environments():
    changes = {
        "batch_size": 8,
        "block_bs": 2,
        "enable_prefix_caching": False,
        "model_dir": Path("/m"),
        "dtype": "float32",
    }
    assert Config().changed(**changes) == Config(**{**changes, "model_dir": "/m"})
    assert Config(block_bs=1.0).changed(block_bs=None) == Config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 0},
            r"^batch_size is 0, it must be at least 1 and at most 1024 \(requests in one step at most\)$",
        ),
        ({"batch_size": 2.5}, "^batch_size is '2.5', it must be a whole number$"),
        ({"batch_size": None}, "^batch_size is 'None', it must be a whole number$"),
        ({"kv_cache_memory_fraction": 2}, "^kv_cache_memory_fraction is 2, it must be at least 0.01 and at most 0.95"),
        ({"dtype": "int4"}, "^dtype is 'int4', it must be one of: auto, float32, bfloat16, float16$"),
        ({"use_warmup": 7}, "^use_warmup is '7', it must be 0 or 1$"),
        ({"service_http_port": 8110}, "^SERVICE_HTTP_PORT is 8110, which HEALTH_HTTP_PORT has already"),
    ],
)
def test_settings_given_by_name_are_checked_like_the_environments(changes, message):
    with pytest.raises(ConfigError, match=message):
        Config().changed(**changes)


def test_a_run_directory_whose_sockets_would_have_no_name_is_refused():
    limit = 107 - len("/.triton/grpc:1")
    Config.from_env({"RUN_DIR": "/" + "x" * (limit - 1)})
    with pytest.raises(ConfigError, match=f"which has {limit + 1} bytes; sockets in it need a path of at most {limit}"):
        Config.from_env({"RUN_DIR": "/" + "x" * limit})


def test_the_socket_of_tritonserver_may_be_in_a_folder_of_any_name():
    assert Config(run_dir="/a b/(1)").triton_target == "unix:/a%20b/%281%29/.triton/grpc%3A1"


def test_values_have_the_names_of_other_servers_too():
    given = {
        "DEVICE": "cuda",
        "LOG_LEVEL": "info",
        "REASONING_PARSER": "deepseek-r1",
        "TOOL_CALL_PARSER": "deepseek_v31",
    }
    config = Config.from_env(given)
    values = (config.device, config.log_level, config.reasoning_parser, config.tool_call_parser)
    assert values == ("gpu", "INFO", "deepseek_r1", "deepseek")
