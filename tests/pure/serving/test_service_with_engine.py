"""Service, journal and an engine process together, with the counting executor: crashes and clients that leave."""

import base64
import itertools
import random
import time

import numpy as np
import pytest

from engine.core.types import Sampling
from engine.link import client as client_module
from engine.link.client import EngineClient
from engine.serving import service as service_module
from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer
from tests.patience import wait_until
from tests.pure.counting_executor import CountingExecutor, answer
from tests.pure.engine_helpers import a_free_address, a_server, an_engine_process
from tests.pure.service_fakes import FakeSender, a_payload, a_service, an_input_processor


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(client_module, "PING_INTERVAL_S", 0.01)
    monkeypatch.setattr(service_module, "MIN_CANCEL_POLL_S", 0.002)
    return a_free_address()


@pytest.fixture
def lengths():
    return 160, 80, 120


@pytest.fixture
def service(tmp_path, address, lengths):
    write_tokenizer(tmp_path)
    with a_service(an_input_processor(Tokenizer.load(tmp_path), 2**31 - 1, lengths), EngineClient(address)) as service:
        yield service


def ask(service, req_id, prompt, max_dec_len, **fields):
    sender = FakeSender()
    sampling = {"temperature": 0, "seed": req_id, "ignore_eos": True, "max_dec_len": max_dec_len, **fields}
    service.submit(a_payload(req_id=req_id, input_ids=prompt, **sampling), sender)
    sender.expected = answer(prompt, Sampling(max_dec_len, temperature=sampling["temperature"], seed=req_id))
    return sender


LONE = "\ud800"  # a surrogate without its other half: JSON can say it, nothing that is UTF-8 can


@pytest.mark.parametrize(
    ("blamed", "fields"),
    [
        ("req_id", {"req_id": LONE}),
        ("text", {"text": LONE, "input_ids": None}),
        ("messages", {"messages": [{"content": LONE}], "input_ids": None}),
        ("messages", {"messages": [{"role": LONE, "content": ""}], "input_ids": None}),
        ("system", {"messages": [{"content": ""}], "system": LONE, "input_ids": None}),
        ("stop_sequences", {"stop_sequences": [LONE]}),
        ("bad_words", {"bad_words": ["a", LONE]}),
        ("cache_salt", {"cache_salt": LONE}),
        ("lora_name", {"lora_name": LONE}),
        ("traceparent", {"traceparent": LONE}),
        ("guided_json", {"guided_json": {"const": LONE}}),
        ("guided_grammar", {"guided_grammar": LONE}),
    ],
)
def test_a_request_that_cannot_be_packed_fails_alone(service, address, blamed, fields):
    with a_server(address=address):
        refused = FakeSender()
        service.submit(a_payload(**{"req_id": "a", "input_ids": [5], **fields}), refused)
        assert (refused.final["error_code"], refused.final["error_field"]) == (400, blamed)
        other = ask(service, 1, [5], 3)
        assert other.final["tokens_all_ids"] == other.expected


@pytest.mark.slow
def test_a_kill_of_the_engine_is_a_pause_for_sixteen_streams(service, address):
    senders = [ask(service, n, [n + 1] * (n + 1), 60 + n, temperature=n % 2) for n in range(16)]
    with an_engine_process(address, max_steps=40):
        wait_until(lambda: sum(bool(sender.sent) for sender in senders) >= 8)
    assert not any(sender.is_over for sender in senders)
    with an_engine_process(address):
        for sender in senders:
            final = sender.final
            assert final["tokens_all_ids"] == sender.expected
            assert sum((fields["token_ids"] for fields, _ in sender.sent), []) == sender.expected
            assert "".join(fields["token"] for fields, _ in sender.sent) == final["tokens_all"]
    assert service.client.num_restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_of_several_answers_the_likeliest_are_returned_the_best_first(service, address, n):
    """This also holds for a client that has received a part of them. The logprob of a token is an eighth of it,
    negative.
    """
    samplings = [Sampling(7, temperature=1, seed=5 + index) for index in range(6)]
    made = sorted((answer([9], sampling) for sampling in samplings), key=sum)
    with an_engine_process(address):
        sender = ask(service, 5, [9], 7, temperature=1, n=n, best_of=6)
        assert answers_of(sender) == made[:n]
        assert len(sender.sent) == n and "logprobs" not in sender.final
        again = ask(service, 7, [9], 7, temperature=1, n=n, best_of=6, resume_from=[3] * n, seed=5)
        assert again.final["is_end"] == 1
        rest = [fields["token_ids"] for fields, _ in sorted(again.sent, key=lambda each: each[0]["index"])]
        assert rest == [each[3:] for each in made[:n]]
        assert ask(service, 6, [9], 7, temperature=1, best_of=2, logprobs=0).final["logprobs"]


