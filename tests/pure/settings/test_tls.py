"""The certificate: which files are taken, what is said of the others, and how the server's own questions trust it."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import grpc
import pytest

from engine import wire
from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.tls import key_and_chain, server_context
from engine.settings.unused import likely_misspelt
from gateway.__main__ import listen
from server_scripts.probe import Probe, ProbeError, _of_gateway
from server_scripts.tls_client import certified_name
from tests.pure.inference_fake import PATIENCE_S, FakeTriton, serving

FILES = Path(__file__).resolve().parents[2] / "certificates"  # for llm.example, until the year 2126
CERTIFICATE, KEY = str(FILES / "server.pem"), str(FILES / "server.key")
RIGHT = Config(tls_cert_file=CERTIFICATE, tls_key_file=KEY)


def test_without_a_certificate_there_is_no_tls():
    assert server_context(Config()) is None


def test_a_certificate_and_its_key_are_taken():
    assert isinstance(server_context(RIGHT), ssl.SSLContext)
    key, chain = key_and_chain(RIGHT)
    assert b"PRIVATE KEY" in key and b"CERTIFICATE" in chain


@pytest.mark.parametrize(
    ("certificate", "key", "text"),
    [
        (CERTIFICATE, str(FILES / "other.key"), "the key is not that of the certificate"),
        (CERTIFICATE, str(FILES / "locked.key"), "TLS_KEY_FILE is encrypted, and its password cannot be entered here"),
        (
            CERTIFICATE,
            "/nowhere/key",
            "TLS_KEY_FILE is '/nowhere/key', which cannot be read: No such file or directory",
        ),
        ("/nowhere", KEY, "TLS_CERT_FILE is '/nowhere', which cannot be read: No such file or directory"),
        (KEY, KEY, "these are no certificate and its key in PEM"),
        (CERTIFICATE, CERTIFICATE, "these are no certificate and its key in PEM"),
        (__file__, KEY, "these are no certificate and its key in PEM"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_the_reason(certificate, key, text):
    with pytest.raises(ConfigError) as caught:
        server_context(Config(tls_cert_file=certificate, tls_key_file=key))
    assert text in str(caught.value)


@pytest.mark.parametrize(("given", "missing"), [("TLS_CERT_FILE", "TLS_KEY_FILE"), ("TLS_KEY_FILE", "TLS_CERT_FILE")])
def test_one_file_without_the_other_is_named(given, missing):
    with pytest.raises(ConfigError, match=f"{missing} is not set; TLS needs both"):
        Config.from_env({given: "x.pem"})


def test_openssls_own_variable_is_not_taken_for_a_misspelt_one():
    assert likely_misspelt({"SSL_CERT_FILE": "ca.pem"}) == []
    assert likely_misspelt({"TLS_CERTFILE": "x.pem"}) != []


def test_a_probe_trusts_the_certificate_whatever_its_name_is(tmp_path):
    async def scenario():
        credentials = grpc.ssl_server_credentials([key_and_chain(RIGHT)])
        triton = FakeTriton(wire.write_answer(wire.ModelState(ready=True)))
        async with serving(tmp_path, triton, credentials) as (_, port):
            assert await asyncio.to_thread(certified_name, RIGHT, "127.0.0.1", port) == "llm.example"
            probe = Probe(RIGHT.changed(service_host="127.0.0.1", service_grpc_port=port))

            def ask():
                with probe._channel(f"127.0.0.1:{port}", "gRPC", port) as channel:
                    return probe._infer(channel, {"probe": True}, PATIENCE_S, _of_gateway)

            assert (await asyncio.to_thread(ask))["ready"]

    asyncio.run(scenario())


def test_a_port_without_a_certificate_fails_the_probe():
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ProbeError, match="gRPC"), Probe(RIGHT)._channel("", "gRPC", port):
            pass
