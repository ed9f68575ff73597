"""Reads what the JSON files beside a tokenizer say: special tokens, chat templates, and ids that end an answer.

Every function raises TokenizerError for values of a wrong type. Independent of the tokenizers library.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import TokenizerError
from engine.models import config_fields

Json = Mapping[str, Any]
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"  # of older models that read images; only used if there is no other template
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of added tokens


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file without its null values; empty if the file is missing."""
    config = config_fields.read_json(path, TokenizerError) if path.is_file() else {}
    return {key: value for key, value in config.items() if value is not None}


def special_tokens(config: Json) -> dict[str, Any]:
    """Return the texts of special tokens by name. A token is given by its text, or by an object with `content`."""
    tokens: dict[str, Any] = {name: _content(name, config[name]) for name in SPECIAL_TOKENS if name in config}
    name = "additional_special_tokens"
    additional = config.get(name, [])
    if not isinstance(additional, list):
        _refuse(name, additional, "a list of tokens")
    if additional:
        tokens[name] = [_content(name, token) for token in additional]
    return tokens


def added_tokens(config: Json) -> list[tuple[int, dict[str, Any]]]:
    """Return id and fields of the tokens in `added_tokens_decoder`, in the order of their ids."""
    listed = config.get("added_tokens_decoder", {})
    try:
        tokens = sorted(((int(token_id), token) for token_id, token in listed.items()), key=itemgetter(0))
    except (AttributeError, ValueError):
        _refuse("added_tokens_decoder", listed, "an object of tokens by id")
    return [(token_id, _fields(token_id, token)) for token_id, token in tokens]


def _fields(token_id: int, token: Any) -> dict[str, Any]:
    known = {key: token[key] for key in ("content", *FLAGS) if key in token} if isinstance(token, Mapping) else {}
    if not isinstance(known.get("content"), str) or not all(isinstance(known.get(flag, False), bool) for flag in FLAGS):
        expected = f"an object with the text `content` and truth values for {', '.join(FLAGS)}"
        _refuse(f"token {token_id} in added_tokens_decoder", token, expected)
    return known


def chat_template_file(directory: Path, config: Json) -> Path:
    """Return the path of the file that has the chat templates, if there are any. `config` is tokenizer_config.json."""
    names = (TEMPLATE_FILE, *(() if config.get("chat_template") else (PROCESSOR_TEMPLATE,)))
    found = [path for name in names if (path := directory / name).is_file()]
    return found[0] if found else directory / "tokenizer_config.json"


def chat_templates(directory: Path, config: Json) -> dict[str, str]:
    """Return the chat templates by name. A separate file takes precedence over tokenizer_config.json."""
    path = chat_template_file(directory, config)
    config = read_json(path) if path.name == PROCESSOR_TEMPLATE else config
    try:
        source = path.read_text(encoding="utf-8") if path.name == TEMPLATE_FILE else config.get("chat_template", "")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}") from None
    match source:
        case str():
            return {"default": source} if source else {}
        case list() if all(isinstance(item, Mapping) and {"name", "template"} <= item.keys() for item in source):
            source = {item["name"]: item["template"] for item in source}
    if not isinstance(source, Mapping) or not all(isinstance(template, str) for template in source.values()):
        _refuse("chat_template", source, "a text, an object of texts, or a list of objects with name and template")
    return dict(source)


def eos_ids(config: Json) -> list[int]:
    """Return the ids of `eos_token_id`, which is an id, a list of ids, or absent."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id <= config_fields.MAX_NUMBER for token_id in ids):
        _refuse("eos_token_id", value, f"a token id from 0 to {config_fields.MAX_NUMBER}, or a list of these")
    return ids


def _content(name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        _refuse(name, token, "a text or an object with the text `content`")
    return text


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise TokenizerError(f"{name} of the tokenizer is {value!r:.100}, it must be {expected}")
