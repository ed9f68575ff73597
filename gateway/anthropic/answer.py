"""Anthropic's message object and stream events for the model's answer. It is independent of HTTP."""

from __future__ import annotations

import json
from typing import Any

from gateway.openai.content_blocks import ContentBlock, ContentBlockExchange
from gateway.openai.output_parser import CONTENT, REASONING, TOOL_CALL

Json = dict[str, Any]
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesExchange(ContentBlockExchange):
    """Exchange of a message request."""

    def whole(self) -> Json:
        return self._message([_whole(block) for block in self.blocks], **self._end(), usage=self._usage())

    def _message(self, content: list[Json], **fields: Any) -> Json:
        completion = self.completion
        about = {"id": self.answer_id, "type": "message", "role": "assistant", "model": completion.model}
        return {**about, "content": content, **fields}

    def _end(self) -> Json:
        stop_text = self.choice.stop_reason if isinstance(self.choice.stop_reason, str) else None
        reason = "stop_sequence" if stop_text is not None else REASONS[self.choice.finish_reason or "stop"]
        return {"stop_reason": reason, "stop_sequence": stop_text}

    def _usage(self) -> Json:
        """Return the usage. Cached tokens of the prompt are counted beside `input_tokens`, not among them."""
        usage = self.choice.usage
        num_cached = usage.cached_tokens or 0
        of_prompt = {"input_tokens": usage.prompt_tokens - num_cached, "cache_creation_input_tokens": 0}
        return {**of_prompt, "cache_read_input_tokens": num_cached, "output_tokens": usage.completion_tokens}

    # --- a stream ---

    def begin(self) -> list[Json]:
        message = self._message([], stop_reason=None, stop_sequence=None, usage={**self._usage(), "output_tokens": 0})
        return [{"type": "message_start", "message": message}]

    def begin_block(self, block: ContentBlock, text: str) -> list[Json]:
        empty = {
            CONTENT: {"type": "text", "text": ""},
            REASONING: {"type": "thinking", "thinking": "", "signature": ""},
            TOOL_CALL: {"type": "tool_use", "id": _call_id(block), "name": block.name, "input": {}},
        }[block.kind]
        return [{"type": "content_block_start", "index": block.index, "content_block": empty}]

    def add_text(self, block: ContentBlock, text: str) -> list[Json]:
        delta = {
            CONTENT: {"type": "text_delta", "text": text},
            REASONING: {"type": "thinking_delta", "thinking": text},
            TOOL_CALL: {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def end_block(self, block: ContentBlock, text: str) -> list[Json]:
        return [{"type": "content_block_stop", "index": block.index}]

    def end(self) -> list[Json]:
        return [{"type": "message_delta", "delta": self._end(), "usage": self._usage()}, {"type": "message_stop"}]


def _call_id(block: ContentBlock) -> str:
    return "toolu_" + block.block_id


def _whole(block: ContentBlock) -> Json:
    if block.kind == TOOL_CALL:
        return {"type": "tool_use", "id": _call_id(block), "name": block.name, "input": _input(block.text)}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _input(arguments: str) -> Json:
    """Return the arguments of a call as an object.

    Arguments that are no JSON object, for example because they were cut short, are wrapped in `INVALID_JSON` as
    Anthropic recommends.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
