"""Defaults of sampling parameters that a model comes with, in its generation_config.json."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequest
from engine.settings.config import Config
from gateway.openai.request import CHECKS

log = logging.getLogger(__name__)

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # those that vLLM reads as well


def add_sampling_defaults(body: dict[str, Any], config: Config) -> None:
    """Add the model's defaults for the fields that an OpenAI or Anthropic request does not have.

    A beam search gets none, because it does not sample.
    """
    if not body.get("use_beam_search"):
        body |= {name: value for name, value in sampling_defaults_of(config).items() if body.get(name) is None}


@functools.lru_cache(maxsize=8)
def sampling_defaults_of(config: Config) -> Mapping[str, Any]:
    """Return the sampling parameters in the configured model's file. Those that are out of range are left out."""
    if config.generation_config == "none":
        return {}
    try:
        found = json.loads((config.graph_path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a file that is not JSON has prevented the start already
        return {}
    defaults = {}
    for name in NAMES:
        try:
            if found.get(name) is not None:
                defaults[name] = CHECKS[name](name, found[name])
        except InvalidRequest as error:
            log.warning("%s: %s; ignored", FILE, error)
    if defaults:
        log.info("defaults of requests from %s: %s", FILE, defaults)
    return defaults
