"""Which machines there are and which one this is, from settings alone."""

import re

import pytest

from engine.errors import ConfigError
from engine.settings.config import Config
from server_scripts import ports
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


def test_who_does_not_serve_says_what_it_does_and_who_does():
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
    names = ("HEALTH_HTTP_PORT", "SERVICE_GRPC_PORT", "METRICS_HTTP_PORT", "INTER_PROC_PORT", "INTER_NODE_PORT")
    free = {name: str(port) for name, port in zip(names, free_ports(len(names)), strict=True)}
    pods = {"POD_IPS": "203.0.113.1,203.0.113.2", "POD_0_IP": "203.0.113.1", "HOST_IP": "203.0.113.2"}
    config = Config.from_env({**TWO, **free, **pods, "SERVICE_HTTP_PORT": "-1"})
    [problem] = ports.problems(config)
    assert problem.startswith("HOST_IP is '203.0.113.2', which is no address of this machine: ")
