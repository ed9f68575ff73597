"""Translation of option values of other servers that takes more than a table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.settings.foreign.row import OptionMeaning
from engine.settings.setting import with_unit

DEFAULT_BATCH_SIZE = 50
METHODS = {"ngram": "ngram", "ngram_match": "ngram", "suffix": "suffix", "draft_model": "draft", "draft": "draft"}
MTP_FAMILIES = ("deepseek", "ernie", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5")  # vLLM's NAME_mtp
METHODS["eagle3"] = "eagle3"
METHODS |= dict.fromkeys(("mtp", *(f"{family}_mtp" for family in MTP_FAMILIES)), "mtp")


def object_of(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is {text!r}, which is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is {text!r}, it must be a JSON object")
    return found


def speculation(name: str, text: str, _: Mapping[str, str]) -> OptionMeaning:
    """Read `{"method": "suffix", "num_speculative_tokens": 4}`. A `model` without a method is a draft model."""
    config = object_of(name, text)
    model = config.pop("model", None)
    method = config.pop("method", "ngram" if model in ("ngram", "[ngram]") else "draft_model" if model else None)
    if method not in METHODS:
        raise ConfigError(
            f"{name}: the method {method!r} is not supported, it must be ngram, suffix, mtp, eagle3 or draft_model"
        )
    meaning = OptionMeaning({"SPECULATE_METHOD": METHODS[method]})
    if METHODS[method] in ("draft", "eagle3") and model:
        meaning.settings["SPECULATE_MODEL_PATH"] = str(model)
    elif METHODS[method] == "mtp" and model:
        meaning.notes.append(f"{name}: model has no effect: the layer that drafts is read from the served checkpoint")
    names = {
        "num_speculative_tokens": "SPECULATE_MAX_DRAFT_TOKEN_NUM",
        "prompt_lookup_max": "SPECULATE_MAX_NGRAM_SIZE",
        "max_ngram_size": "SPECULATE_MAX_NGRAM_SIZE",
    }
    for key, value in config.items():
        if setting := names.get(key):
            meaning.settings[setting] = str(value)
        else:
            meaning.notes.append(f"{name}: {key} has no effect")
    return meaning


def graph_optimization(name: str, text: str, _: Mapping[str, str]) -> OptionMeaning:
    """Read FastDeploy's object of graph settings."""
    config = object_of(name, text)
    meaning = OptionMeaning()
    for key, value in config.items():
        if key == "use_cudagraph":
            meaning.settings["USE_CUDAGRAPH"] = str(int(bool(value)))
        elif key == "cudagraph_capture_sizes":
            if value:
                meaning.settings["CUDAGRAPH_CAPTURE_SIZES"] = _sizes(name, key, value)
        elif key == "cudagraph_only_prefill" and value:
            raise ConfigError(f"{name}: {key} is not supported: decode steps are captured; leave it out")
        elif key == "graph_opt_level":
            meaning.notes.append(f"{name}: {key} has no effect: a model is always a static graph")
        else:
            meaning.notes.append(f"{name}: {key} has no effect")
    return meaning


def compilation(name: str, text: str, _: Mapping[str, str]) -> OptionMeaning:
    """Read vLLM's compilation level, or its object of compilation settings."""
    if re.fullmatch(r"=?[0-3]", text):
        return OptionMeaning(notes=[f"{name} has no effect: a model is always a static graph"])
    meaning = OptionMeaning()
    for key, value in object_of(name, text).items():
        if key in ("cudagraph_capture_sizes", "compile_sizes") and value:
            meaning.settings["CUDAGRAPH_CAPTURE_SIZES"] = _sizes(name, key, value)
        else:
            meaning.notes.append(f"{name}: {key} has no effect")
    return meaning


def concurrency(name: str, text: str, environ: Mapping[str, str]) -> OptionMeaning:
    """Read the number of requests that run or wait: those that do not run wait."""
    total, running = _whole(name, text), _whole("BATCH_SIZE", environ.get("BATCH_SIZE") or str(DEFAULT_BATCH_SIZE))
    if total < running:
        raise ConfigError(
            f"{name} is {total}, it must be at least BATCH_SIZE ({running}), the number of requests that run"
        )
    return OptionMeaning({"MAX_CACHED_TASK_NUM": str(max(1, total - running))})


def seconds_or_no_limit(name: str, text: str, _: Mapping[str, str]) -> OptionMeaning:
    return OptionMeaning({"QUEUE_TIMEOUT": "0" if text == "-1" else text})


def _sizes(name: str, key: str, value: Any) -> str:
    if not isinstance(value, list) or not all(type(size) is int and size > 0 for size in value):
        raise ConfigError(f"{name}: {key} is {value!r}, it must be a list of whole numbers from 1")
    return ",".join(map(str, value))


def _whole(name: str, text: str) -> int:
    try:
        return with_unit(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, it must be a whole number") from None
