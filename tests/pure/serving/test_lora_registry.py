"""Tests of the adapters of a server: PEFT files that are refused, LORA_MODULES, loading and unloading."""

import json
import os
import shutil
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ConfigError, InvalidRequest, UnknownModel
from engine.llm import LLM
from engine.models.adapters import AdapterError, checked, identified
from engine.serving import lora_registry
from engine.serving.lora_registry import LoraRegistry
from engine.serving.options import ServiceOptions
from engine.serving.service import Service
from engine.settings.config import Config
from engine.settings.processes import LORAS_FILE
from engine.wire import LoraList, Owner
from tests.lora_adapters import make_adapter
from tests.patience import PATIENCE_S
from tests.pure.service_fakes import FakeEngine, FakeSender, a_payload, an_input_processor

NO_OWNER = Owner()
A = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory, checkpoint):
    return make_adapter(tmp_path_factory.mktemp("good"), checkpoint("qwen2"), 1)


@pytest.fixture(scope="module")
def model(checkpoint):
    """Return a folder with the config.json of a graph, which is all that is read of it."""
    return checkpoint("qwen2")


def refusal(directory, model, max_rank=16):
    with pytest.raises(AdapterError) as caught:
        checked(directory, model, max_rank)
    assert str(caught.value).startswith(f"adapter {directory}: ")
    return str(caught.value).removeprefix(f"adapter {directory}: ")


# --- PEFT's files ---


@pytest.mark.parametrize(
    ("keys", "trouble"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', supported is 'LORA'"),
        ({"bias": "all"}, "bias is 'all', which is not supported"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of 'q_proj' is 0, it must be a positive whole number"),
        ({"rank_pattern": {"x": 17}}, "rank_pattern of 'x' is 17, at most MAX_LORA_RANK(16) is supported"),
        ({"rank_pattern": [2]}, "rank_pattern is [2], it must be an object of up to 4096 keys"),
        ({"rank_pattern": {"(q_proj": 2}}, "rank_pattern has '(q_proj', which is no regular expression"),
        ({"alpha_pattern": {"q_proj": "2"}},
         "alpha_pattern of 'q_proj' is '2', it must be a number of at most 3.40282e+38"),
        *(
            ({"alpha_pattern": {pattern: 2}},
             f"alpha_pattern has {pattern!r}, supported are regular expressions with at most 2 of * + ? {{}}, none of"
             " them behind a group")
            for pattern in (".*.*.*x", "(a+)+x", "(a|aa){9}x", r"(a)\1", "(?=a)x")
        ),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
        ({"r": 17}, "r is 17, at most MAX_LORA_RANK(16) is supported"),
        ({"r": True}, "r is True, it must be a positive whole number"),
        ({"lora_alpha": None}, "lora_alpha is None, it must be a number of at most 3.40282e+38"),
        ({"lora_alpha": 1e39}, "lora_alpha is 1e+39, it must be a number of at most 3.40282e+38"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, it must be a number of at most 3.40282e+38"),
        (
            {"lora_alpha": 10**400},
            f"lora_alpha is 1{'0' * 17}...{'0' * 19}, it must be a number of at most 3.40282e+38",
        ),
    ],
)  # fmt: skip
def test_options_that_would_be_computed_differently_are_refused_by_name(good, model, tmp_path, keys, trouble):
    broken = shutil.copytree(good, tmp_path / "broken")
    config = json.loads((good / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, **keys}))
    assert refusal(broken, model) == f"adapter_config.json: {trouble}"


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        (lambda t: t.pop(A), f"tensor {A} is missing in adapter_model.safetensors"),
        (lambda t: t.update({A: t[A][:3]}), f"tensor {A} has shape (3, 150), model and r ask for (4, 150)"),
        (lambda t: t.update({A: t[A].astype(np.int8)}), f"tensor {A} has dtype I8, supported are F32, F16, BF16"),
        (lambda t: t.update({"lm_head.lora_A.weight": t[A], "z": t[A]}),
         "adapter_model.safetensors has tensor lm_head.lora_A.weight and 1 more, for which the model has no place"),
        (lambda t: t.clear(), "adapter_model.safetensors has no tensor for any layer of the model"),
    ],
)  # fmt: skip
def test_tensors_that_are_others_than_the_model_asks_for_are_refused(good, model, tmp_path, change, trouble):
    broken = shutil.copytree(good, tmp_path / "broken")
    tensors = load_file(good / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, broken / "adapter_model.safetensors")
    assert refusal(broken, model) == trouble


