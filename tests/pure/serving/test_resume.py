"""A client that has lost its connection asks again and goes on where it was: with the service, its journal and an
engine, whose counting executor gives every prompt an answer of its own."""

import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine import wire
from engine.core.types import Sampling
from engine.link import client as client_module
from engine.link import server as server_module
from engine.link.client import EngineClient
from engine.serving import service as service_module
from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer
from tests.patience import PATIENCE_S, wait_until
from tests.pure.counting_engine import SlowExecutor
from tests.pure.counting_executor import answer
from tests.pure.engine_helpers import a_server, is_empty
from tests.pure.service_fakes import FakeSender, a_payload, a_service, an_input_processor

ANSWER_LEN = 60
PROMPT = [3, 4, 5]
EXPECTED = answer(PROMPT, Sampling(ANSWER_LEN, temperature=0, seed=1))


@pytest.fixture
def options():
    return {}


class HeldExecutor(SlowExecutor):
    """Waits on demand in the middle of an answer, which then has not ended before a slow test gets to its next line."""

    def __init__(self):
        super().__init__(40, 4, step_s=0.002)
        self._may_go_on = threading.Event()
        self._num_steps = math.inf

    def finish(self):
        if len(self.batches) > self._num_steps:
            assert self._may_go_on.wait(PATIENCE_S)
        super().finish()

    @contextmanager
    def held(self):
        self._may_go_on.clear()
        self._num_steps = len(self.batches) + ANSWER_LEN // 2
        try:
            yield
        finally:
            self._num_steps = math.inf
            self._may_go_on.set()


@pytest.fixture
def executor():
    return HeldExecutor()


@pytest.fixture
def service(tmp_path, monkeypatch, options, executor):
    monkeypatch.setattr(client_module, "PING_INTERVAL_S", 0.01)
    monkeypatch.setattr(server_module, "IDLE_WAIT_MS", 5)
    monkeypatch.setattr(service_module, "MIN_CANCEL_POLL_S", 0.002)
    write_tokenizer(tmp_path)
    processor = an_input_processor(Tokenizer.load(tmp_path), 2**31 - 1, (160, 80, 120))
    with a_server(executor, batch_size=12, max_num_batched_tokens=32) as server:
        with a_service(processor, EngineClient(server.address), **options) as service:
            yield service


def ask(service, req_id="a", sender=None, **fields):
    sender = sender or FakeSender()
    given = {"temperature": 0, "infer_seed": 1, "ignore_eos": True, "max_dec_len": ANSWER_LEN, "input_ids": PROMPT}
    service.submit(a_payload(req_id=req_id, **{**given, **fields}), sender)
    return sender


def token_ids_of(sender, index=0):
    return sum((line["token_ids"] for line, _ in sender.sent if line["index"] == index), [])


def text_of(sender):
    return "".join(line["token"] for line, _ in sender.sent)


def leave_after(service, executor, num_tokens, **fields):
    """Run a client that disconnects after `num_tokens` tokens. Return it and what it has received."""
    with executor.held():
        sender = ask(service, **fields)
        wait_until(lambda: len(token_ids_of(sender)) >= num_tokens)
        sender.cancelled = True
        assert sender.final["error_type"] == "cancelled"
    return sender


def num_generated(service):
    assert is_empty(service.client)
    return service.client.stats["num_generated_tokens"]


@pytest.mark.parametrize("has", [None, 0, 7])
def test_a_resumed_answer_continues_after_the_tokens_of_the_client_and_computes_nothing_twice(service, executor, has):
    first = leave_after(service, executor, 10)
    seen = token_ids_of(first)
    has = len(seen) if has is None else has
    again = ask(service, resume_from=has)
    assert again.final["finish_reason"] == "length"
    assert again.sent[0][0]["send_idx"] == has
    assert seen[:has] + token_ids_of(again) == again.final["tokens_all_ids"] == EXPECTED
    assert text_of(first)[:has] + text_of(again) == again.final["tokens_all"]  # a character a token
    assert num_generated(service) <= ANSWER_LEN + 4  # of the steps in flight when the client left


class Positions(FakeSender):
    def send(self, payload, final):
        answer = wire.read_answer(payload)
        if isinstance(answer, wire.Delta):
            self.positions.append((answer.text_idx, answer.token))
        super().send(payload, final)


def test_a_response_says_where_in_the_text_it_begins(service):
    for has in (0, 7):
        sender = Positions()
        sender.positions = []
        ask(service, sender=sender, resume_from=has)
        text = sender.final["tokens_all"]
        assert sender.positions[0][0] == has  # a character a token
        assert all(text[begin:].startswith(part) for begin, part in sender.positions)


