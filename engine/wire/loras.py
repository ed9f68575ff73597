"""Requests that load and unload LoRA adapters, with vLLM's field names, and their response."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire import checks
from engine.wire.fields import Field

LOAD_LORA, UNLOAD_LORA = "load_lora_adapter", "unload_lora_adapter"
LORA_FIELDS = {
    LOAD_LORA: {"lora_name": Field((), checks.short_name), "lora_path": Field((), checks.filled_string)},
    UNLOAD_LORA: {"lora_name": Field((), checks.short_name)},
}


class LoraList(msgspec.Struct, frozen=True, tag="loras", array_like=True):
    """Response to both requests: the names of the loaded adapters."""

    names: list[str]
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, object]:
        return {"is_end": 1, "lora_names": [*self.names]}
