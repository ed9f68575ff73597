"""The processes of a server are given the settings, each what it needs."""

from dataclasses import replace

from engine.settings.config import Config
from server_scripts import processes, triton
from server_scripts.run_dir import RunDir
from tests.image_requests import write_vision_model


def all_specs(tmp_path, monkeypatch, config):
    monkeypatch.setattr(processes, "triton_spec", lambda config, environ, run_dir, log_path: None)
    specs = processes.all_specs(config, tmp_path / "graph", "a name", RunDir(tmp_path / "run"))
    return {spec.name: spec for spec in specs if spec}


def test_every_gateway_worker_knows_which_it_is_and_what_the_model_is_called(tmp_path, monkeypatch):
    specs = all_specs(tmp_path, monkeypatch, Config(push_mode_http_workers=2))
    assert [specs[f"gateway-{index}"].command[3:] for index in (0, 1)] == [["--index=0"], ["--index=1"]]
    assert {Config.from_env(specs[f"gateway-{index}"].env).served_model_name for index in (0, 1)} == {"a name"}


def test_every_process_reads_the_settings_of_the_start(tmp_path, monkeypatch):
    settings = {"SERVICE_HOST": "::", "DRAIN_TIMEOUT": "2.5", "CORS_ALLOW_ORIGIN": "", "MAX_BODY_BYTES": "4096"}
    for name, text in settings.items():
        monkeypatch.setenv(name, text)
    config = Config.from_env()
    known = {"graph_dir": str(tmp_path / "graph"), "served_model_name": "a name"}
    for spec in all_specs(tmp_path, monkeypatch, config).values():
        assert Config.from_env(spec.env) == replace(config, **known)


def test_the_api_key_is_in_the_environment_of_the_gateway_alone_and_on_no_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cret")
    specs = all_specs(tmp_path, monkeypatch, Config(api_key="s3cret"))
    assert not any("s3cret" in argument for spec in specs.values() for argument in spec.command)
    assert {name for name, spec in specs.items() if "s3cret" in spec.env.values()} == {"gateway-0"}


def test_the_hub_token_is_in_no_environment(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "s3cret")
    assert not any("s3cret" in spec.env.values() for spec in all_specs(tmp_path, monkeypatch, Config()).values())


def test_without_http_the_gateway_is_there_for_grpc(tmp_path, monkeypatch):
    specs = all_specs(tmp_path, monkeypatch, Config(service_http_port=-1))
    assert set(specs) == {"engine", "gateway-0", "health"}


def test_tritonserver_and_gateway_return_the_memory_of_what_slow_clients_left_unread(tmp_path, monkeypatch):
    found = triton.Tritonserver(tmp_path / "tritonserver", tmp_path / "backends", tmp_path / "stub")
    monkeypatch.setattr(triton, "find_tritonserver", lambda: found)
    monkeypatch.setattr(triton, "prepare", lambda *_: None)
    names = ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    specs = processes.all_specs(Config(), tmp_path / "graph", "a name", RunDir(tmp_path / "run"))
    envs = {spec.name: spec.env for spec in specs}
    for name in names:
        assert [each for each, env in envs.items() if name in env] == ["tritonserver", "gateway-0"]


def test_only_the_engine_is_ever_given_up(tmp_path, monkeypatch):
    specs = all_specs(tmp_path, monkeypatch, Config(engine_max_crashes=5))
    assert {name: spec.max_crashes for name, spec in specs.items()} == {"engine": 5, "gateway-0": None, "health": None}


def test_each_of_several_engines_has_files_of_its_own_and_knows_which_it_is(tmp_path, monkeypatch):
    specs = all_specs(tmp_path, monkeypatch, Config(data_parallel_size=2, run_dir=str(tmp_path)))
    first, second = specs["engine"], specs["engine-1"]
    assert [Config.from_env(each.env).engine_index for each in (first, second)] == [0, 1]
    assert (first.log_path.name, second.log_path.name) == ("infer_server.log", "infer_server-1.log")
    assert (first.progress_file.name, second.progress_file.name) == ("engine.progress", "engine-1.progress")
    assert (first.suspect_file.name, second.suspect_file.name) == ("engine.suspect", "engine-1.suspect")
    assert second.max_crashes == first.max_crashes


def test_requests_to_a_model_that_reads_images_may_be_larger(tmp_path, monkeypatch):
    monkeypatch.delenv("MAX_BODY_BYTES", raising=False)
    (tmp_path / "graph").mkdir()
    write_vision_model(tmp_path / "graph")

    def limits(**settings):
        specs = all_specs(tmp_path, monkeypatch, Config(**settings))
        return {Config.from_env(spec.env).max_body_bytes for spec in specs.values()}

    assert limits() == {32 << 20}
    assert limits(enable_mm=False) == {4 << 20}
    monkeypatch.setenv("MAX_BODY_BYTES", "8192")
    assert limits() == {8192}
