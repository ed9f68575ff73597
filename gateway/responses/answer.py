"""Response object and stream events of OpenAI's Responses API. It is independent of HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine import wire
from engine.wire import StoredResponse
from gateway.openai.content_blocks import ContentBlock, ContentBlockExchange
from gateway.openai.output_parser import REASONING, TOOL_CALL
from gateway.openai.request import CompletionRequest

Json = dict[str, Any]
# Fields of the request that the response repeats, with their defaults
REPEATED_FIELDS: Json = {
    **{
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
    },
    **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0, "reasoning": None},
    **{"user": None, "background": False, "previous_response_id": None, "store": False},
}
CONSTANT_FIELDS: Json = {"error": None, "truncation": "disabled"}
CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # error codes by HTTP status
DELTAS = {REASONING: "response.reasoning_text", TOOL_CALL: "response.function_call_arguments"}
PREFIXES = {REASONING: "rs_", TOOL_CALL: "fc_"}


@dataclass(frozen=True)
class ResponseIdentity:
    """Fields of a response that are neither in its request nor in its answer.

    They are stored, so that they are the same whenever it is retrieved.
    """

    created_at: int = field(default_factory=lambda: int(time.time()))
    ids: str = field(default_factory=lambda: uuid.uuid4().hex[:20])  # prefix of the items' ids

    def about(self, body: Json) -> Json:
        """Return what is stored of the request; the model process has the input."""
        return {**asdict(self), "body": {name: value for name, value in body.items() if name != "input"}}


class ResponsesExchange(ContentBlockExchange):
    """Exchange of a response request."""

    def __init__(self, completion: CompletionRequest, names: Mapping[str, str], body: Json, identity: ResponseIdentity):
        super().__init__(completion, names)
        self.identity, self.ids = identity, identity.ids
        self.num_events = 0
        self._is_resumable, self._starting_after = False, -1
        repeated: Json = {name: body.get(name, default) for name, default in REPEATED_FIELDS.items()}
        repeated |= {
            "text": REPEATED_FIELDS["text"] | repeated["text"],
            "parallel_tool_calls": bool(repeated["parallel_tool_calls"]),
            "store": bool(repeated["store"] or repeated["background"]),
        }
        about = {"object": "response", "created_at": identity.created_at}
        self._about = {**about, "model": completion.model, **CONSTANT_FIELDS, **repeated}

    @property
    def _head(self) -> Json:
        return {"id": self.answer_id, **self._about}

    def store(self, body: Json, is_background: bool) -> None:
        """Ask the model process to store the response."""
        storing = {"about": self.identity.about(body), "is_background": is_background}
        self.requests[0][wire.STORE] = storing | {"is_streamed": is_background and self.stream}
        self._is_resumable = is_background

    def resume(self, body: Json, starting_after: int) -> None:
        """Stream a response in the background from its beginning, without the events that its client has."""
        self.stream = True
        self.store(body, is_background=True)
        self.requests[0]["resume_from"] = [0]
        self._starting_after = starting_after

    def stored(self, stored: StoredResponse) -> Json:
        """Return the object of a stored response, as far as it has come."""
        if stored.answer:
            self.gather(0, stored.answer)
        if self.choice.finish_reason:
            return self.whole()
        last = wire.IN_PROGRESS if stored.status in (wire.QUEUED, wire.IN_PROGRESS) else wire.INCOMPLETE
        items = [_item(block, last if block is self.blocks[-1] else wire.COMPLETED) for block in self.blocks]
        error = stored.error and {"code": CODES.get(stored.error.code, "server_error"), "message": str(stored.error)}
        more: Json = {"output": items, "usage": None, "incomplete_details": None}
        return {**self._head, "status": stored.status, **more, "error": error}

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

    def _status(self, block: ContentBlock) -> str:
        is_cut = self.choice.finish_reason == "length" and block is self.blocks[-1]
        return "incomplete" if is_cut else "completed"

    def _usage(self) -> Json:
        usage = self.choice.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    # --- a stream ---

    def _numbered(self, *events: Json) -> list[Json]:
        """Number the events.

        If the stream is resumable each character of a delta counts, so that the numbers do not depend on how the text
        is split, and events that the client already has are left out.
        """
        numbered = []
        for event in events:
            delta = event.get("delta", "") if self._is_resumable else ""
            self.num_events += len(delta) or 1
            num_new = self.num_events - 1 - self._starting_after
            if num_new > 0:
                rest = {"delta": delta[-num_new:]} if delta else {}
                numbered.append({**event, **rest, "sequence_number": self.num_events - 1})
        return numbered

    def begin(self) -> list[Json]:
        response = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        kinds = ("response.created", "response.in_progress")
        return self._numbered(*[{"type": kind, "response": response} for kind in kinds])

    def begin_block(self, block: ContentBlock, text: str) -> list[Json]:
        added = {"type": "response.output_item.added", "output_index": block.index}
        events = [{**added, "item": _item(block, "in_progress", is_new=True)}]
        if block.kind != TOOL_CALL:
            events.append({"type": "response.content_part.added", **_place(block), "part": _part(block, "")})
        return self._numbered(*events)

    def add_text(self, block: ContentBlock, text: str) -> list[Json]:
        kind = DELTAS.get(block.kind, "response.output_text")
        return self._numbered({"type": f"{kind}.delta", **_place(block), "delta": text, **_no_logprobs(block)})

    def end_block(self, block: ContentBlock, text: str) -> list[Json]:
        done = {"type": f"{DELTAS.get(block.kind, 'response.output_text')}.done", **_place(block)}
        if block.kind == TOOL_CALL:
            events = [{**done, "name": block.name, "arguments": text}]
        else:
            part = {"type": "response.content_part.done", **_place(block), "part": _part(block, text)}
            events = [{**done, "text": text, **_no_logprobs(block)}, part]
        item = _item(block, self._status(block))
        return self._numbered(*events, {"type": "response.output_item.done", "output_index": block.index, "item": item})

    def end(self) -> list[Json]:
        response = self.whole()
        return self._numbered({"type": f"response.{response['status']}", "response": response})


def _item_id(block: ContentBlock) -> str:
    return PREFIXES.get(block.kind, "msg_") + block.block_id


def _place(block: ContentBlock) -> Json:
    place: Json = {"item_id": _item_id(block), "output_index": block.index}
    return place if block.kind == TOOL_CALL else {**place, "content_index": 0}


def _part(block: ContentBlock, text: str) -> Json:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _no_logprobs(block: ContentBlock) -> Json:
    return {} if block.kind in DELTAS else {"logprobs": []}


def _item(block: ContentBlock, status: str, is_new: bool = False) -> Json:
    item: Json = {"id": _item_id(block), "status": status}
    content = [] if is_new else [_part(block, block.text)]
    if block.kind == TOOL_CALL:
        call_id = "call_" + block.block_id
        return {**item, "type": "function_call", "call_id": call_id, "name": block.name, "arguments": block.text}
    if block.kind == REASONING:
        return {**item, "type": "reasoning", "summary": [], "content": content}
    return {**item, "type": "message", "role": "assistant", "content": content}
