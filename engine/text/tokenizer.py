"""Tokenizer and chat template of a model, loaded from the files of a checkpoint. Independent of requests and limits.

A `Tokenizer` is immutable after it is loaded, so threads can share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ChatTemplateError, InvalidRequest, TokenizerError
from engine.text.chat_template import ChatTemplate
from engine.text.detokenizer import Detokenizer, TokenBytes
from engine.text.sentencepiece import SentencePiece, model_file
from engine.text.tokenizer_files import (
    added_tokens,
    chat_template_file,
    chat_templates,
    eos_ids,
    read_json,
    special_tokens,
)

log = logging.getLogger(__name__)

Json = Mapping[str, Any]
OTHER_FORMATS = ("vocab.json", "merges.txt", "vocab.txt", "*.tiktoken")
# For these classes add_bos_token and add_eos_token decide, not the post-processor in tokenizer.json.
FLAGS_DECIDE = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


class Tokenizer:
    """Tokenizer of one model, with its special tokens and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Json | None = None,
        chat_template: ChatTemplate | None = None,
        generation_config: Json | None = None,
    ):
        """Take `special_tokens` as in special_tokens_map.json and `generation_config` with eos_token_id."""
        self._backend = backend
        backend.no_padding()
        backend.no_truncation()
        special_tokens = special_tokens or {}
        generation_config = generation_config or {}
        self._template = chat_template
        eos = special_tokens.get("eos_token")
        own = None if eos is None else backend.token_to_id(eos)
        self.eos_token_ids = tuple(dict.fromkeys(([] if own is None else [own]) + eos_ids(generation_config)))
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.token_table = TokenBytes(backend)

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint or exported model. Raises TokenizerError."""
        return _load(Path(model_dir))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def writes_pairs(self) -> bool:
        """Return whether the chat template has the roles `query` and `document`."""
        return self._template is not None and self._template.writes_pairs

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens by their spelling, with the added tokens."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """Return the largest token id plus one. The vocabulary of the model may be larger."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def max_token_bytes(self) -> int:
        """Return the size of the longest token, in bytes."""
        return max(len(self.token_table[token_id]) for token_id in self._backend.get_vocab().values())

    def encode(self, text: str, add_special_tokens: bool = True, pair: str | None = None) -> list[int]:
        """Return the token ids of `text`, and of the second text `pair`. Special tokens in the text are recognised.
        Raises InvalidRequest for lone surrogates."""
        try:
            return self._backend.encode(text, pair, add_special_tokens=add_special_tokens).ids
        except TypeError:  # raised by the library for text that is not valid Unicode
            raise InvalidRequest("the text is not valid Unicode, it has a lone surrogate") from None

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD. For `is_continuation` see Detokenizer."""
        skipped_ids = self.special_ids if skip_special_tokens else frozenset()
        return Detokenizer(self.token_table, skipped_ids, is_continuation).decode(token_ids)

    def render_chat(self, messages: Sequence[Json], /, **variables: Any) -> str:
        """Return the prompt text of a chat, with the beginning of the answer. It contains the special tokens, so
        `encode` must not add them. Raises ChatTemplateError.

        `variables` are passed to the template: add_generation_prompt=False omits the beginning of the answer, and many
        templates use tools and documents. With continue_final_message the text ends with the last message, which the
        answer then continues.
        """
        if self._template is None:
            raise ChatTemplateError("This model does not support chat_template.")
        if variables.pop("continue_final_message", False):
            return self._template.render_open(messages, {**variables, "add_generation_prompt": False})
        return self._template.render(messages, {"add_generation_prompt": True, **variables})

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text, including its space."""
        return self.token_table[token_id].removeprefix(self.token_table.rules.separator)

    def token_name(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """Return the text of a token; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _load(directory: Path) -> Tokenizer:
    config = read_json(directory / "tokenizer_config.json")
    path = directory / "tokenizer.json"
    known: dict[str, str] = {}
    if path.is_file():
        backend = _made(path, lambda: tokenizers.Tokenizer.from_file(str(path)))
    else:
        backend, known, config = _from_sentencepiece(directory, config)
    special = special_tokens(known | read_json(directory / "special_tokens_map.json") | config)
    _add_missing_tokens(backend, config, special)
    _honour_flags(backend, config, special)
    ids = read_json(directory / "config.json") | read_json(directory / "generation_config.json")
    sources = chat_templates(directory, config)
    template = ChatTemplate(sources, special, chat_template_file(directory, config)) if sources else None
    return Tokenizer(backend, special, template, ids)


def _made(path: Path, make: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    try:
        return make()
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _from_sentencepiece(directory: Path, config: Json) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, Any]]:
    """Return the tokenizer of a *.model file, the special tokens it names, and tokenizer_config.json with the flags
    that the classes of such tokenizers have where it does not set them."""
    path = model_file(directory)
    if path is None:
        others = sorted(path.name for name in OTHER_FORMATS for path in directory.glob(name))
        found = f" (found {', '.join(others)})" if others else ""
        raise TokenizerError(
            f"there is no tokenizer.json in {directory}{found}. Supported are this format, of the Hugging Face "
            "tokenizers library, and SentencePiece's *.model; transformers converts others to the first: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    model = SentencePiece.read(path)
    backend = _made(path, lambda: model.backend(prefix_every_segment=config.get("legacy", True)))
    listed = read_json(directory / "added_tokens.json").items()
    added = {str(token_id): {"content": text, "normalized": False} for text, token_id in listed}
    has_bos = _class_of(config) in ("", *FLAGS_DECIDE)
    flags = {"add_bos_token": has_bos, **config, "tokenizer_class": FLAGS_DECIDE[0]}
    flags["added_tokens_decoder"] = added | config.get("added_tokens_decoder", {})
    return backend, model.special_tokens, flags


def _class_of(config: Json) -> str:
    return str(config.get("tokenizer_class", "")).removesuffix("Fast")


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Json, special: Json) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks or describes differently."""
    present = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    named = [text for value in special.values() for text in ([value] if isinstance(value, str) else value)]
    for token_id, fields in added_tokens(config):
        token = tokenizers.AddedToken(**fields)
        token.special = token.special or token.content in named
        if present.get(token.content) != repr(token):
            _add_token(backend, token)
            present[token.content] = repr(token)
        if (actual_id := backend.token_to_id(token.content)) != token_id:
            log.warning("token %r should have the id %s, it has %s", token.content, token_id, actual_id)
    for text in named:
        if text not in present:
            _add_token(backend, tokenizers.AddedToken(text, special=True, normalized=False))


def _add_token(backend: tokenizers.Tokenizer, token: tokenizers.AddedToken) -> None:
    (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _honour_flags(backend: tokenizers.Tokenizer, config: Json, special: Json) -> None:
    """Apply add_bos_token and add_eos_token for the classes in FLAGS_DECIDE, unless the post-processor already does."""
    if _class_of(config) not in FLAGS_DECIDE:
        return
    bos, eos = special.get("bos_token"), special.get("eos_token")
    tokens = backend.encode("a").tokens
    plain = backend.encode("a", add_special_tokens=False).tokens
    now = (tokens[0] == bos != plain[0], tokens[-1] == eos != plain[-1])
    wanted = (
        bos is not None and config.get("add_bos_token", now[0]),
        eos is not None and config.get("add_eos_token", now[1]),
    )
    if now != wanted:
        parts, pair = (
            [f"{bos}:{at}"] * wanted[0] + [f"${name}:{at}"] + [f"{eos}:{at}"] * wanted[1]
            for at, name in enumerate("AB")
        )
        known = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=parts, pair=parts + pair, special_tokens=known
        )
