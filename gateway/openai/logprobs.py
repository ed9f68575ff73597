"""Logprobs objects of OpenAI's chats and completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from engine.wire import MIN_LOGPROB, TokenLogprob


def of_chat(tokens: Sequence[TokenLogprob], as_ids: bool = False) -> dict[str, Any] | None:
    """Return the logprobs object of a chat, or None without tokens. With `as_ids` tokens are named by their ids."""
    if not tokens:
        return None
    content = [
        {**_in_chat(each, as_ids), "top_logprobs": [_in_chat(top, as_ids) for top in each.top]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def of_completion(offsets: list[int], tokens: Sequence[TokenLogprob], as_ids: bool) -> dict[str, Any] | None:
    """Return the logprobs object of a completion, or None without tokens: four parallel lists.

    The top tokens include the chosen one, so there are up to logprobs + 1. The first token of an echoed prompt has no
    logprob.
    """
    if not tokens:
        return None
    tops = [{name_of(top, as_ids): _number(top) for top in (token, *token.top)} for token in tokens]
    return {
        "tokens": [name_of(token, as_ids) for token in tokens],
        "token_logprobs": [None if _is_first(token) else _number(token) for token in tokens],
        "top_logprobs": [None if _is_first(token) else top for token, top in zip(tokens, tops, strict=True)],
        "text_offset": offsets,
    }


def _is_first(token: TokenLogprob) -> bool:
    return token.logprob is None and bool(token.bytes)


def name_of(token: TokenLogprob, as_ids: bool = False) -> str:
    """Return the text of a token.

    A token that is part of a character has no text and is named by its bytes, as at OpenAI, so that different tokens
    have different names.
    """
    if as_ids:
        return f"token_id:{token.token_id}"
    if "\ufffd" not in token.token:
        return token.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def _in_chat(token: TokenLogprob, as_ids: bool) -> dict[str, Any]:
    return {"token": name_of(token, as_ids), "logprob": _number(token), "bytes": list(token.bytes)}


def _number(token: TokenLogprob) -> float:
    return MIN_LOGPROB if token.logprob is None else token.logprob


class TextOffsets:
    """Offsets of tokens in the text of their answer, for `text_offset`.

    The model omits special tokens from the text, and the first space of some tokens, without saying so. A token whose
    text is not at its place gets the offset of the next one.
    """

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset  # in characters: that much of the text belongs to tokens so far
        self._rest = ""  # the text beyond, which may have come before all of its token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character

    def offsets(self, text: str, tokens: Sequence[TokenLogprob]) -> list[int]:
        """Return the offset of each token in characters, after `text` was added to the answer."""
        text, position, offsets = self._rest + text, 0, []
        for token in tokens:
            offsets.append(self._offset + position)
            before = self._decoder.getstate()
            piece = self._decoder.decode(bytes(token.bytes))
            if not text.startswith(piece, position) and offsets[-1] == 0:
                piece = piece.removeprefix(" ")
            if text.startswith(piece, position):
                position += len(piece)
            else:
                self._decoder.setstate(before)
        self._offset += position
        self._rest = text[position:]
        return offsets
