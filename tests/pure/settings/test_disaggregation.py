"""Settings of prefill, decode and scheduler instances: wrong combinations are refused by the names of the variables."""

import pytest

from engine.errors import ConfigError
from engine.settings.config import Config

PREFILLS = {"INNODE_PREFILL_PORTS": "7013"}
SHARING = {"REPLICAS": "10.0.0.2:8811", "REPLICA_CACHE_PORT": "8700"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SPLITWISE_ROLE": "decode"}, "needs INNODE_PREFILL_PORTS or PREFILL_INSTANCES"),
        ({"SPLITWISE_ROLE": "decode", "INNODE_PREFILL_PORTS": "7013,70130"}, "has '70130', it must be ports"),
        (PREFILLS, "INNODE_PREFILL_PORTS is for SPLITWISE_ROLE=decode, SPLITWISE_ROLE is mixed"),
        ({"PREFILL_INSTANCES": "a:1"}, "PREFILL_INSTANCES is for SPLITWISE_ROLE=decode, SPLITWISE_ROLE is mixed"),
        ({"SPLITWISE_ROLE": "scheduler"}, "needs REPLICAS"),
        ({"REPLICA_CACHE_PORT": "8700"}, "REPLICA_CACHE_PORT is 8700, it needs REPLICAS"),
        ({**SHARING, "SWAP_SPACE": "1"}, "SWAP_SPACE is 1, it must be 0 with REPLICA_CACHE_PORT=8700"),
        ({**SHARING, "KV_TRANSFER": "nixl"}, "SPLITWISE_ROLE=mixed without KV_TRANSFER=nixl; they are mixed and nixl"),
        ({**SHARING, **PREFILLS, "SPLITWISE_ROLE": "decode"}, "REPLICA_CACHE_PORT is 8700, it is for SPLITWISE_ROLE=m"),
        ({"SPLITWISE_ROLE": "prefill", "DATA_PARALLEL_SIZE": "2"}, "DATA_PARALLEL_SIZE is 2, it must be 1"),
        (
            {"SPLITWISE_ROLE": "decode", **PREFILLS, "ENABLE_PREFIX_CACHING": "0"},
            "ENABLE_PREFIX_CACHING is 0, it must be 1 with SPLITWISE_ROLE=decode",
        ),
        (
            {"SPLITWISE_ROLE": "decode", **PREFILLS, "KV_TRANSFER": "mooncake"},
            "KV_TRANSFER is 'mooncake': Mooncake is not supported, because .*; use nixl",
        ),
        (
            {"SPLITWISE_ROLE": "decode", **PREFILLS, "KV_TRANSFER": "nixl", "TLS_CERT_FILE": "a", "TLS_KEY_FILE": "b"},
            "KV_TRANSFER is nixl, which does not encrypt blocks, and TLS_CERT_FILE is set",
        ),
        ({"SPLITWISE_ROLE": "prefill", "SERVICE_HTTP_PORT": "65300"}, "SERVICE_HTTP_PORT is 65300, ports up to 400"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_env(environ)


def test_prefill_instances_of_this_machine_and_of_others_are_used_together():
    config = Config.from_env({"SPLITWISE_ROLE": "decode", **PREFILLS, "PREFILL_INSTANCES": "host:7023"})
    assert sorted(config.prefill_addresses) == [("127.0.0.1", 7013), ("host", 7023)]
