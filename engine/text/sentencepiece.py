"""Converts a SentencePiece model file (*.model) to a tokenizer of the `tokenizers` library.

It reads this file only; the caller applies special tokens and flags of the JSON files beside it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from engine.errors import TokenizerError
from engine.protobuf import fields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
UNIGRAM, BPE = 1, 2
SPACE = "▁"
# Fields of the messages in the file, with the defaults of those that are read
PIECES, TRAINER, NORMALIZER = 1, 2, 3
MODEL_TYPE, SPACE_AS_SUFFIX, BYTE_FALLBACK, BOS_ID, EOS_ID = 3, 24, 35, 41, 42
CHARS_MAP, ADD_DUMMY_PREFIX, REMOVE_EXTRA_SPACES, ESCAPE_SPACES = 2, 3, 4, 5
TRAINER_DEFAULTS = {MODEL_TYPE: UNIGRAM, SPACE_AS_SUFFIX: 0, BYTE_FALLBACK: 0, BOS_ID: 1, EOS_ID: 2}
NORMALIZER_DEFAULTS = {CHARS_MAP: b"", ADD_DUMMY_PREFIX: 1, REMOVE_EXTRA_SPACES: 1, ESCAPE_SPACES: 1}


def model_file(directory: Path) -> Path | None:
    """Return tokenizer.model, or the only other *.model, or None. Raises TokenizerError if there are several."""
    found = sorted(directory.glob("*.model"))
    named = [path for path in found if path.name == "tokenizer.model"] or found
    if len(named) > 1:
        names = ", ".join(path.name for path in named)
        raise TokenizerError(f"{directory} has several SentencePiece models: {names}; leave the one that is used")
    return named[0] if named else None


@dataclass(frozen=True)
class Piece:
    """A token of the vocabulary; its id is its place in the file."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePiece:
    """A parsed model file."""

    pieces: tuple[Piece, ...]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]

    @classmethod
    def read(cls, path: Path) -> SentencePiece:
        """Parse a model file. Raises TokenizerError, which names the file, if it is invalid or not supported."""
        try:
            message = list(fields(path.read_bytes()))
            pieces = tuple(_piece(value) for field, value in message if field == PIECES)
            parts = {field: dict(fields(value)) for field, value in message if field in (TRAINER, NORMALIZER)}
        except (ValueError, TypeError, KeyError, struct.error) as error:
            raise TokenizerError(f"{path} is not a SentencePiece model: {error!r}") from None
        made = cls(pieces, TRAINER_DEFAULTS | parts.get(TRAINER, {}), NORMALIZER_DEFAULTS | parts.get(NORMALIZER, {}))
        try:
            made.check()
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None
        return made

    def check(self) -> None:
        """Raise TokenizerError if the model is of a kind that is not supported."""
        if self.trainer[MODEL_TYPE] not in (UNIGRAM, BPE):
            raise TokenizerError(f"model_type is {self.trainer[MODEL_TYPE]}, supported are 1 (unigram) and 2 (BPE)")
        if sum(piece.kind == UNKNOWN for piece in self.pieces) != 1:
            raise TokenizerError("exactly one piece of type UNKNOWN is needed")
        if any(piece.kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE) for piece in self.pieces):
            raise TokenizerError("pieces of type UNUSED are not supported")
        if self.trainer[SPACE_AS_SUFFIX] or not self.normalizer[ESCAPE_SPACES]:
            raise TokenizerError("treat_whitespace_as_suffix and escape_whitespaces=false are not supported")
        if len({piece.text for piece in self.pieces}) < len(self.pieces):
            raise TokenizerError("two pieces have the same text")

    @property
    def special_tokens(self) -> dict[str, str]:
        """Begin and end tokens by their names in special_tokens_map.json."""
        ids = {"bos_token": self.trainer[BOS_ID], "eos_token": self.trainer[EOS_ID]}
        known = {name: self.pieces[at] for name, at in ids.items() if at < len(self.pieces)}
        return {name: piece.text for name, piece in known.items() if piece.kind == CONTROL}

    def backend(self, prefix_every_segment: bool = True) -> tokenizers.Tokenizer:
        """Return the tokenizer. Text between special tokens is a segment: each begins with a space if the model was
        trained so, or with `prefix_every_segment` false only the first of a text."""
        backend = tokenizers.Tokenizer(self._bpe() if self.trainer[MODEL_TYPE] == BPE else self._unigram())
        has_prefix = bool(self.normalizer[ADD_DUMMY_PREFIX])
        whole_text = has_prefix and not prefix_every_segment
        backend.normalizer = normalizers.Sequence(list(self._normalizers(has_prefix and not whole_text)))
        splits: list[Any] = [pre_tokenizers.Metaspace(prepend_scheme="first", split=False)] if whole_text else []
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits + list(self._splits()))
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * has_prefix)
        special = [piece.text for piece in self.pieces if piece.kind in (UNKNOWN, CONTROL)]
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        return backend

    @cached_property
    def _user_defined(self) -> list[str]:
        """Return the user-defined symbols, which are never split or merged."""
        return [piece.text for piece in self.pieces if piece.kind == USER_DEFINED]

    def _splits(self) -> Iterator[Any]:
        if self._user_defined:
            symbols = "|".join(re.escape(text) for text in sorted(self._user_defined, key=len, reverse=True))
            yield pre_tokenizers.Split(tokenizers.Regex(symbols), "isolated")
        if self.trainer[BYTE_FALLBACK] and (self._user_defined or self.trainer[MODEL_TYPE] == UNIGRAM):
            # Otherwise a text that spells the name of a byte token would be tokenized as this byte.
            yield pre_tokenizers.Split(tokenizers.Regex("<0x(?=[0-9A-F]{2}>)"), "merged_with_previous")

    def _normalizers(self, add_prefix: bool) -> Iterator[Any]:
        if self.normalizer[CHARS_MAP]:
            yield normalizers.Precompiled(self.normalizer[CHARS_MAP])
        if self.normalizer[REMOVE_EXTRA_SPACES]:
            yield normalizers.Replace(tokenizers.Regex("^ +| +$"), "")
            yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
        if add_prefix:
            yield normalizers.Prepend(SPACE)
        yield normalizers.Replace(" ", SPACE)

    def _unigram(self) -> models.Unigram:
        [unk_id] = (at for at, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)
        vocab = [(piece.text, piece.score) for piece in self.pieces]
        return models.Unigram(vocab, unk_id, bool(self.trainer[BYTE_FALLBACK]))

    def _bpe(self) -> models.BPE:
        """Return the BPE model. Its merges are all pairs of pieces that concatenate to a piece, by descending score."""
        vocab = {piece.text: at for at, piece in enumerate(self.pieces)}
        normal = [piece for piece in self.pieces if piece.kind == NORMAL]
        texts = {piece.text for piece in normal}
        merges = [
            (piece.text[:at], piece.text[at:])
            for piece in sorted(normal, key=lambda piece: -piece.score)
            for at in range(1, len(piece.text))
            if piece.text[:at] in texts and piece.text[at:] in texts
        ]
        [unk] = (piece.text for piece in self.pieces if piece.kind == UNKNOWN)
        has_bytes = bool(self.trainer[BYTE_FALLBACK])
        # Without `ignore_merges` user-defined symbols would be split by the merges.
        return models.BPE(
            vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=has_bytes, ignore_merges=bool(self._user_defined)
        )


def _piece(message: bytes) -> Piece:
    given = dict(fields(message))
    [score] = struct.unpack("<f", given.get(2, bytes(4)))
    return Piece(given[1].decode(), score, given.get(3, NORMAL))
