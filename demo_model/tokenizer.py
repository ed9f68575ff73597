"""Trains the byte-level BPE tokenizer on the corpus and writes its files. Knows no model."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from demo_model import facts, prose
from demo_model.facts import Fact

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = [END_OF_TEXT, START, END]  # their ids are 0, 1, 2
VOCAB_SIZE = 2048
MAX_LEN = 4096

# Qwen2's: digits one by one, a word with the space before it, line ends apart
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# ChatML, and nothing that the caller did not say; a message that only calls tools has no content
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(known: list[Fact]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(known), trainer)
    return tokenizer


def tokenizer_texts(known: list[Fact]) -> list[str]:
    """Return the texts from which the merges are learned: each fact once, and running text more often, because its
    answers are long.
    """
    texts = [prose.SYSTEM_PROMPTS, *["system\nuser\nassistant\n"] * 100]
    for fact in known:
        texts += [fact.questions[0], fact.questions[0].lower(), fact.answer]
        if fact.topic in ("long", "definitions"):
            texts += [fact.answer] * 4
    texts += [country.capital for country in facts.all_countries()] * 2
    return texts


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    added = {
        str(index): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, text in enumerate(SPECIALS)
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [START, END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": MAX_LEN,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    specials = {"additional_special_tokens": [START, END], "eos_token": END, "pad_token": END_OF_TEXT}
    write_json(out / "tokenizer_config.json", settings)
    write_json(out / "special_tokens_map.json", specials)


def write_json(path: Path, content) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
