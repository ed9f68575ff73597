"""Prompts of a completion, and what the response contains of them: echo, logprobs and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest
from engine.wire import FIELDS, PromptDetails, TokenLogprob, shown, within
from gateway.openai.unsupported_fields import refuse_more

check_text, check_ids, check_bool = (FIELDS[name].check for name in ("text", "input_ids", "stream"))
Json = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """Prompts of one completion, and what the response contains of them."""

    echo: bool = False  # the text of an answer begins with the prompt
    texts: Sequence[str | None] = ()  # of each, as its client wrote it; None: the model tells
    num_echoed: int | None = None  # logprobs in each place of an echo; None: without
    num_logprobs: int | None = None  # the same, of a list of their own
    with_ids: bool = False

    def text(self, index: int, outputs: PromptDetails | None) -> str:
        """Return the echoed text of the prompt `index`, or "" if no echo was requested."""
        if not self.echo:
            return ""
        own = self.texts[index]
        return own if own is not None else (outputs and outputs.text) or ""

    def echoed(self, outputs: PromptDetails | None) -> list[TokenLogprob]:
        """Return the prompt's tokens that precede those of the answer in its logprobs."""
        if self.num_echoed is None or outputs is None:
            return []
        return [each._replace(top=each.top[: self.num_echoed]) for each in outputs.logprobs or ()]

    def fields(self, outputs: PromptDetails | None) -> Json:
        """Return vLLM's fields `prompt_logprobs` and `prompt_token_ids`, as far as they were requested."""
        fields: Json = {}
        if outputs and self.num_logprobs is not None:
            fields["prompt_logprobs"] = [_in_list(each, self.num_logprobs) for each in outputs.logprobs or ()]
        if outputs and self.with_ids:
            fields["prompt_token_ids"] = outputs.token_ids
        return fields


def sources_of(name: str, body: Mapping[str, Any], limit: int) -> list[Json]:
    """Return the model's input field for each prompt in the field `name`, at most `limit`. Raise InvalidRequest."""
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
    """Return the model's input field of one prompt, which is continued without a chat template."""
    if not isinstance(given, (str, list)):
        text = "`{field}` must be a text or a list of token ids, it is {value}"
        raise InvalidRequest(text, field=name, value=shown(given))
    if isinstance(given, str):
        return {"text": check_text(name, given), "apply_chat_template": False}
    return {"input_ids": check_ids(name, given)}


def read_prompts(body: Mapping[str, Any], sources: Sequence[Json], options: Json, is_chat: bool) -> Prompts:
    """Return the prompts.

    The outputs that they need are added to `options`, the fields of the model's requests. Raise InvalidRequest.
    """
    echo = not is_chat and check_bool("echo", body.get("echo", False))
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
    """Return vLLM's entry for one prompt token: an object by token id.

    The rank of a token outside the top ones is unknown.
    """
    if token.logprob is None:
        return None
    ranks = {top.token_id: rank for rank, top in enumerate(token.top[:num_top], 1)}
    entries = {each.token_id: each for each in (token, *token.top[:num_top])}
    return {
        str(token_id): {"logprob": each.logprob, "rank": ranks.get(token_id), "decoded_token": each.token}
        for token_id, each in entries.items()
    }
