"""`run_batch`: every request of a file gets its line, once, whatever happens in between."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from yarl import URL

from engine.errors import InvalidRequest, Overloaded
from server_scripts import run_batch
from server_scripts.run_batch import BatchError, BatchProgress, _ask
from tests.pure.gateway_fake import WAIT, FakeBackend, running

ROOT = Path(__file__).resolve().parents[3]
RUN = [sys.executable, "-c", "import sys; from server_scripts.run_batch import main; sys.exit(main())"]
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}


class Files:
    def __init__(self, folder):
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines):
        self.input.write_bytes(b"\n".join([*map(self._encoded, lines), b"\n"]))

    @staticmethod
    def _encoded(line):
        return line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()

    def answers(self):
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({line["id"] for line in lines}) == len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}

    def start(self, url, *more, **environ):
        command = [*RUN, str(self.input), str(self.output), "--url", url, *more]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def run(self, url, *more, **environ):
        """Run the command and return its status and output."""
        process = self.start(url, *more, **environ)
        _, said = process.communicate(timeout=60)
        return process.returncode, said


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture
def refused(files, monkeypatch, capsys):
    """Return a function that runs a wrong call in this process and returns its message; the status must be 2."""

    def refused(url, **environ):
        monkeypatch.setattr(sys, "argv", ["run_batch", str(files.input), str(files.output), "--url", url])
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert run_batch.main() == 2
        return capsys.readouterr().err

    return refused


def a_request(custom_id, url="/v1/chat/completions", **fields):
    return {"custom_id": str(custom_id), "method": "POST", "url": url, "body": {**BODIES[url], **fields}}


@pytest.mark.slow
def test_a_server_without_an_http_port_is_a_sentence_and_that_of_triton_is_one(files, tmp_path):
    files.write(a_request("1"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SERVICE_HTTP_PORT": "-1"}

    def run(**environ):
        command = [*RUN, str(files.input), str(files.output)]
        return subprocess.run(command, env={**env, **environ}, capture_output=True, text=True, timeout=60)

    done = run()
    assert done.returncode == 2
    assert "run_batch: the server has no HTTP port (SERVICE_HTTP_PORT=-1); --url" in done.stderr
    assert "Traceback" not in done.stderr
    with running(FakeBackend("a")) as gateway:
        assert run(TRITON_HTTP_PORT=str(gateway.port)).returncode == 0
    assert files.answers()["1"]["response"]["status_code"] == 200


@pytest.mark.parametrize("names", [("-i", "-o"), ("--input-file", "--output-file")])
def test_the_files_may_be_named_as_for_other_servers(files, monkeypatch, names):
    files.write(a_request("1"))
    named = [names[0], str(files.input), names[1], str(files.output)]
    with running(FakeBackend("a")) as gateway:
        monkeypatch.setattr(sys, "argv", ["run_batch", "--url", gateway.url, *named])
        assert run_batch.main() == 0
    assert files.answers()["1"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("given", "missing"),
    [((), "the input and the output file"), (("-o", "x"), "the input file"), (("x",), "the output file")],
)
def test_a_missing_file_is_said(monkeypatch, capsys, given, missing):
    monkeypatch.setattr(sys, "argv", ["run_batch", *given])
    with pytest.raises(SystemExit) as ended:
        run_batch.main()
    assert (ended.value.code, missing in capsys.readouterr().err) == (2, True)


@pytest.mark.slow
def test_every_path_of_the_server_may_be_asked_and_an_error_is_the_affair_of_its_line(files):
    wrong = a_request("wrong", temperature=-1)
    files.write(*[a_request(path, path) for path in BODIES], wrong)
    with running(FakeBackend("Hel", "lo")) as gateway:
        status, said = files.run(gateway.url)
    assert (status, "5/5" in said, "1 errors" in said) == (0, True, True)
    answers = files.answers()
    assert set(answers) == {*BODIES, "wrong"}
    chat = answers["/v1/chat/completions"]["response"]
    assert (chat["status_code"], chat["body"]["choices"][0]["message"]["content"]) == (200, "Hello")
    assert chat["request_id"] == chat["body"]["id"]
    assert answers["/v1/messages"]["response"]["body"]["content"][0]["text"] == "Hello"
    refused = answers["wrong"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "temperature")
    assert {line["error"] for line in answers.values()} == {None}


@pytest.mark.slow
def test_it_goes_on_after_an_interruption_and_asks_nothing_twice(files):
    files.write(*[a_request(index, request_id=f"r{index}") for index in range(6)])
    backend = FakeBackend("a")
    backend.scripts = [("a",), ("a",), (WAIT, "a")]
    with running(backend) as gateway:
        process = files.start(gateway.url, "--at-once", "1")
        assert backend.waiting.acquire(timeout=60)
        process.send_signal(signal.SIGINT)
        assert "to continue" in process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert set(files.answers()) == {"0", "1"}
        with files.output.open("a") as output:
            output.write('{"id": "batch_req_x", "custom_id": "2", "resp')  # of a write that did not end
        backend.go()
        assert files.run(gateway.url)[0] == 0
        assert set(files.answers()) == {str(index) for index in range(6)}
        asked = [body["req_id"] for body in backend.bodies]
        assert files.run(gateway.url)[0] == 0
    assert sorted(asked) == sorted([*(f"r{index}" for index in range(6)), "r2"])
    assert len(backend.bodies) == len(asked)


@pytest.mark.slow
def test_a_client_retries_after_the_time_that_it_got(files, monkeypatch):
    files.write(a_request("a"), a_request("b"))
    backend = FakeBackend("a")
    backend.scripts = [(Overloaded("full"),), (InvalidRequest("no"),)]
    with running(backend) as gateway:
        assert files.run(gateway.url, "--at-once", "1")[0] == 0
    statuses = {name: line["response"]["status_code"] for name, line in files.answers().items()}
    assert statuses == {"a": 400, "b": 200}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is no JSON"),
        (b'{"custom_id": "\xff"}', "line 2 is no JSON: 'utf-8' codec can't decode byte 0xff"),
        ("[" * 100_000, "line 2 is nested too deeply"),
        ([1], "line 2: must be a JSON object, it is a list"),
        ({"url": "/v1/completions"}, "line 2: custom_id must be a text, it is null"),
        (a_request("first"), "line 2: custom_id 'first' is that of line 1"),
        ({**a_request("b"), "method": "GET"}, "line 2: method must be POST, it is 'GET'"),
        ({**a_request("b"), "url": "v1/completions"}, "line 2: url must be a path"),
        *[
            ({**a_request("b"), "url": url}, "line 2: url must be a path")
            for url in ("//h:1/v1", "http://h/v1", "/\\h/v1", "\\\\h/v1", "/\t/h/v1", "/\n/h/v1", "/\ud800", "@h/v1")
        ],
        ({**a_request("b"), "body": []}, "line 2: body must be an object, it is a list"),
        (a_request("b", stream=True), "line 2: body.stream must be false"),
    ],
)
def test_a_wrong_line_is_found_before_anything_is_asked(files, refused, line, says):
    files.write(a_request("first"), line)
    assert says in refused("http://127.0.0.1:1")
    assert not files.output.exists()


def test_the_key_goes_to_no_other_host_though_the_file_changes_after_it_was_checked(files):
    server = URL("http://127.0.0.1:1")
    session = Mock()
    session.post.side_effect = BatchError("asked")
    with pytest.raises(BatchError, match="asked"):
        asyncio.run(_ask(session, server, {"url": "//elsewhere:2/v1", "body": {}}, Mock()))
    assert session.post.call_args.args[0].origin() == server
    with pytest.raises(BatchError, match="'@elsewhere/v1' is not a path of the server"):
        asyncio.run(_ask(session, server, {"url": "@elsewhere/v1", "body": {}}, Mock()))


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "localhost:8000", "http://h/v1", "http://h/v1/", "http://", "ftp://h"]
)
def test_a_server_that_is_no_address_is_named_before_anything_is_asked(files, refused, url):
    files.write(a_request("a"))
    assert f"without a path; it is {url!r}" in refused(url)
    assert not files.output.exists()


@pytest.mark.slow
def test_no_more_requests_are_open_than_the_file_has(files):
    files.write(a_request("a"))
    with running(FakeBackend("a")) as gateway:
        assert files.run(gateway.url, "--at-once", str(10**9))[0] == 0  # as many tasks would fill the memory
    assert set(files.answers()) == {"a"}


@pytest.mark.slow
def test_errors_that_keep_it_from_working_are_printed(files):
    files.write(a_request("a"))
    status, said = files.run("http://127.0.0.1:1")
    expected = "run_batch: no server can be asked at http://127.0.0.1:1: connection refused\n"
    assert (status, said.splitlines(keepends=True)[-1]) == (1, expected)
    with running(FakeBackend("a"), api_key="secret") as gateway:
        status, said = files.run(gateway.url, API_KEY="wrong")
        assert (status, "rejects the API key" in said, files.answers()) == (2, True, {})
        status, said = files.run(gateway.url)
        assert (status, "requires an API key: set API_KEY" in said) == (2, True)
        assert files.run(gateway.url, API_KEY="secret")[0] == 0


@pytest.mark.slow
def test_ids_that_are_no_unicode_text_stay_apart(files):
    files.write(a_request("\ud800"), a_request("\ud801"))
    with running(FakeBackend("a")) as gateway:
        assert files.run(gateway.url)[0] == 0
        assert sorted(files.answers()) == ["\ud800", "\ud801"]
        assert files.run(gateway.url)[0] == 0
        assert sorted(files.answers()) == ["\ud800", "\ud801"]


@pytest.mark.parametrize("write", [Mock(side_effect=OSError(28, "No space left on device")), Mock(return_value=3)])
def test_an_answer_that_cannot_be_written_is_no_wrong_setting(write):
    with pytest.raises(BatchError, match="an answer cannot be written") as caught:
        BatchProgress(Mock(), SimpleNamespace(write=write)).write({"custom_id": "a"}, 200, {})
    assert caught.value.status == 1


def test_a_file_that_is_not_there_is_named(files, refused):
    assert f"run_batch: {files.input}: No such file or directory" in refused("http://127.0.0.1:1")


def test_a_certificate_that_is_not_there_is_named(files, refused):
    files.write(a_request("a"))
    said = refused("", TLS_CERT_FILE="certs/mine.pem", TLS_KEY_FILE="certs/mine.key")
    assert "TLS_CERT_FILE is 'certs/mine.pem': [Errno 2] No such file" in said


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("line", [json.dumps(a_request("a")), "notes", '{"id": "batch"}', "[]"])
def test_a_file_that_is_no_output_of_run_batch_stays_as_it_is(files, refused, line, end):
    files.write(a_request("a"))
    files.output.write_text(line + end)
    assert "line 1 is no answer of run_batch's" in refused("http://127.0.0.1:1")
    assert files.output.read_text() == line + end


@pytest.mark.parametrize("name", ["input", "output"])
def test_a_file_that_can_be_read_only_once_is_refused(files, refused, name):
    files.write(a_request("a"))
    setattr(files, name, "/dev/null")  # as a pipe would be
    assert "/dev/null must be a regular file" in refused("http://127.0.0.1:1")


@pytest.mark.parametrize("link", [os.link, os.symlink, None])
def test_the_input_is_not_written_over_by_whichever_of_its_names(files, refused, link):
    files.input.write_text(json.dumps(a_request("a")))
    if link:
        link(files.input, files.output)
    else:
        files.output = files.input
    assert "is the input" in refused("http://127.0.0.1:1")
    assert files.input.read_text() == json.dumps(a_request("a"))
