"""Placement of a request on a replica, by the part of its prompt that the replica has cached and by its load.

It works on the text of the prompt, so it needs no tokenizer. It opens no connections and reads no clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from engine.placement import KnownPrefixes, placement_cost
from engine.wire import is_image_part

PIECE_CHARS = 256  # characters of the prompt in one key: about the 64 tokens of a block, the unit of the prefix cache
MAX_KEYS = 2048  # of one prompt
CHARS_PER_TOKEN = 4  # a usual ratio; only the order of the scores depends on it
IMAGE_CHARS = 4096  # an image counts like so many characters, about 1000 tokens
SESSION_CHARS, PREFIX_CHARS = 4096, 1024  # of a prompt that is not a chat
NUM_BY_SESSION, NUM_BY_PREFIX = 2, 8  # candidates
# A request that is forwarded passes a second gateway, which takes processor time for each of its tokens. So the server
# that was asked computes a prompt itself up to this multiple of the lowest cost, if it has cached as much of it.
MAX_COST_HERE = 2.0
ANSWER_TOKENS = 64  # of a prompt that cost as much as an answer adds, so that a few tokens of prompts decide nothing


@dataclass(frozen=True)
class PromptKeys:
    """Hashes of a prompt: `chain` has one for each prefix of a multiple of PIECE_CHARS characters."""

    chain: tuple[bytes, ...]
    session: bytes  # the same for all turns of a conversation
    prefix: bytes  # the same for all conversations with one system prompt
    num_chars: int


def prompt_keys(body: dict[str, Any]) -> PromptKeys:
    """Return the keys of the prompt in `body`, which need not be a valid request."""
    root = json.dumps([body.get(name) for name in ("cache_salt", "lora_name", "tools", "system")]).encode()
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
        texts = [json.dumps(_with_digests(each), ensure_ascii=False, sort_keys=True) for each in messages]
        num_system = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
        num_first = next((i for i, role in enumerate(roles) if role == "user"), 0) + 1
        text = "".join(texts)
        prefix = "".join(texts[:num_system]) or text[:PREFIX_CHARS]
        session = "".join(texts[:num_first])
    else:
        given = body.get("text")
        text = given if isinstance(given, str) else json.dumps(body.get("input_ids"))
        session, prefix = text[:SESSION_CHARS], text[:PREFIX_CHARS]
    chain, found = [], root
    for begin in range(0, min(len(text) - PIECE_CHARS + 1, MAX_KEYS * PIECE_CHARS), PIECE_CHARS):
        found = _key(found, text[begin : begin + PIECE_CHARS])
        chain.append(found)
    return PromptKeys(tuple(chain), _key(root, session), _key(root, prefix), len(text))


def _with_digests(message: Any) -> Any:
    """Return a message where each image is replaced by text that differs between images, and whose length is to other
    text about as the tokens of an image are to those of the text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_digest(part) if is_image_part(part) else part for part in content]}


def _digest(part: Any) -> str:
    found = blake2b(json.dumps(part).encode(), digest_size=16).hexdigest()
    return found * (IMAGE_CHARS // len(found))


def _key(before: bytes, text: str) -> bytes:
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def num_uncached_tokens(keys: PromptKeys, known: KnownPrefixes) -> int:
    """Return about how many tokens of a prompt would have to be computed; at least 1."""
    return (keys.num_chars - known.count(keys.chain) * PIECE_CHARS) // CHARS_PER_TOKEN + 1


class Candidate(Protocol):
    """Fields of a replica on which its placement depends."""

    @property
    def identity(self) -> bytes: ...

    @property
    def known(self) -> KnownPrefixes: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...


R = TypeVar("R", bound=Candidate)


def choose(keys: PromptKeys, replicas: Sequence[R], here: R | None = None) -> R | None:
    """Return the replica for a prompt, or None if there are none. `here` is the one that was asked, if it is ready.

    Candidates are the first replicas by rendezvous hashing of the session and of the prefix, so that every front end
    has the same ones. The candidate with the lowest (uncached + queued + ANSWER_TOKENS) * (running requests + 1) is
    chosen, or `here` if it is a candidate that knows as much of the prompt and costs at most MAX_COST_HERE times as
    much. A prompt that is too short for the prefix cache may go to any replica, and to the first one if they are equal.
    """
    candidates: Sequence[R] = replicas
    if keys.chain:
        by_session = _ranked(keys.session, replicas)[:NUM_BY_SESSION]
        by_prefix = _ranked(keys.prefix, replicas)[:NUM_BY_PREFIX]
        candidates = list({each.identity: each for each in (*by_session, *by_prefix)}.values())
    best = min(candidates, key=lambda replica: score(keys, replica), default=None)
    if best and here and here in candidates and here.known.count(keys.chain) >= best.known.count(keys.chain):
        return here if score(keys, here) <= MAX_COST_HERE * score(keys, best) else best
    return best


def score(keys: PromptKeys, replica: Candidate) -> int:
    """Return the cost of a prompt and its answer on a replica; lower is better."""
    num_uncached = num_uncached_tokens(keys, replica.known) + ANSWER_TOKENS
    return placement_cost(num_uncached, replica.num_queued_tokens, replica.num_running)


def _ranked(key: bytes, replicas: Sequence[R]) -> list[R]:
    return sorted(
        replicas, key=lambda replica: blake2b(replica.identity, key=key, digest_size=8).digest(), reverse=True
    )
