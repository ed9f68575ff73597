"""Prefix caching of a hybrid model in the engine, compared with an attention-only model of the same block size."""

from os.path import commonprefix

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


def chats(rng):
    """Return prompts behind a system prompt of 150 tokens, then some behind examples that follow it."""
    system, header = a_message(rng, 150), [START, 50, 30]
    examples = [token_id for length in (60, 70, 80) for token_id in a_message(rng, length)]
    beginnings = [system] * 3 + [system + examples] * 3
    return [beginning + a_message(rng, 90) + header for beginning in beginnings]


class Server:
    """An engine loop that answers one prompt after another."""

    def __init__(self, executor, **settings):
        executor.allocate(NUM_BLOCKS)
        self.loop = EngineLoop(executor, NUM_BLOCKS, Config(batch_size=4, **settings))
        self.answers, self.found = [], []  # with log-probabilities; tokens that were found
        self.computed, self.could_find = [], []  # sequences of tokens; what an attention-only model could find

    def answer(self, prompt, max_new_tokens=8):
        """Return the tokens of the answer."""
        sampling = Sampling(max_new_tokens, temperature=0, num_logprobs=0, stop_token_ids=(EOS_ID,))
        request = Request("one", list(prompt), len(prompt), sampling)
        self.loop.add(request)
        self.answers.append([])
        while not self.loop.is_idle:
            for update in self.loop.step():
                self.answers[-1] += zip(update.token_ids, update.logprobs, strict=True)
        self.found.append(request.num_cached)
        longest = max((len(commonprefix([prompt, each])) for each in self.computed), default=0)
        self.could_find.append(min(longest, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE)
        self.computed.append(request.token_ids[:-1])
        return request.token_ids[len(prompt) :]


def ask_chats(server):
    for prompt in chats(np.random.default_rng(0)):
        server.answer(prompt)


def converse(server):
    """Ask four questions in one conversation, each of them twice, and again with another beginning of the answer."""
    rng = np.random.default_rng(0)
    prompt = a_message(rng, 150)
    for _ in range(4):
        prompt += a_message(rng, 40) + [START, 50, 30]
        tokens = server.answer([*prompt, 60, 70], 30)
        assert tokens == server.answer([*prompt, 60, 70], 30)
        prompt += [*server.answer([*prompt, 61], 50), 62]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 37}], ids=["whole", "in chunks"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_chats_find_as_much_with_states_as_with_attention_alone(family, settings, exported):
    executor = make_executor(exported(family, block_size=BLOCK_SIZE), Config())
    server = Server(executor, **settings)
    ask_chats(server)
    assert server.found == server.could_find == [0, 144, 144, 144, 352, 352]
    assert server.loop.stats()["num_tokens_without_state"] == 0
    executor.close()


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 37}], ids=["whole", "in chunks"])
@pytest.mark.parametrize("ask", [ask_chats, converse])
def test_states_from_the_prefix_cache_change_no_bit(ask, settings, exported):
    executor = make_executor(exported("qwen3_next", block_size=BLOCK_SIZE), Config())
    server, expected = Server(executor, **settings), Server(executor, enable_prefix_caching=False)
    ask(expected)
    ask(server)
    assert server.answers == expected.answers and set(expected.found) == {0}
    pairs = list(zip(server.found, server.could_find, strict=True))
    assert all(found >= could_find - BLOCK_SIZE for found, could_find in pairs)
    assert sum(found >= could_find for found, could_find in pairs) >= len(pairs) - 1
    executor.close()