def test_an_answer_that_has_ended_is_repeated_without_the_engine(service):
    whole = ask(service).final
    before = num_generated(service)
    again = ask(service, resume_from=ANSWER_LEN - 1)
    assert again.final["tokens_all"] == whole["tokens_all"]
    assert token_ids_of(again) == EXPECTED[-1:]
    assert num_generated(service) == before


def test_the_previous_stream_is_ended_if_its_disconnect_was_not_noticed(service, executor):
    with executor.held():
        first = ask(service)
        wait_until(lambda: len(token_ids_of(first)) >= 5)
        again = ask(service, resume_from=5)
        assert first.final["error_type"] == "cancelled"
    assert again.final["finish_reason"] == "length"
    assert token_ids_of(first)[:5] + token_ids_of(again) == EXPECTED


def test_each_of_several_answers_goes_on_where_its_client_was(service, executor):
    first = leave_after(service, executor, 4, n=2)
    has = [len(token_ids_of(first, index)) for index in range(2)]
    again = ask(service, n=2, resume_from=has)
    wait_until(lambda: again.is_over)
    for index in range(2):
        expected = answer(PROMPT, Sampling(ANSWER_LEN, temperature=0, seed=1 + index))
        assert token_ids_of(first, index) + token_ids_of(again, index) == expected


def test_a_seed_that_was_drawn_is_kept_and_may_be_given_back(service, executor):
    first = leave_after(service, executor, 5, infer_seed=None, temperature=1)
    seed = first.sent[0][0]["infer_seed"]
    for given in (None, seed):
        again = ask(service, infer_seed=given, temperature=1, resume_from=3)
        assert again.final["infer_seed"] == seed
        assert token_ids_of(first)[:3] + token_ids_of(again) == again.final["tokens_all_ids"]


@pytest.mark.parametrize("known", [{}, {"answer_ids": EXPECTED[:20]}])
def test_a_server_that_does_not_know_the_answer_computes_what_is_missing(service, known):
    again = ask(service, resume_from=20, **known)
    assert again.final["tokens_all_ids"] == EXPECTED
    assert (again.sent[0][0]["send_idx"], token_ids_of(again)) == (20, EXPECTED[20:])
    assert num_generated(service) == ANSWER_LEN - len(known.get("answer_ids", ()))


def test_a_client_with_fewer_tokens_than_the_server_was_given_gets_the_log_probabilities_of_all(service):
    first = ask(service, resume_from=20, answer_ids=EXPECTED[:20], logprobs=0, infer_seed=None)
    assert first.final["tokens_all_ids"] == EXPECTED
    for has in (20, 15):
        again = ask(service, resume_from=has, logprobs=0, infer_seed=None)
        assert again.final["tokens_all_ids"] == EXPECTED
        assert token_ids_of(again) == EXPECTED[has:]
        assert all("logprob" in each for line, _ in again.sent for each in line["logprobs"])
    assert num_generated(service) == 2 * ANSWER_LEN - 20  # once from the 20th token, once from the first


def test_the_known_part_may_be_the_whole_answer(service):
    again = ask(service, resume_from=ANSWER_LEN, answer_ids=EXPECTED)
    assert (again.final["finish_reason"], again.final["tokens_all_ids"]) == ("length", EXPECTED)
    assert num_generated(service) == 0


def test_a_client_that_has_the_whole_answer_gets_no_character_twice(service):
    known = {"max_dec_len": 2, "answer_ids": [ord("A"), 0xC3]}  # it ends inside a character
    for has, text in ((1, "\N{REPLACEMENT CHARACTER}"), (2, "")):
        again = ask(service, "b", resume_from=has, **known)
        assert (again.final["tokens_all"], text_of(again)) == ("A\N{REPLACEMENT CHARACTER}", text)


@pytest.mark.parametrize("is_kept", [True, False])
def test_more_tokens_than_the_answer_has_are_refused_with_its_length(service, is_kept, caplog):
    if is_kept:
        assert ask(service).final["tokens_all_ids"] == EXPECTED
    error = ask(service, resume_from=ANSWER_LEN + 1).final
    assert (error["error_code"], error["error_type"]) == (400, "invalid_request")
    assert error["error_msg"] == "The `resume_from` is 61, the answer ended after 60 tokens"
    assert not caplog.records  # it is no error of the server
    again = ask(service, resume_from=ANSWER_LEN)  # it is still kept
    assert (again.final["tokens_all_ids"], token_ids_of(again)) == (EXPECTED, [])


