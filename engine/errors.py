"""Errors in two families: of requests (`RequestError`, a closed set of kinds) and of the set-up (`SetupError`). It
defines kinds and codes, independent of protocols.

Set-up errors of one part (models, graph, ops) are defined in that part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any


class RequestError(Exception):
    """A request failed. `kind` is the stable name a client may switch on, `code` the HTTP status that says the same.

    With a `field` of the request that is to blame, a `value` or a `limit`, `text` is a template: it may have them as
    `{field}`, `{value}` and `{limit}`, and other fields under their native names, `{max_dec_len}`, so that each
    protocol can call them as its clients do. `value` is what to show of it: a number, or a short text. Without any of
    the three, `text` is the sentence, whatever braces it has.
    """

    kind = "internal"
    code = 500

    def __init__(self, text: str, *, field: str | None = None, value: Any = None, limit: Any = None):
        super().__init__(text)
        self.text, self.field, self.value, self.limit = text, field, value, limit
        self.retry_after_s: int | None = None  # for whom it may be different then; None: the client's affair

    @property
    def cause(self) -> dict[str, Any]:
        """Return those of `field`, `value` and `limit` that are known: the arguments of `error_of` besides kind and
        text.
        """
        known = {"field": self.field, "value": self.value, "limit": self.limit}
        return {name: each for name, each in known.items() if each is not None}

    def message(self, names: Mapping[str, str]) -> str:
        """Return the message for clients of a protocol with other field names. `names` maps native names to theirs."""
        return self.text.format_map(_Words(self, names)) if self.cause else self.text

    def as_template(self) -> str:
        """Return the message as a template in which only names of fields are placeholders: a part of another error."""
        if not self.cause:
            return escape_braces(self.text)
        field = self.field or ""
        return self.text.format_map(
            _Placeholders(
                field=f"{{{field}}}" if field.isidentifier() else escape_braces(field),
                value=escape_braces(_shown(self.value)),
                limit=escape_braces(_shown_limit(self.limit)),
            )
        )

    def __str__(self) -> str:
        return self.message({})

    def blaming(self, field: str) -> RequestError:
        """Return the same error with the field, for callers that know which field has caused it."""
        return type(self)(self.as_template(), field=field)


class _Words(dict[str, str]):
    """Values of the placeholders in the template of an error."""

    def __init__(self, error: RequestError, names: Mapping[str, str]):
        field = error.field or ""
        super().__init__(field=names.get(field, field), value=_shown(error.value), limit=_shown_limit(error.limit))
        self._names = names

    def __missing__(self, name: str) -> str:
        return self._names.get(name, name)


class _Placeholders(dict[str, str]):
    """Values of some placeholders of a template. The others stay placeholders."""

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"


def escape_braces(text: str) -> str:
    """Escape the braces of a text for the template of an error."""
    return text.replace("{", "{{").replace("}", "}}")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shown_limit(limit: Any) -> str:
    if isinstance(limit, list):
        return f"[{', '.join(map(_shown_limit, limit))}]"
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


class NoToken(RequestError):
    """The model gave no usable token for a single request. The engine continues, and a replay of the request must not
    crash it."""

    def __init__(self) -> None:
        super().__init__("the model gave no token: its logits are no numbers, or every token is banned")


class InvalidRequest(RequestError):
    """The client must change the request; the message names the field, the value and the limit."""

    kind = "invalid_request"
    code = 400


class PromptTooLong(InvalidRequest):
    kind = "prompt_too_long"


class ChatTemplateError(InvalidRequest):
    """The chat template refused the messages, or there is none."""


class DuplicateRequest(RequestError):
    kind = "duplicate_request"
    code = 409


class UnknownAnswer(RequestError):
    """Asked to go on with an answer that is not known any more, and that would not be the same again."""

    kind = "unknown_answer"
    code = 404


class UnknownModel(RequestError):
    """The request names an adapter that is not loaded, or a model that is not served."""

    kind = "model_not_found"  # as OpenAI calls it
    code = 404


class Overloaded(RequestError):
    """Too much is waiting, or its owner has asked for too much. The same request may succeed later."""

    kind = "overloaded"
    code = 429


class Cancelled(RequestError):
    """The client has disconnected, or the request was aborted."""

    kind = "cancelled"
    code = 499


class EngineUnavailable(RequestError):
    """The engine is stopped, stopping, or has crashed too often in a row."""

    kind = "engine_unavailable"
    code = 503


class TimedOut(RequestError):
    kind = "timeout"
    code = 504


KINDS: dict[str, type[RequestError]] = {
    error.kind: error
    for error in (
        RequestError,
        InvalidRequest,
        PromptTooLong,
        DuplicateRequest,
        UnknownAnswer,
        UnknownModel,
        Overloaded,
        Cancelled,
        EngineUnavailable,
        TimedOut,
    )
}


def queue_full(num_waiting: int, limit: int) -> Overloaded:
    text = "{value} requests are waiting, at most MAX_CACHED_TASK_NUM({limit}) may"
    return Overloaded(text, value=num_waiting, limit=limit)


def tokens_full(num_tokens: int, limit: int) -> Overloaded:
    text = "{value} tokens of prompts are waiting, at most MAX_WAITING_TOKENS({limit}) may"
    return Overloaded(text, value=num_tokens, limit=limit)


def waited_too_long(limit_s: float) -> Overloaded:
    return Overloaded("the request has waited for {limit} s, which is QUEUE_TIMEOUT", limit=limit_s)


def error_of(kind: str, text: str, retry_after_s: int | None = None, **cause: Any) -> RequestError:
    """Return the error with these attributes, after they have crossed a process boundary. An unknown kind is an
    internal error."""
    error = KINDS.get(kind, RequestError)(text, **cause)
    error.retry_after_s = retry_after_s
    return error


def as_request_error(error: BaseException) -> RequestError:
    """Return the error to report to the client. An unexpected exception is reported by its type only; the log contains
    the rest."""
    if isinstance(error, RecursionError):  # JSON may be read that is too deep to be compared or written
        return InvalidRequest("the request is nested too deeply")
    return error if isinstance(error, RequestError) else RequestError(f"internal error: {type(error).__name__}")


class SetupError(Exception):
    """The server cannot start with what it was given: settings, a model, a compiler. The message is for the operator
    and says all there is to know; no traceback is needed."""


class ConfigError(SetupError):
    """A setting is wrong. The message names the variable, its value and what was expected."""


class HostLost(SetupError):
    """Another host of the model has ended or cannot be reached. It is not counted as a crash of a request: the engine
    restarts and waits for the host."""

    exit_status = os.EX_TEMPFAIL  # of the engine's process

    def __init__(self, ip: str):
        super().__init__(f"{ip} has ended or cannot be reached")


class TokenizerError(ConfigError):
    """The tokenizer of a model cannot be loaded."""
