"""A byte-level BPE tokenizer that needs no training: 256 bytes, common English pairs, three special tokens, ChatML."""

from __future__ import annotations

import json
from pathlib import Path

PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic"
    " ne ea ra ce li ch ll be ma si om ur"
).split()
SPACED = ("t", "a", "s", "o", "i", "w")  # after a space
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 256 + len(PAIRS) + len(SPACED) + SPECIAL_TOKENS.index("<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_symbols() -> list[str]:
    """Return the printable symbol that GPT-2 uses in place of each byte, by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (b for b in range(256) if b not in shown)
    symbol = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return [symbol[b] for b in range(256)]


def write_tokenizer(directory: Path) -> None:
    space = byte_symbols()[ord(" ")]
    merges = [(pair[0], pair[1]) for pair in PAIRS] + [(space, letter) for letter in SPACED]
    tokens = byte_symbols() + [left + right for left, right in merges]
    special = [
        {
            "id": len(tokens) + i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, content in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **names}
    generation = {"eos_token_id": [EOS_ID, EOS_ID - 2], "do_sample": False}
    for name, value in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", names),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
