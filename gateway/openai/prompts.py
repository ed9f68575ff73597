"""The prompts of a completion, and what is told of them beside their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest
from engine.wire import FIELDS, PromptDetails, TokenLogprob, shown, within
from gateway.openai.unsupported_fields import refuse_more

A_TEXT, IDS, A_BOOL = (FIELDS[name].check for name in ("text", "input_ids", "stream"))
Json = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    echo: bool = False  # the text of an answer begins with the prompt
    texts: Sequence[str | None] = ()  # of each, as its client wrote it; None: the model tells
    num_echoed: int | None = None  # logprobs in each place of an echo; None: without
    num_logprobs: int | None = None  # the same, of a list of their own
    with_ids: bool = False

    def text(self, index: int, told: PromptDetails | None) -> str:
        """What an answer to this one begins with."""
        if not self.echo:
            return ""
        own = self.texts[index]
        return own if own is not None else (told and told.text) or ""

    def echoed(self, told: PromptDetails | None) -> list[TokenLogprob]:
        """The tokens that an answer begins with, where these have logprobs."""
        if self.num_echoed is None or told is None:
            return []
        return [each._replace(top=each.top[: self.num_echoed]) for each in told.logprobs or ()]

    def fields(self, told: PromptDetails | None) -> Json:
        """vLLM's, of what was asked for."""
        fields: Json = {}
        if told and self.num_logprobs is not None:
            fields["prompt_logprobs"] = [_in_list(each, self.num_logprobs) for each in told.logprobs or ()]
        if told and self.with_ids:
            fields["prompt_token_ids"] = told.token_ids
        return fields


def sources_of(name: str, body: Mapping[str, Any], limit: int) -> list[Json]:
    """Of each prompt in this field the model's field; so many there may be. Raises InvalidRequest."""
    if name not in body:
        raise InvalidRequest("`{field}` is missing", field=name)
    given = body[name]
    is_one = isinstance(given, str) or (isinstance(given, list) and given and not isinstance(given[0], (str, list)))
    if is_one:
        return [_source(name, given)]
    if not isinstance(given, list) or not given:
        text = "`{field}` must be a text, a list of token ids, or a list of either, it is {value}"
        raise InvalidRequest(text, field=name, value=shown(given))
    refuse_more(name, len(given), limit)
    return [within(name, f"[{place}]", _source, each) for place, each in enumerate(given)]


def _source(name: str, given: Any) -> Json:
    """Continued as it stands."""
    if not isinstance(given, (str, list)):
        text = "`{field}` must be a text or a list of token ids, it is {value}"
        raise InvalidRequest(text, field=name, value=shown(given))
    if isinstance(given, str):
        return {"text": A_TEXT(name, given), "apply_chat_template": False}
    return {"input_ids": IDS(name, given)}


def read_prompts(body: Mapping[str, Any], sources: Sequence[Json], options: Json, is_chat: bool) -> Prompts:
    """Raises InvalidRequest. `options` of the model's requests get what it has to tell for this."""
    echo = not is_chat and A_BOOL("echo", body.get("echo", False))
    num_logprobs = options.get("prompt_logprobs", -1)
    prompts = Prompts(
        echo=echo,
        texts=[None if "truncate_prompt_tokens" in options else source.get("text") for source in sources],
        num_echoed=options.get("logprobs") if echo else None,
        num_logprobs=num_logprobs if num_logprobs >= 0 else None,
        with_ids=options.get("return_token_ids", False),
    )
    if prompts.num_echoed is not None:
        options["prompt_logprobs"] = max(num_logprobs, prompts.num_echoed)
    if echo and None in prompts.texts:
        options["return_token_ids"] = True
    return prompts


def _in_list(token: TokenLogprob, num_top: int) -> Json | None:
    """By id. Ranks are those among the likeliest: the token's own may be unknown."""
    if token.logprob is None:
        return None
    ranks = {top.token_id: rank for rank, top in enumerate(token.top[:num_top], 1)}
    told = {each.token_id: each for each in (token, *token.top[:num_top])}
    return {
        str(token_id): {"logprob": each.logprob, "rank": ranks.get(token_id), "decoded_token": each.token}
        for token_id, each in told.items()
    }
