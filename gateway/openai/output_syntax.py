"""How the served model writes what is not the answer itself: calls of tools, and what it thinks before it answers. By
the settings, or by the chat template beside the model. Knows no requests."""

from __future__ import annotations

import functools
import json
import runpy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.errors import ConfigError
from engine.settings.config import Config
from gateway.openai import deepseek_tool_parser
from gateway.openai.deepseek_tool_parser import DeepSeekToolCallParser
from gateway.openai.json_tool_parser import JsonToolCallParser


class ToolCallParser(Protocol):
    """Reads one call while it comes: call_reader.py says how."""

    name: str | None
    is_done: bool
    has_failed: bool

    def push(self, text: str) -> int: ...

    def take_arguments(self) -> str: ...


@dataclass(frozen=True)
class ToolCallFormat:
    """Calls are JSON objects with a name and arguments, or what begins with `opens` and another `reader` reads; a
    format is what is around them."""

    begin: str  # text before calls
    end: str  # and after them
    bare: str = ""  # what an answer begins with that has calls and no `begin`
    filler: str = ""  # may be between, besides whitespace
    arguments: str = "arguments"  # the key of JSON objects, where calls are forced
    forced: tuple[str, str, str] = ("", "", "")  # written before all calls, between two, and after them
    sign: str = ""  # as a rule of a grammar: before them where there may be words instead
    call_id_len: int = 24
    has_special_token: bool = True  # `begin` is one: it has no text unless that is asked for
    opens: str = "{"
    reader: Callable[[Collection[str]], ToolCallParser] = JsonToolCallParser
    # Of what is no JSON, for the name of a call: each way to write it, before its arguments and after them
    ways: Callable[[str], Sequence[tuple[str, str]]] | None = None

    @property
    def has_form(self) -> bool:
        """What has none can only be read: the form of a call that must be is another."""
        return self.opens == "{" or self.ways is not None

    def around(self, name: str) -> Sequence[tuple[str, str]]:
        return self.ways(name) if self.ways else [(f'{{"name": {json.dumps(name)}, "{self.arguments}": ', "}")]


FORMATS = {
    "hermes": ToolCallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        forced=("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        has_special_token=False,
    ),
    "llama3_json": ToolCallFormat("<|python_tag|>", "", "{", ";,", "parameters", forced=("", "; ", "")),
    "mistral": ToolCallFormat(
        begin="[TOOL_CALLS]",
        end="]",
        filler="[,",
        forced=("[", ", ", "]"),
        sign='<|[TOOL_CALLS]|> " "?',
        call_id_len=9,  # so its template wants
    ),
    "deepseek": ToolCallFormat(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        forced=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        opens=deepseek_tool_parser.BEGIN,
        reader=DeepSeekToolCallParser,
        ways=deepseek_tool_parser.ways,
    ),
}
# What a chat template has that tells the model of tools in this format
SIGNS = {
    **{"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "deepseek": "<｜tool▁calls▁begin｜>"},
    "llama3_json": '"parameters": ',
}
PLUGIN = ".py"  # how the name of a file ends that has a FORMAT
AROUND = {"ernie": ("<response>", "</response>")}  # by REASONING_PARSER


@dataclass(frozen=True)
class OutputSyntax:
    calls: ToolCallFormat | None = None  # None: the model writes none
    thought: str = "never"  # before an answer; "may": if the answer begins so, "does": whether it says so or not
    around: tuple[str, str] = ("", "")  # what may be written before and after the words of an answer


PLAIN = OutputSyntax()


@functools.lru_cache(maxsize=8)
def output_syntax_of(config: Config) -> OutputSyntax:
    name = config.tool_call_parser
    if name == "auto":
        template = _chat_template(config.graph_path)
        name = next((name for name, sign in SIGNS.items() if "tools" in template and sign in template), "none")
    calls = _plugged_in(name) if name.endswith(PLUGIN) else FORMATS.get(name)
    return OutputSyntax(calls, config.reasoning, AROUND.get(config.reasoning_parser, ("", "")))


def _plugged_in(path: str) -> ToolCallFormat:
    """FORMAT of somebody's file. Raises ConfigError."""
    try:
        calls = runpy.run_path(path).get("FORMAT")
    except Exception as error:  # it may do anything
        raise ConfigError(f"TOOL_CALL_PARSER is {path!r}: {type(error).__name__}: {error}") from error
    if not isinstance(calls, ToolCallFormat):
        raise ConfigError(
            f"TOOL_CALL_PARSER is {path!r}: its FORMAT must be a ToolCallFormat, it is {type(calls).__name__}"
        )
    return calls


def _chat_template(directory: Path) -> str:
    """Of all there are, with escapes as they are written in JSON or not."""
    try:
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        pass
    try:
        template = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError):
        return ""
    if isinstance(template, list):
        return "".join(each.get("template", "") for each in template)
    return template if isinstance(template, str) else ""