def test_files_that_are_cut_off_or_missing_are_refused(good, model, tmp_path):
    broken = shutil.copytree(good, tmp_path / "broken")
    weights = (good / "adapter_model.safetensors").read_bytes()
    (broken / "adapter_model.safetensors").write_bytes(weights[:-1])
    assert f"adapter_model.safetensors ({len(weights) - 1} bytes) is cut off" in refusal(broken, model)
    (broken / "adapter_config.json").write_text("{")
    assert "adapter_config.json" in refusal(broken, model)
    (broken / "adapter_config.json").write_text("[" * 100_000)
    assert refusal(broken, model).startswith("adapter_config.json is not JSON: maximum recursion depth exceeded")
    (broken / "adapter_config.json").unlink()
    assert refusal(broken, model) == "adapter_config.json cannot be read: No such file or directory"


@pytest.mark.parametrize(
    "case",
    [(np.nan, 8, None), (-np.inf, 8, None), (8, 3e38, None), (60000, 8, "float16"), (np.nan, 8, "bfloat16")],
)
def test_weights_that_would_make_every_answer_nan_are_refused(good, model, tmp_path, case):
    """This includes weights that the type of the model cannot represent once they are scaled."""
    value, alpha, dtype = case
    model = shutil.copytree(model, tmp_path / "model")
    keys = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**keys, "infer_model_dtype": dtype}))
    broken = shutil.copytree(good, tmp_path / "broken")
    tensors = load_file(good / "adapter_model.safetensors")
    name = A.replace("lora_A", "lora_B")
    tensors[name][0, 0] = value
    save_file(tensors, broken / "adapter_model.safetensors")
    config = json.loads((good / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": alpha}))
    trouble = f"has a value, or with its scale has one, that is no number of {dtype or 'float32'}"
    assert refusal(broken, model) == f"tensor {name} {trouble}"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_nothing_is_read_of_what_is_no_file_or_too_large(good, model, tmp_path, name):
    broken = shutil.copytree(good, tmp_path / "broken")
    os.truncate(broken / name, 1 << 40)
    assert refusal(broken, model).startswith(f"{name} has {1 << 40} bytes, at most ")
    (broken / name).unlink()
    os.mkfifo(broken / name)  # opening it would wait for a writer
    assert refusal(broken, model) == f"{name} is no file"


def test_the_same_files_have_the_same_name_wherever_they_are(good, model, tmp_path):
    one, _ = identified(good)
    assert identified(shutil.copytree(good, tmp_path / "copy"))[0] == one
    with pytest.raises(AdapterError, match="its path is not UTF-8"):
        checked(tmp_path / "\udc80", model, 16)
    with (tmp_path / "copy" / "adapter_config.json").open("a") as file:
        file.write(" ")
    assert identified(tmp_path / "copy")[0] != one


# --- LORA_MODULES ---


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a=/x b=y/z=1", {"a": "/x", "b": "/loras/y/z=1"}),
        ('{"name": "a", "path": "/with blank", "base_model_name": "x"}', {"a": "/with blank"}),
        ('[{"name": "a", "path": "/x"}, {"name": "b", "path": "y"}]', {"a": "/x", "b": "/loras/y"}),
        ("", {}),
    ],
)
def test_modules_are_vllms(text, names):
    config = Config.from_env({"LORA_MODULES": text, "LORA_DIR": "/loras"})
    assert {name: str(path) for name, path in config.lora_paths.items()} == names


