"""Tests of survival of the whole server: streams outlive the supervisor, the engine survives silence, and secrets are
hidden from other users.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import json
import os
import re
import signal
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as triton_client

from server_scripts.health import ENGINE_SILENT_S
from server_scripts.run_dir import RunDir
from tests.patience import in_background, wait_until
from tests.server import a_server, is_alive, is_clean, paused, pids_of, running_server, state_of
from tests.triton.asking import grpc_request, health_of, post, settled


@pytest.fixture
def server(tmp_path):
    """Return a server that does not run yet. It is stopped at the end if it runs."""
    server = a_server(tmp_path, {})
    yield server
    assert server.command("stop_server", "0").returncode == 0


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Return a server for tests after which it still runs."""
    with running_server(tmp_path_factory.mktemp("running"), {"MAX_DEC_LEN": "4000"}) as server:
        yield server


def test_files_and_sockets_are_for_this_user_alone(running):
    made = [*Path("/dev/shm").glob(f"{RunDir(running.run_dir).shm_prefix}*"), running.run_dir]
    made += [path for path in running.run_dir.iterdir() if not path.is_dir()]
    assert {"engine.sock", "state.json"} <= {path.name for path in made}
    assert {path.name: path.stat().st_mode & 0o077 for path in made} == dict.fromkeys([path.name for path in made], 0)


class Stream:
    """A long answer over HTTP, read in the background."""

    def __init__(self, server, max_dec_len=600):
        self.lines = []
        body = {"text": "Tell me", "temperature": 0, "ignore_eos": True, "stream": True, "req_id": str(id(self))}
        body |= {"max_dec_len": max_dec_len, "min_dec_len": max_dec_len}
        self._request = urllib.request.Request(f"{server.http_url}/v1/chat/completions", json.dumps(body).encode())
        self._read = in_background(self._read_all)

    def _read_all(self):
        with urllib.request.urlopen(self._request, timeout=120) as response:
            for line in response:
                self.lines.append(json.loads(line))

    def wait_for(self, count):
        """Wait for so many tokens: how many come in one line depends on how busy the machine is."""
        wait_until(lambda: sum(len(line["token_ids"]) for line in self.lines) >= count or self._read.done())

    def answer(self):
        self._read.result(120)
        assert self.lines[-1]["is_end"] == 1 and not self.lines[-1]["error_msg"]
        return self.lines[-1]["tokens_all_ids"]


def test_a_killed_supervisor_cuts_no_stream_and_the_next_start_takes_all_over(server):
    assert server.command("start_server").returncode == 0
    expected = Stream(server).answer()
    before = pids_of(state_of(server))[1:]
    stream = Stream(server)
    stream.wait_for(5)
    os.kill(server.pid_of("supervisor"), signal.SIGKILL)
    assert stream.answer() == expected
    streams = [Stream(server) for _ in range(4)]
    streams[0].wait_for(5)
    done = server.command("start_server")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "taking over what an earlier start_server has left running" in done.stdout
    assert pids_of(state_of(server))[1:] == before
    assert [stream.answer() for stream in streams] == [expected] * 4

    stream = Stream(server)
    stream.wait_for(5)
    os.kill(server.pid_of("engine"), signal.SIGKILL)  # it is no child of the one that restarts it
    assert stream.answer() == expected
    stream, state = Stream(server, 300), state_of(server)
    stream.wait_for(5)
    assert server.command("stop_server").returncode == 0
    stream.answer()
    assert is_clean(server, state)


@pytest.mark.thorough
def test_a_start_with_other_settings_or_a_stop_ends_what_a_killed_supervisor_has_left(server):
    assert server.command("start_server").returncode == 0
    before = state_of(server)
    os.kill(before.supervisor.pid, signal.SIGKILL)
    refused = server.command("start_server", "no-name")
    assert refused.returncode == 1, refused.stdout
    assert all(process.is_alive for process in before.processes)  # it was no reason to end what answers
    server.env["BATCH_SIZE"] = "7"
    done = server.command("start_server")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has other settings or another model: ending it" in done.stdout
    assert not any(process.is_alive for process in before.processes)

    state, stream = state_of(server), Stream(server, 300)
    stream.wait_for(5)
    os.kill(state.supervisor.pid, signal.SIGKILL)
    assert server.command("stop_server").returncode == 0
    stream.answer()  # to its end
    assert is_clean(server, state)


