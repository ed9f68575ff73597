"""gRPC server reflection: the services of the public port and their messages, for grpcurl and similar tools."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import ReflectionServicer
from tritonclient.grpc import service_pb2

MAX_REQUEST_BYTES = 1024  # a name
FILES = (service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
SERVICER = ReflectionServicer([service.full_name for each in FILES for service in each.services_by_name.values()])


def answer(message: bytes) -> bytes:
    """Answer one request, whose messages are the same in v1 and v1alpha. Raise ValueError if it is malformed."""
    if len(message) > MAX_REQUEST_BYTES:
        raise ValueError(f"the request has {len(message)} bytes, the limit is {MAX_REQUEST_BYTES}")
    try:
        request = reflection_pb2.ServerReflectionRequest.FromString(message)
    except DecodeError:
        raise ValueError("the message is no ServerReflectionRequest") from None
    [response] = SERVICER.ServerReflectionInfo([request], None)
    return bytes(response.SerializeToString())