@pytest.mark.slow
def test_the_beams_of_a_search_end_as_the_answers_of_its_client(service, address):
    with an_engine_process(address):  # whose greedy choice is the next number, and nothing else has a logprob
        sender = ask(service, 1, [3], 4, n=2, best_of=3, use_beam_search=True, prompt_logprobs=0)
        assert len(answers_of(sender)) == 2
        assert [fields["finish_reason"] for fields, _ in sender.sent] == ["length"] * 2
        for field, value in {
            "logit_bias": {"5": 1},
            "penalty_score": 1.5,
            "guided_regex": "a",
            "bad_words": "x",
        }.items():
            refused = ask(service, field, [5], 4, seed=None, use_beam_search=True, **{field: value}).final
            assert (refused["error_code"], refused["error_field"]) == (400, field)
        for field, fields in {"best_of": {"n": 3, "best_of": 2}, "length_penalty": {"length_penalty": 2}}.items():
            refused = ask(service, field, [5], 4, seed=None, **fields).final
            assert (refused["error_code"], refused["error_field"]) == (400, field)


@pytest.mark.slow
def test_100_clients_that_leave_at_random_moments_leave_nothing_behind(service, address):
    rng = random.Random(0)
    with an_engine_process(address, step_s=0.0005):
        kept = [ask(service, n, [n], 100) for n in range(4)]
        wait_until(lambda: kept[0].sent)
        gone = []
        for n in range(100, 200):
            gone.append(ask(service, n, [n] * rng.randint(1, 50), 100))
            rng.choice(gone).cancelled = True
            time.sleep(rng.random() * 0.002)
        for sender in gone:
            sender.cancelled = True
        for sender in kept:
            assert sender.final["tokens_all_ids"] == sender.expected
        for sender in gone:
            assert sender.final.get("error_type", "length") in ("cancelled", "length", "overloaded")
        names = ("num_running", "num_waiting", "num_blocks_held")
        wait_until(lambda: [service.client.stats[name] for name in names] == [0, 0, 0])
        assert (service.num_open, service.client.num_open) == (0, 0)
        assert service.client.stats["num_dropped"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(160, 150, 120)])
def test_the_scores_of_a_prompt_come_once_whatever_the_engine_does(service, address):
    """Killed in the prompt, killed in the answers: each of these has begun with its scores, and goes on without."""
    prompt = list(range(1000, 1120))
    with an_engine_process(address, max_steps=10):  # six scores a step
        sender = ask(service, 1, prompt, 12, n=2, prompt_logprobs=1, return_token_ids=True)
        wait_until(lambda: service.client.stats.get("num_steps", 0) >= 10)
    with an_engine_process(address, max_steps=26):
        wait_until(lambda: len(sender.sent) >= 2)
    with an_engine_process(address):
        assert sender.final["tokens_all_ids"] == sender.expected
    for index in range(2):
        first, *others = [fields for fields, _ in sender.sent if fields["index"] == index]
        reported = first["prompt_logprobs"]
        assert [each["token_id"] for each in reported] == first["prompt_token_ids"] == prompt
        assert [each.get("logprob") for each in reported] == [None] + [-token_id / 8 for token_id in prompt[1:]]
        assert [each["top"][0]["token_id"] for each in reported[1:]] == prompt[1:]
        assert not any("prompt_logprobs" in fields for fields in others)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(200, 150, 120)])
