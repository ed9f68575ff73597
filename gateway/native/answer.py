"""Native lines or one native object for the model's answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestError
from engine.wire import Delta, Failure, TokenLogprob, Usage
from gateway.json_encoder import dump

# Fields of one response that the complete answer lacks
DELTA_FIELDS = ("token", "token_ids", "is_end", "send_idx", "usage", "logprobs")


@dataclass(eq=False)
class NativeExchange:
    """Exchange (`gateway.protocol.Exchange`) of the native protocol."""

    requests: list[dict[str, Any]]
    stream: bool
    timeout_s: float | None
    return_usage: bool
    received: str | None  # time of arrival, if the client measures latencies
    last: dict[int, Delta] = field(default_factory=dict)  # last answer of each choice
    logprobs: defaultdict[int, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    names: Mapping[str, str] = field(default_factory=dict)
    unenforced: tuple[str, ...] = ()  # schema keywords that are not enforced

    def __post_init__(self) -> None:
        self.answer_id = str(self.requests[0]["req_id"])

    @property
    def num_tokens(self) -> int:
        return sum(last.usage.completion_tokens for last in self.last.values())

    def event(self, index: int, answer: Delta) -> bytes:
        self.last[answer.index] = answer
        fields = answer.fields()
        if self.received is not None:
            fields["http_received_time"] = self.received
        return dump(fields) + b"\n"

    def gather(self, index: int, answer: Delta) -> None:
        self.last[answer.index] = answer
        self.logprobs[answer.index] += answer.logprobs or ()

    def whole(self) -> dict[str, Any]:
        """Return the first answer, so that a client which expects one finds it.

        If there are several, `choices` has all of them.
        """
        choices = [self._whole(last) for _, last in sorted(self.last.items())]
        if len(choices) == 1:
            return choices[0]
        usage = {"usage": self._usage().fields()} if self.return_usage else {}
        return {**choices[0], **usage, "choices": choices}

    def failure(self, error: RequestError, req_id: str | None) -> Failure:
        """Return the failure with what has been sent so far."""
        if not self.last:
            return Failure(error, req_id)
        num_sent = sum(last.send_idx + len(last.token_ids) for last in self.last.values())
        _, first = min(self.last.items())
        return Failure(error, req_id, num_sent, self._usage(), first.infer_seed)

    def _whole(self, last: Delta) -> dict[str, Any]:
        fields = last.fields()
        whole = {key: value for key, value in fields.items() if key not in DELTA_FIELDS}
        whole["result"] = whole["tokens_all"]
        if self.return_usage:
            whole["usage"] = fields["usage"]
        if logprobs := self.logprobs[last.index]:
            whole["logprobs"] = [each.fields() for each in logprobs]
        return whole

    def _usage(self) -> Usage:
        """Return the usage of all choices, which share one prompt."""
        _, first = min(self.last.items())
        return first.usage._replace(completion_tokens=self.num_tokens)
