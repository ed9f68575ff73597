"""Tests of the hosts of a model and of the number of this host, from settings alone."""

import re

import pytest

import download_model
from engine.errors import ConfigError
from engine.models.config_fields import ModelError
from engine.settings.config import Config
from server_scripts import model_source, ports
from tests.server import free_ports

TWO = {"MP_NNODE": "2", "MP_NUM": "4", "POD_IPS": "10.0.0.1,10.0.0.2", "POD_0_IP": "10.0.0.1", "HOST_IP": "10.0.0.2"}


def machines(**environ):
    return Config.from_env({**TWO, **environ}).machines


def test_one_machine_has_all_ranks_and_serves():
    alone = Config.from_env({"MP_NUM": "4", "POD_IPS": "10.0.0.1", "HOST_IP": "10.9.9.9"}).machines
    assert (alone.num_hosts, alone.is_master, [*alone.ranks], alone.why_not_served) == (1, True, [0, 1, 2, 3], "")


def test_the_master_has_the_first_ranks_and_the_others_follow_in_the_order_of_their_addresses():
    assert [*machines(HOST_IP="10.0.0.1").ranks] == [0, 1]
    assert [*machines().ranks] == [2, 3]
    turned = machines(POD_0_IP="10.0.0.2")
    assert (turned.ips, turned.is_master, [*turned.ranks]) == (("10.0.0.2", "10.0.0.1"), True, [0, 1])
    assert machines(POD_0_IP="").ips[0] == "10.0.0.1"
    four = machines(MP_NNODE="4", MP_NUM="4", POD_IPS="10.0.0.1, 10.0.0.2,10.0.0.3,fd00::0:4", HOST_IP="fd00::4")
    assert (four.host, [*four.ranks]) == (3, [3])


def test_a_host_that_does_not_serve_names_its_ranks_and_the_master():
    assert machines(HOST_IP="10.0.0.1").why_not_served == ""
    holds = "of the model; requests are served by 10.0.0.1"
    assert machines().why_not_served == f"this host holds ranks 2 and 3 {holds}"
    assert machines(MP_NUM="2").why_not_served == f"this host holds rank 1 {holds}"
    assert machines(MP_NUM="6").why_not_served == f"this host holds ranks 3, 4 and 5 {holds}"


def test_the_address_that_this_machine_has_is_its_own():
    own = machines(POD_IPS="203.0.113.1,127.0.0.1", POD_0_IP="203.0.113.1", HOST_IP="")
    assert (own.host, own.is_master) == (1, False)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"POD_IPS": ""}, "POD_IPS is '', it must have one address for each of MP_NNODE=2 hosts"),
        ({"POD_IPS": "10.0.0.1"}, "POD_IPS is '10.0.0.1', it must have one address for each of MP_NNODE=2 hosts"),
        ({"MP_NNODE": "1"}, "POD_IPS is '10.0.0.1,10.0.0.2', it must have one address for each of MP_NNODE=1 hosts"),
        ({"POD_IPS": "10.0.0.1,node-2"}, "POD_IPS has 'node-2', it must be IP addresses with commas between them"),
        ({"POD_IPS": "10.0.0.1,10.0.0.1"}, "POD_IPS is '10.0.0.1,10.0.0.1', it must not name a host twice"),
        ({"MP_NUM": "3"}, "MP_NUM is 3, it must be a multiple of MP_NNODE, 2"),
        ({"MP_NUM": "1"}, "MP_NUM is 1, it must be a multiple of MP_NNODE, 2"),
        ({"POD_0_IP": "10.0.0.3"}, "POD_0_IP is '10.0.0.3', it must be one of POD_IPS, 10.0.0.1,10.0.0.2"),
        ({"HOST_IP": "10.0.0.3"}, "HOST_IP is '10.0.0.3', it must be one of POD_IPS, 10.0.0.1,10.0.0.2"),
        ({"HOST_IP": "me"}, "HOST_IP has 'me', it must be an IP address"),
        (
            {"POD_IPS": "203.0.113.1,203.0.113.2", "POD_0_IP": "", "HOST_IP": ""},
            "HOST_IP must say which of POD_IPS, 203.0.113.1,203.0.113.2, this machine is: it has none of them",
        ),
        (
            {"POD_IPS": "127.0.0.1,127.0.0.2", "POD_0_IP": "", "HOST_IP": ""},
            "HOST_IP must say which of POD_IPS, 127.0.0.1,127.0.0.2, this machine is: it has 127.0.0.1 and 127.0.0.2",
        ),
        ({"INTER_NODE_PORT": "8110"}, "INTER_NODE_PORT is 8110, which HEALTH_HTTP_PORT has already"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(environ, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        machines(**environ)


def test_the_port_between_machines_matters_only_to_several():
    assert Config.from_env({"INTER_NODE_PORT": "8110"}).mp_nnode == 1
    assert "INTER_NODE_PORT" not in ports.ports_of(Config())


def test_an_address_that_this_machine_has_not_is_a_problem_of_its_variable():
    names = ("HEALTH_HTTP_PORT", "SERVICE_GRPC_PORT", "METRICS_HTTP_PORT", "INTER_NODE_PORT")
    free = {name: str(port) for name, port in zip(names, free_ports(len(names)), strict=True)}
    pods = {"POD_IPS": "203.0.113.1,203.0.113.2", "POD_0_IP": "203.0.113.1", "HOST_IP": "203.0.113.2"}
    config = Config.from_env({**TWO, **free, **pods, "SERVICE_HTTP_PORT": "-1"})
    [problem] = ports.problems(config)
    assert problem.startswith("HOST_IP is '203.0.113.2', which is no address of this machine: ")


@pytest.fixture
def on_the_second_of_two(monkeypatch):
    for name, text in TWO.items():
        monkeypatch.setenv(name, text)


@pytest.mark.usefixtures("on_the_second_of_two")
def test_a_host_exports_its_own_ranks_and_needs_no_others(checkpoint, exported, tmp_path):
    made = model_source.export(checkpoint("qwen2"), tmp_path / "cache")
    assert {path.name for path in made.glob("rank_*")} == {"rank_2", "rank_3"}
    whole = exported("qwen2", num_ranks=4)
    for name in ("manifest.json", "config.json", "rank_3/model.json", "rank_3/model.pdiparams"):
        assert (made / name).read_bytes() == (whole / name).read_bytes()
    assert model_source.export(made, tmp_path / "cache") == made
    assert model_source.export(whole, tmp_path / "cache") == whole


@pytest.mark.usefixtures("on_the_second_of_two")
def test_a_model_with_the_ranks_of_another_host_is_refused(exported, tmp_path):
    with pytest.raises(ModelError, match="is an exported graph, but rank_2/model.json is missing"):
        model_source.export(exported("qwen2", num_ranks=4, ranks=(0, 1)), tmp_path)


@pytest.mark.usefixtures("on_the_second_of_two")
@pytest.mark.parametrize(("host_ip", "folder"), [("10.0.0.1", "node1"), ("10.0.0.2", "node2")])
def test_each_host_fetches_its_own_part_from_a_mirror(monkeypatch, tmp_path, host_ip, folder):
    monkeypatch.setenv("HOST_IP", host_ip)
    monkeypatch.setenv("MODEL_MIRROR", "http://127.0.0.1:9")
    asked = []

    def download(name, directory, options):
        asked.append(options.part)
        return download_model.ModelDownload(tmp_path, None, is_static=True)

    monkeypatch.setattr(download_model, "download", download)
    model_source.find_source(Config.from_env(), "an-org/a-model-2nodes", lambda text: None)
    assert asked == [folder]