def test_an_answer_that_is_not_known_and_would_be_another_is_refused(service):
    error = ask(service, "b", resume_from=1, infer_seed=None, temperature=1).final
    assert (error["error_code"], error["error_type"]) == (404, "unknown_answer")
    assert error["error_msg"] == 'The answer to req_id "b" is not known any more: ask again without `resume_from`'


@pytest.mark.parametrize("options", [{"is_first_model": False}])
def test_after_a_reload_no_answer_is_resumed_by_its_length_alone(service):
    assert ask(service, resume_from=10).final["error_type"] == "unknown_answer"
    known = ask(service, resume_from=10, answer_ids=EXPECTED[:10])
    assert known.final["tokens_all_ids"] == EXPECTED
    whole = ask(service, "b", resume_from=0)
    assert whole.final["tokens_all_ids"] == EXPECTED
    again = ask(service, "b", resume_from=10)  # it is kept, so it is of this model
    assert again.final["tokens_all_ids"] == EXPECTED
    assert token_ids_of(again) == EXPECTED[10:]


def test_so_it_is_with_an_adapter_which_may_have_become_another(service, monkeypatch):
    loras = SimpleNamespace(find=lambda name: (), answer=lambda *_: None)
    for part in (service, service._resumption):
        monkeypatch.setattr(part, "_processor", replace(service._processor, loras=loras))
    assert ask(service, resume_from=10, lora_name="one").final["error_type"] == "unknown_answer"
    known = ask(service, resume_from=10, answer_ids=EXPECTED[:10], lora_name="one")
    assert known.final["tokens_all_ids"] == EXPECTED
    assert ask(service, resume_from=10).final["error_type"] == "duplicate_request"  # that one was the adapter's


def test_after_a_while_an_answer_is_forgotten(service, monkeypatch):
    ask(service, infer_seed=None, temperature=1).final  # noqa: B018
    monkeypatch.setattr(service._resumption.finished, "_retention_s", 0.0)
    assert ask(service, infer_seed=None, temperature=1, resume_from=1).final["error_code"] == 404


@pytest.mark.slow
def test_only_so_much_is_finished(service, monkeypatch):
    monkeypatch.setattr(service._resumption.finished, "_max_tokens", 2 * (len(PROMPT) + ANSWER_LEN))
    for req_id in "abc":
        assert ask(service, req_id, infer_seed=None, temperature=1).final["finish_reason"]
    again = {req_id: ask(service, req_id, infer_seed=None, temperature=1, resume_from=1) for req_id in "abc"}
    assert {req_id: sender.final["error_code"] for req_id, sender in again.items()} == {"a": 404, "b": 0, "c": 0}


def test_a_long_prompt_counts_too(service, monkeypatch):
    monkeypatch.setattr(service._resumption.finished, "_max_tokens", 2 * (len(PROMPT) + ANSWER_LEN))
    long = {"input_ids": list(range(3, 75)), "infer_seed": None, "temperature": 1}
    for req_id in "ab":
        assert ask(service, req_id, **long).final["finish_reason"]
    again = {req_id: ask(service, req_id, **long, resume_from=1) for req_id in "ab"}
    assert {req_id: sender.final["error_code"] for req_id, sender in again.items()} == {"a": 404, "b": 404}


@pytest.mark.parametrize("is_open", [False, True])
def test_only_who_knows_the_request_goes_on_with_its_answer(service, executor, is_open):
    first = None if is_open else leave_after(service, executor, 5)
    with executor.held():
        first = first or ask(service)
        wait_until(lambda: first.sent)
        error = ask(service, resume_from=0, input_ids=[3, 4]).final
    assert (error["error_code"], error["error_type"]) == (409, "duplicate_request")
    if is_open:
        assert first.final["tokens_all_ids"] == EXPECTED


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"resume_from": -1}, "The `resume_from` must be a number of tokens, it is -1"),
        ({"resume_from": "1"}, "The `resume_from` in input parameters must be a list, it is a string"),
        ({"resume_from": [1, 2]}, "The `resume_from` is for 2 answers, `n` is 1"),
        ({"resume_from": 1, "n": 2}, "The `resume_from` is for 1 answers, `n` is 2"),
        ({"answer_ids": [[1], [2]]}, "The `answer_ids` is for 2 answers, `n` is 1"),
        ({"answer_ids": [1] * 61}, "The `answer_ids` has 61 tokens, the answer at most 60"),
        ({"answer_ids": [-1]}, "The `answer_ids` must hold token ids, -1 is none"),
    ],
)
def test_answers_that_cannot_be_resumed_are_refused_by_name(service, fields, text):
    assert ask(service, **fields).final["error_msg"] == text
