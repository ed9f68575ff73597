"""The answer to a request for a response: the object, or the events by which it grows. Knows nothing of HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gateway.openai.blocks import Block, BlockExchange
from gateway.openai.reader import CALL, REASONING
from gateway.openai.request import Completion

Json = dict[str, Any]
# What the answer tells of its request, and if nothing was said there
TOLD: Json = {
    **{
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
    },
    **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0, "reasoning": None},
    **{"user": None},
}
OF_ALL: Json = {
    "background": False,
    "error": None,
    "previous_response_id": None,
    "store": False,
    "truncation": "disabled",
}
DELTAS = {REASONING: "response.reasoning_text", CALL: "response.function_call_arguments"}
PREFIXES = {REASONING: "rs_", CALL: "fc_"}


class ResponsesExchange(BlockExchange):
    def __init__(self, completion: Completion, names: Mapping[str, str], body: Json):
        super().__init__(completion, names)
        self.num_events = 0
        told: Json = {name: body.get(name, default) for name, default in TOLD.items()}
        told |= {"text": TOLD["text"] | told["text"], "parallel_tool_calls": bool(told["parallel_tool_calls"])}
        about = {"id": completion.answer_id, "object": "response", "created_at": int(time.time())}
        self._head = {**about, "model": completion.model, **OF_ALL, **told}

    def whole(self) -> Json:
        is_cut = self.choice.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [_item(block, self._status(block)) for block in self.blocks],
            "usage": self._usage(),
        }

    def _status(self, block: Block) -> str:
        is_cut = self.choice.finish_reason == "length" and block is self.blocks[-1]
        return "incomplete" if is_cut else "completed"

    def _usage(self) -> Json:
        usage = self.choice.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_thought_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    # --- a stream ---

    def _numbered(self, *events: Json) -> list[Json]:
        self.num_events += len(events)
        first = self.num_events - len(events)
        return [{**event, "sequence_number": first + index} for index, event in enumerate(events)]

    def begin(self) -> list[Json]:
        response = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        kinds = ("response.created", "response.in_progress")
        return self._numbered(*[{"type": kind, "response": response} for kind in kinds])

    def begin_block(self, block: Block, text: str) -> list[Json]:
        added = {"type": "response.output_item.added", "output_index": block.index}
        events = [{**added, "item": _item(block, "in_progress", is_new=True)}]
        if block.kind != CALL:
            events.append({"type": "response.content_part.added", **_place(block), "part": _part(block, "")})
        return self._numbered(*events)

    def gain(self, block: Block, text: str) -> list[Json]:
        kind = DELTAS.get(block.kind, "response.output_text")
        return self._numbered({"type": f"{kind}.delta", **_place(block), "delta": text, **_no_logprobs(block)})

    def end_block(self, block: Block, text: str) -> list[Json]:
        done = {"type": f"{DELTAS.get(block.kind, 'response.output_text')}.done", **_place(block)}
        if block.kind == CALL:
            events = [{**done, "name": block.name, "arguments": text}]
        else:
            part = {"type": "response.content_part.done", **_place(block), "part": _part(block, text)}
            events = [{**done, "text": text, **_no_logprobs(block)}, part]
        item = _item(block, self._status(block))
        return self._numbered(*events, {"type": "response.output_item.done", "output_index": block.index, "item": item})

    def end(self) -> list[Json]:
        response = self.whole()
        return self._numbered({"type": f"response.{response['status']}", "response": response})


def _item_id(block: Block) -> str:
    return PREFIXES.get(block.kind, "msg_") + block.block_id


def _place(block: Block) -> Json:
    place: Json = {"item_id": _item_id(block), "output_index": block.index}
    return place if block.kind == CALL else {**place, "content_index": 0}


def _part(block: Block, text: str) -> Json:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _no_logprobs(block: Block) -> Json:
    return {} if block.kind in DELTAS else {"logprobs": []}


def _item(block: Block, status: str, is_new: bool = False) -> Json:
    item: Json = {"id": _item_id(block), "status": status}
    content = [] if is_new else [_part(block, block.text)]
    if block.kind == CALL:
        call_id = "call_" + block.block_id
        return {**item, "type": "function_call", "call_id": call_id, "name": block.name, "arguments": block.text}
    if block.kind == REASONING:
        return {**item, "type": "reasoning", "summary": [], "content": content}
    return {**item, "type": "message", "role": "assistant", "content": content}