def test_a_resumed_answer_has_prompt_scores_with_its_beginning_only(service, address):
    prompt = list(range(100, 190))
    with an_engine_process(address):
        fields = {"prompt_logprobs": 0, "infer_seed": 1, "seed": None}
        senders = [ask(service, 1, prompt, 3, **fields)]
        for resume_from in (0, 1):
            wait_until(lambda: senders[-1].is_over)
            senders.append(ask(service, 1, prompt, 3, resume_from=resume_from, **fields))
        assert senders[-1].final["tokens_all_ids"] == senders[0].expected
    first, again, later = (sender.sent[0][0].get("prompt_logprobs") for sender in senders)
    assert first == again and len(first) == 90 and later is None


@pytest.mark.slow
def test_a_request_for_no_token_brings_scores_embeddings_or_nothing(service, address):
    with an_engine_process(address):
        scored = ask(service, 1, [5, 6, 7], 0, prompt_logprobs=0, stop="x").final
        assert [each.get("logprob") for each in scored["prompt_logprobs"]] == [None, -6 / 8, -7 / 8]
        assert (scored["tokens_all"], scored["finish_reason"]) == ("", "length")
        assert scored["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "cached_tokens": 0}
        assert ask(service, 2, list(range(9)), 0).final["usage"]["completion_tokens"] == 0
        assert ask(service, 3, list(range(9)), 4).final["usage"]["cached_tokens"] == 8
        for pooling, hidden in (("last", 8), ("mean", 4)):
            reported = ask(service, pooling, list(range(9)), 4, seed=None, pooling=pooling).final
            assert np.frombuffer(base64.b64decode(reported["embedding"]), np.float32).tolist() == [hidden]
        for field, fields in {
            "n": {"max_dec_len": 0, "n": 2},
            "prompt_logprobs": {"pooling": "last", "prompt_logprobs": 0},
            "pooling": {"pooling": "first"},
        }.items():
            refused = ask(service, field, [5], **{"max_dec_len": 4, "seed": None, **fields}).final
            assert (refused["error_code"], refused["error_field"]) == (400, field)


@pytest.mark.parametrize("lengths", [(20_000, 10_000, 120)])
def test_scores_that_would_be_too_many_are_refused_with_their_number(service):
    refused = ask(service, 1, list(range(6000)), 4, prompt_logprobs=20, n=2).final
    assert (refused["error_field"], refused["error_value"], refused["error_limit"]) == (
        "prompt_logprobs",
        252000,
        131072,
    )


def ask_several(service, req_id, prompt, max_dec_len, n, **fields):
    """Request several answers. `expected` of the returned sender has the answer of each seed alone."""
    sender = ask(service, req_id, prompt, max_dec_len, temperature=1, n=n, **fields)
    samplings = [Sampling(max_dec_len, temperature=1, seed=req_id + index) for index in range(n)]
    sender.expected = [answer(prompt, sampling) for sampling in samplings]
    return sender


def answers_of(sender):
    """Return the answer of each choice. Its last response and the concatenation of all its responses must agree."""
    assert sender.final["is_end"] == 1
    assert [fields["is_end"] for fields, final in sender.sent if not final].count(1) == 0
    answers = {fields["index"]: fields["tokens_all_ids"] for fields, _ in sender.sent if "finish_reason" in fields}
    for index, token_ids in answers.items():
        assert sum((fields["token_ids"] for fields, _ in sender.sent if fields["index"] == index), []) == token_ids
    return [answers[index] for index in sorted(answers)]


@pytest.mark.parametrize("lengths", [(2000, 1100, 120)])
def test_eight_answers_are_those_of_their_seeds_and_their_prompt_is_computed_once(service, address):
    with a_server(CountingExecutor(40, 64), address, batch_size=8, enable_prefix_caching=False) as server:
        sender = ask_several(service, 7, list(range(1000)), 20, 8)
        assert answers_of(sender) == sender.expected
        assert len({tuple(token_ids) for token_ids in sender.expected}) == 8
        wait_until(lambda: server.loop.is_idle)
        stats = server.loop.stats()
        num_computed = sum(tokens for rows in server.loop.executor.batches for _, tokens in rows)
    assert stats["num_prompt_tokens"] == 1000
    assert num_computed == 1000 + 8 * 19  # the last token of an answer is never fed back
    assert service.latency.num_ended == {"length": 8}


@pytest.mark.slow
def test_a_kill_of_the_engine_is_a_pause_for_several_answers_to_a_prompt(service, address):
    senders = [ask_several(service, 100 * n, [n + 1] * (n + 5), 32 + n, 3) for n in range(4)]
    with an_engine_process(address, max_steps=25):
        wait_until(lambda: sum(bool(sender.sent) for sender in senders) >= 2)
    assert not any(sender.is_over for sender in senders)
    with an_engine_process(address):
        assert [answers_of(sender) for sender in senders] == [sender.expected for sender in senders]
    assert service.client.num_restarts == 1


@pytest.mark.slow
def test_a_client_that_leaves_in_the_middle_takes_all_its_answers_along(service, address):
    with an_engine_process(address, step_s=0.02):
        stays = ask_several(service, 1, [5, 6, 7], 40, 3)
        leaves = ask_several(service, 50, [9, 8, 7], 36, 4)
        wait_until(lambda: {fields["index"] for fields, _ in leaves.sent} == {0, 1, 2, 3})
        leaves.cancelled = True
        assert leaves.final["error_type"] == "cancelled"
        assert answers_of(stays) == stays.expected
        names = ("num_running", "num_waiting", "num_blocks_held")
        wait_until(lambda: [service.client.stats[name] for name in names] == [0, 0, 0])
        assert (service.num_open, service.client.num_open) == (0, 0)
        assert service.client.stats["num_dropped"] == 4


@pytest.mark.slow
def test_a_stop_string_ends_one_answer_in_the_engine_too_and_the_other_goes_on(service, address):
    def of(seed):
        return answer([5], Sampling(60, temperature=1, seed=seed))

    stop = ord("5")
    seed = next(seed for seed in itertools.count() if stop in of(seed)[:20] and stop not in of(seed + 1))
    with an_engine_process(address, step_s=0.005):
        stopped, whole = answers_of(ask_several(service, seed, [5], 60, 2, stop="5"))
        wait_until(lambda: service.client.stats["num_running"] == 0)
    assert stopped == of(seed)[: of(seed).index(stop)]
    assert whole == of(seed + 1)
    assert service.client.stats["num_dropped"] == 1
    assert service.latency.num_ended == {"stop": 1, "length": 1}


@pytest.mark.slow
def test_of_more_answers_than_run_at_once_some_wait(service, address):
    with an_engine_process(address):
        answers = answers_of(ask_several(service, 1, [5], 4, 13))
    assert answers == [answer([5], Sampling(4, temperature=1, seed=1 + index)) for index in range(13)]


@pytest.mark.slow
def test_prompts_are_cached_for_those_with_the_same_salt(service, address):
    prompt = [7] * 40
    with an_engine_process(address):
        asked = [("a", False), (None, False), ("b", False), ("a", True), (None, True)]
        for req_id, (salt, is_cached) in enumerate(asked):
            before = service.client.stats.get("num_cached_tokens", 0)
            assert ask(service, req_id, prompt, 1, cache_salt=salt).final["tokens_all_ids"]
            wait_until(lambda done=req_id + 1: service.client.stats["num_generated_tokens"] == done)
            assert (service.client.stats["num_cached_tokens"] > before) == is_cached, salt
