"""Tokenize and detokenize requests and responses, with vLLM's field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from engine.wire import checks
from engine.wire.fields import Field
from engine.wire.schema import IDS, accepts


@accepts(**IDS)
def _any_ids(key: str, value: Any) -> list[int]:
    return [] if value == [] else checks.ids(key, value)


TOKENIZE_FIELDS = {
    "prompt": Field((), checks.string),
    "messages": Field((), checks.messages),
    "add_special_tokens": Field((), checks.boolean),
    "add_generation_prompt": Field((), checks.boolean),
    "continue_final_message": Field((), checks.boolean),
    "tools": Field((), checks.objects),
    "chat_template_kwargs": Field((), checks.json_object),
    "mm_processor_kwargs": Field((), checks.mm_processor_kwargs),
    "return_token_strs": Field((), checks.boolean),
}
DETOKENIZE_FIELDS = {"tokens": Field((), _any_ids)}


class TokenizeResponse(msgspec.Struct, frozen=True, tag="tokenized", array_like=True):
    """Response to TOKENIZE."""

    tokens: list[int]
    max_model_len: int
    token_strs: list[str] | None = None  # None: not requested
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        counts = {"count": len(self.tokens), "max_model_len": self.max_model_len, "tokens": self.tokens}
        return {"is_end": 1, **counts, "token_strs": self.token_strs}


class DetokenizeResponse(msgspec.Struct, frozen=True, tag="detokenized", array_like=True):
    """Response to DETOKENIZE."""

    prompt: str
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {"is_end": 1, "prompt": self.prompt}


def check_fields(body: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the checked values of the given fields; unknown fields are ignored. Raises InvalidRequest."""
    return {name: fields[name].check(name, body[name]) for name in fields if body.get(name) is not None}
