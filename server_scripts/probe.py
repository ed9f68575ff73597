"""Asks the running server, as a client would: is it there, does the model answer, does every port."""

from __future__ import annotations

import http.client
import json
import uuid
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine import wire
from engine.address import in_url
from engine.errors import RequestError
from engine.settings.config import Config
from engine.wire.triton import infer_request, read_response
from server_scripts.ports import connect_host

TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0  # for a real request, which may be the first of a large model
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


class ProbeError(Exception):
    """The server did not answer as it should; the message says which port and what came instead."""


class Probes:
    def __init__(self, config: Config):
        self._config = config
        self._host = connect_host(config.service_host)
        self._target = f"{in_url(self._host)}:{config.service_grpc_port}"

    def is_live(self) -> bool:
        """True when tritonserver answers, whatever the model does."""
        with grpc.insecure_channel(self._target, CHANNEL_OPTIONS) as channel:
            try:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                return stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=TIMEOUT_S).live
            except grpc.RpcError:
                return False

    def state(self) -> dict[str, Any]:
        """What the model says about itself and the engine, see engine.wire.ModelState."""
        return self._infer({wire.PROBE: True}, TIMEOUT_S).fields()

    def check(self) -> None:
        """A real request through every enabled port. Raises ProbeError at the first that is not answered."""
        ask = {"req_id": f"start-{uuid.uuid4()}", "text": "Hi", "apply_chat_template": False, "max_dec_len": 1}
        answer = self._infer(ask, REQUEST_TIMEOUT_S)
        if isinstance(answer, wire.Failure):
            raise ProbeError(f"gRPC port {self._config.service_grpc_port}: {answer.error}")
        if self._config.service_http_port > 0:
            body = json.dumps(ask | {"req_id": f"start-{uuid.uuid4()}"})
            text = self._http(self._config.service_http_port, "POST", "/v1/chat/completions", body)
            if json.loads(text).get("error_code"):
                raise ProbeError(f"HTTP port {self._config.service_http_port}: {text[:500]}")
        self._http(self._config.health_http_port, "GET", "/v2/health/ready")
        self._http(self._config.metrics_http_port, "GET", "/metrics")

    def _infer(self, body: dict[str, Any], timeout_s: float) -> wire.Answer:
        """The last response of a streamed request. Reads on to the end of the stream: Triton 2.51 keeps the model
        loaded for a stream that was left before, and its exit would take the whole exit timeout."""
        answer: wire.Answer | None = None
        with grpc.insecure_channel(self._target, CHANNEL_OPTIONS) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                for response in stub.ModelStreamInfer(iter([infer_request(body)]), timeout=timeout_s):
                    answer = read_response(response)
            except RequestError as error:
                raise ProbeError(f"gRPC port {self._config.service_grpc_port}: {error}") from None
            except grpc.RpcError as error:
                raise ProbeError(f"gRPC port {self._config.service_grpc_port}: {error.details()}") from None
        if answer is None or not answer.is_end:
            raise ProbeError(f"gRPC port {self._config.service_grpc_port}: the answer had no end")
        return answer

    def _http(self, port: int, method: str, path: str, body: str | None = None) -> str:
        headers = {"Content-Type": "application/json"} if body else {}
        if self._config.api_key and port == self._config.service_http_port:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        connection = http.client.HTTPConnection(self._host, port, timeout=REQUEST_TIMEOUT_S)  # no proxy, ever
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
