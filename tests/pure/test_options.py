"""`start_server`'s options: every setting, under the names that people type; what is no option is answered."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from engine.settings.config import Config
from server_scripts import run_batch, start, stop
from server_scripts.options import ANSWERS, COMMON, SYNONYMS, Parser, own_name

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {f.metadata["setting"].env: f for f in fields(Config) if not f.metadata["setting"].internal}


def parsed(*arguments, **environ):
    """The environment and what is no setting."""
    parser = Parser("start_server", "")
    parser.add_argument("model_name", nargs="?")
    return environ, parser.parse_into(environ, arguments)


def answer(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_every_setting_is_an_option_but_the_secrets():
    known = set(Parser("", "")._option_string_actions)
    assert {own_name(env) for env in SETTINGS} - known == {"--api-key", "--otel-exporter-otlp-headers"}
    assert set(SYNONYMS.values()) <= set(SETTINGS) and set(COMMON) <= set(SETTINGS)
    assert not set(ANSWERS) & known
    named = {name for text in ANSWERS.values() for name in re.findall(r"--[\w-]+", text)}
    assert len(named) > 8 and named - known == set()


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


def test_what_is_no_option_is_answered_with_what_is(capsys):
    for name, why in ANSWERS.items():
        assert f"{name} is no option here: {why}\n" in answer(capsys, name, "4096")
    assert f"{ANSWERS['--max-model-len']}\n" in answer(capsys, "--max_model_len=4096", "org/model")
    assert "--tensor-paralel-size is no option, did you mean --tensor-parallel-size?" in answer(
        capsys, "--tensor-paralel-size", "2"
    )
    assert "--xyzzy is no option, see --help" in answer(capsys, "--xyzzy")
    assert "--max is no option" in answer(capsys, "--max", "5")  # no guessing which


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
    """As bash itself says; zsh takes bash's way, and what it runs first is left out here."""
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
        "start_server --quant-type weight_only_i": {"weight_only_int4", "weight_only_int8"},
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
    told = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [set(line.split()) for line in told.splitlines()] == [*asked.values()]
