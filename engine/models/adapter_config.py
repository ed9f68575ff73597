"""Configuration of a LoRA adapter, read from PEFT's adapter_config.json: the rank and the scale of each module.

Options of PEFT that change the answer but are not implemented are refused by name. Independent of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import numpy as np

from engine.errors import SetupError

CONFIG = "adapter_config.json"
MAX_ALPHA = float(np.finfo(np.float32).max)
MAX_PATTERNS = 4096  # of one kind; an adapter may name each module of a large model
MAX_REPEATS = 2  # of the characters of a pattern, so that the time of a search is bounded
# Key of adapter_config.json -> values that are accepted, in addition to null, false and empty values
REFUSED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    **dict.fromkeys(("modules_to_save", "use_dora", "fan_in_fan_out"), ()),
    **dict.fromkeys(("lora_bias", "layer_replication", "target_parameters", "trainable_token_indices"), ()),
    **dict.fromkeys(("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"), ()),
    **dict.fromkeys(("monteclora_config", "velora_config"), ()),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # other values change the weights of the base model
}


class AdapterError(SetupError):
    """An adapter cannot be used.

    The message names its folder, the key or tensor, what was found and what is supported.
    """


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales of an adapter. `rank_pattern` and `alpha_pattern` have those of modules that differ."""

    rank: int
    alpha: float
    rank_pattern: Mapping[re.Pattern[str], int]
    alpha_pattern: Mapping[re.Pattern[str], float]
    uses_root_of_rank: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any], max_rank: int) -> AdapterConfig:
        """Read the parsed adapter_config.json. Raises AdapterError."""
        if keys.get("peft_type") != "LORA":
            raise AdapterError(f"{CONFIG}: peft_type is {short(keys.get('peft_type'))}, supported is 'LORA'")
        for name, harmless in REFUSED.items():
            if (value := keys.get(name)) and value not in harmless:
                raise AdapterError(f"{CONFIG}: {name} is {short(value)}, which is not supported")
        return cls(
            _rank("r", keys.get("r"), max_rank),
            _alpha("lora_alpha", keys.get("lora_alpha")),
            {pattern: _rank(name, rank, max_rank) for pattern, name, rank in _patterns(keys, "rank_pattern")},
            {pattern: _alpha(name, alpha) for pattern, name, alpha in _patterns(keys, "alpha_pattern")},
            bool(keys.get("use_rslora")),
        )

    @property
    def max_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values(), 1)

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank of a module, which is named as in the checkpoint, and the scale of its product.

        As in PEFT, the first pattern applies that matches the name, or its part behind a dot.
        """
        rank = next((rank for each, rank in self.rank_pattern.items() if each.match(module)), self.rank)
        alpha = next((alpha for each, alpha in self.alpha_pattern.items() if each.match(module)), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.uses_root_of_rank else rank)


def _rank(name: str, rank: Any, max_rank: int) -> int:
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{CONFIG}: {name} is {short(rank)}, it must be a positive whole number")
    if rank > max_rank:
        raise AdapterError(f"{CONFIG}: {name} is {short(rank)}, at most MAX_LORA_RANK({max_rank}) is supported")
    return rank


def _alpha(name: str, alpha: Any) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise AdapterError(f"{CONFIG}: {name} is {short(alpha)}, it must be a number of at most {MAX_ALPHA:g}")
    return alpha


def _patterns(keys: Mapping[str, Any], name: str) -> list[tuple[re.Pattern[str], str, Any]]:
    """Return the patterns of a key with their names for messages and their values. Raises AdapterError."""
    patterns = keys.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise AdapterError(f"{CONFIG}: {name} is {short(patterns)}, it must be an object of up to {MAX_PATTERNS} keys")
    return [(_pattern(name, each), f"{name} of {short(each)}", value) for each, value in patterns.items()]


def _pattern(name: str, text: str) -> re.Pattern[str]:
    """Return a pattern for whole names of modules. A pattern that could take long to search for is refused."""
    plain = re.sub(r"\\.", "", text)
    if re.search(r"\)[*+?{]|\(\?(?!:)|\\\d", text) or len(re.findall(r"[*+?{]", plain)) > MAX_REPEATS:
        raise AdapterError(
            f"{CONFIG}: {name} has {short(text)}, supported are regular expressions with at most {MAX_REPEATS} of"
            " * + ? {}, none of them behind a group"
        )
    for dot in (".", r"\."):  # the decoder of a model that reads images, see the names of tensors
        text = text.replace(f"model{dot}language_model{dot}", f"model{dot}")
    try:
        return re.compile(rf"(?:.*\.)?(?:{text})$")
    except (re.error, OverflowError, RecursionError):
        raise AdapterError(f"{CONFIG}: {name} has {short(text)}, which is no regular expression") from None