@pytest.mark.parametrize(
    ("env", "trouble"),
    [
        ({"LORA_MODULES": "a"}, "LORA_MODULES has 'a', it must be name=path, or JSON"),
        ({"LORA_MODULES": "a=x"}, "LORA_MODULES has 'a' in 'x'; without LORA_DIR it must be an absolute path"),
        ({"LORA_MODULES": "a=/x a=/y"}, "LORA_MODULES has 'a' twice"),
        ({"LORA_MODULES": "=/x"}, "LORA_MODULES has ''='/x', it must have a name of 1 to 256 characters and a path"),
        ({"LORA_MODULES": '{"name": 1}'}, "LORA_MODULES has 1=None, it must have a name"),
        ({"LORA_MODULES": "[1]"}, "LORA_MODULES has 1, it must be an object with `name` and `path`"),
        ({"LORA_MODULES": "[{"}, "LORA_MODULES is no JSON"),
        ({"LORA_MODULES": "[" * 100_000}, "LORA_MODULES is no JSON: maximum recursion depth exceeded"),
        ({"LORA_MODULES": "a=/x b=/y", "MAX_LORAS": "1"}, "LORA_MODULES has 2 adapters, MAX_LORAS is 1"),
        ({"LORA_MODULES": "m=/x", "SERVED_MODEL_NAME": "a,m"}, "LORA_MODULES has 'm', which is the model's own name"),
        ({"LORA_MODULES": "m=/x", "SERVED_MODEL_NAME": "m"}, "LORA_MODULES has 'm', which is the model's own name"),
    ],
)
def test_wrong_modules_are_refused(env, trouble):
    with pytest.raises(ConfigError) as caught:
        Config.from_env(env)
    assert str(caught.value).startswith(trouble)


# --- loading and unloading ---


@pytest.fixture
def folder(good, tmp_path):
    """Return LORA_DIR with an adapter; beside it is one that must not be found."""
    folder = tmp_path / "loras"
    shutil.copytree(good, folder / "a")
    shutil.copytree(good, tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "inner").symlink_to(folder / "a")
    for name, there in (("of links", folder / "a"), ("of links out", tmp_path / "secret")):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").symlink_to("../a/adapter_config.json")
        (folder / name / "adapter_model.safetensors").symlink_to(there / "adapter_model.safetensors")
    return folder


def load(names, name, path, owner=NO_OWNER):
    return names.answer({"load_lora_adapter": {"lora_name": name, "lora_path": str(path)}}, owner)


def unload(names, name, owner=NO_OWNER):
    return names.answer({"unload_lora_adapter": {"lora_name": name}}, owner)


def test_the_log_has_the_names_of_adapters_escaped(model, folder, caplog):
    caplog.set_level("INFO")
    load(LoraRegistry(Config(lora_dir=str(folder)), model), "x\n\x1b[31m", "a")
    assert caplog.messages == [r'load_lora_adapter: "x\n\u001b[31m"']


def test_a_loaded_adapter_can_be_used_until_it_is_unloaded(model, folder):
    names = LoraRegistry(Config(lora_dir=str(folder), max_loras=2), model)
    assert load(names, "one", "a") == LoraList(["one"])
    assert load(names, "two", folder / "inner") == LoraList(["one", "two"])
    assert names.find("two") == identified(folder / "a")
    unload(names, "two")
    assert load(names, "two", "of links") == LoraList(["one", "two"])  # as in a hub's cache
    for again, trouble in (("one", 'The `lora_name` "one" is loaded already'),
                           ("three", r"2 adapters are loaded, at most MAX_LORAS\(2\) may be")):  # fmt: skip
        with pytest.raises(InvalidRequest, match=trouble):
            load(names, again, "a")
    assert unload(names, "one") == LoraList(["two"])
    for ask in (unload, LoraRegistry.find):
        with pytest.raises(UnknownModel, match=r'The `lora_name` "one" is not loaded; loaded adapters: \[two\]'):
            ask(names, "one")
    assert names.answer({"text": "Hi"}, Owner()) is None


def test_a_disk_that_does_not_answer_holds_up_no_other_request(model, folder, tokenizer, monkeypatch):
    names = LoraRegistry(Config(lora_modules="one=a", lora_dir=str(folder)), model)
    answers, is_read = threading.Event(), threading.Event()
    read = lora_registry.checked

    def slow(*args):
        is_read.set()
        assert answers.wait(PATIENCE_S)
        return read(*args)

    monkeypatch.setattr(lora_registry, "checked", slow)
    engine = FakeEngine()
    service = Service(an_input_processor(tokenizer, loras=names), engine, ServiceOptions())

    def ask(**fields):
        service.submit(a_payload(**fields), sender := FakeSender())
        return sender

    try:
        first = ask(load_lora_adapter={"lora_name": "two", "lora_path": "a"})
        assert is_read.wait(PATIENCE_S)
        others = [ask(load_lora_adapter={"lora_name": name, "lora_path": "a"}) for name in ("three", "four")]
        others[1].cancelled = True
        generation = ask(req_id="a", input_ids=[1, 2])
        engine.give([1, 2], b"a", "length")
        assert generation.final["tokens_all"] == "a"
        assert ask(unload_lora_adapter={"lora_name": "one"}).final["lora_names"] == []
        assert not first.is_over and not others[0].is_over
        answers.set()
        assert [sender.final.get("error_code", 0) for sender in (first, *others)] == [0, 0, 499]
        assert names.names() == ["two", "three"]
    finally:
        answers.set()
        service.close(drain_s=0)


