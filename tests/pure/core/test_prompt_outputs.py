"""Prompt outputs, log-probabilities and hidden states, are the same in every schedule."""

from dataclasses import replace

import numpy as np
import pytest

from engine.core.loop import EngineLoop
from engine.core.prompt_logprobs import PromptLogprobCache
from engine.core.types import Batch, Logprobs, PromptOutputSpec, Row, Sampling
from engine.errors import InvalidRequest
from engine.executors import make_executor
from engine.executors.prompt_outputs import LOGITS_BYTES, PooledStates, make_outputs, max_prompt_logits
from engine.executors.reference import ReferenceExecutor
from engine.ops.sampling_rows import SampledRows
from engine.settings.config import Config
from tests.checkpoints import FAMILIES
from tests.golden_arrays import golden
from tests.prompt_outputs import (
    LAST,
    MEAN,
    READ_LEN,
    SCORES,
    a_request,
    check_like_transformers,
    hidden_of,
    requests_of,
    run,
)
from tests.pure.counting_executor import CountingExecutor, answer, logprobs_of

# --- the model's own numbers ---


@pytest.fixture(scope="module")
def expected():
    return golden("prompt_outputs")


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_hidden_states_are_those_of_transformers(family, exported, expected):
    """The prompts run in chunks that fill no block, next to one another, and again with a prefix cache that has all of
    them.
    """
    prompt = golden(family)[f"prompt_{READ_LEN}"].tolist()
    config = Config(batch_size=4, max_num_batched_tokens=29, block_bs=4)
    executor = make_executor(exported(family), config)
    executor.allocate(64)
    executor.max_prompt_logits = 23
    loop = EngineLoop(executor, 64, config)
    _, outputs, _ = run(loop, *requests_of(prompt))
    check_like_transformers(outputs, expected, family)
    assert all(len(each.top) == 2 for each in outputs["scores"].prompt_logprobs)
    assert run(loop, *requests_of(prompt))[1]["scores"].prompt_logprobs == outputs["scores"].prompt_logprobs
    executor.close()


def test_the_definition_of_the_ops_tells_the_same(exported, expected):
    prompt = golden("qwen2")[f"prompt_{READ_LEN}"].tolist()
    executor = ReferenceExecutor(exported("qwen2"))
    executor.allocate(16)
    _, outputs, _ = run(EngineLoop(executor, 16, Config(max_num_batched_tokens=40, batch_size=4)), *requests_of(prompt))
    check_like_transformers(outputs, expected, "qwen2")


def test_the_logits_that_are_read_in_a_step_are_bounded_in_bytes():
    assert max_prompt_logits(151_936) * 151_936 * 4 <= LOGITS_BYTES < (max_prompt_logits(151_936) + 1) * 151_936 * 4
    assert max_prompt_logits(10**9) == 1


def test_the_outputs_of_a_step_are_those_of_the_request_that_had_the_slot_at_its_launch():
    """The next step may be launched, with another request in the slot, before the first one has ended."""
    states, spec = PooledStates(), PromptOutputSpec(num_pooled=2, returns_pooled=True)
    states.begin(0)
    first = states.specs(Batch([Row(0, 0, [1, 2], prompt_spec=spec)], has_prompt_outputs=True))
    states.begin(0)
    second = states.specs(Batch([Row(0, 0, [3, 4], prompt_spec=spec)], has_prompt_outputs=True))
    hidden = np.array([[1, 2], [3, 4]], np.float32)
    for asked, values in ((first, hidden), (second, 10 * hidden)):
        [of_prompt] = make_outputs(asked, SampledRows.empty(0, 0), values)
        assert hidden_of(of_prompt).tolist() == values.mean(axis=0).tolist()


# --- schedules, on an executor that counts ---


def scores_of(prompt, sampling=SCORES):
    return [logprobs_of(token_id, sampling.num_prompt_logprobs) for token_id in prompt[1:]]


def a_loop(num_blocks=64, **settings):
    return EngineLoop(CountingExecutor(num_blocks, 4), num_blocks, Config(**settings))


def test_every_token_but_the_first_has_a_score_whatever_its_neighbours_do():
    """Prompts have all lengths around chunks and blocks and run among growing answers, in a pool that is too small, so
    that requests are preempted.
    """
    for num_blocks in (64, 22):
        loop = a_loop(num_blocks, max_num_batched_tokens=9, batch_size=8, block_ratio=0.9)
        prompts = {str(size): list(range(size, 2 * size)) for size in (1, 2, 3, 8, 9, 10, 17, 24)}
        long = Sampling(12, temperature=0)
        asked = [a_request(name, prompt, replace(SCORES, max_new_tokens=9)) for name, prompt in prompts.items()]
        token_ids, outputs, _ = run(loop, *asked, *(a_request(f"other {n}", [n], long) for n in range(3)))
        assert {name: outputs[name].prompt_logprobs for name in prompts} == {
            name: scores_of(each) for name, each in prompts.items()
        }
        assert all(token_ids[name] == answer(prompts[name], asked[0].sampling) for name in prompts)
        assert (loop.stats()["num_preemptions"] > 0) == (num_blocks == 22)


def test_one_that_was_preempted_in_its_prompt_tells_each_score_once():
    loop = a_loop(10, max_num_batched_tokens=4, batch_size=2, block_ratio=0.99)
    prompt = list(range(100, 128))
    grows = a_request("grows", [1, 2, 3, 4], Sampling(24, temperature=0))
    _, outputs, _ = run(loop, grows, a_request("scored", prompt, SCORES))
    assert loop.stats()["num_preemptions"] > 0
    assert outputs["scored"].prompt_logprobs == scores_of(prompt)


