"""Prefix caching of a hybrid model in the engine, compared with an attention-only model of the same block size."""

import numpy as np
import pytest

from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.settings.config import Config
from tests.byte_tokenizer import EOS_ID

pytestmark = pytest.mark.slow

BLOCK_SIZE, NUM_BLOCKS = 16, 1200
START, HEADER_LEN = EOS_ID - 1, 3


def a_message(rng, num_tokens):
    """Return the tokens of a message of a chat, of which the last but one ends it."""
    return [START, 20, 30, *rng.integers(0, 250, num_tokens - HEADER_LEN - 2).tolist(), EOS_ID, 40]


def chats():
    """Return prompts behind a system prompt of 150 tokens, then some behind examples that follow it."""
    rng = np.random.default_rng(0)
    system, header = a_message(rng, 150), [START, 50, 30]
    examples = [token_id for length in (60, 70, 80) for token_id in a_message(rng, length)]
    beginnings = [system] * 3 + [system + examples] * 3
    return [beginning + a_message(rng, 90) + header for beginning in beginnings]


def run(executor, name, **settings):
    """Return the answers to the chats, one after another, with log-probabilities, and the tokens that were found."""
    executor.allocate(NUM_BLOCKS)
    loop = EngineLoop(executor, NUM_BLOCKS, Config(batch_size=4, **settings))
    answers, found = [], []
    for prompt in chats():
        sampling = Sampling(8, temperature=0, num_logprobs=0, stop_token_ids=(EOS_ID,))
        request = Request(name, prompt, len(prompt), sampling)
        loop.add(request)
        answers.append([])
        while not loop.is_idle:
            for update in loop.step():
                answers[-1] += zip(update.token_ids, update.logprobs, strict=True)
        found.append(request.num_cached)
    return answers, found, loop.stats()["num_tokens_without_state"]


def test_each_chat_finds_what_it_finds_with_an_attention_only_model_and_no_bit_changes(exported):
    attention = make_executor(exported("qwen3", block_size=BLOCK_SIZE), Config())
    _, expected, _ = run(attention, "attention")
    assert expected == [0, 144, 144, 144, 352, 352]
    attention.close()
    hybrid = make_executor(exported("qwen3_next", block_size=BLOCK_SIZE), Config())
    answers, found, num_missed = run(hybrid, "hybrid")
    assert (found, num_missed) == (expected, 0)
    assert run(hybrid, "alone", enable_prefix_caching=False)[:2] == (answers, [0] * len(answers))
    hybrid.close()
