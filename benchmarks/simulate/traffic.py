"""Traffic of a simulation: conversations of applications that each have a system prompt, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

PIECE = 4  # characters of a token
NUM_APPS = 60
MAX_CHATS = 20_000  # that are remembered, because they need memory
NEW_PROMPT_CHARS = 1120  # 280 tokens, as those of the throughput in benchmarks/replicas.py
THINK_S = 20.0  # mean time until the next request of a conversation


@dataclass(frozen=True)
class Arrival:
    """A request: seconds since the start, and the body in the wire's fields."""

    at: float
    body: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return int(self.body["max_dec_len"])


def answer_token(index: int) -> int:
    """Return the token at an index of any answer."""
    return int.from_bytes(f"{index % 10000:4d}".encode(), "big")


def token_ids(messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a chat with the header of its answer: each stands for PIECE ASCII characters."""
    texts = [text for each in messages for text in (each["role"], each["content"])] + ["assistant"]
    encoded = [text.encode() for text in texts]
    return [
        int.from_bytes(text[i : i + PIECE].ljust(PIECE), "big") for text in encoded for i in range(0, len(text), PIECE)
    ]


def num_tokens_of(message: dict[str, str]) -> int:
    """Return how many of `token_ids` belong to a message."""
    return sum(-(-len(text) // PIECE) for text in (message["role"], message["content"]))


def arrivals(seed: int, rate: float, seconds: float, answer_len: int) -> Iterator[Arrival]:
    """Yield the requests of `seconds`, on average `rate` of them a second, in the order of their arrival. Answers have
    `answer_len` tokens on average. A conversation has three turns on average; each repeats the turns before it."""
    rng = random.Random(seed)
    systems = [_text(rng, rng.randint(300, 2000)) for _ in range(NUM_APPS)]
    weights = list(accumulate(1 / (i + 1) for i in range(NUM_APPS)))
    open_chats: list[list[dict[str, str]]] = []  # may be continued
    now, number = rng.expovariate(rate), 0
    while now < seconds:
        if open_chats and rng.random() < 2 / 3:
            messages = open_chats.pop(rng.randrange(len(open_chats)))
        else:
            [system] = rng.choices(systems, cum_weights=weights)
            messages = [{"role": "system", "content": system}]
        messages = [*messages, {"role": "user", "content": _text(rng, rng.randint(20, 400))}]
        count = rng.randint(max(1, answer_len // 2), answer_len + answer_len // 2)
        yield Arrival(now, {"req_id": f"{number}", "messages": messages, "max_dec_len": count, "min_dec_len": count})
        if len(messages) < 8:
            answer = "".join(f"{i % 10000:4d}" for i in range(count))
            open_chats.append([*messages, {"role": "assistant", "content": answer}])
            del open_chats[: -max(1, min(MAX_CHATS, int(rate * THINK_S)))]
        now, number = now + rng.expovariate(rate), number + 1


def new_prompts(seed: int, count: int, answer_len: int) -> Iterator[Arrival]:
    """Yield requests that begin differently, for clients in turn. Answers have `answer_len` tokens on average."""
    rng = random.Random(seed)
    for number in range(count):
        messages = [{"role": "user", "content": _text(rng, NEW_PROMPT_CHARS)}]
        size = rng.randint(max(1, answer_len // 4), 2 * answer_len - max(1, answer_len // 4))
        yield Arrival(0.0, {"req_id": f"{number}", "messages": messages, "max_dec_len": size, "min_dec_len": size})


def chats(seed: int, count: int) -> Iterator[Arrival]:
    """Yield questions to 20 applications that each have a system prompt, for clients in turn."""
    rng = random.Random(seed)
    systems = [f"{rng.random()} You are helpful. " * rng.randint(5, 40) for _ in range(20)]
    for number in range(count):
        messages = [{"role": "system", "content": rng.choice(systems)}, {"role": "user", "content": f"{rng.random()}"}]
        yield Arrival(0.0, {"req_id": f"{number}", "messages": messages, "max_dec_len": 8, "min_dec_len": 8})


def _text(rng: random.Random, num_chars: int) -> str:
    return f"{rng.getrandbits(4 * num_chars):0{num_chars}x}"
