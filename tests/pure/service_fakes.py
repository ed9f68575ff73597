"""The service for tests, and both of its ends: a stream that remembers its responses, an engine driven by hand."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from pathlib import Path

from engine import wire
from engine.errors import EngineUnavailable
from engine.link import messages
from engine.serving.input_processor import InputProcessor
from engine.serving.length_limits import LengthLimits
from engine.serving.lora_registry import LoraRegistry
from engine.serving.options import ServiceOptions
from engine.serving.service import Service
from engine.settings.config import Config
from tests.patience import wait_until


def an_input_processor(tokenizer, vocab_size=400, lengths=(100, 80, 50), loras=None, **more):
    """Return an input processor. `lengths` limits prompt and answer together, a prompt, and an answer."""
    loras = loras or LoraRegistry(Config(), Path())
    return InputProcessor(tokenizer, vocab_size, LengthLimits(*lengths), loras, **more)


@contextmanager
def a_service(processor, client, **options):
    service = Service(processor, client, ServiceOptions(**options))
    try:
        yield service
    finally:
        service.close(drain_s=0)


def fields_of(payload):
    """Return the fields that the JSON of an answer would have."""
    [fields] = json.loads(b"[%s]" % wire.native_json(wire.read_answer(payload)))
    return fields[0] if isinstance(fields, list) else fields


class FakeSender:
    """Remembers every response; `before_send` may wait, raise, or do anything else."""

    def __init__(self, before_send=lambda fields, final: None):
        self.before_send = before_send
        self.sent: list[tuple[dict, bool]] = []  # fields, final
        self.cancelled = False
        self.misuses: list[str] = []  # what would crash Triton
        self._final_tried = False

    def send(self, payload, final):
        if self._final_tried:
            self.misuses.append(f"send after the final response: {payload!r}")
        self._final_tried |= final
        fields = fields_of(payload)
        self.before_send(fields, final)
        self.sent.append((fields, final))

    def is_cancelled(self):
        if self._final_tried:
            self.misuses.append("asked for a cancellation after the final response")
        return self.cancelled

    @property
    def deltas(self):
        return [fields for fields, final in self.sent if not final]

    @property
    def is_over(self):
        return any(final for _, final in self.sent)

    @property
    def final(self):
        """Return the only final response."""
        wait_until(lambda: self.is_over)
        [final] = [fields for fields, final in self.sent if final]
        assert self.misuses == []
        assert self.sent[-1][1], "the final response is not the last"
        return final


class FakeEngine:
    """Stands in for EngineClient. `give` brings tokens to the request with this prompt."""

    def __init__(self):
        self.stats = {"num_running": 1, "num_blocks": 8, "num_blocks_held": 2, "block_size": 64}
        self.num_restarts = 0
        self.silent_s = 0.0
        self.reason = None
        self.listeners = {}  # by engine id
        self.prompts = {}  # engine id -> prompt, of all that were ever submitted
        self.spans = {}  # engine id -> the spans of the prompt
        self.cancelled, self.asked_to_expire, self.queue_positions = [], [], []
        self.on_submit = lambda: None
        self._lock = threading.Lock()

    def submit(self, entry):
        submissions, spans = entry.answers.values(), entry.spans
        samplings = [messages.pack_sampling(each.sampling) for each in submissions]
        messages.pack(entry.prompt_ids, samplings, entry.salt, entry.queue_position, messages.pack_spans(spans))
        self.on_submit()
        self.queue_positions.append(entry.queue_position)
        if self.reason:
            raise EngineUnavailable(self.reason)
        with self._lock:
            for each in submissions:
                assert each.request_id not in self.prompts, "an id is used twice"
                self.prompts[each.request_id], self.spans[each.request_id] = list(entry.prompt_ids), list(spans)
                self.listeners[each.request_id] = each.listener

    def cancel(self, request_id, is_complete):
        with self._lock:
            if self.listeners.pop(request_id, None):
                self.cancelled.append(request_id)

    def expire(self, request_id, error):
        """End a request that has not begun with an error."""
        self.asked_to_expire.append(request_id)
        if listener := self.listeners.pop(request_id, None):
            listener.ended(error)

    def failure(self):
        return self.reason

    @property
    def engines(self):
        return [self]

    def close(self):
        for listener in list(self.listeners.values()):
            listener.ended(EngineUnavailable("the server is stopping"))
        self.listeners.clear()

    def listener_of(self, prompt):
        """Return the listener of the open request with this prompt, waiting for it if it has not arrived."""

        def found():  # `list`, as others submit and leave meanwhile
            return [(name, listener) for name, listener in list(self.listeners.items()) if self.prompts[name] == prompt]

        [the_one] = wait_until(found)
        return the_one

    def give(self, prompt, token_ids, finish_reason=None):
        name, listener = self.listener_of(prompt)
        for index, token_id in enumerate(token_ids, 1):
            is_last = bool(finish_reason) and index == len(token_ids)
            if is_last:
                del self.listeners[name]
            listener.tokens([token_id], None, finish_reason if is_last else None)


def a_payload(**fields):
    return json.dumps([fields]).encode()


def answer_to(service, **body):
    sender = FakeSender()
    service.submit(a_payload(**body), sender)
    return sender.final
