"""What can fail, in two families: a request (`RequestError`, a closed set of kinds), and the set-up (`SetupError`).

Knows kinds and codes, not protocols. Set-up errors of one part (models, graph, ops) are defined beside it.
"""

from __future__ import annotations


class RequestError(Exception):
    """A request failed. `kind` is the stable name a client may switch on, `code` the HTTP status that says the same."""

    kind = "internal"
    code = 500


class NoToken(RequestError):
    """Of one request only: the engine must not crash with it, or be crashed by its replay."""

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


class Overloaded(RequestError):
    """The waiting queue is full. The same request may succeed later."""

    kind = "overloaded"
    code = 429


class Cancelled(RequestError):
    """The client left. Nobody reads this answer, but every request ends exactly once."""

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
        Overloaded,
        Cancelled,
        EngineUnavailable,
        TimedOut,
    )
}


def queue_full(num_waiting: int, limit: int) -> Overloaded:
    return Overloaded(f"cached task num ({num_waiting}) exceeds the limit ({limit})")


def error_of(kind: str, message: str) -> RequestError:
    """The error of a `kind` that crossed a process border; an unknown kind is an internal error."""
    return KINDS.get(kind, RequestError)(message)


def as_request_error(error: Exception) -> RequestError:
    """What the client is told about `error`. Of a bug of ours only its type: the log has the rest."""
    return error if isinstance(error, RequestError) else RequestError(f"internal error: {type(error).__name__}")


class SetupError(Exception):
    """The server cannot start with what it was given: settings, a model, a compiler. The message is for the operator
    and says all there is to know; no traceback is needed."""


class ConfigError(SetupError):
    """A setting is wrong. The message names the variable, its value and what was expected."""


class TokenizerError(ConfigError):
    """The tokenizer of a model cannot be loaded."""
