"""Requests that check the running server like a client: the model's state, and a real request through every port.

`python -m server_scripts.probe` is the health check of a container: exit status 0 if the server is ready. It runs every
few seconds, so gRPC, which takes a quarter of a second to load, is imported only where it is used.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from engine import wire
from engine.address import connect_host, in_url
from engine.errors import RequestError
from engine.settings.config import Config
from engine.settings.tls import key_and_chain
from server_scripts.tls_client import certified_name, client_context

TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0  # for a real request, which may be the first one of a large model
HEALTH_TIMEOUT_S = 4.0
OPEN_TIMEOUT_S = 2.0
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


Json = dict[str, Any]


class ProbeError(Exception):
    """The server did not answer as expected; the message names the port and the answer."""


class Probe:
    """Client of the server's own ports.

    Every call opens a connection, waits for the answer and raises ProbeError on failure.
    """

    def __init__(self, config: Config, http_timeout_s: float = REQUEST_TIMEOUT_S):
        self._config = config
        self._http_timeout_s = http_timeout_s
        self._host = connect_host(config.service_host)

    def state(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return what the model reports about itself and the engine, see engine.wire.ModelState."""
        with self._channel(self._config.triton_target, "tritonserver") as channel:
            return self._infer(channel, {wire.PROBE: True}, timeout_s, _of_model)

    def check_all_ports(self) -> None:
        """Send a real request through every enabled port. Raise ProbeError for the first one that fails."""
        if self._config.machines.is_master:
            self._check_requests()
        self.check_ready()
        self.http(self._config.metrics_http_port, "GET", "/metrics")

    def check_model(self) -> None:
        """Send a real request directly to the model, because the gateway makes requests wait during a reload."""
        self._check_request(self._config.triton_target, "tritonserver")
        self.check_ready()

    def _check_requests(self) -> None:
        port = self._config.service_grpc_port
        self._check_request(f"{in_url(self._host)}:{port}", f"gRPC port {port}", port)
        if self._config.service_http_port > 0:
            body = json.dumps(self._small_request())
            text = self.http(self._config.service_http_port, "POST", "/v1/chat/completions", body)
            if json.loads(text).get("error_code"):
                raise ProbeError(f"HTTP port {self._config.service_http_port}: {text[:500]}")

    def _check_request(self, target: str, name: str, port: int = 0) -> None:
        with self._channel(target, name, port) as channel:
            answer = self._infer(channel, self._small_request(), REQUEST_TIMEOUT_S, _of_gateway if port else _of_model)
        if answer.get("error_code"):
            raise ProbeError(f"{name}: {answer['error_msg']}")

    def check_ready(self) -> None:
        """Raise ProbeError unless the health port reports that the server is ready."""
        self.http(self._config.health_http_port, "GET", "/v2/health/ready")

    def num_open(self) -> int:
        """Return the number of unfinished requests, or 0 if the model does not answer: they cannot finish then."""
        return self._count("num_open")

    def num_blocks_held(self) -> int:
        """Return the number of KV blocks that requests or other instances hold, or 0 if the model does not answer."""
        return self._count("num_blocks_held")

    def _count(self, name: str) -> int:
        try:
            return int(self.state(OPEN_TIMEOUT_S)[name])
        except ProbeError:
            return 0

    def _small_request(self) -> dict[str, Any]:
        max_dec_len = int(not self.state()["num_labels"])  # a classifier generates no tokens
        text = {"text": "Hi", "apply_chat_template": False, "truncate_prompt_tokens": 1}  # fits any MAX_SEQ_LEN
        return {"req_id": f"start-{uuid.uuid4()}", **text, "max_dec_len": max_dec_len}

    def _infer(self, channel: Any, body: Json, timeout_s: float, read: Callable[[bytes], Json]) -> Json:
        """Return the fields of the last response of a streamed request, parsed by `read`.

        The stream is read to its end: Triton 2.51 keeps the model loaded for a stream that is abandoned earlier, and
        its exit would then take the whole exit timeout.
        """
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        from engine.wire.triton import infer_request, payload_of

        answer: Json = {}
        metadata = [(name.lower(), value) for name, value in self._auth_header.items()]
        requests = iter([infer_request(body)])
        responses = GRPCInferenceServiceStub(channel).ModelStreamInfer(requests, timeout=timeout_s, metadata=metadata)
        for response in responses:
            payload = payload_of(response)
            try:
                answer = read(payload)
            except (ValueError, msgspec.MsgspecError) as error:
                raise ProbeError(f"an answer of {len(payload)} bytes is unreadable: {error}") from None
        if not answer.get("is_end"):
            raise ProbeError("the answer had no end")
        return answer

    @contextlib.contextmanager
    def _channel(self, target: str, name: str, port: int = 0) -> Iterator[Any]:
        """Yield a gRPC channel to one of the server's ports or to tritonserver.

        Failures are raised as ProbeError with `name`.
        """
        import grpc

        try:
            if port and self._config.tls_cert_file:
                _, chain = key_and_chain(self._config)
                options = [
                    *CHANNEL_OPTIONS,
                    ("grpc.ssl_target_name_override", certified_name(self._config, self._host, port)),
                ]
                opened = grpc.secure_channel(target, grpc.ssl_channel_credentials(chain), options)
            else:
                opened = grpc.insecure_channel(target, CHANNEL_OPTIONS)
            with opened as channel:
                yield channel
        except grpc.RpcError as error:
            raise ProbeError(f"{name}: {error.details()}") from None
        except (RequestError, ProbeError, OSError) as error:
            raise ProbeError(f"{name}: {error}") from None

    @property
    def _auth_header(self) -> dict[str, str]:
        key = self._config.api_key or next(iter(self._config.owners), "")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def connection(self, host: str, port: int) -> http.client.HTTPConnection:
        """Return an HTTP or HTTPS connection, without a proxy."""
        timeout_s = self._http_timeout_s
        if port == self._config.service_http_port and self._config.tls_cert_file:
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=client_context(self._config))
        return http.client.HTTPConnection(host, port, timeout=timeout_s)  # never through a proxy

    def http(self, port: int, method: str, path: str, body: str | None = None) -> str:
        """Return the body of a response with status 200. Raise ProbeError for any other result."""
        headers = {"Content-Type": "application/json"} if body else {}
        if port == self._config.service_http_port:
            headers |= self._auth_header
        connection = self.connection(self._host, port)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ProbeError(f"port {port}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise ProbeError(f"port {port}: {method} {path} was answered with {response.status}: {text[:500]}")
        return text


def _of_model(payload: bytes) -> Json:
    return wire.read_answer(payload).fields()


def _of_gateway(payload: bytes) -> Json:
    answer = json.loads(payload)
    return answer[0] if isinstance(answer, list) else answer


def main() -> int:
    """Return 0 if the server is ready, otherwise print the reason and return 1."""
    try:
        Probe(Config.from_env(), HEALTH_TIMEOUT_S).check_ready()
    except ProbeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
