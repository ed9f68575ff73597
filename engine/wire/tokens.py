"""Questions about a model's tokens: what they hold, and their answers, in vLLM's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from engine.wire import checks
from engine.wire.fields import Field
from engine.wire.schema import IDS, holds


@holds(**IDS)
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
    "return_token_strs": Field((), checks.boolean),
}
DETOKENIZE_FIELDS = {"tokens": Field((), _any_ids)}


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized", array_like=True):
    """The answer to TOKENIZE."""

    tokens: list[int]
    max_model_len: int
    token_strs: list[str] | None = None  # None: not asked for
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        told = {"count": len(self.tokens), "max_model_len": self.max_model_len, "tokens": self.tokens}
        return {"is_end": 1, **told, "token_strs": self.token_strs}


class Detokenized(msgspec.Struct, frozen=True, tag="detokenized", array_like=True):
    """The answer to DETOKENIZE."""

    prompt: str
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {"is_end": 1, "prompt": self.prompt}


def checked(question: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The fields that are given. Raises InvalidRequest. Others do nothing."""
    return {name: fields[name].check(name, question[name]) for name in fields if question.get(name) is not None}
