"""From the model's answers to OpenAI's objects: chunks, choices, logprobs, usage. Knows nothing of HTTP or requests."""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, field
from typing import Any

from gateway.backend import Answer
from gateway.openai_request import Completion

UNLIKELY = -9999.0  # what OpenAI writes for a logprob that is no number


class Alignment:
    """Where tokens begin in the text of their answer, for `text_offset`.

    The model leaves special tokens out of the text, and the first space of some, and does not say so: a token of which
    nothing is at its place in the text begins where the next one does.
    """

    def __init__(self) -> None:
        self._offset = 0  # in characters: that much of the text belongs to tokens so far
        self._rest = ""  # the text beyond, which may have come before all of its token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character

    def offsets(self, text: str, tokens: list[dict[str, Any]]) -> list[int]:
        text, position, offsets = self._rest + text, 0, []
        for token in tokens:
            offsets.append(self._offset + position)
            before = self._decoder.getstate()
            piece = self._decoder.decode(bytes(token["bytes"]))
            if not text.startswith(piece, position) and offsets[-1] == 0:
                piece = piece.removeprefix(" ")
            if text.startswith(piece, position):
                position += len(piece)
            else:
                self._decoder.setstate(before)
        self._offset += position
        self._rest = text[position:]
        return offsets


@dataclass(eq=False)
class Choice:
    """One choice as it grows."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    aligned: Alignment = field(default_factory=Alignment)
    usage: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | None = None
    has_begun: bool = False

    def take(self, answer: Answer) -> None:
        self.usage = answer.get("usage") or self.usage
        if answer.get("is_end"):
            self.finish_reason = answer.get("finish_reason") or "stop"
            self.stop_reason = answer.get("stop_reason")


class Writer:
    """Writes one completion's objects. Keeps the state of its choices."""

    def __init__(self, completion: Completion):
        self.completion = completion
        self.choices = [Choice(index) for index in range(len(completion.requests))]
        self._head = {
            "id": completion.answer_id,
            "object": "",
            "created": int(time.time()),
            "model": completion.model,
        }

    @property
    def is_complete(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """The prompt of several choices is counted once."""
        first_of_prompts = [choice.usage for choice in self.choices[:: self.completion.n]]
        num_prompt = sum(usage.get("prompt_tokens", 0) for usage in first_of_prompts)
        num_new = sum(choice.usage.get("completion_tokens", 0) for choice in self.choices)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        if any("cached_tokens" in each for each in first_of_prompts):
            num_cached = sum(each.get("cached_tokens", 0) for each in first_of_prompts)
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        return usage

    # --- a stream ---

    def chunks(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        """What one answer adds to choice `index`: none while its text is held back, two with the role."""
        choice = self.choices[index]
        choice.take(answer)
        text = answer.get("token", "")
        chunks = []
        if not choice.has_begun:
            choice.has_begun = True
            if self.completion.is_chat:
                delta = {"role": "assistant", "content": ""}
                chunks.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            else:
                text = self.completion.echoes[index] + text
        logprobs = self._logprobs(choice, answer.get("token", ""), answer.get("logprobs") or [])
        if text or logprobs or choice.finish_reason:
            content = {"delta": {"content": text}} if self.completion.is_chat else {"text": text}
            chunk = {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}
            if choice.finish_reason:
                chunk["stop_reason"] = choice.stop_reason
            chunks.append(chunk)
        return [self._chunk([chunk]) for chunk in chunks]

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.completion.is_chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        if self.completion.include_usage:
            chunk["usage"] = self.usage() if self.completion.continuous_usage else None
        return chunk

    # --- one piece ---

    def gather(self, index: int, answer: Answer) -> None:
        choice = self.choices[index]
        choice.take(answer)
        choice.texts.append(answer.get("token", ""))
        choice.logprobs += answer.get("logprobs") or []

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self.completion.is_chat else "text_completion"
        choices = [self._whole_choice(choice) for choice in self.choices]
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = self.completion.echoes[choice.index] + "".join(choice.texts)
        if self.completion.is_chat:
            content: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            content = {"text": text}
        return {
            "index": choice.index,
            **content,
            "logprobs": self._logprobs(choice, "".join(choice.texts), choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    # --- logprobs ---

    def _logprobs(self, choice: Choice, text: str, tokens: list[dict[str, Any]]) -> dict[str, Any] | None:
        """`text` is what the choice has gained with the tokens."""
        if not self.completion.with_logprobs:
            return None
        if not self.completion.is_chat:
            return _completion_logprobs(choice.aligned.offsets(text, tokens), tokens)
        if not tokens:
            return None
        content = [{**_chat_token(each), "top_logprobs": [_chat_token(top) for top in each["top"]]} for each in tokens]
        return {"content": content, "refusal": None}


def _completion_logprobs(offsets: list[int], tokens: list[dict[str, Any]]) -> dict[str, Any] | None:
    """OpenAI's four parallel lists. The top ones include the chosen token, so up to logprobs + 1."""
    if not tokens:
        return None
    return {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [_number(token) for token in tokens],
        "top_logprobs": [{_name(top): _number(top) for top in (token, *token["top"])} for token in tokens],
        "text_offset": offsets,
    }


def _chat_token(token: dict[str, Any]) -> dict[str, Any]:
    return {"token": _name(token), "logprob": _number(token), "bytes": token["bytes"]}


def _number(token: dict[str, Any]) -> float:
    return token["logprob"] if token["logprob"] > UNLIKELY else UNLIKELY


def _name(token: dict[str, Any]) -> str:
    """Part of a character has no text: it is named by its bytes, as OpenAI does, so that two of them stay two."""
    if "\ufffd" not in token["token"]:
        return token["token"]
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])