def test_the_prompt_logits_of_a_step_are_bounded_and_answers_go_on_beside_them():
    loop = a_loop(max_num_batched_tokens=100, batch_size=4)
    executor = loop.executor
    seen = []
    launch = executor.launch

    def note(batch):
        asked = [row.prompt_spec for row in batch.rows if row.prompt_spec]
        assert batch.has_prompt_outputs == bool(asked)
        seen.append((sum(len(each.scored_ids) + each.num_pooled for each in asked), len(batch.rows)))
        return launch(batch)

    executor.launch = note
    run(
        loop,
        a_request("answer", [5], Sampling(9, temperature=0)),
        a_request("a", range(20), SCORES),
        a_request("b", range(40, 60), MEAN),
    )
    assert max(read for read, _ in seen) == executor.max_prompt_logits == 6
    assert sum(read for read, _ in seen) == 19 + 20
    assert all(num_rows > 1 for _, num_rows in seen[:6])


def test_a_cached_prompt_is_computed_again_for_its_scores_once_and_not_for_its_last_hidden_state():
    loop = a_loop()
    prompt = list(range(17))
    plain = run(loop, a_request("plain", prompt, Sampling(2, temperature=0)))[1]["plain"]
    assert (plain.num_cached, plain.prompt_logprobs) == (0, [])
    first, second = (run(loop, a_request(name, prompt, SCORES))[1][name] for name in "ab")
    # The score of a block's first token is one of the logits of the block before, the last of which are computed.
    assert (first.num_cached, second.num_cached) == (0, 12)
    assert first.prompt_logprobs == second.prompt_logprobs == scores_of(prompt)
    last = run(loop, a_request("d", prompt, LAST))[1]["d"]
    assert (last.num_cached, hidden_of(last).tolist()) == (16, [16])
    mean = run(loop, a_request("e", prompt, MEAN))[1]["e"]
    assert (mean.num_cached, hidden_of(mean).tolist()) == (0, [8])


def test_known_scores_are_those_of_the_same_beginning_and_of_as_many_of_the_likeliest():
    loop = a_loop()
    fewer, more = (replace(SCORES, num_prompt_logprobs=SCORES.num_prompt_logprobs + more) for more in (-1, 1))
    prompts = {"a": range(20), "b": [*range(10), *range(40, 50)], "c": range(16), "d": range(20), "e": range(20)}
    sampling = {"d": fewer, "e": more}
    for name, num_cached in {"a": 0, "b": 4, "c": 12, "d": 16, "e": 0}.items():
        outputs = run(loop, a_request(name, prompts[name], sampling.get(name, SCORES)))[1][name]
        assert (outputs.prompt_logprobs, outputs.num_cached) == (
            scores_of(prompts[name], sampling.get(name, SCORES)),
            num_cached,
        )


def test_of_known_scores_the_beginnings_of_prompts_that_were_asked_for_last_stay():
    known = PromptLogprobCache(block_size=2, max_numbers=12)
    scores = [logprobs_of(token_id, 1) for token_id in range(9)]
    known.keep([b"a", b"b", b"c"], scores, 1)
    assert known.find([b"a", b"b", b"c", b"d"], 1) == scores[:5]
    known.keep([b"d"], scores, 1)
    assert known.find([b"a", b"b", b"c"], 1) == scores[:3]
    known.keep([b"e"], scores, 5)
    assert known.find([b"a"], 1) == known.find([b"d"], 1) == [] and known.find([b"e"], 5) == scores[:1]


def test_several_answers_share_the_scores_of_their_prompt():
    leader, *forks = (a_request(name, range(9), replace(SCORES, max_new_tokens=3)) for name in "abc")
    leader.forks = forks
    loop = a_loop()
    token_ids, outputs, _ = run(loop, leader)
    assert [outputs[name].prompt_logprobs for name in "abc"] == [scores_of(range(9))] * 3
    assert token_ids == dict.fromkeys("abc", [9, 10, 11])
    assert loop.stats()["num_prompt_tokens"] == 9


def test_a_request_for_no_token_ends_with_its_prompt():
    loop = a_loop(max_num_batched_tokens=5, batch_size=2)
    nothing = Sampling(0)
    asked = [a_request("a", range(12), nothing), a_request("b", [7], nothing), a_request("c", range(6), SCORES)]
    token_ids, outputs, ends = run(loop, *asked)
    assert (token_ids, ends) == ({"a": [], "b": [], "c": [6]}, dict.fromkeys("abc", "length"))
    assert outputs["a"].prompt_logprobs == [] and loop.stats()["num_generated_tokens"] == 1
    loop.scheduler.check()


def test_prompt_outputs_that_are_not_numbers_fail_only_their_request():
    loop = a_loop()
    broken = iter([Logprobs(float("nan"))])
    read = loop.executor._read
    loop.executor._read = lambda row: read(row)._replace(
        prompt_logprobs=list(broken) or read(row).prompt_logprobs, pooled=b""
    )
    _, _, ends = run(loop, a_request("a", range(3), SCORES))
    assert ends["a"] == "failed"
    _, outputs, ends = run(loop, a_request("b", range(3), SCORES), a_request("c", range(3), LAST))
    assert ends == {"b": "length", "c": "failed"}
    assert outputs["b"].prompt_logprobs == scores_of(range(3))


def test_an_executor_that_cannot_read_refuses_by_name():
    executor = CountingExecutor()
    executor.max_prompt_logits = 0
    loop = EngineLoop(executor, 16, Config())
    for sampling, field in ((SCORES, "prompt_logprobs"), (LAST, "pooling"), (MEAN, "pooling")):
        with pytest.raises(InvalidRequest) as refused:
            loop.add(a_request("a", [1, 2], sampling))
        assert refused.value.field == field
    assert run(loop, a_request("a", [1, 2], Sampling(0)))[2] == {"a": "length"}
