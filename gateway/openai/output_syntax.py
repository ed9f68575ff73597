"""Syntax in which the served model writes tool calls and reasoning.

It is set by the settings or detected from the model's chat template.
"""

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
    """Interface of a streaming parser of one tool call; see json_tool_parser.py."""

    name: str | None
    is_done: bool
    has_failed: bool

    def push(self, text: str) -> int: ...

    def take_arguments(self) -> str: ...


@dataclass(frozen=True)
class ToolCallFormat:
    """Syntax of tool calls.

    A call is a JSON object with a name and arguments, or text that begins with `opens` and is parsed by `reader`. The
    other fields describe the text around calls.
    """

    begin: str  # text before the first call
    end: str  # text after the last call
    bare: str = ""  # beginning of an answer that has calls without `begin`
    filler: str = ""  # characters between calls, besides whitespace
    arguments: str = "arguments"  # field of the arguments in forced calls
    forced: tuple[str, str, str] = ("", "", "")  # text of forced calls: before the first, between two, after the last
    marker: str = ""  # grammar rule before calls where the answer may be text instead
    call_id_len: int = 24
    has_special_token: bool = True  # `begin` is a special token: it has no text unless special tokens are kept
    opens: str = "{"
    reader: Callable[[Collection[str]], ToolCallParser] = JsonToolCallParser
    # For formats that are not JSON: returns the text before and after the arguments, for each way to write a call
    ways: Callable[[str], Sequence[tuple[str, str]]] | None = None

    @property
    def is_enforceable(self) -> bool:
        """Return True if the format can be enforced by a grammar.

        Other formats can only be parsed, and a forced call uses another one.
        """
        return self.opens == "{" or self.ways is not None

    def around(self, name: str) -> Sequence[tuple[str, str]]:
        """Return the text before and after the arguments of a call to `name`, for each way to write it."""
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
        marker='<|[TOOL_CALLS]|> " "?',
        call_id_len=9,  # required by Mistral's template
    ),
    "deepseek": ToolCallFormat(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        forced=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        opens=deepseek_tool_parser.BEGIN,
        reader=DeepSeekToolCallParser,
        ways=deepseek_tool_parser.ways,
    ),
}
# Text in a chat template that identifies the format
TEMPLATE_MARKERS = {
    **{"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "deepseek": "<｜tool▁calls▁begin｜>"},
    "llama3_json": '"parameters": ',
}
PLUGIN = ".py"  # suffix of plug-in files, which define FORMAT
CONTENT_MARKERS = {"ernie": ("<response>", "</response>")}  # text around the content, by REASONING_PARSER


@dataclass(frozen=True)
class OutputSyntax:
    """Syntax of a model's answers: its tool calls, its reasoning, and what encloses the text."""

    calls: ToolCallFormat | None = None  # None: the model writes no tool calls
    reasoning: str = "never"  # "may": if the answer starts with its marker; "does": always, also without the marker
    around: tuple[str, str] = ("", "")  # optional text before and after the content


NO_SYNTAX = OutputSyntax()


@functools.lru_cache(maxsize=8)
def output_syntax_of(config: Config) -> OutputSyntax:
    """Return the syntax of the configured model. Raise ConfigError if a plug-in file is wrong."""
    name = config.tool_call_parser
    if name == "auto":
        template = _chat_template(config.graph_path)
        name = next(
            (name for name, marker in TEMPLATE_MARKERS.items() if "tools" in template and marker in template), "none"
        )
    calls = _load_plugin(name) if name.endswith(PLUGIN) else FORMATS.get(name)
    return OutputSyntax(calls, config.reasoning, CONTENT_MARKERS.get(config.reasoning_parser, ("", "")))


def _load_plugin(path: str) -> ToolCallFormat:
    """Return the FORMAT of a plug-in file. Raise ConfigError."""
    try:
        calls = runpy.run_path(path).get("FORMAT")
    except Exception as error:  # a plug-in may raise anything
        raise ConfigError(f"TOOL_CALL_PARSER is {path!r}: {type(error).__name__}: {error}") from error
    if not isinstance(calls, ToolCallFormat):
        raise ConfigError(
            f"TOOL_CALL_PARSER is {path!r}: its FORMAT must be a ToolCallFormat, it is {type(calls).__name__}"
        )
    return calls


def _chat_template(directory: Path) -> str:
    """Return the text of all chat templates of the model, or "" if there is none.

    Characters may be escaped as in JSON.
    """
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
