"""One answer to a chat as blocks that follow one another: what the model thinks, its words, each of its calls. For the
protocols that tell it so; how they write a block is theirs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.wire import Delta
from gateway.json_encoder import dump
from gateway.openai.answer import ChoiceState
from gateway.openai.output_parser import CONTENT, REASONING, TOOL_CALL, OutputPart
from gateway.openai.request import CompletionRequest

BEGIN, GAIN, END = "begin", "gain", "end"
Json = dict[str, Any]


@dataclass(eq=False)
class ContentBlock:
    kind: str  # of a Part
    index: int
    name: str = ""  # of a call
    text: str = ""  # so far; of a call its arguments
    block_id: str = ""


class ContentBlockExchange:
    """A `gateway.protocol.Exchange` of a chat with one answer. Who extends it writes `whole` and the events below, each
    an object with its `type`. `names` are those of the chat's fields that its client calls otherwise."""

    def __init__(self, completion: CompletionRequest, names: Mapping[str, str]):
        self.requests = completion.requests
        self.answer_id = completion.answer_id
        self.names: Mapping[str, str] = {
            **names,
            **{native: names.get(name, name) for native, name in completion.names.items()},
        }
        self.stream = completion.stream
        self.timeout_s = completion.timeout_s
        self.unenforced = completion.unenforced
        self.completion = completion
        self.choice = ChoiceState(0, completion.reader())
        self.blocks: list[ContentBlock] = []
        self.ids = uuid.uuid4().hex[:20]  # how those of the blocks begin
        self.num_thought_tokens = 0  # as far as answers of several tokens can be told apart

    @property
    def num_tokens(self) -> int:
        return self.choice.usage.completion_tokens

    def event(self, index: int, answer: Delta) -> bytes:
        has_begun, self.choice.has_begun = self.choice.has_begun, True
        changes = list(self._changes(answer))
        events = [] if has_begun else self.begin()
        writers = {BEGIN: self.begin_block, GAIN: self.gain, END: self.end_block}
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
        raise NotImplementedError

    def begin_block(self, block: ContentBlock, text: str) -> list[Json]:
        raise NotImplementedError

    def gain(self, block: ContentBlock, text: str) -> list[Json]:
        raise NotImplementedError

    def end_block(self, block: ContentBlock, text: str) -> list[Json]:
        """`text` is all of it."""
        raise NotImplementedError

    def end(self) -> list[Json]:
        raise NotImplementedError

    def _changes(self, answer: Delta) -> Iterator[tuple[str, ContentBlock, str]]:
        """What it does to the blocks, of which the last one is open."""
        for part in self.choice.take(answer):
            if part.kind == TOOL_CALL and part.call_index and not self.completion.tools.is_parallel:
                continue
            yield from self._place(part)
            if part.text:
                self.blocks[-1].text += part.text
                yield GAIN, self.blocks[-1], part.text
        if self.blocks and self.blocks[-1].kind == REASONING:
            self.num_thought_tokens = answer.usage.completion_tokens
        if self.choice.finish_reason:
            if not self.blocks:
                yield from self._place(OutputPart(CONTENT, ""))
            yield END, self.blocks[-1], self.blocks[-1].text

    def _place(self, part: OutputPart) -> Iterator[tuple[str, ContentBlock, str]]:
        """Makes the last block the one that the part belongs to."""
        last = self.blocks[-1] if self.blocks else None
        if last and last.kind == part.kind and part.name is None:
            return
        if last:
            yield END, last, last.text
        index = len(self.blocks)
        self.blocks.append(ContentBlock(part.kind, index, part.name or "", block_id=f"{self.ids}{index:04x}"))
        yield BEGIN, self.blocks[-1], ""


def as_named_event(fields: Json) -> bytes:
    return b"event: " + fields["type"].encode() + b"\ndata: " + dump(fields) + b"\n\n"
