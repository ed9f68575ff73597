"""From the model's answers to native lines, or to one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.wire import Delta, TokenLogprob
from gateway.as_json import dump

OF_ONE_RESPONSE = ("token", "token_ids", "is_end", "send_idx", "usage", "logprobs")  # not of the whole answer


@dataclass(eq=False)
class NativeExchange:
    """A `gateway.protocol.Exchange`."""

    requests: list[dict[str, Any]]
    stream: bool
    timeout_s: float | None
    return_usage: bool
    received: str | None  # when, for who measures
    last: Delta | None = None  # of the answers so far
    logprobs: list[TokenLogprob] = field(default_factory=list)
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.last.usage.completion_tokens if self.last else 0

    def event(self, index: int, answer: Delta) -> bytes:
        self.last = answer
        fields = answer.fields()
        if self.received is not None:
            fields["http_received_time"] = self.received
        return dump(fields) + b"\n"

    def gather(self, index: int, answer: Delta) -> None:
        self.last = answer
        self.logprobs += answer.logprobs or ()

    def whole(self) -> dict[str, Any]:
        assert self.last is not None
        fields = self.last.fields()
        whole = {key: value for key, value in fields.items() if key not in OF_ONE_RESPONSE}
        whole["result"] = whole["tokens_all"]
        if self.return_usage:
            whole["usage"] = fields["usage"]
        if self.logprobs:
            whole["logprobs"] = [each.fields() for each in self.logprobs]
        return whole
