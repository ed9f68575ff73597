"""Writes the tokenizer that the metadata of a GGUF file describes as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import TokenizerError
from engine.text.sentencepiece import (
    ADD_DUMMY_PREFIX,
    BOS_ID,
    BPE,
    BYTE,
    BYTE_FALLBACK,
    CONTROL,
    EOS_ID,
    MODEL_TYPE,
    NORMAL,
    NORMALIZER_DEFAULTS,
    REMOVE_EXTRA_SPACES,
    TRAINER_DEFAULTS,
    UNUSED,
    USER_DEFINED,
    Piece,
    SentencePiece,
)

PREFIX = "tokenizer.ggml."
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2, GPT2 = WORDS % r"\p{N}{1,3}", WORDS % r"\p{N}", ""  # the last is what ByteLevel splits by itself
SPLITS = {  # by tokenizer.ggml.pre
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "gpt-2": GPT2,
    "smollm": GPT2,
}
ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")  # end an answer besides eos_token_id


def write_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write the tokenizer's files into a folder. Raises TokenizerError if its kind is not supported, or if values are
    missing or have other types."""
    try:
        _write_files(metadata, directory)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"the tokenizer of the GGUF file cannot be used: {error!r}") from error


def _write_files(metadata: Mapping[str, Any], directory: Path) -> None:
    given = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    kind, tokens = given.get("model"), given.get("tokens") or []
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in makers or not tokens:
        raise TokenizerError(
            f"the GGUF file has {len(tokens)} tokens of a tokenizer of the kind {kind!r}, supported are"
            f" {', '.join(makers)}; put the model's tokenizer.json beside the file"
        )
    backend = makers[kind](given, tokens)
    special = {
        f"{name}_token": tokens[given[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if 0 <= given.get(f"{key}_token_id", -1) < len(tokens)
    }
    has_bos = given.get("add_bos_token", kind == "llama" or SPLITS.get(given.get("pre", "")) == LLAMA3)
    if has_bos and (bos := special.get("bos_token")):
        first, known = f"{bos}:0", [(bos, tokens.index(bos))]
        pair = f"{first} $A:0 {bos}:1 $B:1"
        backend.post_processor = processors.TemplateProcessing(f"{first} $A:0", pair, known)
    backend.save(str(directory / "tokenizer.json"))
    config = special | {"chat_template": metadata.get("tokenizer.chat_template")}
    _write(directory / "tokenizer_config.json", config)
    ends = [given.get("eos_token_id"), given.get("eot_token_id"), *map(backend.token_to_id, ENDS_OF_TURN)]
    _write(directory / "generation_config.json", {"eos_token_id": sorted({end for end in ends if end is not None})})


def _write(path: Path, config: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}, indent=2) + "\n")


def _byte_level(given: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer, as those of GPT-2, Llama 3 and Qwen."""
    pre = given.get("pre", "gpt-2")
    if pre not in SPLITS:
        raise TokenizerError(
            f"the GGUF file splits words as {PREFIX}pre={pre!r}, supported are {', '.join(SPLITS)};"
            " put the model's tokenizer.json beside the file"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in given.get("merges", ())]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=SPLITS[pre] == LLAMA3))
    if SPLITS[pre] == QWEN2:
        backend.normalizer = normalizers.NFC()
    words: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(SPLITS[pre]), "isolated")] if SPLITS[pre] else []
    if pre == "smollm":
        words = [pre_tokenizers.Digits(individual_digits=True)]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not SPLITS[pre])
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, last])
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, given.get("token_type", ()), strict=False):
        if kind in (CONTROL, USER_DEFINED):
            added = AddedToken(token, special=kind == CONTROL, normalized=False)
            (backend.add_special_tokens if kind == CONTROL else backend.add_tokens)([added])
    return backend


def _sentencepiece(given: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a SentencePiece model of BPE, as those of Llama 2, Mistral and Gemma."""
    kinds = given.get("token_type") or [NORMAL] * len(tokens)
    scores = given.get("scores") or [0.0] * len(tokens)
    pieces = tuple(
        Piece(token, score, CONTROL if kind == UNUSED else kind)
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
    )
    trainer = TRAINER_DEFAULTS | {MODEL_TYPE: BPE, BYTE_FALLBACK: int(BYTE in kinds)}
    trainer |= {BOS_ID: given.get("bos_token_id", 1), EOS_ID: given.get("eos_token_id", 2)}
    normalizer = NORMALIZER_DEFAULTS | {ADD_DUMMY_PREFIX: int(given.get("add_space_prefix", True))}
    normalizer |= {REMOVE_EXTRA_SPACES: int(given.get("remove_extra_whitespaces", False))}
    model = SentencePiece(pieces, trainer, normalizer)
    model.check()
    return model.backend()
