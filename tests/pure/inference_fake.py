"""The gRPC front with a fake of tritonserver behind it, and requests for both."""

from __future__ import annotations

import asyncio
import contextlib
import json

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine import wire
from engine.settings.config import Config
from engine.wire.triton import LENGTH_BYTES, infer_request
from gateway.grpc_server.server import GrpcServer
from gateway.triton_connections import TritonConnections

PATIENCE_S = 60  # only a test that fails waits that long
WAIT = object()  # in a script: what follows comes when the test says so
NEVER = object()  # in a script: nothing more comes


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers a request with one response for each item of its script: what the model writes, a text that it says, or
    an error that ends it."""

    def __init__(self, *script):
        self.script = script
        self.scripts = []  # of the first requests, when they differ
        self.on_shared_stream = ()  # the script of a shared stream
        self.requests = []
        self.num_sent = 0
        self.num_cancelled = 0
        self.is_waiting = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.go = asyncio.Event()  # what waits goes on

    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            if wire.PROBE_PAYLOAD in request.raw_input_contents[0]:
                yield a_response(wire.write_answer(wire.ModelState(ready=True)))
                return
            self.requests.append(request)
            script = self.scripts.pop(0) if self.scripts else self.script
            if f'"{wire.SHARE}":'.encode() in request.raw_input_contents[0]:
                script = self.on_shared_stream
            try:
                for item in script:
                    if item is WAIT:
                        self.is_waiting.set()
                        await self.go.wait()
                    elif item is NEVER:
                        await asyncio.Event().wait()
                    elif isinstance(item, grpc.StatusCode):
                        await context.abort(item, "unix:/run/secret/socket has failed")
                    else:
                        yield a_response(said(item) if isinstance(item, str) else item, request.id)
                        self.num_sent += 1
            except (asyncio.CancelledError, GeneratorExit):
                self.num_cancelled += 1
                self.is_cancelled.set()
                raise

    async def ServerLive(self, request, context):  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerMetadata(self, request, context):  # noqa: N802
        return service_pb2.ServerMetadataResponse(name="triton", extensions=["logging", "statistics", "classification"])

    async def ModelMetadata(self, request, context):  # noqa: N802
        self.requests.append(request)
        if request.name != "model":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        return service_pb2.ModelMetadataResponse(name=request.name)


def a_response(payload, name=""):
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.id = name
    response.infer_response.raw_output_contents.append(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
    return response


def said(text):
    return wire.write_answer(wire.Delta("", text, [], 0, wire.Usage(), 0))


def text_of(response):
    """Return the text of a response that a client of the gateway sees."""
    [fields] = json.loads(response.infer_response.raw_output_contents[0][LENGTH_BYTES:])
    return fields["token"]


def a_request(name="", **body):
    request = infer_request({"text": "hi", **body})
    request.id = name
    return request


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


@contextlib.asynccontextmanager
async def serving(folder, triton, credentials=None, replicas=None, **settings):
    """Run the gRPC server of a gateway in front of a fake tritonserver. Return it and the port where it listens."""
    config = Config(run_dir=str(folder), **settings)
    config.triton_socket.parent.mkdir(exist_ok=True)
    behind = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, behind)
    behind.add_insecure_port(config.triton_target)
    await behind.start()
    front = GrpcServer(TritonConnections(config.triton_target), config, replicas)
    port = await front.start("127.0.0.1:0", credentials)
    try:
        yield front, port
    finally:
        await front.drain(0)
        await behind.stop(None)


@contextlib.asynccontextmanager
async def a_client(port):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def answers(responses):
    """Return for each response its id, its text or the object of its error, and the error of Triton."""
    found = []
    async for response in responses:
        payload = b"".join(response.infer_response.raw_output_contents)[LENGTH_BYTES:]
        fields = json.loads(payload) if payload else ""
        reported = fields[0]["token"] if isinstance(fields, list) else fields
        found.append((response.infer_response.id, reported, response.error_message))
    return found