@pytest.mark.parametrize(
    "path", ["..", "../secret", "link", "/etc", "a/../../secret", "\0", "of links out", "{tmp}/secret"]
)
def test_nothing_outside_of_the_folder_is_looked_at(model, folder, path):
    names = LoraRegistry(Config(lora_dir=str(folder)), model)
    with pytest.raises(InvalidRequest, match="The `lora_path` .* is not in LORA_DIR"):
        load(names, "x", path.replace("{tmp}", str(folder.parent)))
    with pytest.raises(InvalidRequest, match="adapter_config.json cannot be read: No such file"):
        load(names, "x", "nothing")
    assert names.names() == []


def test_adapters_may_be_changed_only_with_a_setting_and_not_with_a_named_api_key(model, folder):
    names = LoraRegistry(Config(lora_modules=f"one={folder / 'a'}"), model)
    for ask in (lambda: load(names, "x", folder / "a"), lambda: unload(names, "one")):
        with pytest.raises(InvalidRequest, match="LORA_DIR is not set"):
            ask()
    names = LoraRegistry(Config(lora_modules="one=a", lora_dir=str(folder)), model)
    with pytest.raises(InvalidRequest, match="clients with an API key of a named owner cannot change them"):
        unload(names, "one", Owner("somebody"))
    with pytest.raises(InvalidRequest, match="`lora_path` is missing"):
        names.answer({"load_lora_adapter": {"lora_name": "x"}}, Owner())
    assert names.names() == ["one"]


def test_the_next_process_of_the_server_has_what_the_last_one_had(model, folder, tmp_path, exported):
    config = Config(lora_modules="one=a", lora_dir=str(folder), run_dir=str(tmp_path), graph_dir=str(model))
    names = LoraRegistry.of_server(config)
    load(names, "two", "a")
    unload(names, "one")
    shutil.rmtree(folder / "a")  # the names stay as they are; requests get the error
    assert LoraRegistry.of_server(config).find("two") == names.find("two")
    with pytest.raises(AdapterError, match="cannot be read"):  # another model begins with the settings
        LoraRegistry.of_server(Config(**{**vars(config), "graph_dir": str(exported("qwen2"))}))
    (tmp_path / LORAS_FILE).write_text("[")
    with pytest.raises(AdapterError, match="cannot be read"):
        LoraRegistry.of_server(config)


def test_prompts_offline_may_have_adapters(folder, exported):
    """Prompts with and without an adapter are in the same batch."""
    llm = LLM(exported("qwen2", block_size=16), lora_modules="one=a", lora_dir=str(folder), block_bs=2.0)
    try:
        prompt, options = {"input_ids": list(range(20))}, {"max_dec_len": 12, "temperature": 0, "ignore_eos": True}
        some, none = llm.generate([{**prompt, "lora_name": "one"}, prompt], options, progress=False)
        [again] = llm.generate([{**prompt, "lora_name": "one"}], options, progress=False)
        assert some.token_ids == again.token_ids != none.token_ids
        with pytest.raises(UnknownModel, match=r'`lora_name` "two" is not loaded; loaded adapters: \[one\]'):
            llm.generate([{**prompt, "lora_name": "two"}], options, progress=False)
    finally:
        llm.close()


def test_an_adapter_of_the_start_that_does_not_fit_is_named(model, folder, checkpoint, tmp_path):
    other = make_adapter(tmp_path / "other", checkpoint("llama"), 1)
    with pytest.raises(AdapterError, match=f"adapter {other}: tensor .* has shape"):
        LoraRegistry(Config(lora_modules=f"one={other}"), model)
