"""Tests of structured output from real executors, with one rank and with two, and over crashes of the engine."""

import json
import threading

import jsonschema
import pytest

from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.errors import InvalidRequest
from engine.executors import make_executor
from engine.exporting.export import ExportOptions, export
from engine.grammars.pool import GrammarPool
from engine.link.journal import JournalEntry, Submission
from engine.link.server import Server
from engine.settings.config import Config
from engine.text.grammars import write_grammar
from engine.wire.structured_output_fields import STRUCTURED_OUTPUT_FIELDS
from tests.byte_tokenizer import EOS_ID
from tests.mtp_checkpoints import make_mtp_checkpoint
from tests.patience import wait_until
from tests.pure.engine_helpers import Collector, a_client, a_free_address
from tests.pure.guided import PROMPT, VOCAB_SIZE, Guided, a_request, load_tokenizer
from tests.pure.random_model import RandomModel
from tests.pure.random_schemas import random_schema

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "array",
    "items": {"enum": ["one", "two", {"three": [3, None]}, 4]},
    "minItems": 6,
    "maxItems": 9,
}


class Bytes:
    """A tokenizer for the vocabulary of the small checkpoints: a token a byte."""

    eos_token_ids = (299,)
    special_ids = frozenset(eos_token_ids)

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text, add_special_tokens):
        return list(text.encode())


def answers_of(graph_dir, vocab_size=300, **settings):
    config = Config(max_dec_len=256, batch_size=8, **settings)
    executor, grammars = make_executor(graph_dir, config), GrammarPool(Bytes, vocab_size, config)
    structured_output = (
        "guided_json",
        write_grammar(STRUCTURED_OUTPUT_FIELDS["guided_json"]("guided_json", SCHEMA), any_whitespace=False),
    )
    try:
        executor.allocate(100)
        loop = EngineLoop(executor, 100, config, grammars)
        for seed in range(6):
            sampling = Sampling(
                256, temperature=float(seed % 2), seed=seed, stop_token_ids=(299,), structured_output=structured_output
            )
            loop.add(Request(str(seed), [seed + 7, 20], 2, sampling))
        loop.add(Request("free", [9, 20], 2, Sampling(100)))
        answers = {}
        while not loop.is_idle:
            for update in loop.step():
                answers.setdefault(update.request.request_id, []).extend(update.token_ids)
        return answers, loop.stats()
    finally:
        executor.close()
        grammars.close()


def answers_with_drafts(counter, *args, **settings):
    """Return the answers, once `counter` is above 0: on a busy machine the masks may be too late for every draft."""

    def attempt():
        answers, stats = answers_of(*args, **settings)
        return answers if stats[counter] > 0 else None

    return wait_until(attempt)


@pytest.mark.thorough
def test_ranks_and_drafts_change_no_token_of_structured_output(exported, monkeypatch):
    one = answers_with_drafts("num_accepted_tokens", exported("qwen2", block_size=16))
    for seed in range(6):
        jsonschema.validate(json.loads(bytes(one[str(seed)][:-1])), SCHEMA)
    assert answers_of(exported("qwen2", block_size=16), speculate_method="ngram")[0] == one
    draft = {"speculate_method": "draft", "speculate_model_path": str(exported("qwen2", block_size=16))}
    with monkeypatch.context() as patch:
        patch.setattr("engine.executors.DraftPolicy", lambda _: None)  # everything is drafted, whatever it costs
        assert answers_with_drafts("num_accepted_tokens/draft/1", exported("qwen2", block_size=16), **draft) == one
    two = exported("qwen2", block_size=16, num_ranks=2)
    assert answers_of(two, mp_num=2, cpu_threads=1)[0] == one


@pytest.mark.thorough
def test_the_mtp_layer_of_two_ranks_changes_no_token_of_structured_output(tmp_path, monkeypatch):
    checkpoint = make_mtp_checkpoint(tmp_path / "checkpoint", "glm4_moe")
    export(checkpoint, tmp_path / "out", ExportOptions(block_size=16, mtp=True, num_ranks=2))
    settings = {"vocab_size": 320, "mp_num": 2, "cpu_threads": 1}
    expected, _ = answers_of(tmp_path / "out", **settings)
    monkeypatch.setattr("engine.executors.DraftPolicy", lambda _: None)
    drafts = settings | {"speculate_method": "mtp"}
    assert answers_with_drafts("num_drafted_tokens/mtp/1", tmp_path / "out", **drafts) == expected


