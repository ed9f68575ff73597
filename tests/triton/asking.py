"""Requests of tests to a whole server: over HTTP in the native protocol, over gRPC as a client of the predecessor."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import random
import time
import urllib.request

import numpy as np
import tritonclient.grpc as triton

from tests.patience import wait_until

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def post(server, path, body, headers=None):
    """Return status and JSON of a native answer in one piece."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["SERVICE_HTTP_PORT"], timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def get(port, path):
    """Return status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def health_of(server, what):
    """Return the answer of the health port to `live`, `ready` or `started`."""
    return get(server.ports["HEALTH_HTTP_PORT"], f"/v2/health/{what}")


@contextlib.contextmanager
def stream_of(server, body):
    request = urllib.request.Request(f"{server.http_url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        yield (json.loads(line) for line in response)


def stream_lines(server, body):
    with stream_of(server, body) as lines:
        return list(lines)


def grpc_request(fields):
    tensor = triton.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([json.dumps([fields]).encode()], dtype=np.object_))
    return [tensor]


class GrpcStream:
    """One bidirectional stream to Triton."""

    def __init__(self, server):
        self.answers: queue.Queue = queue.Queue()
        self.client = triton.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def ask(self, fields):
        self.client.async_stream_infer("model", grpc_request(fields), request_id=str(fields.get("req_id")))

    def next(self):
        """Return the next message, a list with one object. An error has no list around it."""
        result, error = self.answers.get(timeout=120)
        assert error is None, error
        return json.loads(result.as_numpy("OUT")[0])

    def lines(self, fields):
        """Return the whole answer, like `stream_lines`."""
        self.ask(fields)
        lines = self.next()
        while not lines[-1]["is_end"]:
            lines += self.next()
        return lines

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def facts(server):
    """Return the model information, once no request is open."""
    with GrpcStream(server) as stream:
        [state] = stream.lines({"probe": True})
        return state


def wait_until_idle(server):
    def held():
        state = facts(server)
        return [name for name in ("num_open", "num_running", "num_waiting", "num_blocks_held") if state[name]]

    wait_until(lambda: not held(), held)


def settled(read, server):
    """Return a value that is reported with a delay."""
    seen = [read(server)]
    while len(seen) < 8 or seen[-8] != seen[-1]:
        time.sleep(0.25)
        seen.append(read(server))
    return seen[-1]


def long_answers(count, seed=0, length=96):
    """Return requests whose answers take a while: greedy and seeded, forced to their full length."""
    rng = random.Random(seed)
    return [
        {
            "text": f"Tell me a short story. {rng.randint(0, 999)}",
            "max_dec_len": length,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0 if index % 2 else 8.0,
            "seed": index,
            "req_id": f"long-{seed}-{index}-{time.monotonic_ns()}",
        }
        for index in range(count)
    ]
