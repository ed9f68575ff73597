"""gRPC server of the public port: its methods, their authentication, and the limits of what a client may use.

Methods that change the server or reveal its internals are not served: shared memory, model repository, logging and
trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from engine.errors import EngineUnavailable
from engine.settings.config import Config
from engine.settings.served import ServedModel
from engine.wire import Owner
from gateway.api_keys import InvalidApiKey, authenticate
from gateway.body_memory import BodyMemoryBudget
from gateway.grpc_server.message_limits import IncomingMessages, IncompleteMessageLimiter
from gateway.grpc_server.replica_methods import ReplicaMethods
from gateway.grpc_server.stream import STOPPING, InferStream, StreamContext
from gateway.health import ANSWER_WITHIN_S, readiness
from gateway.replicas.backend import ReplicatedBackend
from gateway.replicas.replica_set import ReplicaSet
from gateway.triton_client import TritonBackend
from gateway.triton_connections import SERVICE, TritonConnections, failure

log = logging.getLogger(__name__)

HEALTH = "grpc.health.v1.Health/Check"
INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
# Methods that are forwarded, with the type of their request; None if the request is empty.
FORWARDED: dict[str, type[Message] | None] = {
    HEALTH: None,
    f"{SERVICE}/ServerLive": None,
    f"{SERVICE}/ServerReady": None,
    f"{SERVICE}/ServerMetadata": None,
    f"{SERVICE}/ModelReady": service_pb2.ModelReadyRequest,
    f"{SERVICE}/ModelMetadata": service_pb2.ModelMetadataRequest,
    f"{SERVICE}/ModelConfig": service_pb2.ModelConfigRequest,
    f"{SERVICE}/ModelStatistics": service_pb2.ModelStatisticsRequest,
}
REFLECTION = tuple(f"grpc.reflection.{each}.ServerReflection/ServerReflectionInfo" for each in ("v1", "v1alpha"))
UNGUARDED = (*REFLECTION, HEALTH, f"{SERVICE}/ServerLive", f"{SERVICE}/ServerReady", f"{SERVICE}/ModelReady")
OPEN_EXTENSIONS = ("model_configuration", "binary_tensor_data", "parameters", "statistics")
MAX_NAME_LEN = 256
FORWARD_TIMEOUT_S = 60.0  # longest wait for a forwarded method; the client may set a shorter one
MESSAGE_TIMEOUT_S = 10.0  # longest wait for the message of such a method
ENVELOPE_BYTES = 64 << 10  # allowance for the message around its text
MAX_STREAMS = 1024  # streams of one connection
MAX_CONNECTIONS = 4096
MAX_CALLS = 8192  # calls on all connections
MAX_PENDING_STREAMS = 16384  # streams that have arrived and that the event loop has not started yet
PENDING_TIMEOUT_S = 300
ERROR_RESPONSES_S = 2.0  # for the model's own error responses after the drain timeout, and the same again for ours

OPTIONS = [  # gRPC itself limits metadata to 16 KiB
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Connections without a stream are closed.
    ("grpc.max_connection_idle_ms", 600_000),
    # Bytes buffered for a stream that is not read. The BDP probe would raise them to what the network carries.
    ("grpc.http2.lookahead_bytes", 16 << 10),
    ("grpc.http2.bdp_probe", 0),
    # Beyond these limits gRPC ends a stream as CANCELLED. Its defaults hit one stream in a thousand of a burst.
    ("grpc.server.max_pending_requests", MAX_PENDING_STREAMS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_STREAMS),
    ("grpc.server_max_unrequested_time_in_server", PENDING_TIMEOUT_S),
]
Respond = Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]


class GrpcServer(grpc.GenericRpcHandler):
    """gRPC server of one worker. It belongs to the event loop in which it is created."""

    def __init__(self, connections: TritonConnections, config: Config, replicas: ReplicaSet | None = None):
        self._connections = connections
        self._of_replicas = ReplicaMethods(replicas, connections) if replicas else None
        self._owners = config.owners
        ready = readiness(TritonBackend(connections), ANSWER_WITHIN_S)
        served, body_memory = ServedModel(config.run_path), BodyMemoryBudget.for_worker(config)
        replicated = ReplicatedBackend(replicas) if replicas else None
        self._shared = StreamContext(connections, ready, served, body_memory, config.max_body_bytes, replicated)
        self._streams: set[InferStream] = set()
        self._limiter = IncompleteMessageLimiter(body_memory.max_bytes)
        self._watch: asyncio.Task[None] | None = None
        options = [*OPTIONS, ("grpc.max_receive_message_length", config.max_body_bytes + ENVELOPE_BYTES)]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self,))

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen on `address` and return the port. Raise RuntimeError if that is impossible."""
        if credentials:
            port = self._server.add_secure_port(address, credentials)
        else:
            port = self._server.add_insecure_port(address)
        await self._server.start()
        self._watch = asyncio.create_task(self._limiter.watch(port))
        log.info("listening on %s for gRPC", address)
        return port

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until the running ones have finished.

        After `timeout_s` seconds the rest ends with an error.
        """
        stopped = asyncio.ensure_future(self._server.stop(timeout_s + 2 * ERROR_RESPONSES_S))
        for stream in self._streams:
            stream.stop()
        await asyncio.wait({stopped}, timeout=timeout_s + ERROR_RESPONSES_S)
        for stream in self._streams:
            stream.cut(EngineUnavailable(STOPPING))
        await stopped
        if self._watch:
            self._watch.cancel()
        await self._connections.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call. gRPC invokes it for every call."""
        method = handler_call_details.method.lstrip("/")
        if self._of_replicas and method in self._of_replicas.methods:
            if self._of_replicas.is_replica(handler_call_details.invocation_metadata):
                return grpc.stream_stream_rpc_method_handler(self._for_replica(self._of_replicas.methods[method]))
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, "API_KEY and API_KEYS must be equal on all replicas")
        if method not in UNGUARDED and self._owner(handler_call_details.invocation_metadata) is None:
            text = "the API key is missing or wrong, the metadata must have `authorization: Bearer <key>`"
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, text)
        if method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self._infer)
        if method in REFLECTION:
            return grpc.stream_stream_rpc_method_handler(self._reflect)
        if method == INFER:
            text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
            return _refusing(grpc.StatusCode.UNIMPLEMENTED, text)
        if method in FORWARDED:
            return grpc.stream_stream_rpc_method_handler(self._forwarding(method))
        return _refusing(grpc.StatusCode.UNIMPLEMENTED, "this server does not have this method")

    def _owner(self, metadata: Iterable[tuple[str, str | bytes]]) -> Owner | None:
        """Return the owner of the API key, or None if a required key is missing or wrong."""
        if not self._owners:
            return Owner()
        given = next((value for name, value in metadata if name == "authorization"), "")
        with contextlib.suppress(InvalidApiKey):
            return authenticate(given if isinstance(given, str) else "", self._owners)
        return None

    async def _infer(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        with self._limiter.incoming(context) as incoming:
            await self._serve(context, incoming)

    async def _serve(self, context: grpc.aio.ServicerContext, incoming: IncomingMessages) -> None:
        owner = self._owner(context.invocation_metadata()) or Owner()
        stream, started = InferStream(self._shared, context, incoming, owner), time.monotonic()
        self._streams.add(stream)
        try:
            await stream.serve()
        finally:
            self._streams.discard(stream)
            log.info(
                "gRPC stream %.3fs%s %d requests %d responses",
                time.monotonic() - started,
                f" {owner.name}" if owner.name else "",
                stream.num_requests,
                stream.num_responses,
            )

    def _for_replica(self, respond: Callable[[IncomingMessages, grpc.aio.ServicerContext], Awaitable[None]]) -> Respond:
        async def limited(_: Any, context: grpc.aio.ServicerContext) -> None:
            with self._limiter.incoming(context) as incoming:
                await respond(incoming, context)

        return limited

    async def _reflect(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        from gateway.grpc_server import reflection  # imported late because few clients use it

        with self._limiter.incoming(context) as incoming:
            while (message := await incoming.next(MESSAGE_TIMEOUT_S)) is not grpc.aio.EOF:
                try:
                    await context.write(reflection.answer(message))
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _forwarding(self, method: str) -> Respond:
        kind = FORWARDED[method]

        async def respond(_: Any, context: grpc.aio.ServicerContext) -> None:
            timeout_s = min(context.time_remaining() or FORWARD_TIMEOUT_S, FORWARD_TIMEOUT_S)
            message = b""
            if kind is not None:  # otherwise the message is not read
                with self._limiter.incoming(context) as incoming:
                    message = await incoming.next(MESSAGE_TIMEOUT_S) or b""  # EOF is falsy
            try:
                answer = await self._connections.ask(method, _rewritten(kind, message), timeout_s)
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except grpc.aio.AioRpcError as error:
                known = error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
                await context.abort(error.code(), error.details() if known else failure(error))
            await context.write(_without_closed(answer) if method.endswith("/ServerMetadata") else answer)

        return respond


def _refusing(code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, text)

    return grpc.stream_stream_rpc_method_handler(refuse)  # a stream handler does not wait for a message


def _rewritten(kind: Any, message: bytes) -> bytes:
    """Return a new message with the name and version of the client's; these requests have no other fields.

    Raise ValueError.
    """
    if kind is None:
        return b""
    try:
        given = kind.FromString(message)
    except DecodeError:
        raise ValueError(f"the message is no {kind.DESCRIPTOR.name}") from None
    for field, value in (("name", given.name), ("version", given.version)):
        if len(value) > MAX_NAME_LEN:
            raise ValueError(f"the {field} has {len(value)} characters, the limit is {MAX_NAME_LEN}")
    return kind(name=given.name, version=given.version).SerializeToString()


def _without_closed(answer: bytes) -> bytes:
    metadata = service_pb2.ServerMetadataResponse.FromString(answer)
    metadata.extensions[:] = [name for name in metadata.extensions if name in OPEN_EXTENSIONS]
    return metadata.SerializeToString()
