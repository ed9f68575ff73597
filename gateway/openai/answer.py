"""OpenAI's response objects for the model's answers: chunks, choices and usage. It is independent of HTTP."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.wire import Delta, Final, PromptDetails, TokenLogprob, Usage
from gateway.json_encoder import dump
from gateway.openai.logprobs import TextOffsets, of_chat, of_completion
from gateway.openai.output_parser import CONTENT, TOOL_CALL, OutputParser, OutputPart
from gateway.openai.request import CompletionRequest

DONE = b"data: [DONE]\n\n"


def as_event(fields: dict[str, Any]) -> bytes:
    """Return `fields` as a server-sent event."""
    return b"data: " + dump(fields) + b"\n\n"


@dataclass(eq=False)
class ChoiceState:
    """State of one choice while it is generated."""

    index: int
    reader: OutputParser
    texts: list[str] = field(default_factory=list)
    parts: list[OutputPart] = field(default_factory=list)  # parts of a chat's message
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # includes the token that ended it
    prompt_details: PromptDetails | None = None
    aligned: TextOffsets = field(default_factory=TextOffsets)
    usage: Usage = Usage()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    has_begun: bool = False

    def take(self, answer: Delta) -> list[OutputPart]:
        """Record an answer and return the parts of the message that it adds."""
        self.usage = answer.usage
        self.prompt_details = answer.prompt_details or self.prompt_details
        if answer.reasoning:
            self.reader.set_reasoning(answer.reasoning)
        if not isinstance(answer, Final):
            return self.reader.push(answer.token)
        parts = self.reader.push(answer.token, is_end=True)
        has_calls = self.reader.num_calls and answer.finish_reason == "stop"
        self.finish_reason = "tool_calls" if has_calls else answer.finish_reason
        self.stop_reason = answer.stop_reason
        return parts


class CompletionExchange:
    """Base class of the exchanges (`gateway.protocol.Exchange`) of a completion request."""

    def __init__(self, completion: CompletionRequest):
        self.completion = completion
        self.requests = completion.requests
        self.answer_id = completion.answer_id
        self.names = completion.names
        self.stream = completion.stream
        self.timeout_s = completion.timeout_s
        self.unenforced = completion.unenforced


class OpenAIExchange(CompletionExchange):
    """Exchange of a completion or chat: its choices and response objects."""

    def __init__(self, completion: CompletionRequest):
        super().__init__(completion)
        num_choices = len(completion.requests) * completion.n
        self._choices = [ChoiceState(index, completion.reader()) for index in range(num_choices)]
        self._about = {"object": "", "created": int(time.time()), "model": completion.model}

    def go_on(self, num_tokens: Sequence[int]) -> None:
        """Continue a stream of which the client already has `num_tokens` tokens of each choice."""
        for choice, count in zip(self._choices, num_tokens, strict=True):
            choice.has_begun = count > 0

    @property
    def num_tokens(self) -> int:
        return sum(choice.usage.completion_tokens for choice in self._choices)

    @property
    def _head(self) -> dict[str, Any]:
        return {"id": self.answer_id, **self._about}

    def _choice(self, index: int, answer: Delta) -> ChoiceState:
        return self._choices[index * self.completion.n + answer.index]

    def _echo(self, choice: ChoiceState) -> str:
        return self.completion.prompts.text(choice.index // self.completion.n, choice.prompt_details)

    def _tokens(self, answer: Delta) -> tuple[list[TokenLogprob], list[int]]:
        """Return the tokens with logprobs and the token ids of an answer, with the token that ended it.

        OpenAI's chats omit the logprobs of that one.
        """
        tokens, ids = [*(answer.logprobs or ())], [*answer.token_ids]
        if isinstance(answer, Final) and answer.stop_token:
            ids.append(answer.stop_token.token_id)
            if not self.completion.is_chat or self.completion.prompts.with_ids:
                tokens.append(answer.stop_token)
        return tokens, ids

    def _usage(self, num_unsent: int = 0) -> dict[str, Any]:
        """Return the usage without `num_unsent` tokens. A prompt is counted once, however many choices it has."""
        prompt_usages = [choice.usage for choice in self._choices[:: self.completion.n]]
        num_prompt, num_new = sum(usage.prompt_tokens for usage in prompt_usages), self.num_tokens - num_unsent
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        details: Counter[str] = Counter()
        for each in prompt_usages:
            details.update(each.prompt_details())
        return {**usage, "prompt_tokens_details": dict(details)} if details else usage

    # --- a stream ---

    def event(self, index: int, answer: Delta) -> bytes:
        events = [as_event(chunk) for chunk in self._chunks(self._choice(index, answer), answer)]
        if answer.is_end and all(choice.finish_reason for choice in self._choices):
            if self.completion.include_usage:
                events.append(as_event({**self._chunk([]), "usage": self._usage()}))
            events.append(DONE)
        return b"".join(events)

    def _chunks(self, choice: ChoiceState, answer: Delta) -> list[dict[str, Any]]:
        """Return the chunks that one answer adds: none while its text is held back, and two if the first one carries
        the role.
        """
        parts, (tokens, ids) = choice.take(answer), self._tokens(answer)
        index, text, prompts = choice.index, answer.token, self.completion.prompts
        prompt_fields: dict[str, Any] = {}
        chunks: list[dict[str, Any]] = []
        if not choice.has_begun:
            choice.has_begun = True
            prompt_fields = prompts.fields(choice.prompt_details)
            if self.completion.is_chat:
                delta = {"role": "assistant", "content": ""}
                chunks.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            else:
                text, tokens = self._echo(choice) + text, prompts.echoed(choice.prompt_details) + tokens
        logprobs = self._logprobs(choice, text, tokens)
        added = self._message(parts, choice) if self.completion.is_chat else {"text": text}
        shown_ids = prompts.with_ids and ids  # also of tokens without text, such as parts of characters
        if any(added.values()) or logprobs or shown_ids or prompt_fields or choice.finish_reason:
            content = {"delta": added} if self.completion.is_chat else added
            chunk = {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}
            if prompts.with_ids:
                chunk["token_ids"] = ids
            if choice.finish_reason:
                chunk["stop_reason"] = choice.stop_reason
            chunks.append(chunk)
        if not self.completion.is_chat:
            return [self._chunk([chunk | prompt_fields]) for chunk in chunks]
        last = len(chunks) - 1  # the one before has the role and no token yet
        unsent = [choice.usage.completion_tokens if place < last else 0 for place in range(len(chunks))]
        made = [self._chunk([chunk], num_unsent) for chunk, num_unsent in zip(chunks, unsent, strict=True)]
        return [chunk | (prompt_fields if place == 0 else {}) for place, chunk in enumerate(made)]

    def _chunk(self, choices: list[dict[str, Any]], num_unsent: int = 0) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.completion.is_chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        if self.completion.include_usage:
            chunk["usage"] = self._usage(num_unsent) if self.completion.continuous_usage else None
        return chunk

    # --- one piece ---

    def gather(self, index: int, answer: Delta) -> None:
        choice = self._choice(index, answer)
        choice.parts += choice.take(answer)
        choice.texts.append(answer.token)
        tokens, ids = self._tokens(answer)
        choice.logprobs += tokens
        choice.token_ids += ids

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self.completion.is_chat else "text_completion"
        choices = [self._whole_choice(choice) for choice in self._choices]
        prompt_fields = (
            self.completion.prompts.fields(self._choices[0].prompt_details) if self.completion.is_chat else {}
        )
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(), **prompt_fields}

    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        prompts, text = self.completion.prompts, self._echo(choice) + "".join(choice.texts)
        if self.completion.is_chat:
            message = {"role": "assistant", "content": "", "refusal": None, **self._message(choice.parts, choice)}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" in message:
                message["content"] = message["content"] or None
            content: dict[str, Any] = {"message": message}
        else:
            content = {"text": text, **prompts.fields(choice.prompt_details)}
        if prompts.with_ids:
            content["token_ids"] = choice.token_ids
        return {
            "index": choice.index,
            **content,
            "logprobs": self._logprobs(choice, text, prompts.echoed(choice.prompt_details) + choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _message(self, parts: Sequence[OutputPart], choice: ChoiceState) -> dict[str, Any]:
        """Return `parts` as the fields of a message or of its delta."""
        message: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if part.kind != TOOL_CALL:
                message[part.kind] = message.get(part.kind, "") + part.text
            elif part.name is not None:
                function = {"name": part.name, "arguments": part.text}
                calls[part.call_index] = {
                    "index": part.call_index,
                    "id": self._call_id(),
                    "type": "function",
                    "function": function,
                }
            else:
                call = calls.setdefault(part.call_index, {"index": part.call_index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        if wanted := [call for index, call in calls.items() if index == 0 or self.completion.tools.is_parallel]:
            message["tool_calls"] = wanted
        if not message and not choice.reader.num_calls:
            message[CONTENT] = ""
        return message

    def _call_id(self) -> str:
        calls = self.completion.tools.calls
        assert calls
        return ("" if calls.call_id_len < 10 else "call_") + uuid.uuid4().hex[: calls.call_id_len]

    # --- logprobs ---

    def _logprobs(self, choice: ChoiceState, text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return the logprobs object of `tokens`. `text` is the text that was added to the choice with them."""
        if not self.completion.with_logprobs:
            return None
        if self.completion.is_chat:
            return of_chat(tokens, self.completion.as_token_ids)
        return of_completion(choice.aligned.offsets(text, tokens), tokens, self.completion.as_token_ids)