class GrpcStream:
    """One long request and its answers. It is closed when it has its end, as clients do."""

    def __init__(self, server, number, max_dec_len=1000, **more):
        self.answers = []
        self._client = triton_client.InferenceServerClient(server.grpc_url)
        self._client.start_stream(self._note)
        body = {"text": "Tell me", "req_id": str(number), "ignore_eos": True, "temperature": 0}
        body |= {"max_dec_len": max_dec_len, "min_dec_len": max_dec_len, **more}
        self._client.async_stream_infer("model", grpc_request(body))

    def _note(self, result, error):
        if error:  # the stream's end: its request has had its own
            return
        answer = json.loads(result.as_numpy("OUT")[0])
        self.answers.append(answer[0] if isinstance(answer, list) else answer)

    def wait_for(self, count):
        """Wait for so many tokens."""
        wait_until(lambda: sum(len(answer["token_ids"]) for answer in self.answers) >= count)

    def close(self):
        wait_until(lambda: self.answers[-1]["is_end"])
        self._client.stop_stream()
        self._client.close()
        return self.answers


@pytest.fixture(scope="module")
def expected(running):
    """Return the answer of a stream that nothing disturbs."""
    return Stream(running).answer()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("victim", "number"),
    [*[(name, signal.SIGKILL) for name in ("engine", "stub", "tritonserver")], ("stub", signal.SIGSTOP)],
)
def test_a_death_under_open_streams_is_a_pause(running, expected, victim, number):
    wait_until(lambda: is_known(running, victim))  # the supervisor notes a new stub some seconds later
    pid = running.pid_of(victim)
    over_http, over_grpc = [Stream(running) for _ in range(4)], [GrpcStream(running, n, 600) for n in range(4)]
    for stream in (*over_http, *over_grpc):
        stream.wait_for(3)
    os.kill(pid, number)
    assert [stream.answer() for stream in over_http] == [expected] * 4
    for stream in over_grpc:
        answers = stream.close()
        assert [answer["error_msg"] for answer in answers] == [""] * len(answers)
        assert sum((answer["token_ids"] for answer in answers), []) == answers[-1]["tokens_all_ids"] == expected
        starts = [0, *(answer["send_idx"] + len(answer["token_ids"]) for answer in answers)]
        assert [answer["send_idx"] for answer in answers] == starts[:-1]
    for stream in over_http:
        assert sum((line["token_ids"] for line in stream.lines), []) == expected


