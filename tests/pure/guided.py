"""Structured output from a model with random logits."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path

from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors.speculation.executor import with_speculation
from engine.grammars.pool import GrammarPool
from engine.settings.config import Config
from engine.text.grammars import write_grammar
from engine.text.tokenizer import Tokenizer
from engine.wire.structured_output_fields import STRUCTURED_OUTPUT_FIELDS
from tests.byte_tokenizer import EOS_ID, write_tokenizer
from tests.pure.random_model import RandomModel

PROMPT = [72, 101, 108]
VOCAB_SIZE = EOS_ID + 10  # more than the tokenizer has
STOP_IDS = (EOS_ID, EOS_ID - 2)


def load_tokenizer():
    """Return the tokenizer of the fixture `tokenizer`, in another process."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        return Tokenizer.load(Path(directory))


@lru_cache
def shared_grammars():
    """Return the grammar workers that tests share, because starting their processes takes most of a second."""
    return GrammarPool(load_tokenizer, VOCAB_SIZE)


def begun(grammars, request):
    """Return the result of `begin`."""
    future = grammars.begin(request)
    while not future.done():
        grammars.poll(1)
    return future.result()


def a_request(name, field, value, token_ids=(), **sampling):
    """Return a request with one more answer for each of `forks`."""
    num_forks = sampling.pop("forks", 0)
    options = {"any_whitespace": sampling.pop("any_whitespace", True), "reasoning": sampling.pop("reasoning", None)}
    structured_output = (
        (field, write_grammar(STRUCTURED_OUTPUT_FIELDS[field](field, value), **options)) if field else ()
    )
    seed = sampling.pop("seed", 0)
    given = {
        "max_new_tokens": 900,
        "temperature": 1.0,
        "stop_token_ids": STOP_IDS,
        "structured_output": structured_output,
        **sampling,
    }
    requests = [
        Request(f"{name}{'-' * index}", [*PROMPT, *token_ids], len(PROMPT), Sampling(seed=seed + index, **given))
        for index in range(1 + num_forks)
    ]
    requests[0].forks = requests[1:]
    return requests[0]


class Guided:
    """A loop over a random model, and what has come out of it."""

    def __init__(self, tokenizer, num_blocks=4096, grammars=None, **settings):
        self.tokenizer = tokenizer
        likely = [token_id for text in '"}],:0' for token_id in tokenizer.encode(text)]
        self.model = RandomModel(VOCAB_SIZE, tuple(likely))
        self.grammars = grammars or shared_grammars()
        config = Config(**{"batch_size": 32, "max_cached_task_num": 1000, **settings})
        self.loop = EngineLoop(with_speculation(self.model, config), num_blocks, config, self.grammars)
        self.token_ids, self.ends, self.errors = {}, {}, {}

    def turn(self):
        for update in self.loop.step():
            name = update.request.request_id
            self.token_ids.setdefault(name, []).extend(update.token_ids)
            if update.finish_reason:
                self.ends[name], self.errors[name] = update.finish_reason, update.error

    def run(self, *requests):
        """Run the requests and return the text of the last one."""
        for request in requests:
            self.loop.add(request)
        while not self.loop.is_idle:
            self.turn()
        return self.text(requests[-1].request_id) if requests else ""

    def text(self, name):
        token_ids = self.token_ids[name]
        return self.tokenizer.decode(token_ids[:-1] if self.ends[name] == "stop" else token_ids, False)

    def json(self, name):
        assert self.ends[name] == "stop", self.errors[name]
        return json.loads(self.text(name))
