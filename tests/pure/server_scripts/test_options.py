"""`start_server`'s options: every setting, under the names that people type; what is no option is answered."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.foreign.table import OPTIONS, ROWS, check_variables, notes_on_variables
from gateway import __main__ as gateway_main
from gateway import health as gateway_health
from server_scripts import run_batch, start, stop
from server_scripts.completion import REFUSED
from server_scripts.options import COMMON, OptionParser, own_name

ROOT = Path(__file__).resolve().parents[3]
DRAFT = str(ROOT / "demo_model" / "draft")
SETTINGS = {f.metadata["setting"].env: f for f in fields(Config) if not f.metadata["setting"].internal}

OLD_NAMES = {name for f in SETTINGS.values() for name in f.metadata["setting"].old}


def parsed(*arguments, **environ):
    """Return the environment and the arguments that are no settings."""
    parser = OptionParser("start_server", "")
    parser.add_argument("model_name", nargs="?")
    return environ, parser.parse_into(environ, arguments)


def answer(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_every_setting_is_an_option_but_the_secrets():
    known = {name for name, action in OptionParser("", "")._option_string_actions.items() if action.dest != REFUSED}
    assert {own_name(env) for env in SETTINGS} - known == {"--api-key", "--otel-exporter-otlp-headers"}
    assert set(COMMON) <= set(SETTINGS)


def test_settings_named_in_the_table_of_other_servers_exist():
    known = set(OptionParser("", "")._option_string_actions)
    assert {row.setting for row in ROWS if row.setting} - set(SETTINGS) - OLD_NAMES == set()
    texts = [text for row in ROWS for text in (row.instead, row.why, *row.refused.values())]
    named = {name for text in texts for name in re.findall(r"(?<!\w)--[\w-]+", text)}
    assert len(named) > 8 and named - known == {"--reload"}
    assert set(OPTIONS) <= known and not any(OPTIONS[name].is_always_refused for name in named & set(OPTIONS))


def test_an_option_wins_over_the_variable_and_its_old_name():
    given = ["--port", "-1", "org/model", "--tensor-parallel-size=2", "--use-warmup", "--no-enable-prefix-caching"]
    environ, rest = parsed(*given, "--run-dir", "/a b", PUSH_MODE_HTTP_PORT="5", SERVICE_HTTP_PORT="6", MAX_DEC_LEN="7")
    assert environ == {
        **{"SERVICE_HTTP_PORT": "-1", "MP_NUM": "2", "USE_WARMUP": "1", "ENABLE_PREFIX_CACHING": "0"},
        **{"RUN_DIR": "/a b", "MAX_DEC_LEN": "7"},
    }
    assert rest.model_name == "org/model"
    config = Config.from_env(environ)
    assert (config.service_http_port, config.mp_num, config.use_warmup, config.enable_prefix_caching) == (
        -1,
        2,
        True,
        False,
    )
    assert parsed("--model", "org/model")[0] == {"model_name": "org/model"}


@pytest.mark.slow
def test_a_refused_option_is_answered_with_what_is_there_instead(capsys):
    for name, row in OPTIONS.items():
        if row.is_always_refused:
            assert f"{name} is not supported: {row.instead}\n" in answer(capsys, name, "4096")
    assert "--max-cpu-loras is not supported: --max-loras" in answer(capsys, "--max_cpu_loras=4096", "org/model")
    assert "--quantization smoothquant is not supported: a8w8" in answer(capsys, "--quantization", "smoothquant")
    assert "--no-enable-chunked-prefill is not" in answer(capsys, "--enable-chunked-prefill", "0", "org/model")


def test_an_option_without_effect_is_accepted_with_a_note():
    given = ["--enable-chunked-prefill", "org/model", "--load-choices", "default_v1", "--static-decode-blocks=2"]
    environ, rest = parsed(*given)
    assert (environ, rest.model_name) == ({}, "org/model")
    assert [note.partition(":")[0] for note in rest.notes] == [
        f"{name} has no effect" for name in ("--enable-chunked-prefill", "--load-choices", "--static-decode-blocks")
    ]


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ("--quantization wint4", {"QUANT_TYPE": "weight_only_int4"}),
        ("--quantization wint8", {"QUANT_TYPE": "weight_only_int8"}),
        ("--quantization block_wise_fp8", {"QUANT_TYPE": "block_wise_fp8"}),
        ("-q awq", {}),
        ("--quantization modelopt", {}),
        ("--quantization gguf", {}),
        ("--uvicorn-log-level info --quantize fp8", {"LOG_LEVEL": "INFO", "QUANT_TYPE": "weight_only_fp8"}),
        ("--use-warmup 1 --enable_prefix_caching=false", {"USE_WARMUP": "1", "ENABLE_PREFIX_CACHING": "0"}),
        ("--max-waiting-time -1", {"QUEUE_TIMEOUT": "0"}),
        ("--max-model-len -1 --max-num-batched-tokens 8K", {"MAX_MODEL_LEN": "-1", "MAX_NUM_BATCHED_TOKENS": "8K"}),
        ("org/model --served-model-name a org/b --port 1", {"SERVED_MODEL_NAME": "a,org/b", "SERVICE_HTTP_PORT": "1"}),
        ("--served-model-name a b --model x", {"SERVED_MODEL_NAME": "a,b", "model_name": "x"}),
        ("--served-model-name a org/model", {"SERVED_MODEL_NAME": "a"}),
        ("--max-concurrency 512", {"MAX_CACHED_TASK_NUM": "462"}),
        ("--max-concurrency 128 --max-num-seqs 128", {"BATCH_SIZE": "128", "MAX_CACHED_TASK_NUM": "1"}),
        ("--max-concurrency 1k --max-num-seqs 100", {"BATCH_SIZE": "100", "MAX_CACHED_TASK_NUM": "900"}),
        (
            "--max-num-partial-prefills 4 --max-long-partial-prefills 2 --long-prefill-token-threshold 1024",
            {
                "MAX_NUM_PARTIAL_PREFILLS": "4",
                "MAX_LONG_PARTIAL_PREFILLS": "2",
                "LONG_PREFILL_TOKEN_THRESHOLD": "1024",
            },
        ),
        ("--enforce-eager", {"USE_CUDAGRAPH": "0"}),
        ("--lora-modules a=/x b=/y org/model", {"LORA_MODULES": "a=/x b=/y"}),
        ("--lora-modules=a=/x b=/y -q awq", {"LORA_MODULES": "a=/x b=/y"}),
        ('--lora-paths [{"name":"a","path":"/x"}]', {"LORA_MODULES": '[{"name":"a","path":"/x"}]'}),
        ("--cuda-graph-bs 1 2 4 org/model", {"CUDAGRAPH_CAPTURE_SIZES": "1,2,4"}),
        ("--cudagraph-capture-sizes 1 2 4", {"CUDAGRAPH_CAPTURE_SIZES": "1,2,4"}),
        ("--cuda-graph-sizes 16", {"CUDAGRAPH_CAPTURE_SIZES": "16"}),
        ("--generation-config vllm", {"GENERATION_CONFIG": "vllm"}),
        (
            "--kv-offloading-size 4 --language-model-only -asc 2 --enable-log-requests",
            {"SWAP_SPACE": "4", "ENABLE_MM": "0", "PUSH_MODE_HTTP_WORKERS": "2"},
        ),
        (
            "--model-path org/model --tp 2 --dp-size 2 --context-length 4096 --mem-fraction-static 0.8 --page-size 16"
            " --chunked-prefill-size 4096 --max-running-requests 32 --disable-radix-cache --disable-cuda-graph"
            " --sampling-defaults openai --enable-metrics --schedule-policy lpm --attention-backend fa3",
            {
                **{"model_name": "org/model", "MP_NUM": "2", "DATA_PARALLEL_SIZE": "2", "MAX_MODEL_LEN": "4096"},
                **{"GPU_MEMORY_UTILIZATION": "0.8", "BLOCK_SIZE": "16", "MAX_NUM_BATCHED_TOKENS": "4096"},
                **{"BATCH_SIZE": "32", "ENABLE_PREFIX_CACHING": "0", "USE_CUDAGRAPH": "0", "GENERATION_CONFIG": "none"},
            },
        ),
        (
            "--speculative-algorithm NEXTN --enable-deterministic-inference",
            {"SPECULATE_METHOD": "mtp", "BATCH_INVARIANT": "1"},
        ),
        (
            "-v -b 2048 --no-context-shift --no-mmproj --warmup --slots -tb 4 --draft-max 3",
            {"LOG_LEVEL": "DEBUG", "ENABLE_MM": "0", "USE_WARMUP": "1", "SPECULATE_MAX_DRAFT_TOKEN_NUM": "3"},
        ),
        ("-O3", {}),
        ('--graph-optimization-config {"use_cudagraph":true,"graph_opt_level":1}', {"USE_CUDAGRAPH": "1"}),
        ('--graph-optimization-config {"cudagraph_capture_sizes":[1,3]}', {"CUDAGRAPH_CAPTURE_SIZES": "1,3"}),
        (
            '--speculative-config {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":2}',
            {"SPECULATE_METHOD": "ngram", "SPECULATE_MAX_DRAFT_TOKEN_NUM": "5", "SPECULATE_MAX_NGRAM_SIZE": "2"},
        ),
        (
            f'--speculative-config {{"method":"eagle3","model":"{DRAFT}"}}',
            {"SPECULATE_METHOD": "eagle3", "SPECULATE_MODEL_PATH": DRAFT},
        ),
        (
            f'--speculative-config {{"model":"{DRAFT}","num_speculative_tokens":3}}',
            {
                "SPECULATE_METHOD": "draft",
                "SPECULATE_MODEL_PATH": DRAFT,
                "SPECULATE_MAX_DRAFT_TOKEN_NUM": "3",
            },
        ),
    ],
)
def test_values_of_other_servers_are_translated(arguments, environ):
    assert parsed(*arguments.split())[0] == environ
    Config.from_env(environ)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('--speculative-config {"method":"eagle"}', "the method 'eagle' is not supported, it must be ngram"),
        ("--speculative-config ngram", "--speculative-config is 'ngram', which is not valid JSON"),
        ("--speculative-config [1]", "--speculative-config is '[1]', it must be a JSON object"),
        ('--graph-optimization-config {"cudagraph_only_prefill":true}', "cudagraph_only_prefill is not supported"),
        ('--graph-optimization-config {"cudagraph_capture_sizes":[0]}', "is [0], it must be a list of whole numbers"),
        ("--max-concurrency 49", "--max-concurrency is 49, it must be at least BATCH_SIZE (50)"),
        ("--quantization wint2", "wint2 is not supported: it is a convolution code of 2 bits"),
        ("--quantization w4a8", "wint4 is made of the checkpoint with unquantized weights"),
        ("--quantization mix_quant", "a8w8_fp8_wint4 has 4 bits for experts and 8-bit floats for the rest"),
        ("--quantization wfp8afp8", "a8w8_fp8 has 8-bit floats for weights and activations"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8 is not supported: int8 stores keys and values in 8 bits"),
        ("--chunked-prefill-size -1", "--chunked-prefill-size -1 is not supported: long prompts are always computed"),
        ("--speculative-algorithm EAGLE", "EAGLE3 is an EAGLE-3 head, NEXTN the layer of the checkpoint"),
        ("--temp 0.7", "--temp is not supported: defaults of requests are in generation_config.json of the model"),
        ("--enable-sleep-mode", "--enable-sleep-mode is not supported: stop_server frees the memory of the model"),
        ("--max-concurrency many", "--max-concurrency is 'many', it must be a whole number"),
    ],
)
def test_a_wrong_value_of_another_servers_option_is_named(arguments, message, capsys):
    assert message in answer(capsys, *arguments.split())


def test_a_variable_of_another_server_is_noted_or_refused():
    assert notes_on_variables({"MAX_PREFILL_BATCH": "4", "ENC_DEC_BLOCK_NUM": ""}) == [
        "MAX_PREFILL_BATCH has no effect: MAX_NUM_BATCHED_TOKENS limits a step instead"
    ]
    check_variables({"MAX_PREFILL_BATCH": "4", "FD_API_KEY": "", "FD_ENABLE_INTERNAL_ADAPTER": "0"})
    assert notes_on_variables({"FD_ENABLE_INTERNAL_ADAPTER": "0", "FD_PD_REORDER": "1"}) == [
        "FD_PD_REORDER has no effect: KV_TRANSFER says how blocks are transferred; a decode instance that gets none"
        " computes the prompt itself",
        "FD_ENABLE_INTERNAL_ADAPTER 0 has no effect: 0 is how it works here",
    ]
    with pytest.raises(ConfigError, match="^ROPE_THETA is not supported: HF_OVERRIDES changes"):
        check_variables({"ROPE_THETA": "10000"})
    with pytest.raises(ConfigError, match="^FD_API_KEY is not supported: API_KEY is the key[^:]*$"):
        check_variables({"FD_API_KEY": "a secret"})


def test_an_unknown_option_is_answered_with_the_one_that_was_meant(capsys):
    assert "--tensor-paralel-size is no option, did you mean --tensor-parallel-size?" in answer(
        capsys, "--tensor-paralel-size", "2"
    )
    assert "--http-port is no option, did you mean --service-http-port?" in answer(capsys, "--http-port", "8000")
    assert "did you mean --health-http-port?" in answer(capsys, "--health-htp-port", "8000")
    assert "--xyzzy is no option, see --help" in answer(capsys, "--xyzzy")
    assert "--max is no option" in answer(capsys, "--max", "5")  # no guessing which
    assert "--gpu is no option, see --help" in answer(capsys, "--gpu")
    assert "only one model can be served, 'other' is another argument" in answer(capsys, "one", "other")


def test_the_command_that_help_texts_name_prints_every_setting(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    named = set()
    for main in (gateway_main.main, gateway_health.main):
        with pytest.raises(SystemExit):
            main()
        text = " ".join(capsys.readouterr().out.split()).partition("environment variables")[2]
        named.update(re.findall(r"python -m ([\w.]+)", text))
    [module] = named
    command = [sys.executable, "-m", module]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"| `{env}` |" in table for env in ("MAX_DEC_LEN", "SERVICE_HTTP_PORT"))


@pytest.mark.slow
def test_the_command_shows_the_common_ones_and_names_a_wrong_value():
    def start(*arguments):
        command = [sys.executable, "-m", "server_scripts.start", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    text = start("--help").stdout
    assert all(f"({env})" in " ".join(text.split()) for env in COMMON) and "--port" in text
    assert "FD_LOG_BACKUP_COUNT" not in text
    wrong = start("--batch-size", "0")
    assert (wrong.returncode, wrong.stderr.startswith("start_server: BATCH_SIZE is 0, it must be")) == (2, True)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_the_options_of_every_command_and_what_they_take(shell, capsys, monkeypatch):
    """bash itself is asked; zsh uses the completion of bash, and its initialization is left out here."""
    monkeypatch.setattr(sys, "argv", ["", "--completion", shell])
    for main in (start.main, stop.main, run_batch.main):
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    scripts = capsys.readouterr().out
    first = "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n"
    assert scripts.count(first + "_llm_") == (3 if shell == "zsh" else 0)
    asked = {
        "start_server --max-dec": {"--max-dec-len"},
        "start_server --no-use-w": {"--no-use-warmup"},
        "start_server --device ": {*SETTINGS["DEVICE"].metadata["setting"].choices},
        "start_server --quant-type weight_only_i": {"weight_only_int4", "weight_only_int4_g32", "weight_only_int8"},
        "stop_server --comp": {"--completion"},
        "run_batch --at": {"--at-once"},
        "run_batch pyproj": {"pyproject.toml"},
    }
    typed = []
    for line in asked:
        *words, word = line.split(" ")
        typed.append(f"COMP_WORDS=({' '.join(words)} '{word}'); COMP_CWORD={len(words)}; _llm_{words[0]}")
    calls = "\n".join(f'{each}; echo "${{COMPREPLY[@]}}"' for each in typed)
    ask = ["bash", "-c", f"{scripts.replace(first, '')}\n{calls}"]
    reported = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [set(line.split()) for line in reported.splitlines()] == [*asked.values()]
