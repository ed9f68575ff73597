"""Generate extension in the form of Triton's vLLM and TensorRT-LLM backends.

The prompt is `text_input`, the options are in `parameters` under the native protocol's names, and an answer is
`text_output`.
"""

from __future__ import annotations

from typing import Any

from engine import wire
from engine.errors import InvalidRequest
from engine.wire.triton import MODEL, VERSION
from gateway.json_encoder import dump
from gateway.native.answer import NativeExchange
from gateway.native.request import parse
from gateway.openai.request import check_bool, check_object, check_string
from gateway.protocol import RequestContext
from gateway.triton import TritonGenerateProtocol

PROMPT, PARAMETERS, STREAM, ANSWER = "text_input", "parameters", "stream", "text_output"
OTHER_PROMPTS = ("text", "input_ids", "messages", "text_pair")
# Options without a field in the response
UNSUPPORTED_OUTPUTS = ("logprobs", "prompt_logprobs", "return_token_ids", "pooling")
TENSORRT_LLM_NAMES = {"stop_words": "stop_sequences", "bad_words": "bad_words"}  # TensorRT-LLM's name -> the wire's


class TextExchange(NativeExchange):
    """Exchange whose answers are texts in Triton's envelope."""

    def event(self, index: int, answer: wire.Delta) -> bytes:
        self.last[answer.index] = answer
        event = {**_envelope(answer.token), "index": answer.index}
        if isinstance(answer, wire.Final):
            event["finish_reason"] = answer.finish_reason
        return b"data: " + dump(event) + b"\n\n"

    def whole(self) -> dict[str, Any]:
        """Return the text, or a list of texts if several answers were asked for."""
        answers = [last for _, last in sorted(self.last.items()) if isinstance(last, wire.Final)]
        texts, reasons = [each.tokens_all for each in answers], [each.finish_reason for each in answers]
        is_one = len(answers) == 1
        return _envelope(texts[0] if is_one else texts) | {"finish_reason": reasons[0] if is_one else reasons}


class TritonTextProtocol(TritonGenerateProtocol):
    """Triton's generate extension with a text prompt."""

    name = "triton-text"

    def fields(self, path: str) -> dict[str, Any]:
        options = {
            name: each
            for name, each in wire.field_schemas().items()
            if name not in (*OTHER_PROMPTS, *UNSUPPORTED_OUTPUTS)
        }
        return {
            PROMPT: {"type": "string", "description": wire.strip_links(wire.FIELD_DESCRIPTIONS["text"])},
            PARAMETERS: {"type": "object", "properties": options, "description": "fields of the native protocol"},
            STREAM: {"type": "boolean", "description": "for generate_stream: send the text as it is generated"},
            "id": {"type": "string", "description": "does nothing"},
        }

    def needs(self, path: str) -> tuple[str]:
        return (PROMPT,)

    def example(self, path: str) -> dict[str, Any]:
        return {PROMPT: "Hello, how are you?", PARAMETERS: {"max_tokens": 64}}

    def speaks(self, body: dict[str, Any]) -> bool:
        return PROMPT in body

    def parse(self, body: dict[str, Any], context: RequestContext) -> TextExchange:
        is_stream = context.path.endswith("_stream")
        as_it_comes = is_stream if body.get(STREAM) is None else check_bool(STREAM, body[STREAM])
        if as_it_comes and not is_stream:
            raise InvalidRequest("`{field}` is true, which is for generate_stream", field=STREAM, value=True)
        asked = {"text": check_string(PROMPT, body[PROMPT]), "cut_max_dec_len": True, **_parameters(body)}
        native = parse({**asked, "return_all_tokens": not as_it_comes}, context)
        names = {**native.names, "text": PROMPT}
        return TextExchange(native.requests, is_stream, native.timeout_s, False, None, names=names)


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    """Return the options in `parameters` and beside it, because Triton treats every field that is no input as a
    parameter. Raise InvalidRequest.
    """
    given = {name: value for name, value in body.items() if name not in (PROMPT, PARAMETERS, STREAM, "id")}
    given |= check_object(PARAMETERS, body.get(PARAMETERS) or {})
    given = {name: value for name, value in given.items() if value is not None}
    for name in (*OTHER_PROMPTS, *UNSUPPORTED_OUTPUTS):
        if given.get(name, False) is not False:
            raise InvalidRequest(f"`{{field}}` is not supported beside `{PROMPT}`", field=name)
    if "max_completion_tokens" in given:  # litellm sends both
        given["max_tokens"] = given.pop("max_completion_tokens")
    for name, own in TENSORRT_LLM_NAMES.items():
        words = given.pop(name, [])
        if words := [each for each in words if each] if isinstance(words, list) else words:  # "" means no word
            given[own] = words
    return given


def _envelope(text: Any) -> dict[str, Any]:
    return {"model_name": MODEL, "model_version": VERSION, ANSWER: text}
