"""Responses of every protocol of a server with the demo model, as text: what tests/golden/protocols/ holds.

    python -m tests.golden.protocols      # starts a server and writes the files anew

A file has the requests of one protocol in their order, each with the status, the headers and the bytes of its answer.
What differs between two runs or two machines is replaced: random ids, times, and floats with many digits. The tokens of
a stream may come together when the machine is busy, so a request is repeated until each comes alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from google.protobuf import text_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.golden.protocol_cases import BEFORE, CASES, RESPONSES, Case
from tests.patience import wait_until
from tests.server import RunningServer, running_server

FOLDER = Path(__file__).parent / "protocols"
MAX_ATTEMPTS = 60
LENGTH_BYTES = 4  # before each string of a tensor
KEYS = {"golden": {"key": "golden"}, "poor": {"key": "poor", "tokens_per_minute": 1}}
SETTINGS = {
    "BATCH_SIZE": "16",
    "MAX_BODY_BYTES": "65536",
    "SERVED_MODEL_NAME": "demo",
    "TOOL_CALL_PARSER": "hermes",
}
LEFT_OUT = ("date", "server", "content-length", "transfer-encoding", "connection")  # headers; and all of CORS
NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?"
NORMAL = [  # pattern, replacement
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<uuid>"),
    (r"(?<!\.)\b([a-z]+[-_])?[0-9a-f]{20,32}\b", r"\1<hex>"),  # no fraction of a float
    (r'("(?:created|created_at)": ?)\d{10}\b', r"\1<time>"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+", "<date>"),
    (r"\b\d{10}\.\d+\b", "<time>"),
    (rf'("(?:logprob|inference_time_cost|relevance_score|score)": ?){NUMBER}', r"\1<float>"),
    (r"-?\b\d+\.\d{3,}(?:e[-+]\d+)?\b|-?\b\d+(?:\.\d+)?e[-+]\d+\b", "<float>"),
    (r"<float>(?:, ?<float>){15,}", "<floats>"),
    (r"[A-Za-z0-9+/]{200,}={0,2}", "<base64>"),
    (r'(has used |retry-after: |"retry_after": ?|"error_value": ?)\d{2,}', r"\1<number>"),
]


@contextlib.contextmanager
def golden_server(folder: Path) -> Iterator[RunningServer]:
    keys = folder / "keys.json"
    keys.write_text(json.dumps(KEYS))
    with running_server(folder, {**SETTINGS, "API_KEYS": str(keys)}) as server:
        for case in BEFORE:
            answer(server, case)
        wait_until(
            lambda: '"status":"incomplete"' in answer(server, Case(f"{RESPONSES}/resp_background", method="GET"))
        )
        yield server


def answer(server: RunningServer, case: Case) -> str:
    """Return the normalised answer of the server to the case."""
    text = _over_grpc(server, case) if case.method == "gRPC" else _over_http(server, case)
    for pattern, replacement in NORMAL:
        text = re.sub(pattern, replacement, text)
    return text


def _over_http(server: RunningServer, case: Case) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["SERVICE_HTTP_PORT"], timeout=120)
    headers = {"Authorization": "Bearer golden", "Content-Type": "application/json", **case.headers}
    with contextlib.closing(connection):
        connection.request(case.method, case.path, case.payload, headers)
        response = connection.getresponse()
        named = sorted((name.lower(), value) for name, value in response.getheaders())
        kept = [each for each in named if each[0] not in LEFT_OUT and not each[0].startswith("access-control")]
        lines = [f"{name}: {value}" for name, value in kept]
        return "\n".join([str(response.status), *lines, "", response.read().decode()])


def _over_grpc(server: RunningServer, case: Case) -> str:
    request = service_pb2.ModelInferRequest(model_name="model", id="golden")
    request.inputs.add(name="IN", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(case.payload).to_bytes(LENGTH_BYTES, "little") + case.payload)
    metadata = [("authorization", case.headers.get("Authorization", "Bearer golden"))]
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            responses = list(stub.ModelStreamInfer(iter([request]), metadata=metadata, timeout=120))
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}\n"
    return "".join(map(_as_text, responses))


def _as_text(response: service_pb2.ModelStreamInferResponse) -> str:
    contents = [each[LENGTH_BYTES:].decode() for each in response.infer_response.raw_output_contents]
    del response.infer_response.raw_output_contents[:]
    return "\n".join([text_format.MessageToString(response, as_one_line=True), *contents, ""])


def entry(case: Case, answered: str) -> str:
    """Return what the file of its protocol has of a case."""
    request = f"{case.method} {case.path} {json.dumps(case.headers) if case.headers else ''}".rstrip()
    body = "" if case.payload is None else f"{case.payload[:300].decode()}\n"
    return f"=== {request}\n{body}--- {answered}\n"


def file_of(name: str, ask: Callable[[Case], str]) -> str:
    return "".join(entry(case, ask(case)) for case in CASES[name])


def finest(server: RunningServer, case: Case) -> str:
    """Return the answer in which every token comes alone: the longest of many."""
    return max((answer(server, case) for _ in range(MAX_ATTEMPTS if case.is_streamed else 1)), key=len)


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, golden_server(Path(folder)) as server:
        for name in CASES:
            text = file_of(name, lambda case: finest(server, case))
            if not names or name in names:
                (FOLDER / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
