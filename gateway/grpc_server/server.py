"""The gRPC port: which methods there are, who may call them, and what a client may take of this process.

What may change the server or show its inside is not served at all: shared memory, model repository, logging, trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from engine.errors import EngineUnavailable
from engine.settings.config import Config
from engine.settings.served import ServedModel
from engine.wire import Owner
from gateway.api_keys import InvalidApiKey, owner_of
from gateway.body_memory import BodyMemoryBudget
from gateway.grpc_server.message_limits import IncomingMessages, IncompleteMessageLimiter
from gateway.grpc_server.stream import STOPPING, InferStream, StreamContext
from gateway.health import ANSWER_WITHIN_S, readiness
from gateway.triton_client import TritonBackend
from gateway.triton_connections import SERVICE, TritonConnections, failure

log = logging.getLogger(__name__)

HEALTH = "grpc.health.v1.Health/Check"
INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
# Methods that are passed on, with their requests: None where Triton looks at none of it.
PASSED_ON: dict[str, type[Message] | None] = {
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
PASS_ON_WITHIN_S = 60.0  # a method that is passed on, unless its client has less patience
NAMED_WITHIN_S = 10.0  # the message of such a method
ENVELOPE_BYTES = 64 << 10  # of a message around its text
MAX_STREAMS = 1024  # of one connection
MAX_CONNECTIONS = 4096
MAX_CALLS = 8192  # on all of them
MAX_UNSEEN = 16384  # streams that have come and that the event loop has not got to yet
UNSEEN_FOR_S = 300
LAST_WORDS_S = 2.0  # for the model's own last words after the drain timeout, and then for ours

OPTIONS = [  # of metadata gRPC itself takes 16 KiB at most
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 600_000),  # without a stream, so that nobody keeps the others out for nothing
    # What may come of a stream that nobody reads: without the probe it is that, and not what the network carries.
    ("grpc.http2.lookahead_bytes", 16 << 10),
    ("grpc.http2.bdp_probe", 0),
    # Beyond these gRPC itself ends a stream as CANCELLED: one in a thousand of a burst, by its own limits.
    ("grpc.server.max_pending_requests", MAX_UNSEEN),
    ("grpc.server.max_pending_requests_hard_limit", MAX_UNSEEN),
    ("grpc.server_max_unrequested_time_in_server", UNSEEN_FOR_S),
]
Respond = Callable[[Any, Any], Awaitable[None]]


class GrpcServer(grpc.GenericRpcHandler):
    """Belongs to the event loop it is made in."""

    def __init__(self, connections: TritonConnections, config: Config):
        self._connections = connections
        self._owners = config.owners
        ready = readiness(TritonBackend(connections), ANSWER_WITHIN_S)
        served, intake = ServedModel(config.run_path), BodyMemoryBudget.for_worker(config)
        self._way = StreamContext(connections, ready, served, intake, config.max_body_bytes)
        self._streams: set[InferStream] = set()
        self._unfinished = IncompleteMessageLimiter(intake.max_bytes)
        self._watch: asyncio.Task[None] | None = None
        options = [*OPTIONS, ("grpc.max_receive_message_length", config.max_body_bytes + ENVELOPE_BYTES)]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self,))

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """The port. Raises RuntimeError when it cannot listen there."""
        if credentials:
            port = self._server.add_secure_port(address, credentials)
        else:
            port = self._server.add_insecure_port(address)
        await self._server.start()
        self._watch = asyncio.create_task(self._unfinished.watch(port))
        log.info("listening on %s for gRPC", address)
        return port

    async def drain(self, timeout_s: float) -> None:
        """New requests are refused, running ones may end; what runs longer ends with an error."""
        stopped = asyncio.ensure_future(self._server.stop(timeout_s + 2 * LAST_WORDS_S))
        for stream in self._streams:
            stream.stop()
        await asyncio.wait({stopped}, timeout=timeout_s + LAST_WORDS_S)
        for stream in self._streams:
            stream.cut(EngineUnavailable(STOPPING))
        await stopped
        if self._watch:
            self._watch.cancel()
        await self._connections.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """gRPC asks for each call who takes it."""
        method = handler_call_details.method.lstrip("/")
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
        if method in PASSED_ON:
            return grpc.stream_stream_rpc_method_handler(self._passing_on(method))
        return _refusing(grpc.StatusCode.UNIMPLEMENTED, "this server does not have this method")

    def _owner(self, metadata: Any) -> Owner | None:
        """Who asks; None: somebody without a key, where one is needed."""
        if not self._owners:
            return Owner()
        given = next((value for name, value in metadata if name == "authorization"), "")
        with contextlib.suppress(InvalidApiKey):
            return owner_of(given if isinstance(given, str) else "", self._owners)
        return None

    async def _infer(self, _: Any, context: Any) -> None:
        with self._unfinished.incoming(context) as incoming:
            await self._serve(context, incoming)

    async def _serve(self, context: Any, incoming: IncomingMessages) -> None:
        owner = self._owner(context.invocation_metadata()) or Owner()
        stream, started = InferStream(self._way, context, incoming, owner), time.monotonic()
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

    async def _reflect(self, _: Any, context: Any) -> None:
        from gateway.grpc_server import reflection  # only here: few clients ask

        with self._unfinished.incoming(context) as incoming:
            while (message := await incoming.next(NAMED_WITHIN_S)) is not grpc.aio.EOF:
                try:
                    await context.write(reflection.answer(message))
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _passing_on(self, method: str) -> Respond:
        kind = PASSED_ON[method]

        async def respond(_: Any, context: Any) -> None:
            patience_s = min(context.time_remaining() or PASS_ON_WITHIN_S, PASS_ON_WITHIN_S)
            message = b""
            if kind is not None:  # else it is not waited for
                with self._unfinished.incoming(context) as incoming:
                    message = await incoming.next(NAMED_WITHIN_S) or b""  # EOF is false
            try:
                answer = await self._connections.ask(method, _fresh(kind, message), patience_s)
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except grpc.aio.AioRpcError as error:
                known = error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
                await context.abort(error.code(), error.details() if known else failure(error))
            await context.write(_without_closed(answer) if method.endswith("/ServerMetadata") else answer)

        return respond


def _refusing(code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    async def refuse(_: Any, context: Any) -> None:
        await context.abort(code, text)

    return grpc.stream_stream_rpc_method_handler(refuse)  # which waits for no message


def _fresh(kind: Any, message: bytes) -> bytes:
    """Name and version are all that these requests have. Raises ValueError."""
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