def http_lines(server, body, **headers):
    """Return the lines of a streamed answer, until it ends or is cut."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{server.http_url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError), urllib.request.urlopen(request) as response:
        yield from filter(None, map(bytes.strip, response))


def is_known(server, name):
    with contextlib.suppress(LookupError):
        return server.pid_of(name) > 0


def takes_connections(server, *names):
    with contextlib.suppress(OSError):
        for name in names:
            socket.create_connection(("127.0.0.1", server.ports[name])).close()
        return True


def num_generated(server):
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=60) as response:
        return float(re.search(r"^llm_generated_tokens_total (\S+)$", response.read().decode(), re.M)[1])


def test_a_stream_that_has_lost_its_gateway_worker_is_resumed_and_nothing_is_computed_twice(running):
    count, numbers = 2500, itertools.count()
    first = Stream(running, count)
    expected = first.answer()
    ask = {"temperature": 0, "ignore_eos": True, "stream": True}
    native = {**ask, "text": "Tell me", "max_dec_len": count, "min_dec_len": count}
    openai = {**ask, "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": count, "min_tokens": count}

    def attempt():
        """Kill the worker under three streams. Return what was read of them, unless one has ended before, as it may
        have on a fast machine.
        """
        name, before = f"lost-{next(numbers)}", settled(num_generated, running)
        over_http = (
            http_lines(running, native | {"req_id": f"{name}-1"}),
            http_lines(running, openai, X_Request_Id=f"{name}-2", Last_Event_ID="0"),
        )
        lines, events = ([next(each)] for each in over_http)
        over_grpc = GrpcStream(running, f"{name}-3", count)
        over_grpc.wait_for(1000)
        killed, engine = running.pid_of("gateway-0"), running.pid_of("engine")
        with paused(engine):  # so that no stream ends before the worker does
            os.kill(killed, signal.SIGKILL)
        lines, events = [*lines, *over_http[0]], [*events, *over_http[1]]
        wait_until(lambda: not is_alive(killed))  # until then its ports may take connections
        wait_until(lambda: takes_connections(running, "SERVICE_HTTP_PORT", "SERVICE_GRPC_PORT"))
        wait_until(lambda: is_known(running, "gateway-0"))
        known = sum((answer["token_ids"] for answer in over_grpc.answers), [])
        has_ended = json.loads(lines[-1])["is_end"] or events[-1] == b"data: [DONE]" or len(known) == count
        return not has_ended and (name, before, lines, events, known)

    name, before, lines, events, known = wait_until(attempt)
    seen = json.loads(lines[-1])
    native["req_id"] = f"{name}-1"
    lines += http_lines(running, native | {"resume_from": seen["send_idx"] + len(seen["token_ids"])})
    last_id = [line[4:].decode() for line in events if line.startswith(b"id: ")][-1]
    events += http_lines(running, openai, X_Request_Id=f"{name}-2", Last_Event_ID=last_id)
    again = GrpcStream(running, f"{name}-3", count, resume_from=len(known))
    again.wait_for(1)
    assert 1000 <= len(known) < count
    assert sum((json.loads(line)["token_ids"] for line in lines), []) == expected
    assert known + sum((answer["token_ids"] for answer in again.close()), []) == expected
    reported = [json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in events if b"{" in line]
    assert "".join(reported) == first.lines[-1]["tokens_all"]
    # Also the steps that ran when they were cut, which are as many as the machine is slow; an answer that was begun
    # anew would be 1,000 tokens more, at least.
    assert settled(num_generated, running) - before < 3 * count + 900


def test_a_stop_with_many_streams_gives_each_its_one_end(server):
    server.env.update({"DRAIN_TIMEOUT": "0.5", "BATCH_SIZE": "16", "MAX_DEC_LEN": "4000"})
    assert server.command("start_server").returncode == 0
    engine, numbers = server.pid_of("engine"), itertools.count()

    def open_streams():
        """Return streams that have begun, unless one has ended, as it may have on a fast machine."""
        with paused(engine):
            streams = [GrpcStream(server, next(numbers), max_dec_len=3900) for _ in range(16)]
        for stream in streams:
            stream.wait_for(2)
        if not any(stream.answers[-1]["is_end"] for stream in streams):
            return streams
        for stream in streams:
            stream.close()
        return None

    streams = wait_until(open_streams)
    with paused(engine):  # so that none ends while the others are waited for
        os.kill(server.pid_of("supervisor"), signal.SIGTERM)
        ends = [stream.close() for stream in streams]
    for *deltas, last in ends:
        assert last["error_msg"] == "the server is stopping"
        assert not any(delta["is_end"] or delta["error_msg"] for delta in deltas)
    wait_until(lambda: state_of(server) is None)
    assert "Signal (" not in (server.log_dir / "server.log").read_text()  # no crash
    assert "has not ended in time" not in (server.log_dir / "console.log").read_text()


class Collector(http.server.BaseHTTPRequestHandler):
    """OTLP collector that records the trace id and name of each span."""

    def do_POST(self):
        for resource in json.loads(self.rfile.read(int(self.headers["Content-Length"])))["resourceSpans"]:
            spans = [span for scope in resource["scopeSpans"] for span in scope["spans"]]
            self.server.received.update((span["traceId"], span["name"]) for span in spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.thorough
def test_a_stop_right_after_an_answer_loses_no_span_of_it(server):
    trace_id, body = "0af7651916cd43dd8448eb211c80319c", {"text": "Hello", "max_dec_len": 20}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.received = set()
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
        thread.start()
        server.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector.server_port}"
        assert server.command("start_server").returncode == 0
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        assert post(server, "/v1/chat/completions", body, headers)[0] == 200
        assert server.command("stop_server").returncode == 0
        collector.shutdown()
        thread.join()
    assert {(trace_id, "queue"), (trace_id, "prefill"), (trace_id, "decode")} <= collector.received


def test_a_stopped_engine_is_not_ready_long_before_it_is_ended_and_ready_when_it_goes_on(running):
    assert [health_of(running, what)[0] for what in ("live", "ready", "started")] == [200, 200, 200]
    engine = running.pid_of("engine")
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: health_of(running, "ready")[0] != 200, patience_s=ENGINE_SILENT_S / 2)
    assert "the engine has been silent for" in health_of(running, "ready")[1]
    assert [health_of(running, what)[0] for what in ("live", "started")] == [200, 200]
    os.kill(engine, signal.SIGCONT)
    wait_until(lambda: health_of(running, "ready")[0] == 200)
    assert running.pid_of("engine") == engine
