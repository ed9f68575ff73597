"""Answer to a chat as a sequence of content blocks: reasoning, text, and one for each tool call.

Protocols that stream such blocks extend it with their own objects.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.wire import Delta
from gateway.json_encoder import dump
from gateway.openai.answer import ChoiceState, CompletionExchange
from gateway.openai.output_parser import CONTENT, REASONING, TOOL_CALL, OutputPart
from gateway.openai.request import CompletionRequest

BEGIN, ADD, END = "begin", "add_text", "end"
Json = dict[str, Any]


@dataclass(eq=False)
class ContentBlock:
    """One content block of an answer."""

    kind: str  # kind of an OutputPart
    index: int
    name: str = ""  # name of a tool call
    text: str = ""  # text so far; the arguments of a tool call
    block_id: str = ""


class ContentBlockExchange(CompletionExchange):
    """Exchange of a chat with one answer in content blocks.

    A subclass implements `whole` and the methods that return events, which are objects with a `type`. `names` maps the
    chat's fields to the names that its protocol uses.
    """

    def __init__(self, completion: CompletionRequest, names: Mapping[str, str]):
        super().__init__(completion)
        self.names = {**names, **{native: names.get(name, name) for native, name in completion.names.items()}}
        self.choice = ChoiceState(0, completion.reader())
        self.blocks: list[ContentBlock] = []
        self.ids = uuid.uuid4().hex[:20]  # prefix of the blocks' ids
        self.num_reasoning_tokens = 0  # approximate if one answer has several tokens

    @property
    def num_tokens(self) -> int:
        return self.choice.usage.completion_tokens

    def event(self, index: int, answer: Delta) -> bytes:
        has_begun, self.choice.has_begun = self.choice.has_begun, True
        changes = list(self._changes(answer))
        events = [] if has_begun else self.begin()
        writers = {BEGIN: self.begin_block, ADD: self.add_text, END: self.end_block}
        for what, block, text in changes:
            events += writers[what](block, text)
        if self.choice.finish_reason:
            events += self.end()
        return b"".join(map(as_named_event, events))

    def gather(self, index: int, answer: Delta) -> None:
        for _ in self._changes(answer):
            pass

    def whole(self) -> Json:
        raise NotImplementedError

    def begin(self) -> list[Json]:
        """Return the events that start the stream."""
        raise NotImplementedError

    def begin_block(self, block: ContentBlock, text: str) -> list[Json]:
        """Return the events that start a block."""
        raise NotImplementedError

    def add_text(self, block: ContentBlock, text: str) -> list[Json]:
        """Return the events for `text` that is added to a block."""
        raise NotImplementedError

    def end_block(self, block: ContentBlock, text: str) -> list[Json]:
        """Return the events that end a block. `text` is all of its text."""
        raise NotImplementedError

    def end(self) -> list[Json]:
        """Return the events that end the stream."""
        raise NotImplementedError

    def _changes(self, answer: Delta) -> Iterator[tuple[str, ContentBlock, str]]:
        """Yield (BEGIN, ADD or END, block, text) for each change that an answer makes. Only the last block is open."""
        is_reasoning = False
        for part in self.choice.take(answer):
            is_reasoning |= part.kind == REASONING
            if part.kind == TOOL_CALL and part.call_index and not self.completion.tools.is_parallel:
                continue
            yield from self._place(part)
            if part.text:
                self.blocks[-1].text += part.text
                yield ADD, self.blocks[-1], part.text
        if is_reasoning or self.blocks and self.blocks[-1].kind == REASONING:
            self.num_reasoning_tokens = answer.usage.completion_tokens
        if self.choice.finish_reason:
            if not self.blocks:
                yield from self._place(OutputPart(CONTENT, ""))
            yield END, self.blocks[-1], self.blocks[-1].text

    def _place(self, part: OutputPart) -> Iterator[tuple[str, ContentBlock, str]]:
        """Start a new block unless `part` continues the last one, and yield the changes."""
        last = self.blocks[-1] if self.blocks else None
        if last and last.kind == part.kind and part.name is None:
            return
        if last:
            yield END, last, last.text
        index = len(self.blocks)
        self.blocks.append(ContentBlock(part.kind, index, part.name or "", block_id=f"{self.ids}{index:04x}"))
        yield BEGIN, self.blocks[-1], ""


def as_named_event(fields: Json) -> bytes:
    """Return `fields` as a server-sent event that is named by its `type`."""
    return b"event: " + fields["type"].encode() + b"\ndata: " + dump(fields) + b"\n\n"
