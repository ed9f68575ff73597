"""Chat templates: render messages to the prompt text of a model. Independent of tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ChatTemplateError, TokenizerError

Json = Mapping[str, Any]
PAIR = ("query", "document")  # roles in the templates of rerankers


class ChatTemplate:
    """Chat template of a model: sandboxed Jinja, with the functions that published templates expect.

    `sources` contains the templates by name: `tool_use` is used if the chat has tools, else `default`. `path` is their
    file, for errors. Raises TokenizerError.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Json, path: Path | None = None):
        environment = _environment()
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                which = "" if name == "default" else f" {name!r}"
                where = f" in {path}" if path else ""
                text = f"the chat template{which}{where} is wrong in its line {error.lineno}: {error}"
                raise TokenizerError(text) from error
        self._special_tokens = dict(special_tokens)
        self.writes_pairs = all(re.search(f"['\"]{role}['\"]", sources.get("default", "")) for role in PAIR)

    def render(self, messages: Sequence[Json], variables: Json) -> str:
        """Return the prompt text of a chat. Raises ChatTemplateError."""
        if "messages" in variables:
            raise ChatTemplateError("messages cannot be set among the variables of the chat template")
        variables = {"tools": None, "documents": None, **self._special_tokens, **variables}
        template = self._pick(bool(variables["tools"]))
        messages = [with_joined_texts(message) for message in messages]
        try:
            return template.render(variables, messages=messages)
        except Exception as error:  # a template is foreign code and may raise anything
            raise ChatTemplateError(f"the chat template refused the messages: {_reason(error)}") from error

    def render_open(self, messages: Sequence[Json], variables: Json) -> str:
        """Return the prompt text up to the end of the last message, which the answer continues. Raises
        ChatTemplateError."""
        content = str(with_joined_texts(messages[-1]).get("content") or "") if messages else ""
        text = self.render(messages, variables)
        for end in (content, content.strip()):  # some templates leave out the space around it
            if end.strip() and end in text:
                return text[: text.rindex(end) + len(end)]
        raise ChatTemplateError("the last message has no content that the answer could go on with")

    def _pick(self, has_tools: bool) -> jinja2.Template:
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ChatTemplateError(f"there is no default chat template, only {sorted(self._templates)}")
        return self._templates[name]


class _Generation(Extension):
    """Jinja extension for `{% generation %}`, which marks text for training. Serving renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _reason(error: Exception) -> str:
    is_own_words = isinstance(error, jinja2.TemplateError)
    return str(error) if is_own_words and str(error) else f"{type(error).__name__}: {error}"


def with_joined_texts(message: Json) -> Json:
    """Return the message with adjacent text parts joined. Without images its content is a single string, because
    templates expect that."""
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"a message must be an object with role and content, it is {message!r:.80}")
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    joined: list[dict[str, str]] = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                if joined and joined[-1]["type"] == "text":
                    text = joined.pop()["text"] + text
                joined.append({"type": "text", "text": text})
            case {"type": "image"}:
                joined.append({"type": "image"})
            case _:
                raise ChatTemplateError(f"content may have parts of type text only, got {part!r:.80}")
    has_images = any(part["type"] == "image" for part in joined)
    return {**message, "content": joined if has_images else "".join(part["text"] for part in joined)}
