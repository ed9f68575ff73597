"""`start_server --reload` under load: no request fails, and every answer is one model's."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from engine.exporting.export import ExportOptions, export
from tests.checkpoints import make_checkpoint
from tests.patience import wait_until
from tests.server import running_server, state_of
from tests.triton.asking import GrpcStream, stream_lines

one_rank, two_ranks = pytest.param("1", id="one rank"), pytest.param("2", id="two ranks")
PROMPTS = ("Hello", "Tell me", "A", "Why is the sky blue?")
NUM_TOKENS = 100
TIMEOUT_S = 120
PAUSE_S = 0.3


def on(*ranks):
    """Mark a test for servers with these numbers of ranks. A server is shared by all of its tests."""
    return pytest.mark.parametrize("server", ranks, indirect=True, scope="module")


def a_body(prompt, req_id):
    fixed = {"temperature": 0, "ignore_eos": True, "max_dec_len": NUM_TOKENS, "min_dec_len": NUM_TOKENS}
    return {"text": prompt, "req_id": req_id, "stream": True, **fixed}


def over_grpc(server, body):
    with GrpcStream(server) as stream:
        return stream.lines(body)


class Load:
    """Four clients that ask one thing after another, two over each protocol. They leave some of the processor's time to
    the reload, which would otherwise take several times as long."""

    def __init__(self, server):
        self.answers = []  # prompt, all of its lines
        self.failures = []
        self._server = server
        self._is_over = threading.Event()
        asks = [stream_lines, over_grpc] * 2
        self._threads = [threading.Thread(target=self._run, args=(n, ask)) for n, ask in enumerate(asks)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def _run(self, number, ask):
        count = 0
        while not self._is_over.is_set():
            prompt = PROMPTS[(number + count) % len(PROMPTS)]
            try:
                self.answers.append((prompt, ask(self._server, a_body(prompt, f"{number}-{count}"))))
            except Exception as error:
                self.failures.append(error)
                return
            count += 1
            self._is_over.wait(PAUSE_S)

    def wait_for(self, count):
        """Wait for this many more answers."""
        target = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= target or self.failures, patience_s=TIMEOUT_S)

    def tokens(self):
        """Return the tokens of every answer, with its prompt."""
        assert self.failures == []
        assert [lines[-1]["error_msg"] for _, lines in self.answers if lines[-1]["error_msg"]] == []
        for _, lines in self.answers:
            assert sum((line["token_ids"] for line in lines), []) == lines[-1]["tokens_all_ids"]
        return [(prompt, lines[-1]["tokens_all_ids"]) for prompt, lines in self.answers]


def answers_of(server):
    """Return the answers of the current model to every prompt."""
    return {prompt: stream_lines(server, a_body(prompt, f"alone {prompt}"))[-1]["tokens_all_ids"] for prompt in PROMPTS}


def models(server):
    with urllib.request.urlopen(f"{server.http_url}/v1/models", timeout=TIMEOUT_S) as response:
        return [model["id"] for model in json.loads(response.read())["data"]]


def reloaded(server, model_dir):
    server.env["MODEL_DIR"] = str(model_dir)
    return server.command("start_server", "--reload")


@pytest.fixture(scope="module")
def server(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("server")
    settings = {"MP_NUM": request.param, "BLOCK_BS": "16", "DRAIN_TIMEOUT": "60", "CPU_THREADS": "1"}
    with running_server(folder, {"MODEL_DIR": str(make_checkpoint(folder / "first", "llama")), **settings}) as running:
        yield running


@pytest.mark.sampled(2)
@on(one_rank, two_ranks)
def test_under_load_the_model_changes_and_every_answer_is_the_old_ones_or_the_new_ones(server, tmp_path):
    old = answers_of(server)
    before = state_of(server)
    with Load(server) as load:
        load.wait_for(4)
        done = reloaded(server, make_checkpoint(tmp_path / "second", "qwen3"))
        assert done.returncode == 0, done.stdout + done.stderr
        load.wait_for(12)  # four may be of the old model
    new = answers_of(server)
    assert all(old[prompt] != new[prompt] for prompt in PROMPTS)
    of_old = [tokens == old[prompt] for prompt, tokens in load.tokens()]
    of_new = [tokens == new[prompt] for prompt, tokens in load.tokens()]
    assert [a or b for a, b in zip(of_old, of_new, strict=True)] == [True] * len(of_old)
    assert sum(of_old) >= 4 and sum(of_new) >= 8
    assert models(server) == ["second"]
    pids = [{each.name: each.pid for each in state.processes} for state in (before, state_of(server))]
    assert {name for name in pids[0] if pids[0][name] == pids[1][name]} == {"gateway-0", "health"}


@pytest.mark.thorough
@on(one_rank)
def test_a_model_that_does_not_become_ready_leaves_the_one_before(server, tmp_path):
    """Exported, so that it is found out by the engine alone."""
    old, served, broken = answers_of(server), models(server), tmp_path / "broken"
    export(make_checkpoint(tmp_path / "checkpoint", "qwen2"), broken, ExportOptions())
    [weights, *_] = sorted(broken.rglob("*.pdiparams"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with Load(server) as load:
        load.wait_for(4)
        done = reloaded(server, broken)
        load.wait_for(4)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: engine ended with exit status" in done.stdout
    assert f"restoring {served[0]}" in done.stdout
    assert all(tokens == old[prompt] for prompt, tokens in load.tokens())
    assert (models(server), state_of(server).phase, answers_of(server)) == (served, "ready", old)


@on(one_rank)
def test_a_checkpoint_that_cannot_be_exported_changes_nothing_at_all(server, tmp_path):
    before = state_of(server)
    broken = make_checkpoint(tmp_path / "broken", "qwen2")
    (broken / "model.safetensors").write_bytes(b"no weights")
    done = reloaded(server, broken)
    assert (done.returncode, state_of(server)) == (1, before)
    assert "failed: exporting" in done.stdout
    shutil.rmtree(broken)
    assert "which does not exist" in reloaded(server, Path(broken)).stdout


@pytest.mark.thorough
@on(one_rank)
def test_answers_of_the_old_model_are_not_continued_by_the_new_one(server, tmp_path):
    whole = stream_lines(server, a_body("Hello", "begun"))[-1]["tokens_all_ids"]
    assert reloaded(server, make_checkpoint(tmp_path / "third", "mistral")).returncode == 0
    with pytest.raises(urllib.error.HTTPError) as refused:
        stream_lines(server, {**a_body("Hello", "begun"), "resume_from": 10})
    with refused.value as answer:
        assert answer.code == 404
    assert stream_lines(server, {**a_body("Hello", "begun"), "resume_from": 0})[-1]["tokens_all_ids"] != whole
