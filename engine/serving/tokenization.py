"""Tokenize and detokenize requests, which are answered without the engine."""

from __future__ import annotations

from typing import Any

from engine import wire
from engine.errors import InvalidRequest
from engine.serving.image_prompts import Chat
from engine.serving.input_processor import InputProcessor


def tokenize_or_detokenize(
    body: dict[str, Any], processor: InputProcessor
) -> wire.TokenizeResponse | wire.DetokenizeResponse | None:
    """Return the answer to a tokenize or detokenize request, or None if `body` is another one. Raises
    InvalidRequest."""
    for key, answer in ((wire.TOKENIZE, _tokenize), (wire.DETOKENIZE, _detokenize)):
        if key in body:
            return answer(wire.json_object(key, body[key]), processor)
    return None


def _tokenize(body: dict[str, Any], processor: InputProcessor) -> wire.TokenizeResponse:
    given = wire.check_fields(body, wire.TOKENIZE_FIELDS)
    if ("prompt" in given) == ("messages" in given):
        raise InvalidRequest("Exactly one of `{field}` and `messages` must be set", field="prompt")
    source = "prompt" if "prompt" in given else "messages"
    try:
        token_ids = _prompt_ids(given, processor) if source == "prompt" else _chat_ids(given, processor)
    except InvalidRequest as error:  # errors of the tokenizer and the template have no field
        raise (error if error.field else error.blaming(source)) from None
    names = [processor.tokenizer.token_name(each) for each in token_ids] if given.get("return_token_strs") else None
    return wire.TokenizeResponse(token_ids, processor.lengths.model_len, names)


def _prompt_ids(given: dict[str, Any], processor: InputProcessor) -> list[int]:
    processor.check_size("prompt", given["prompt"])
    return processor.tokenizer.encode(given["prompt"], given.get("add_special_tokens", True))


def _chat_ids(given: dict[str, Any], processor: InputProcessor) -> list[int]:
    own = ("add_generation_prompt", "continue_final_message", "tools")
    variables = {**given.get("chat_template_kwargs", {}), **{name: given[name] for name in own if name in given}}
    messages, images = wire.take_images(given["messages"])
    if images:
        return processor.encode_images(Chat(messages, images, variables, given.get("mm_processor_kwargs")))[0]
    text = processor.tokenizer.render_chat(messages, **variables)
    processor.check_size("messages", text)
    # The template adds special tokens itself.
    return processor.tokenizer.encode(text, given.get("add_special_tokens", False))


def _detokenize(body: dict[str, Any], processor: InputProcessor) -> wire.DetokenizeResponse:
    given = wire.check_fields(body, wire.DETOKENIZE_FIELDS)
    if "tokens" not in given:
        raise InvalidRequest("`{field}` is missing", field="tokens")
    processor.check_ids("tokens", given["tokens"])
    return wire.DetokenizeResponse(processor.tokenizer.decode(given["tokens"], skip_special_tokens=False))
