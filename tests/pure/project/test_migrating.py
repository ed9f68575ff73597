"""Every command, variable, option and request of five documents works as they say, or fails with a sentence that names
what to use instead."""

import json
import re
import shlex

import pytest

import download_model
from engine.download.sources import EXPORT_SUFFIX
from engine.errors import ConfigError, InvalidRequest
from engine.models.paddlenlp import program_of, rank_files
from engine.settings.config import Config
from engine.settings.foreign import commands
from engine.settings.foreign.keywords import FIELDS, own_keywords
from engine.settings.foreign.rank_table import settings_of_tables
from engine.settings.foreign.table import VARIABLES, check_variables
from engine.text.sentencepiece import model_file
from engine.wire import parse_request
from gateway.health import make_health_app
from server_scripts.model_source import export_dtype
from server_scripts.options import SETTINGS, OptionParser
from tests.documents import (
    ADDRESSES,
    COMMANDS,
    DOWNLOADS,
    GLOBAL_TABLE,
    LAYOUTS,
    LOCAL_TABLE,
    MODELS,
    OF_PARAMETERS,
    OF_TABLES,
    REQUESTS,
    STARTS,
)
from tests.pure.gateway_fake import FakeBackend, running

OF_THE_SHELL = {"MODEL_PATH"}  # variables that only the documents' own command lines read
KNOWN = {*VARIABLES, *OF_THE_SHELL}.union(*((s.env, *s.old) for s in SETTINGS.values()))


def name_of(row):
    return f"{row[0].partition(':')[0]} {row[1]}"[:80]


def started(typed):
    """Return the environment after a start with `NAME=value ... --option ... model`, as typed in a shell."""
    words = shlex.split(typed)
    num_variables = next((i for i, word in enumerate(words) if "=" not in word or word.startswith("-")), len(words))
    environ = dict(word.split("=", 1) for word in words[:num_variables])
    assert environ.keys() <= KNOWN
    parser = OptionParser("start_server", "")
    parser.add_argument("model_name", nargs="?")
    parser.parse_into(environ, words[num_variables:])
    environ |= settings_of_tables(environ)
    check_variables(environ)
    Config.from_env(environ)
    return environ


@pytest.mark.parametrize(("document", "typed", "outcome"), STARTS, ids=map(name_of, STARTS))
def test_a_documented_start_sets_what_it_says_or_names_the_replacement(document, typed, outcome, capsys):
    if isinstance(outcome, dict):
        assert started(typed).items() >= outcome.items()
        return
    with pytest.raises((ConfigError, SystemExit)) as refused:
        started(typed)
    assert outcome in capsys.readouterr().err + str(refused.value)


def keywords_of(typed):
    """Return options as a program gives them, `max_model_len=2048`: JSON as objects, flags as True."""
    given, name = {}, ""
    for word in shlex.split(typed):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            given[name] = True
        else:
            given[name] = json.loads(word) if word[0] in "-{0123456789" else word
    return given


@pytest.mark.parametrize(("typed", "outcome"), OF_PARAMETERS, ids=[typed[:80] for typed, _ in OF_PARAMETERS])
def test_a_documented_parameter_means_the_same_to_a_program(typed, outcome):
    if not isinstance(outcome, dict):
        with pytest.raises(ConfigError, match=re.escape(outcome)):
            own_keywords(keywords_of(typed))
        return
    wanted = Config.from_env(outcome)
    found = Config().changed(**own_keywords(keywords_of(typed)))
    for env in outcome:
        assert getattr(found, FIELDS[env]) == getattr(wanted, FIELDS[env])


@pytest.mark.parametrize(("document", "name", "repo", "outcome"), MODELS, ids=map(name_of, MODELS))
def test_a_documented_model_is_fetched_and_exported(document, name, repo, outcome):
    repo_id, quant = download_model.parse_model_name(name)
    assert EXPORT_SUFFIX.sub("", download_model.MIRROR_VARIANT.sub(r"\1", repo_id)) == repo
    assert export_dtype(quant, Config()) == ("auto", outcome)


def test_a_variable_that_is_said_to_set_a_setting_does():
    names = {name for setting in SETTINGS.values() for name in (setting.env, *setting.old)}
    assert {name for name, row in VARIABLES.items() if row.setting} - names == set()


@pytest.mark.parametrize(("document", "typed", "error"), DOWNLOADS, ids=map(name_of, DOWNLOADS))
def test_a_documented_download_is_accepted_or_names_the_replacement(document, typed, error, monkeypatch, capsys):
    monkeypatch.delenv("MODEL_MIRROR", raising=False)
    asked = []
    monkeypatch.setattr(download_model, "_from_hub", lambda repo_id, *_: asked.append(repo_id) or 0)
    assert download_model.main(typed.split()) == bool(error)
    assert error in capsys.readouterr().err
    assert bool(asked) != bool(error)


@pytest.mark.parametrize(("document", "typed"), COMMANDS, ids=map(name_of, COMMANDS))
def test_a_documented_command_is_on_the_page_for_migrating(document, typed):
    assert [row for row in commands.COMMANDS if row.theirs.startswith(typed) and (row.here or row.remark)]


@pytest.mark.parametrize(
    ("document", "path", "body", "error"), REQUESTS, ids=[name_of((r[0], str(r[2]))) for r in REQUESTS]
)
def test_a_documented_request_is_answered_or_refused_by_name(document, path, body, error):
    backend = FakeBackend("Hello")
    with running(backend) as gateway:
        status, _, payload = gateway.send("POST", path, body)
    text = payload.decode()
    if status == 200:  # the model reads it again
        try:
            parse_request({"req_id": "a", **backend.bodies[0]})
        except InvalidRequest as refusal:
            text = str(refusal)
        else:
            assert not error
            return
    assert error and error in text


@pytest.mark.parametrize(("document", "files", "program", "tokenizer"), LAYOUTS)
def test_a_documented_layout_of_a_model_is_read(document, files, program, tokenizer, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    [parameters] = rank_files(tmp_path)
    assert (program_of(parameters), model_file(tmp_path)) == (tmp_path / program, tmp_path / tokenizer)


def test_documented_rank_tables_give_the_settings_of_an_instance(tmp_path):
    paths = {"GLOBAL_RANK_TABLE_FILE_PATH": GLOBAL_TABLE, "RANK_TABLE_FILE_PATH": LOCAL_TABLE}
    for name, content in paths.items():
        (tmp_path / name).write_text(json.dumps(content))
    environ = {name: str(tmp_path / name) for name in paths} | {"NODE_PORTS": "8088,8089"}
    assert settings_of_tables(environ) == OF_TABLES
    assert Config.from_env(environ | OF_TABLES).prefill_addresses == [("localhost", 8488)]


@pytest.mark.parametrize(("document", "port", "path"), ADDRESSES)
def test_a_documented_address_is_served(document, port, path):
    assert path in {route.resource.canonical for route in make_health_app(None, 1.0).router.routes()}
