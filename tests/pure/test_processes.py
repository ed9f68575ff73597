"""The commands of the server's processes carry the settings, and the processes understand them."""

import pytest

from engine.settings.config import Config
from gateway.__main__ import parse_arguments
from gateway.backend import GatewaySettings
from server_scripts import processes
from server_scripts.run_dir import RunDir


def all_specs(tmp_path, monkeypatch, config):
    monkeypatch.setattr(processes, "triton_spec", lambda config, environ, run_dir, log_path: None)
    specs = processes.all_specs(config, tmp_path / "graph", "a name", RunDir(tmp_path / "run"))
    return {spec.name: spec for spec in specs if spec}


def test_every_gateway_worker_understands_its_command(tmp_path, monkeypatch):
    config = Config(
        service_host="::", push_mode_http_workers=2, max_body_bytes=4096, drain_timeout_s=2.5, log_level="DEBUG"
    )
    specs = all_specs(tmp_path, monkeypatch, config)
    for index in (0, 1):
        given = parse_arguments(specs[f"gateway-{index}"].command[3:])
        assert (given.host, given.port, given.grpc_host, given.grpc_port) == ("::", 9965, "::1", 8811)
        assert (given.model_name, given.max_body_bytes, given.drain_timeout) == ("a name", 4096, 2.5)
        assert (given.workers_index, given.log_level) == (index, "DEBUG")


@pytest.mark.parametrize("origin", ["*", "", "http://chat"])
def test_whose_pages_may_call_is_told_to_the_gateway(tmp_path, monkeypatch, origin):
    specs = all_specs(tmp_path, monkeypatch, Config(cors_allow_origin=origin))
    assert parse_arguments(specs["gateway-0"].command[3:]).cors_allow_origin == origin


def test_the_api_key_is_in_the_environment_of_the_gateway_alone_and_on_no_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cret")
    specs = all_specs(tmp_path, monkeypatch, Config(api_key="s3cret"))
    assert not any("s3cret" in argument for spec in specs.values() for argument in spec.command)
    assert {name for name, spec in specs.items() if "s3cret" in spec.env.values()} == {"gateway-0"}


def test_a_worker_takes_by_itself_what_the_setting_says_a_body_that_stalls_nobody():
    assert Config().max_body_bytes == GatewaySettings().max_body_bytes == 4 << 20


def test_without_http_there_is_no_gateway_but_health(tmp_path, monkeypatch):
    specs = all_specs(tmp_path, monkeypatch, Config(service_http_port=-1))
    assert set(specs) == {"engine", "health"}
    assert not any("http-port" in argument for argument in specs["health"].command)
    assert "--log-level=INFO" in specs["health"].command


def test_what_the_caller_has_set_for_the_engine_stays(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    env = all_specs(tmp_path, monkeypatch, Config(engine_max_crashes=5))["engine"].env
    assert (env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"]) == ("passive", "7")
    assert env["GRAPH_DIR"] == str(tmp_path / "graph")


def test_only_the_engine_is_ever_given_up(tmp_path, monkeypatch):
    specs = all_specs(tmp_path, monkeypatch, Config(engine_max_crashes=5))
    assert {name: spec.max_crashes for name, spec in specs.items()} == {"engine": 5, "gateway-0": None, "health": None}