class Slow(RandomModel):
    """One step each time the test says so."""

    def __init__(self, *args):
        super().__init__(*args)
        self.may_step = threading.Semaphore(0)

    def launch(self, batch):
        self.may_step.acquire()
        return super().launch(batch)


class Engine:
    """A server over a random model, in a thread."""

    def __init__(self, address, tokenizer):
        likely = [token_id for text in '"}],:0' for token_id in tokenizer.encode(text)]
        self.model = Slow(VOCAB_SIZE, tuple(likely))
        self.server, self.grammars = Server(address), GrammarPool(load_tokenizer, VOCAB_SIZE)
        self.server.begin(EngineLoop(self.model, 400, Config(), self.grammars))
        self._thread = threading.Thread(target=self.server.run, args=[self.server.loop])
        self._thread.start()

    def __enter__(self):
        return self

    def loses_all_but_one_update(self):
        """Lose every later update before the client gets any of them."""
        send, are_sent = self.server._send_updates, []
        self.server._send_updates = lambda updates: are_sent or (are_sent.extend(updates), send(updates))

    def __exit__(self, *_):
        self.server.close()
        self.model.may_step.release(1000)
        self._thread.join()
        self.grammars.close()


def test_structured_output_continues_after_a_crash(tokenizer):
    schema = random_schema(3)
    whole = Guided(tokenizer)
    request = a_request("a", "guided_json", {"type": "array", "items": schema, "minItems": 3}, seed=8)
    whole.run(request)
    expected = whole.token_ids["a"]
    assert len(expected) > 20
    address, listener = a_free_address(), Collector()
    with a_client(address) as client:
        client.submit(JournalEntry.of(PROMPT, [Submission("a", request.sampling, listener)]))
        for _ in range(3):
            before = len(listener.token_ids)
            with Engine(address, tokenizer) as engine:
                engine.loses_all_but_one_update()
                wait_until(lambda e=engine, b=before: e.model.may_step.release() or len(listener.token_ids) > b)
            assert not listener.ends
        with Engine(address, tokenizer) as engine:
            wait_until(lambda: engine.model.may_step.release() or listener.ends)
        assert listener.wait() == "stop"
        assert listener.token_ids[:-1] == expected[:-1]
        assert client.num_restarts == 3


def test_after_a_crash_no_request_waits_for_a_grammar_that_compiles_slowly(tokenizer):
    """Requests are tried one by one then."""
    address, slow, quick = a_free_address(), Collector(), Collector()
    structured_output = (
        "guided_json",
        json.dumps({"grammars": [{"json_schema": {"type": "integer", "multipleOf": 7777777}}]}),
    )
    with a_client(address) as client:
        with Engine(address, tokenizer) as engine:
            sampling = Sampling(9, stop_token_ids=(EOS_ID,), structured_output=structured_output)
            client.submit(JournalEntry.of(PROMPT, [Submission("slow", sampling, slow)]))
            client.submit(JournalEntry.of(PROMPT, [Submission("quick", Sampling(30), quick)]))
            wait_until(lambda: engine.model.may_step.release() or quick.token_ids)
        with Engine(address, tokenizer) as engine:
            wait_until(lambda: engine.model.may_step.release() or quick.ends)
            assert quick.wait() == "length" and not slow.ends


def test_a_grammar_that_cannot_be_compiled_is_refused_over_the_socket(tokenizer):
    address, listener = a_free_address(), Collector()
    structured_output = ("guided_regex", write_grammar(STRUCTURED_OUTPUT_FIELDS["guided_regex"]("guided_regex", "(")))
    with a_client(address) as client, Engine(address, tokenizer):
        sampling = Sampling(9, stop_token_ids=(EOS_ID,), structured_output=structured_output)
        client.submit(JournalEntry.of(PROMPT, [Submission("a", sampling, listener)]))
        error = listener.wait()
    assert isinstance(error, InvalidRequest)
    assert (error.field, str(error)[:38]) == ("guided_regex", "The `guided_regex` cannot be compiled:")
