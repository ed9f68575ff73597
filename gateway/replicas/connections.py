"""gRPC connections to another replica, with the methods that only replicas may call."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from engine.address import in_url
from engine.errors import RequestError
from engine.settings.config import Config
from engine.settings.tls import key_and_chain
from gateway.backend import ModelLost
from gateway.triton_connections import CHANNEL_OPTIONS, TritonConnections

REPLICAS = "llm.Replicas"  # the service
INFER, POLL = f"{REPLICAS}/ModelStreamInfer", f"{REPLICAS}/Poll"
TOKEN, FRONT_END = "x-replica-token", "x-replica-front-end"  # metadata
TRITON_ONLY_OPTIONS = ("grpc.default_authority",)  # options that are only for the socket of tritonserver
# Statuses with which another replica ends calls without the model: it is stopping or has other settings.
LOST = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


def replica_credentials(config: Config) -> grpc.ChannelCredentials | None:
    """Return the credentials for connections to replicas, which show certificates of the authorities that this system
    trusts, or the certificate of this server. Return None without TLS.
    """
    if not config.tls_cert_file:
        return None
    of_system = ssl.get_default_verify_paths().cafile
    roots = Path(of_system).read_bytes() if of_system else b""
    return grpc.ssl_channel_credentials(key_and_chain(config)[1] + b"\n" + roots)


class ReplicaConnections(TritonConnections):
    """Connections of the front end with the identity `front_end` to the gateway of another replica, which forwards
    requests to its own model only. The certificate of the replica must be valid for `host`, the name that was resolved
    to `address`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        host: str,
        token: str,
        credentials: grpc.ChannelCredentials | None,
        front_end: str = "",
    ):
        super().__init__(f"{in_url(address[0])}:{address[1]}")
        self._host = host
        self._metadata = ((TOKEN, token), (FRONT_END, front_end))
        self._credentials = credentials

    def _open(self) -> grpc.aio.Channel:
        options: list[tuple[str, Any]] = [
            (name, value) for name, value in CHANNEL_OPTIONS if name not in TRITON_ONLY_OPTIONS
        ]
        if self._credentials:
            options.append(("grpc.ssl_target_name_override", self._host))
            return grpc.aio.secure_channel(self._target, self._credentials, options=options)
        return grpc.aio.insecure_channel(self._target, options=options)

    def _method(self, channel: grpc.aio.Channel) -> Callable[[bytes], Any]:
        infer = channel.unary_stream(f"/{INFER}")
        return lambda request: infer(request, metadata=self._metadata)

    async def poll(self, request: bytes, timeout_s: float) -> bytes:
        """Return the answer to a poll. Raise AioRpcError."""
        ask = self._least_loaded().channel.unary_unary(f"/{POLL}")
        return await ask(request, timeout=timeout_s, metadata=self._metadata)

    def as_request_error(self, error: grpc.aio.AioRpcError, is_accepted: bool) -> RequestError:
        if error.code() in LOST:
            return ModelLost(f"the replica {self._target} has ended the request: {error.details()}")
        return super().as_request_error(error, is_accepted)
